"""Packed rows, the mask they imply, and the dispatch of attention to a kernel or its plain-JAX twin.

A *row* is one token in flight: not yet in the cache. Rows of all requests are packed into one array, sorted by request, so a kernel reads
each request's cache once. A row sees the whole committed prefix of its request and, among the rows in flight, those named by its ancestor
bits (a draft tree, a bidirectional block) or those before it (`causal`, prefill).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from angelspec_jax.target import kernels

MAX_TREE_ROWS = 64  # two words of ancestor bits


@struct.dataclass
class Rows:
    """Which request each packed row belongs to and which other rows it sees.

    `max_rows` bounds the rows of one request; `uniform` says every request owns exactly `max_rows` rows (N = R * max_rows), which lets the
    plain-JAX twin skip its padding gathers. Rows that are not `valid` are computed but mean nothing.
    """

    request: Int[Array, "N"]
    row_start: Int[Array, "R+1"]
    ancestors: UInt32[Array, "N 2"]  # bit j: sees row j of its own request (itself included)
    prefix_length: Int[Array, "R"]  # tokens of each request in the cache
    valid: Bool[Array, "N"]
    causal: bool = struct.field(pytree_node=False, default=False)
    max_rows: int = struct.field(pytree_node=False, default=1)
    uniform: bool = struct.field(pytree_node=False, default=True)


def uniform_rows(
    prefix_length: Int[Array, "R"],
    width: int,
    *,
    ancestors: UInt32[Array, "W 2"] | None = None,
    valid: Bool[Array, "R W"] | None = None,
    causal: bool = False,
) -> Rows:
    """Rows where every request owns `width` consecutive rows. Without `ancestors` they form a chain (or `causal` prefill chunk)."""
    requests = prefix_length.shape[0]
    if not causal and width > MAX_TREE_ROWS:
        raise ValueError(f"a request can verify at most {MAX_TREE_ROWS} rows with ancestor bits, got {width}")
    if ancestors is None:
        ancestors = jnp.zeros((width, 2), jnp.uint32) if causal else chain_ancestors(width)
    if valid is None:
        valid = jnp.ones((requests, width), bool)
    return Rows(
        request=jnp.repeat(jnp.arange(requests, dtype=jnp.int32), width),
        row_start=jnp.arange(requests + 1, dtype=jnp.int32) * width,
        ancestors=jnp.tile(ancestors, (requests, 1)),
        prefix_length=prefix_length,
        valid=valid.reshape(-1),
        causal=causal,
        max_rows=width,
        uniform=True,
    )


def chain_ancestors(width: int) -> UInt32[Array, "W 2"]:
    """Ancestor bits of a chain: row i sees rows 0..i."""
    return _pack(jnp.tril(jnp.ones((width, width), bool)))


def block_ancestors(width: int) -> UInt32[Array, "W 2"]:
    """Ancestor bits of a bidirectional block: every row sees all of them."""
    return _pack(jnp.ones((width, width), bool))


def tree_ancestors(parents: Int[Array, "R W"]) -> UInt32[Array, "R W 2"]:
    """Ancestor bits of trees given each row's parent row (-1 for the root); parents come before their children."""
    requests, width = parents.shape
    seen = jnp.zeros((requests, width, width), bool)
    for row in range(width):  # static and at most 64
        parent = parents[:, row]
        inherited = jnp.take_along_axis(seen, jnp.maximum(parent, 0)[:, None, None], axis=1)[:, 0]
        inherited = jnp.where((parent >= 0)[:, None], inherited, False)
        seen = seen.at[:, row].set(inherited.at[:, row].set(True))
    return _pack(seen)


def _pack(seen: Bool[Array, "*batch W W"]) -> UInt32[Array, "*batch W 2"]:
    width = seen.shape[-1]
    padded = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, MAX_TREE_ROWS - width)])
    words = padded.reshape(*seen.shape[:-1], 2, 32).astype(jnp.uint32)
    weights = jnp.broadcast_to(jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), words.shape)
    return jnp.sum(words * weights, axis=-1, dtype=jnp.uint32)


def attend(
    q: Float[Array, "N H E"],
    k: Float[Array, "N G E"],
    v: Float[Array, "N G E"],
    k_cache: Float[Array, "*L P G page C"] | Float[Array, "R G E S"],
    v_cache: Float[Array, "*L P G page E"] | Float[Array, "R G S E"] | None,
    table: Int[Array, "R pages"] | None,
    rows: Rows,
    positions: Int[Array, "N"],
    layer: Int[Array, ""] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "N H E"]:
    """Attention of packed rows over their committed prefix and the rows in flight, by the kernel on TPU and by its twin elsewhere.

    The pages may be those of all layers stacked, with `layer` to say which is meant, and may hold keys and values in one row (C = 2E).
    """
    return kernels.tree_attention(q, k, v, k_cache, v_cache, table, rows, positions, layer, scale=scale, window=window)
