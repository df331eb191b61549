"""Training batches addressed by (seed, global step).

Batch `step` is a function of the source, the seed and the step alone: any number of processes, started at any step, reads the same stream,
each its own slice of the batch.
"""

import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np

Sample = Mapping[str, Any]
PADDED = ("tokens", "loss_mask", "features")  # arrays with a leading S
OVERLONG = ("drop", "truncate", "split")


class Source(Protocol):
    """Random access to samples: {"tokens": int32[S], "loss_mask": bool[S]} and, when cached, {"features": [S, T, D], "hidden": [S, D]}."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class Batches:
    """`batches[step]` is the process's slice of the global batch of that step.

    Sequences are shuffled anew in every epoch; a batch may span two epochs, so every step is full.
    """

    def __init__(self, source: Source, batch_size: int, max_length: int, seed: int, process_index: int = 0, process_count: int = 1):
        if len(source) == 0:
            raise ValueError("there is no sequence to train on; check domains, max_length and min_supervised of the data section")
        if batch_size % process_count:
            raise ValueError(f"batch_size {batch_size} must be a multiple of the number of processes ({process_count})")
        self.batch_size, self.max_length = batch_size, max_length
        local = batch_size // process_count
        self._slice = range(process_index * local, (process_index + 1) * local)
        order: Any = range(len(source))
        self._source, self._loads = source, getattr(source, "loads", None)
        self._indices = grain.MapDataset.source(order).seed(seed).shuffle().repeat()
        self.epoch_steps = len(source) / batch_size

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows: list[Any] = [self._indices[step * self.batch_size + row] for row in range(self.batch_size)]
        if self._loads is not None:
            rows = [rows[place] for place in balanced_order([self._loads[row] for row in rows])]
        return pad([self._source[rows[row]] for row in self._slice], self.max_length)


def batches(source: Source, batch_size: int, max_length: int, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
    """Shuffled, repeated, padded batches of `source`, addressed by global step."""
    return Batches(source, batch_size, max_length, seed, process_index, process_count)


def balanced_order(loads: Sequence[int]) -> list[int]:
    """An order in which any equal slices of it, one for each process, carry about the same load, however many processes there are.

    Ranks by load are dealt out to and fro: the reversed bits of a rank's Gray code say where it goes, so that p slices, p a power of two,
    get every rank of one round in one direction and of the next in the other. The order does not depend on the number of processes, which
    therefore does not change what is trained.
    """
    ranked = sorted(range(len(loads)), key=lambda row: (-loads[row], row))
    bits = max(len(loads) - 1, 0).bit_length()
    places = [int(format(rank ^ (rank >> 1), "b").zfill(bits)[::-1], 2) for rank in range(len(loads))]
    return [ranked[rank] for rank in sorted(range(len(loads)), key=places.__getitem__)]


def sequential(source: Source, indices: Sequence[int], batch_size: int, max_length: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of chosen samples in order, for validation; the last one is filled up with rows that supervise nothing."""
    for start in range(0, len(indices), batch_size):
        samples = [source[index] for index in indices[start : start + batch_size]]
        empty = {**samples[-1], "loss_mask": np.zeros_like(samples[-1]["loss_mask"])}
        yield pad(samples + [empty] * (batch_size - len(samples)), max_length)


def pad(samples: Sequence[Sample], length: int) -> dict[str, np.ndarray]:
    """One batch of `samples` padded to `length` tokens: tokens, loss_mask [B, S], lengths [B], what was cached, and what packed rows have.

    Padding is 0, and -1 among the documents.
    """
    lengths = np.asarray([len(sample["tokens"]) for sample in samples], np.int32)
    if lengths.max() > length:
        raise ValueError(f"a sequence has {lengths.max()} tokens, more than max_length {length}")
    batch = {"lengths": lengths}
    for name in ("tokens", "loss_mask", "features", "hidden", "documents", "positions"):
        if name in samples[0]:
            first = np.asarray(samples[0][name])
            out = np.full((len(samples), length, *first.shape[1:]), -1 if name == "documents" else 0, first.dtype)
            for row, sample in enumerate(samples):
                out[row, : len(sample[name])] = sample[name]
            batch[name] = out
    return batch


def fit(samples: Sequence[Sample], length: int, overlong: str, min_supervised: int = 1) -> tuple[list[Sample], dict[str, int]]:
    """Samples of at most `length` tokens, and how many were changed or left out.

    "drop" leaves out longer samples, "truncate" keeps their beginning, "split" cuts them into consecutive pieces (a later piece does not
    see the earlier ones). Samples with fewer than `min_supervised` supervised tokens are left out, whole or as pieces.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}")
    kept: list[Sample] = []
    report = {"sequences": 0, "overlong": 0, "unsupervised": 0}
    for sample in samples:
        size = len(sample["tokens"])
        starts = range(1)
        if size > length:
            report["overlong"] += 1
            if overlong == "drop":
                continue
            starts = range(0, size, length) if overlong == "split" else range(1)
        for start in starts:
            piece = {**sample}
            for name in ("tokens", "loss_mask"):
                piece[name] = sample[name][start : start + length]
            if int(np.sum(piece["loss_mask"])) < min_supervised:
                report["unsupervised"] += 1
                continue
            kept.append(piece)
    report["sequences"] = len(kept)
    return kept, report


def iterate(source: Batches, start: int, stop: int, prefetch: int = 2) -> Generator[tuple[int, dict[str, np.ndarray]], None, None]:
    """(step, batch) for the steps from `start` to before `stop`, read ahead by a thread; its errors are raised here."""
    ready: queue.Queue = queue.Queue(maxsize=max(prefetch, 1))
    cancelled = threading.Event()

    def offer(item) -> bool:
        while not cancelled.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work():
        try:
            for step in range(start, stop):
                if not offer((step, source[step], None)):
                    return
            offer((stop, None, None))
        except BaseException as error:  # handed to the consumer, which raises it
            offer((stop, None, error))

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            step, batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield step, batch
    finally:
        cancelled.set()
        thread.join(timeout=5)
