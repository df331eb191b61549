"""Key-value cache: written once per accepted token by `commit`, never by a forward pass.

Two layouts, a static choice. *Pages* (TPU): `[pages, G, page, E]` with a table `[R, pages]` naming each request's pages in order.
*Slots* (CPU): `[R, G, S, E]`, request r in slot r, no table. Layers are a tuple of arrays (unrolled layers) or one stacked array (scan).
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.target.config import TransformerConfig


@struct.dataclass
class KVCache:
    k: tuple[jax.Array, ...] | jax.Array  # per layer [R, G, S, E] or [pages, G, page, E]; stacked: a leading L
    v: tuple[jax.Array, ...] | jax.Array
    table: Int[Array, "R pages"] | None = None

    @property
    def capacity(self) -> int:
        """Most tokens one request can hold."""
        page = (self.k[0] if isinstance(self.k, tuple) else self.k).shape[-2]
        return page if self.table is None else page * self.table.shape[1]


def create(config: TransformerConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> KVCache:
    """An empty cache for `requests` sequences of `capacity` tokens; with `page`, the paged layout with consecutive pages."""
    if page is None:
        shape, table = (requests, config.num_kv_heads, capacity, config.head_dim), None
    else:
        pages = -(-capacity // page)
        shape = (requests * pages, config.num_kv_heads, page, config.head_dim)
        table = jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages)
    if config.scan_layers:
        stacked = (config.num_layers, *shape)
        return KVCache(jnp.zeros(stacked, dtype), jnp.zeros(stacked, dtype), table)
    layers = range(config.num_layers)
    return KVCache(tuple(jnp.zeros(shape, dtype) for _ in layers), tuple(jnp.zeros(shape, dtype) for _ in layers), table)


def commit(
    cache: KVCache,
    new_kv: tuple,
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
) -> KVCache:
    """Write the accepted rows' keys and values (`new_kv` as `forward` returns it) at their positions; other rows are dropped.

    Rows past the capacity are dropped too: the caller refuses such requests before they start.
    """
    new_k, new_v = new_kv
    write = functools.partial(_write, table=cache.table, request=request, positions=positions, accepted=accepted)
    if isinstance(cache.k, tuple):
        k = tuple(write(old, new) for old, new in zip(cache.k, new_k, strict=True))
        v = tuple(write(old, new) for old, new in zip(cache.v, new_v, strict=True))
    else:
        k, v = jax.vmap(write)(cache.k, new_k), jax.vmap(write)(cache.v, new_v)
    return KVCache(k, v, cache.table)


def _write(
    pages: Float[Array, "P G page E"],
    new: Float[Array, "N G E"],
    *,
    table: Int[Array, "R pages"] | None,
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
) -> Float[Array, "P G page E"]:
    page = pages.shape[2]
    if table is None:
        index, offset = request, positions
    else:
        index, offset = table[request, jnp.minimum(positions // page, table.shape[1] - 1)], positions % page
        accepted = accepted & (positions < page * table.shape[1])
    offset = jnp.where(accepted, offset, page)  # out of bounds: dropped
    return pages.at[index, :, offset].set(new.astype(pages.dtype), mode="drop")
