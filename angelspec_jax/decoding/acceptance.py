"""Which drafts survive: the coupled rule, for chains and any tree.

The target's token after every row is known (`sampling.choose`). A draft is accepted iff it is the target's token after its parent and its
parent was accepted. Siblings are distinct, so what is accepted is one path, and the row at its end gives the bonus token.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from angelspec_jax.drafter.types import Draft


@struct.dataclass
class Accepted:
    """The accepted path of every request: `path[r, :count[r] + 1]` are its rows (row 0, the anchor, first); None says row = depth."""

    count: Int[Array, "R"]  # accepted drafts
    tokens: Int[Array, "R W"]  # what each path row emits: the accepted drafts, then the bonus token
    path: Int[Array, "R W"] | None = None  # row at each depth; rows past `count` mean nothing


def accept(draft: Draft | None, chosen: Int[Array, "R W"], verified: Bool[Array, "R K"] | None = None) -> Accepted:
    """Walk the draft with the target's choices. `chosen[r, 1 + k]` is the target's token after draft k, `chosen[r, 0]` after the anchor.

    Drafts that are not `verified` are never accepted.
    """
    requests, width = chosen.shape
    if draft is None or width == 1:
        return Accepted(jnp.zeros((requests,), jnp.int32), chosen[:, :1])
    tokens = draft.tokens[:, : width - 1]
    if verified is None:
        verified = jnp.ones(tokens.shape, bool)
    if draft.parents is None:
        alive = jnp.cumprod(((tokens == chosen[:, :-1]) & verified).astype(jnp.int32), axis=1)
        return Accepted(jnp.sum(alive, axis=1), chosen)
    parents = draft.parents[:, : width - 1]
    wanted = jnp.take_along_axis(chosen, parents + 1, axis=1)
    return _walk((tokens == wanted) & verified, parents, chosen)


def _walk(matches: Bool[Array, "R K"], parents: Int[Array, "R K"], chosen: Int[Array, "R W"]) -> Accepted:
    """Follow, from the anchor, the one child that matches."""
    requests, width = chosen.shape
    row = jnp.zeros((requests,), jnp.int32)
    going = jnp.ones((requests,), bool)
    path, count = [row], jnp.zeros((requests,), jnp.int32)
    for _ in range(width - 1):
        child = matches & (parents == (row - 1)[:, None])
        going = going & jnp.any(child, axis=1)
        row = jnp.where(going, jnp.argmax(child, axis=1).astype(jnp.int32) + 1, row)
        count = count + going.astype(jnp.int32)
        path.append(row)
    path = jnp.stack(path, axis=1)
    return Accepted(count, jnp.take_along_axis(chosen, path, axis=1), path)
