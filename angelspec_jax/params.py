"""One declaration per parameter: shape, logical axes and initializer.

A model's parameters are a frozen dataclass. Its *specification* is the same dataclass with a `Param` at every leaf, so abstract values,
shardings, random initialization and checkpoint loading all come from one place and cannot disagree.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:

    class _Leaf(type):
        """To a type checker a Param is anything: a specification is the parameters' own dataclass, whose fields are annotated as arrays."""

        def __call__(cls, *args, **kwargs) -> Any: ...
else:
    _Leaf = type


@dataclasses.dataclass(frozen=True)
class Param(metaclass=_Leaf):
    """Shape, logical axis names (one per dimension, None = never sharded) and initializer of one parameter.

    `init` is "normal" (standard deviation `scale`, default 1/sqrt(fan-in)), "zeros" or "ones". `fan_in` counts the input dimensions,
    which come first: weights are stored [in..., out...]. `order` names the axes from the outermost to the innermost in a TPU's memory,
    where that is not their own order (`mesh.placements`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    inputs: int = 1
    scale: float | None = None
    dtype: jnp.dtype | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"parameter of shape {self.shape} needs one logical axis per dimension, got {self.axes}")
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError(f"the order of a parameter of shape {self.shape} must name each of its axes once, got {self.order}")


def is_param(leaf) -> bool:
    return isinstance(leaf, Param)


def map_params(function, specs, *rest):
    """`jax.tree.map` over the `Param` leaves of a specification."""
    return jax.tree.map(function, specs, *rest, is_leaf=is_param)


def stack(specs, count: int):
    """The specification of `count` equal layers stacked on a new leading axis (for `lax.scan`)."""

    def one(p: Param):
        order = None if p.order is None else (0, *(axis + 1 for axis in p.order))
        return dataclasses.replace(p, shape=(count, *p.shape), axes=(None, *p.axes), scale=_scale(p), order=order)

    return map_params(one, specs)


def abstract(specs, dtype, shardings=None):
    """Shape-dtype structs of a specification, with shardings (or formats, which are shardings and layouts) when given."""
    if shardings is None:
        return map_params(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype or dtype), specs)
    return map_params(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype or dtype, sharding=s), specs, shardings)


def initialize(specs, key: jax.Array, dtype=jnp.float32):
    """Random parameters of a specification; every leaf draws from its own key, so adding one does not change the others' draws."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_param)
    leaves = []
    for path, p in paths:
        leaf_key = jax.random.fold_in(key, _stable_hash(jax.tree_util.keystr(path)))
        leaves.append(_draw(p, leaf_key, p.dtype or dtype))
    return jax.tree.unflatten(treedef, leaves)


def count(specs) -> int:
    """Number of scalar parameters of a specification."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(specs, is_leaf=is_param))


def _scale(p: Param) -> float | None:
    if p.init != "normal" or p.scale is not None:
        return p.scale
    return 1.0 / math.sqrt(math.prod(p.shape[: p.inputs]))


def _draw(p: Param, key: jax.Array, dtype) -> jax.Array:
    if p.init == "zeros":
        return jnp.zeros(p.shape, dtype)
    if p.init == "ones":
        return jnp.ones(p.shape, dtype)
    return (jax.random.normal(key, p.shape, jnp.float32) * jnp.float32(_scale(p))).astype(dtype)


def _stable_hash(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
