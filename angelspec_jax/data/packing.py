"""Several conversations in one row of a batch, each isolated from the others.

A packed row carries `documents` (0, 1, ... for its conversations, -1 for padding) and `positions`, which begin anew in each. Everything
that looks across tokens, the target's attention, anchors, labels and the drafter's context, stays inside a document, so a conversation
trains the same whatever it shares a row with. Rows are packed once, by length alone; their order is then shuffled like that of sequences.
"""

import bisect
import dataclasses

import numpy as np

from angelspec_jax.data.pipeline import Sample, Source


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of packed samples of a source."""

    source: Source
    rows: tuple[tuple[int, ...], ...]  # which samples each row holds
    loads: tuple[int, ...]  # supervised tokens of each row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        samples = [self.source[i] for i in self.rows[index]]
        lengths = [len(sample["tokens"]) for sample in samples]
        return {
            "tokens": np.concatenate([np.asarray(sample["tokens"], np.int32) for sample in samples]),
            "loss_mask": np.concatenate([np.asarray(sample["loss_mask"], bool) for sample in samples]),
            "documents": np.repeat(np.arange(len(samples), dtype=np.int32), lengths),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        }


def pack(source: Source, length: int, most: int) -> Packed:
    """Rows of at most `length` tokens and `most` documents: best fit, the longest samples first, ties in the order of the source."""
    sizes = [len(source[index]["tokens"]) for index in range(len(source))]
    supervised = [int(np.sum(source[index]["loss_mask"])) for index in range(len(source))]
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of rows that may take more, ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect.bisect_left(room, (sizes[index], -1))
        if place == len(room):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        if len(rows[row]) < most and left > sizes[index]:
            bisect.insort(room, (left - sizes[index], row))
    return Packed(source, tuple(map(tuple, rows)), tuple(sum(supervised[i] for i in row) for row in rows))
