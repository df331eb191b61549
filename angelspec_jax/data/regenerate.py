"""Training answers from the target itself: conversations whose assistant turns are written anew by the model that will be drafted for.

A drafter learns to foretell its target, so what the target would say is better to learn from than what somebody else said. Every user
turn is answered in order, the new answers being the history of the next. The output is a JSONL file of conversations, a line each as soon
as it is finished, so a run that was killed goes on where it stopped: whole lines stay, the record numbers in them say what is done, nothing
is written twice. Several processes divide the records between them, each with a file of its own.
"""

import concurrent.futures
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from angelspec_jax.data.conversations import Conversation

RECORD = "record"  # key of a line: number of its conversation in the sources


class Answerer(Protocol):
    """What is needed of an engine (`decoding.engine.Engine`)."""

    def submit(self, prompt: Any, /, **options: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How answers are made; written into every line, and the same for every line of a file."""

    target: str
    fingerprint: str
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    thinking: str | None = None  # "on", "off", or None where the template has no such switch
    template: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run did."""

    written: int  # conversations
    before: int  # that earlier runs had written
    left_out: int  # that have no user turn, or do not fit the model's context
    tokens: int
    rounds: int

    @property
    def tau(self) -> float:
        return self.tokens / max(self.rounds, 1)


def shard_path(output: Path, process: int, processes: int) -> Path:
    """The file that a process writes: answers.jsonl, or answers-00001-of-00004.jsonl with several processes."""
    return output if processes == 1 else output.with_name(f"{output.stem}-{process:05d}-of-{processes:05d}{output.suffix}")


def finished_records(output: Path, settings: Settings) -> set[int]:
    """Records that stand in the output file or in a process's share of it; a line that a kill cut off is taken away.

    Raises ValueError where answers were made with other settings, which a file does not mix.
    """
    found: set[int] = set()
    wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
    shares = sorted(output.parent.glob(f"{output.stem}-?????-of-?????{output.suffix}"))
    for path in [path for path in (output, *shares) if path.exists()]:
        _take_back_partial_line(path)
        for number, text in enumerate(path.read_text().splitlines(), 1):
            line = json.loads(text)
            had = line.get("generation", {})
            for key, value in wanted.items():
                if had.get(key) != value:
                    raise ValueError(
                        f"{path}, line {number} was made with {key}={had.get(key)!r}, now it is {value!r}; name another output file"
                    )
            found.add(line[RECORD])
    return found


def run(
    engine: Answerer,
    conversations: Sequence[Conversation],
    output: Path,
    settings: Settings,
    *,
    workers: int,
    process: int = 0,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Answer what is not yet answered of this process's conversations, `workers` at a time.

    `progress(done, total)` is called after each. An error of the engine ends the run; what was written stays.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    done = finished_records(output, settings)
    mine = [number for number in range(len(conversations)) if number % processes == process]
    todo = [number for number in mine if number not in done]
    lock, stop = threading.Lock(), threading.Event()
    counts = {"written": 0, "left_out": 0, "tokens": 0, "rounds": 0}

    def work(number: int) -> None:
        if stop.is_set():
            return
        line, tokens, rounds = _answer(engine, conversations[number], number, settings)
        with lock:
            if stop.is_set():
                return
            if line is not None:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
            counts["written" if line is not None else "left_out"] += 1
            counts["tokens"] += tokens
            counts["rounds"] += rounds
            if progress is not None:
                progress(counts["written"] + counts["left_out"], len(todo))

    path = shard_path(output, process, processes)
    with path.open("a") as file, concurrent.futures.ThreadPoolExecutor(workers, "regenerate") as pool:
        tasks = [pool.submit(work, number) for number in todo]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return Report(counts["written"], len(mine) - len(todo), counts["left_out"], counts["tokens"], counts["rounds"])


def _answer(engine: Answerer, conversation: Conversation, number: int, settings: Settings) -> tuple[dict | None, int, int]:
    """(line, tokens, rounds); no line where nothing could be answered. An answer that a limit cut is the last of its conversation."""
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    messages: list[dict] = []
    finished, tokens, rounds, answers = True, 0, 0, 0
    for message in (*conversation.messages, None):  # None: the end, where the last user turn may stand unanswered
        if message is not None and message["role"] != "assistant":
            messages.append(dict(message))
            continue
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            continue
        seed = (settings.seed + 1_000_003 * number + answers) % 2**32
        try:
            stream = engine.submit(messages, max_new_tokens=settings.max_new_tokens, switches=settings.template, seed=seed, **sampling)
        except ValueError:  # what was said so far and the answer's limit are more than a slot holds
            break
        said = stream.result()
        tokens, rounds, answers = tokens + len(said.tokens), rounds + said.rounds, answers + 1
        messages.append({"role": "assistant", "content": said.text})
        finished = said.finish_reason == "stop"
        if not finished:
            break
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not answers:
        return None, tokens, rounds
    line = {"id": conversation.id, RECORD: number, "domain": conversation.domain, "finished": finished, "messages": messages}
    return line | {"generation": dataclasses.asdict(settings) | {"tokens": tokens}}, tokens, rounds


def _take_back_partial_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
            os.fsync(file.fileno())
