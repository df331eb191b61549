"""Weights in 8 bits: whole numbers with one float32 scale per output channel. Activations and sums keep their types.

Symmetric rounding to the nearest of -127..127, so that a channel's largest weight is exact (LLM.int8(), arXiv 2208.07339, section 2.1, for
the weights alone). The product reads the whole numbers; the scale multiplies its result, once an output instead of once a weight.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from angelspec_jax.params import Param
from angelspec_jax.target import narrow

LARGEST = 127
AT_ONCE = 1 << 22  # weights that are held in float32 at a time while they are rounded


@struct.dataclass
class Int8:
    values: jax.Array  # int8 [lead..., in..., out...]
    scale: jax.Array  # float32, the same axes with every input axis of length 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """What activations are beside these weights: the type of the scales."""
        return self.scale.dtype

    def reshape(self, *shape: int) -> "Int8":
        """The same weights as one matrix [in, out] or as several [lead, in, out]."""
        return Int8(self.values.reshape(shape), self.scale.reshape(*shape[:-2], 1, shape[-1]))

    def __getitem__(self, index) -> "Int8":
        """Some of the output channels, or an entry of a leading axis."""
        return Int8(self.values[index], self.scale[index])


Weight = jax.Array | Int8


def specs(param: Any, lead: int = 0) -> Int8:
    """Declaration in 8 bits of the matrix a `Param` declares; `lead` axes (experts) come before its inputs."""
    last = lead + param.inputs
    shape = tuple(1 if lead <= axis < last else size for axis, size in enumerate(param.shape))
    axes = tuple(None if lead <= axis < last else name for axis, name in enumerate(param.axes))
    scale = Param(shape, axes, "ones", dtype=jnp.float32)
    return Int8(dataclasses.replace(param, init="zeros", dtype=jnp.int8), scale)


def is_int8(node) -> bool:
    return isinstance(node, Int8)


def round_to(weights: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and scales of weights whose input axes are `axes`."""
    values = np.empty(weights.shape, np.int8)
    scale = np.empty([1 if axis in axes else size for axis, size in enumerate(weights.shape)], np.float32)
    along = max((axis for axis in range(weights.ndim) if axis not in axes), key=lambda axis: weights.shape[axis])
    step = max(1, AT_ONCE * weights.shape[along] // weights.size)
    for start in range(0, weights.shape[along], step):
        part = (slice(None),) * along + (slice(start, start + step),)
        wide = weights[part].astype(np.float32)
        largest = np.abs(wide).max(axis=axes, keepdims=True)
        scale[part] = np.where(largest > 0, largest / LARGEST, 1.0)
        values[part] = np.rint(wide / scale[part])
    return values, scale


def product(equation: str, x: jax.Array, weight: Weight, preferred_element_type=None) -> jax.Array:
    """`narrow.einsum(equation, x, weight)`, whose output ends in the weight's output axes; in x's type unless another is preferred."""
    if not isinstance(weight, Int8):
        return narrow.einsum(equation, x, weight, preferred_element_type)
    out = jnp.einsum(equation, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    channels = weight.scale.reshape([size for size, is_input in zip(weight.scale.shape, _inputs(equation), strict=True) if not is_input])
    channels = channels.reshape((1,) * (out.ndim - channels.ndim) + channels.shape)
    return (out * channels).astype(preferred_element_type or x.dtype)


def grouped(rows: jax.Array, weight: Weight, sizes: jax.Array, expert: jax.Array, preferred_element_type=None) -> jax.Array:
    """Product of rows sorted by expert with each one's matrix [X, in, out]; `expert` [N] names it (any id where no group covers a row)."""
    if not isinstance(weight, Int8):
        return jax.lax.ragged_dot(rows, weight, sizes, preferred_element_type=preferred_element_type)
    out = jax.lax.ragged_dot(rows, weight.values.astype(rows.dtype), sizes, preferred_element_type=jnp.float32)
    return (out * weight.scale[:, 0][jnp.minimum(expert, weight.shape[0] - 1)]).astype(preferred_element_type or rows.dtype)


def _inputs(equation: str) -> list[bool]:
    """Which axes of the second operand are summed over."""
    operands, result = equation.replace(" ", "").split("->")
    return [letter not in result for letter in operands.split(",")[1]]
