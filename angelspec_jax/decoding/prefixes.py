"""Caches of prompts that were read in before, for prompts that begin alike."""

import collections
from collections.abc import Sequence

import numpy as np

from angelspec_jax.decoding.step import DecodeState


class Prefixes:
    """The states of the last few prompts and answers, least recently used first out.

    A kept state serves every prompt that shares its beginning: what its caches hold past the common part is invisible behind the prefix
    length and is written over.
    """

    def __init__(self, most: int, shortest: int):
        self.most, self.shortest = most, shortest
        self._kept: collections.OrderedDict[tuple[int, ...], DecodeState] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[int, DecodeState] | None:
        """How many leading tokens need not be read in again, and the state that holds them; None when too few are in common.

        The last token in common is read in again: some drafters remember a token together with the one that follows it.
        """
        best = max(self._kept, key=lambda known: _common(known, tokens), default=None)
        if best is None or (length := _common(best, tokens)) < self.shortest:
            return None
        self._kept.move_to_end(best)
        return length - 1, self._kept[best]

    def keep(self, tokens: Sequence[int], state: DecodeState) -> None:
        """Keep a state of one slot whose caches hold these tokens; states of their beginnings are no longer needed."""
        if not self.most or len(tokens) < self.shortest:
            return
        known = tuple(tokens)
        for other in [other for other in self._kept if other == known[: len(other)]]:
            del self._kept[other]
        self._kept[known] = state
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    if length == 0:
        return 0
    different = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(different[0]) if different.size else length
