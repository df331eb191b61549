"""The rows of a round: every request's anchor and its kept drafts, packed into one array of a static length, and taken apart again."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.drafter.types import Draft
from angelspec_jax.target.attention import Rows, chain_ancestors, tree_ancestors, uniform_rows


@struct.dataclass
class Packed:
    rows: Rows
    tokens: Int[Array, "N"]
    positions: Int[Array, "N"]


def pack(
    draft: Draft | None,
    anchor: Int[Array, "R"],
    prefix: Int[Array, "R"],
    kept: Int[Array, "R"],
    running: Bool[Array, "R"],
    room: int,
    widest: int,
) -> Packed:
    """Rows for `room` drafts a request on average, at most `widest` for any one; the first `kept[r]` drafts of request r are in them.

    Where every request has the same room (none, all, or one request alone) rows are uniform: drafts past `kept` are computed and mean
    nothing. Else they are ragged: requests that are over take no row, and rows past the last request's are not valid.
    """
    requests = anchor.shape[0]
    if room == 0 or draft is None:
        return Packed(uniform_rows(prefix, 1), anchor, prefix)
    width = room + 1 if requests == 1 else widest + 1
    tokens = jnp.concatenate([anchor[:, None], draft.tokens[:, : width - 1]], axis=1)
    if draft.parents is None:
        ancestors = jnp.broadcast_to(chain_ancestors(width)[None], (requests, width, 2))
        depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    else:
        root = jnp.full_like(anchor[:, None], -1)
        ancestors = tree_ancestors(jnp.concatenate([root, draft.parents[:, : width - 1] + 1], axis=1))
        depth = jnp.sum(jax.lax.population_count(ancestors), axis=-1).astype(jnp.int32) - 1
    positions = prefix[:, None] + depth
    if requests == 1 or room == widest:
        rows = dataclasses.replace(uniform_rows(prefix, width), ancestors=ancestors.reshape(-1, 2))
        return Packed(rows, tokens.reshape(-1), positions.reshape(-1))
    start = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(jnp.where(running, 1 + kept, 0), dtype=jnp.int32)])
    row = jnp.arange(requests * (1 + room), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(row[:, None] >= start[None, 1:], axis=1, dtype=jnp.int32), requests - 1)
    offset = jnp.clip(row - start[request], 0, width - 1)
    rows = Rows(
        request=request,
        row_start=start,
        ancestors=ancestors[request, offset],
        prefix_length=prefix,
        valid=row < start[-1],
        max_rows=width,
        uniform=False,
    )
    return Packed(rows, tokens[request, offset], positions[request, offset])


def unpack(x: Float[Array, "N *rest"] | Int[Array, "N *rest"], rows: Rows, width: int) -> jax.Array:
    """[N, ...] -> [R, width, ...]; entries past a request's rows mean nothing."""
    requests = rows.prefix_length.shape[0]
    if rows.uniform:
        x = x.reshape(requests, rows.max_rows, *x.shape[1:])
        return jnp.pad(x, [(0, 0), (0, width - rows.max_rows)] + [(0, 0)] * (x.ndim - 2))
    index = rows.row_start[:-1, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return x[jnp.minimum(index, x.shape[0] - 1)]
