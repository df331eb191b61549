"""Rows of a growing tree that stay in flight: W lanes a level, laid out level by level, each seeing its own path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32


def extend_paths(ancestors: UInt32[Array, "R F 2"], depth: Int[Array, ""], origin: Int[Array, "R W"]) -> UInt32[Array, "R F 2"]:
    """Ancestor bits with those of the rows of level `depth`: the path of the lane each continues, and the row itself."""
    lanes = origin.shape[1]
    column = depth * lanes
    path = jax.lax.dynamic_slice_in_dim(ancestors, jnp.maximum(column - lanes, 0), lanes, axis=1)  # of the level before
    path = jnp.where(depth > 0, jnp.take_along_axis(path, origin[..., None], axis=1), jnp.uint32(0)) | _bit(column, lanes)
    return jax.lax.dynamic_update_slice_in_dim(ancestors, path, column, axis=1)


def _bit(column: Int[Array, ""], lanes: int) -> UInt32[Array, "1 W 2"]:
    """Ancestor bits of rows that see themselves alone."""
    row = column + jnp.arange(lanes, dtype=jnp.int32)[:, None]
    word = jnp.arange(2, dtype=jnp.int32)[None]
    return jnp.where(row // 32 == word, jnp.uint32(1) << (row % 32).astype(jnp.uint32), jnp.uint32(0))[None]


def put(flight: jax.Array, rows: jax.Array, column: Int[Array, ""], lanes: int) -> jax.Array:
    """Write packed rows [R * W, ...] of one level to their place among all rows in flight [R, F, ...]."""
    return jax.lax.dynamic_update_slice_in_dim(flight, rows.reshape(-1, lanes, *rows.shape[1:]), column, axis=1)


def take(flight: jax.Array, column: Int[Array, ""], lanes: int) -> jax.Array:
    """The packed rows of one level."""
    return packed(jax.lax.dynamic_slice_in_dim(flight, column, lanes, axis=1))


def packed(flight: jax.Array) -> jax.Array:
    """All rows in flight, one request after the other."""
    return flight.reshape(flight.shape[0] * flight.shape[1], *flight.shape[2:])
