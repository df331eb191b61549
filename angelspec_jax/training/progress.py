"""What a run says: JSONL metrics and TensorBoard events for machines, a bar on a terminal, plain lines elsewhere. Process 0 only."""

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FILE = "metrics.jsonl"


class Journal:
    """metrics.jsonl of a run folder; records of steps that a resumed run repeats are taken back first."""

    def __init__(self, folder: Path, start_step: int, write: bool = True, tensorboard: bool = False):
        self._file = None
        self._board = Board(folder, start_step, write and tensorboard)
        if not write:
            return
        path = folder / FILE
        kept = [line for line in path.read_text().splitlines() if _precedes(line, start_step)] if path.exists() else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, kind: str, step: int, values: dict) -> None:
        """One record: its kind ("train", "validation", "speculative"), the step it belongs to, and numbers."""
        if self._file is not None:
            record = {"kind": kind, "step": step, "time": round(time.time(), 3), **{k: numbers(v) for k, v in values.items()}}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._board.write(kind, step, values)

    def close(self) -> None:
        self._board.close()
        if self._file is not None:
            self._file.close()


class Board:
    """TensorBoard events of a run, in its folder `tensorboard`; does nothing unless it is wanted.

    Raises ValueError where the tensorboard extra is missing.
    """

    def __init__(self, folder: Path, start_step: int, write: bool):
        self._writer = None
        if not write:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "evaluation.tensorboard needs the tensorboardX package: pip install 'angelspec-jax[tensorboard]', or set it to false"
            ) from error
        # What a resumed run repeats replaces what was written of those steps.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Numbers as kind/name; lists as one scalar for each position, from 1; mappings as kind/name/key."""
        if self._writer is not None:
            for name, value in scalars(kind, values):
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in any nesting of mappings and lists, each with its place."""
    value = numbers(value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from scalars(f"{name}/{key}", inner)
    elif isinstance(value, Sequence):
        for place, inner in enumerate(value, 1):
            yield from scalars(f"{name}/{place}", inner)


class Profile:
    """A trace of a few steps for xprof, in the folder `profile` of a run: the steps after the first two, which compile."""

    WARM = 2

    def __init__(self, folder: Path, start_step: int, steps: int):
        self.folder, self._first, self._last = folder / "profile", start_step + self.WARM, start_step + self.WARM + steps
        self._wanted, self._running = steps > 0, False

    def before(self, index: int) -> None:
        """The step with this index is about to begin."""
        if self._wanted and index == self._first:
            jax.profiler.start_trace(str(self.folder))
            self._running = True

    def after(self, done: int) -> bool:
        """So many steps are done; True when the trace was complete with this one."""
        complete = self._running and done >= self._last
        if complete:
            self.close()
        return complete

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


def peak_memory() -> int | None:
    """Most bytes this process has had in use: of its first device, or of the machine where the device is the processor."""
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics_of_device:
        return int(statistics_of_device["peak_bytes_in_use"])
    try:
        import resource
    except ImportError:  # no such call on this system
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Clock:
    """Seconds per step. A pause (SIGSTOP, a sleeping laptop) is one long step and is not counted as training."""

    PAUSE = 20.0  # times the median step

    def __init__(self, spent: float = 0.0):
        self.spent = spent  # training seconds, earlier runs included
        self._last = time.monotonic()
        self._recent: deque[float] = deque(maxlen=50)

    def skip(self) -> None:
        """What happened since the last tick was no training step."""
        self._last = time.monotonic()

    def tick(self) -> float:
        """Seconds since the last tick or skip."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._recent.append(seconds)
        self.spent += min(seconds, self.PAUSE * self.median)
        return seconds

    @property
    def median(self) -> float:
        return statistics.median(self._recent) if self._recent else 0.0


class Display:
    """Progress for people: a bar on a terminal, otherwise one line each time there is something to tell."""

    def __init__(self, total: int, show: bool = True, console: Console | None = None):
        self._total, self._show = total, show
        self._console = Console(stderr=True) if console is None else console
        self._bar = self._task = None

    def start(self, step: int) -> None:
        """Training begins (again) after this step."""
        if self._show and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"),
                console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("training", total=self._total, completed=step, text="")
            self._bar.start()

    def say(self, text: str) -> None:
        """One line of its own."""
        if self._show:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, values: dict, seconds: float) -> None:
        """The numbers of the last steps."""
        if not self._show:
            return
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items()) + f"  {seconds:.2f} s/step"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text)
        else:
            print(f"step {step}/{self._total}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _precedes(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # the last line of a killed run


def numbers(value):
    """Plain Python numbers of six digits for whatever nesting of arrays, lists and mappings, as JSON takes them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    return {k: numbers(v) for k, v in value.items()} if isinstance(value, dict) else value


def _short(value) -> str:
    value = numbers(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(_short(item) for item in value) if isinstance(value, list) else str(value)
