"""Conversations in JSONL files and Hugging Face datasets: reading, splitting off what is held out, and counting tokens."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

HUB = "hf://"
KEYS = ("conversations", "messages")  # where a line keeps its turns
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for roles


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation: its id, its domain ("" when the file names none) and its turns as {"role", "content"}.

    `finished` is False when a length limit cut the last answer: what would end its turn was never said.
    """

    id: int
    domain: str
    messages: tuple[dict, ...]
    finished: bool = True


def read(paths: Sequence[str | Path], domains: Sequence[str] | None = None) -> list[Conversation]:
    """The conversations of some sources, those of `domains` only when given.

    A source is a JSONL or JSONL.gz file; or, with the `datasets` extra, a parquet file, a folder that `datasets` saved, or a data set of
    the hub as `hf://owner/name` or `hf://owner/name/subset`, with `:split` after it (default train). Its records look like a line's. A
    record without an id takes its number over all sources, counted before any selection, so that a selection never moves a conversation
    between training and validation. Raises FileNotFoundError, or ValueError naming source and record.
    """
    found: list[Conversation] = []
    seen_domains: set[str] = set()
    number = 0
    for path in paths:
        for place, record in _records(path):
            conversation = _parse(record, number, place)
            number += 1
            seen_domains.add(conversation.domain)
            if domains is None or conversation.domain in domains:
                found.append(conversation)
    missing = sorted(set(domains or ()) - seen_domains)
    if missing:
        known = ", ".join(sorted(seen_domains))
        raise ValueError(f"domain {missing[0]!r} occurs in none of {', '.join(map(str, paths))}; there are {known}")
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))} holds no conversation")
    return found


def split(conversations: Iterable[Conversation], modulus: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation): validation are the ids divisible by `modulus`; 0 holds out nothing."""
    training: list[Conversation] = []
    validation: list[Conversation] = []
    for conversation in conversations:
        held_out = modulus > 0 and conversation.id % modulus == 0
        (validation if held_out else training).append(conversation)
    return training, validation


def count_tokens(sequences: Iterable[np.ndarray], vocab_size: int) -> Int[np.ndarray, "V"]:
    """How often each token occurs."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens in sequences:
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def rank_vocabulary(counts: Int[np.ndarray, "V"], size: int, always: Iterable[int] = ()) -> Int[np.ndarray, "size"]:
    """Ids of a draft vocabulary in rising order: `always`, then the most frequent, ties to the lower id (merged earlier, so commoner)."""
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary must have between 1 and {len(counts)} tokens, got {size}")
    kept = sorted(set(always))
    if len(kept) > size:
        raise ValueError(f"a draft vocabulary of {size} tokens cannot hold the {len(kept)} tokens it must have")
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        raise ValueError(f"token {kept[0] if kept[0] < 0 else kept[-1]} is outside the vocabulary of {len(counts)} tokens")
    priority = np.asarray(counts, np.int64).copy()
    priority[kept] = np.iinfo(np.int64).max
    order = np.argsort(-priority, kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def _records(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Where each record of a source stands, and what it holds."""
    if not _is_dataset(source):
        for line, text in _lines(Path(source)):
            place = f"{source}, line {line}"
            try:
                yield place, json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not valid JSON ({error})") from error
        return
    for number, record in enumerate(_dataset(source)):
        yield f"{source}, record {number}", {name: value for name, value in record.items() if value is not None}


def _is_dataset(source: str | Path) -> bool:
    return str(source).startswith(HUB) or Path(source).suffix == ".parquet" or (Path(source) / "dataset_info.json").is_file()


def _dataset(source: str | Path) -> Any:
    """A Hugging Face data set. Raises ValueError where the `datasets` package or the data set is missing."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {source} needs the datasets package: pip install 'angelspec-jax[datasets]'") from error
    name, path = str(source), Path(source)
    if not name.startswith(HUB) and not path.exists():
        raise FileNotFoundError(f"conversations file {path} does not exist")
    try:
        if path.is_dir():
            return datasets.load_from_disk(str(path))
        if not name.startswith(HUB):
            return datasets.load_dataset("parquet", data_files=str(path), split="train")
        place, _, split = name.removeprefix(HUB).partition(":")
        owner, *rest = place.split("/")
        return datasets.load_dataset("/".join([owner, *rest[:1]]), *rest[1:2], split=split or "train")
    except Exception as error:  # the package raises errors of many kinds, its own and those of the network
        reason = " ".join(str(error).split())[:200]
        remedy = "; check the name, the network and HF_TOKEN, or save it elsewhere and give the file" if name.startswith(HUB) else ""
        raise ValueError(f"{source} cannot be read as a data set: {reason}{remedy}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        hint = f"; a data set of the hub is {HUB}{path}" if len(path.parts) == 2 and not path.suffix and not path.parent.exists() else ""
        raise FileNotFoundError(f"conversations file {path} does not exist{hint}")
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number + 1}: not UTF-8 text ({error.reason})") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {error}; fetch or write the file again") from error


def _parse(record: Any, number: int, place: str) -> Conversation:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object, found {type(record).__name__}")
    turns = next((record[key] for key in KEYS if key in record), None)
    if turns is None and isinstance(record.get("prompt"), str):
        turns = [{"role": "user", "content": record["prompt"]}]  # to be answered, see data.regenerate
    if isinstance(turns, list):  # columns of a data set hold every key of every turn, None where a turn lacks it
        turns = [{k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else turn for turn in turns]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: needs a non-empty list of turns under {' or '.join(map(repr, KEYS))}")
    identity = record.get("id", number)
    if type(identity) is not int:
        # Other data sets name conversations by text: a stable hash keeps the split the same on every machine.
        identity = zlib.crc32(str(identity).encode())
    domain = record.get("domain", "")
    if not isinstance(domain, str):
        raise ValueError(f"{place}: 'domain' must be text, found {domain!r}")
    finished = record.get("finished", True)
    if not isinstance(finished, bool):
        raise ValueError(f"{place}: 'finished' must be true or false, found {finished!r}")
    return Conversation(identity, domain, tuple(_turn(turn, place) for turn in turns), finished)


def _turn(turn, place: str) -> dict:
    if not isinstance(turn, dict):
        raise ValueError(f"{place}: a turn must be an object with 'role' and 'content', found {type(turn).__name__}")
    role = turn.get("role", SPEAKERS.get(str(turn.get("from")), turn.get("from")))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{place}: a turn needs 'role' and 'content', both text, found {sorted(turn)}")
    return {**{k: v for k, v in turn.items() if k not in ("from", "value")}, "role": role, "content": content}
