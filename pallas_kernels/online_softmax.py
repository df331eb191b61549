"""The online softmax that the attention kernels share: float32 statistics, replicated over the 128 lanes of a TPU register.

State of `rows` queries, as three references: `top` (largest score so far) and `normalizer` [rows, 128], `weighted` (unnormalized output)
[rows, E]. A masked score is a large finite negative number, because the difference of two infinities is NaN.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.reference import MASKED

LANES = 128


def scratch(rows: int, size: int) -> list:
    """VMEM scratch of one online softmax: top, normalizer, weighted."""
    statistics = pltpu.VMEM((rows, LANES), jnp.float32)
    return [statistics, statistics, pltpu.VMEM((rows, size), jnp.float32)]


def reset(state) -> None:
    top, normalizer, weighted = state
    top[...] = jnp.full(top.shape, MASKED, jnp.float32)
    normalizer[...] = jnp.zeros(normalizer.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)


def update(state, scores: jax.Array, values: jax.Array, value_factors: jax.Array | None = None) -> None:
    """Merge one block of keys: `scores` [rows, keys] float32 (masked ones equal to MASKED), `values` [keys, E], each times its factor."""
    top, normalizer, weighted = state
    previous = top[...]
    largest = jnp.maximum(previous, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(scores > 0.5 * MASKED, jnp.exp(scores - largest[:, :1]), 0.0)
    shrink = jnp.exp(previous - largest)
    top[...] = largest
    normalizer[...] = normalizer[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    weights = weights if value_factors is None else weights * value_factors
    weighted[...] = weighted[...] * shrink[:, :1] + product(weights.astype(values.dtype), values, (1, 0))


def output(state) -> jax.Array:
    """Normalized output [rows, E]; zero where nothing was seen."""
    _, normalizer, weighted = state
    total = normalizer[...][:, :1]
    return weighted[...] / jnp.where(total > 0, total, 1.0)


def product(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over one axis of each side, accumulated in float32. float32 operands are not rounded to bfloat16 on the way."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    """Mask folded scores [queries * rows, keys] (query-major) by `seen` [rows, keys], the same for every folded query."""
    rows, keys = seen.shape
    folded = scores.reshape(scores.shape[0] // rows, rows, keys)
    return jnp.where(seen[None], folded, MASKED).reshape(scores.shape)


def is_last(axis: int):
    return pl.program_id(axis) == pl.num_programs(axis) - 1
