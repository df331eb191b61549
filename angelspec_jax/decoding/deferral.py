"""What the drafter has not digested yet: features of rounds that went without a draft, kept until it drafts again."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

ROWS = 8  # tokens of each request that may wait


@struct.dataclass
class Pending:
    """The features of the last `count[r]` committed tokens of request r."""

    features: Float[Array, "R P T D"]
    hidden: Float[Array, "R P D"]
    count: Int[Array, "R"]


def create(requests: int, taps: int, width: int, dtype) -> Pending:
    return Pending(
        jnp.zeros((requests, ROWS, taps, width), dtype), jnp.zeros((requests, ROWS, width), dtype), jnp.zeros((requests,), jnp.int32)
    )


def append(pending: Pending, features: Float[Array, "R T D"], hidden: Float[Array, "R D"], committed: Bool[Array, "R"]) -> Pending:
    """One more token of every request that committed one."""
    slots = jnp.arange(committed.shape[0], dtype=jnp.int32)
    place = jnp.where(committed, pending.count, ROWS)  # out of bounds: dropped
    return Pending(
        pending.features.at[slots, place].set(features.astype(pending.features.dtype), mode="drop"),
        pending.hidden.at[slots, place].set(hidden.astype(pending.hidden.dtype), mode="drop"),
        pending.count + committed.astype(jnp.int32),
    )


def is_full(pending: Pending) -> Bool[Array, ""]:
    return jnp.any(pending.count >= ROWS)


def emptied(pending: Pending) -> Pending:
    return Pending(pending.features, pending.hidden, jnp.zeros_like(pending.count))


def positions(pending: Pending, prefix: Int[Array, "R"]) -> tuple[Int[Array, "R P"], Bool[Array, "R P"]]:
    """Where the waiting tokens stand, and which entries hold one; `prefix` tokens of each request are committed."""
    index = jnp.arange(ROWS, dtype=jnp.int32)[None]
    return (prefix - pending.count)[:, None] + index, index < pending.count[:, None]
