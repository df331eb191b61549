"""Reading a drafter checkpoint under the plain names of its layout, whatever file names, prefixes and dialects it has.

A layout module declares a `Leaf` for every parameter by plain name; `read_leaves` assembles the parameters and refuses what does not fit.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from angelspec_jax.target.layout import Leaf, TensorSource, Window, check, is_leaf

PREFIXES = ("module.draft_model.", "draft_model.", "model.")


class Renamed:
    """A checkpoint under plain names; tensors whose plain name is None (the target's copies, derived buffers) are left out."""

    def __init__(self, source: TensorSource, rename: Callable[[str], str | None]):
        self.source, self.path = source, source.path
        self.original: dict[str, str] = {}
        for original in source.names():
            plain = rename(original)
            if plain is None:
                continue
            if plain in self.original:
                raise ValueError(f"{self.path}: tensors {self.original[plain]} and {original} are the same parameter under two names")
            self.original[plain] = original

    def names(self) -> list[str]:
        return list(self.original)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.source.shape(self.original[name]))

    def dtype(self, name: str) -> np.dtype:
        return self.source.dtype(self.original[name])

    def read(self, name: str, window: Window) -> np.ndarray:
        return self.source.read(self.original[name], window)

    def sample(self, name: str, size: int) -> bytes:
        return self.source.sample(self.original[name], size)


def strip(name: str) -> str:
    """A tensor's name without the prefixes of training wrappers."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def read_leaves(source: Renamed, leaves, specs, extra: Iterable[str] = ()):
    """The parameters in the tree of `specs`. ValueError for missing, misshapen, superfluous (but for `extra`) or non-finite tensors."""
    used = {name for leaf in jax.tree.leaves(leaves, is_leaf=is_leaf) for name, _ in leaf.tensors} | set(extra)
    unused = [original for plain, original in source.original.items() if plain not in used]
    if unused:
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        raise ValueError(f"{source.path} holds tensors that its configuration gives no place: {shown}; the two do not belong together")
    check(source, leaves)
    params = jax.tree.map(lambda leaf, spec: leaf.read(source, whole(spec.shape)), leaves, specs, is_leaf=is_leaf)
    for key, value in jax.tree_util.tree_leaves_with_path(params):
        if not np.all(np.isfinite(value)):
            raise ValueError(f"{source.path}: parameter {jax.tree_util.keystr(key).lstrip('.')} holds values that are not finite")
    return params


def whole(shape: tuple[int, ...]) -> Window:
    return tuple(slice(0, size) for size in shape)


def architecture(settings: Mapping[str, Any]) -> str:
    """The first of config.json's architectures, or nothing."""
    names = settings.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def plain_leaf(name: str, shape: tuple[int, ...]) -> Any:  # a tree of leaves has the type of the tree of arrays it stands for
    """A parameter stored as it is."""
    return Leaf(((name, shape),), functools.partial(_read_plain, name))


def transposed_leaf(name: str, shape: tuple[int, int]) -> Any:
    """A matrix stored [out, in] with this shape, in memory [in, out]."""
    return Leaf(((name, shape),), functools.partial(_read_transposed, name))


def pair_leaf(names: tuple[str, str], shape: tuple[int, int]) -> Any:
    """Two matrices stored [out, in] of equal shape, in memory one array [in, 2, out]."""
    return Leaf(tuple((name, shape) for name in names), functools.partial(_read_pair, names))


def _read_plain(name: str, source: TensorSource, window: Window) -> np.ndarray:
    return source.read(name, window)


def _read_transposed(name: str, source: TensorSource, window: Window) -> np.ndarray:
    return source.read(name, (window[1], window[0])).T


def _read_pair(names: tuple[str, ...], source: TensorSource, window: Window) -> np.ndarray:
    rows, which, columns = window
    return np.stack([source.read(name, (columns, rows)).T for name in names[which]], axis=1)
