"""Key-value cache: written once per accepted token by `commit`, never by a forward pass.

Two layouts, a static choice. *Pages* (TPU): `[pages, G, page, E]` with a table `[R, pages]` naming each request's pages in order.
*Slots* (CPU): request r owns slot r, no table; values are `[R, G, S, E]` and keys `[R, G, E, S]`, the order in which attention multiplies
them, because XLA on CPU would otherwise transpose the keys at every step. Layers are a tuple of arrays (unrolled layers) or one stacked
array (scan).
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.target import kernels
from angelspec_jax.target.config import TransformerConfig


@struct.dataclass
class KVCache:
    k: tuple[jax.Array, ...] | jax.Array  # per layer [R, G, E, S] or [pages, G, page, E]; stacked: a leading L
    v: tuple[jax.Array, ...] | jax.Array  # per layer [R, G, S, E] or [pages, G, page, E]
    table: Int[Array, "R pages"] | None = None

    @property
    def capacity(self) -> int:
        """Most tokens one request can hold."""
        page = (self.v[0] if isinstance(self.v, tuple) else self.v).shape[-2]
        return page if self.table is None else page * self.table.shape[1]


def create(config: TransformerConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> KVCache:
    """An empty cache for `requests` sequences of `capacity` tokens; with `page`, the paged layout with consecutive pages."""
    if page is None:
        shape, table = (requests, config.num_kv_heads, capacity, config.head_dim), None
        k_shape = (requests, config.num_kv_heads, config.head_dim, capacity)
    else:
        pages = -(-capacity // page)
        shape = k_shape = (requests * pages, config.num_kv_heads, page, config.head_dim)
        table = jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages)
    if config.scan_layers:
        return KVCache(jnp.zeros((config.num_layers, *k_shape), dtype), jnp.zeros((config.num_layers, *shape), dtype), table)
    layers = range(config.num_layers)
    return KVCache(tuple(jnp.zeros(k_shape, dtype) for _ in layers), tuple(jnp.zeros(shape, dtype) for _ in layers), table)


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
    if cache.table is None:
        capacity = cache.capacity
        column = jnp.where(accepted, positions, capacity)  # out of bounds: dropped
        write_k = functools.partial(_write_slots, request=request, column=column, axis=3)
        write_v = functools.partial(_write_slots, request=request, column=column, axis=2)
    else:
        pages = {"table": cache.table, "request": request, "positions": positions, "accepted": accepted}
        write_k = write_v = functools.partial(kernels.cache_commit, **pages)
    if isinstance(cache.k, tuple) or isinstance(cache.v, tuple):
        k = tuple(write_k(old, new) for old, new in zip(cache.k, new_k, strict=True))
        v = tuple(write_v(old, new) for old, new in zip(cache.v, new_v, strict=True))
    elif cache.table is not None:
        k, v = write_k(cache.k, new_k), write_v(cache.v, new_v)
    else:
        k, v = jax.vmap(write_k)(cache.k, new_k), jax.vmap(write_v)(cache.v, new_v)
    return KVCache(k, v, cache.table)


def _write_slots(slots, new: Float[Array, "N G E"], *, request: Int[Array, "N"], column: Int[Array, "N"], axis: int):
    """Rows into their request's slot; `axis` is where the slot keeps its positions."""
    new = new.astype(slots.dtype)
    if axis == 2:
        return slots.at[request, :, column].set(new, mode="drop")
    return slots.at[request, :, :, column].set(new, mode="drop")
