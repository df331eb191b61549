"""Key-value cache: written once per accepted token by `commit`, never by a forward pass.

Two layouts, a static choice. *Pages* (TPU): `[pages, G, page, E]`; a request owns consecutive pages, which `table` [R, pages] names. Small
heads (2E <= 128) keep a token's key and value in one row, `[pages, G, page, 2E]`, because a TPU moves rows of 128 numbers; `v` is None.
*Slots* (CPU, GPU): request r owns slot r, no table; values are `[R, G, S, E]` and keys `[R, G, E, S]`, the order in which attention
multiplies them, because XLA on CPU would otherwise transpose the keys at every step. Layers are a tuple of arrays (unrolled layers) or one
stacked array (scan).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.target import kernels
from angelspec_jax.target.config import TransformerConfig

PAGE = 128  # tokens; one register of lanes, and a whole number of tiles in every dtype
_LANES = 128


@struct.dataclass
class KVCache:
    k: tuple[jax.Array, ...] | jax.Array  # per layer [R, G, E, S] or [pages, G, page, E or 2E]; stacked: a leading L
    v: tuple[jax.Array | None, ...] | jax.Array | None  # per layer [R, G, S, E] or [pages, G, page, E]; None beside rows of 2E
    columns: int | None = struct.field(pytree_node=False, default=None)  # pages of a request; None: slots

    @property
    def table(self) -> Int[Array, "R pages"] | None:
        """The pages of every request, in order; None for slots."""
        if self.columns is None:
            return None
        pages = self.k[0].shape[0] if isinstance(self.k, tuple) else self.k.shape[1]
        return jnp.arange(pages, dtype=jnp.int32).reshape(pages // self.columns, self.columns)

    def layer(self, index: int) -> tuple[jax.Array, jax.Array | None]:
        """Keys and values of one layer; rows of 2E hold both."""
        return self.k[index], None if self.v is None else self.v[index]

    @property
    def capacity(self) -> int:
        """Most tokens one request can hold."""
        keys = self.k[0] if isinstance(self.k, tuple) else self.k
        return keys.shape[-1] if self.columns is None else keys.shape[-2] * self.columns


def native_page() -> int | None:
    """Page size of the layout that the devices at hand want, or those of the mesh the program is traced for; None: slots."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return PAGE if (jax.default_backend() if device is None else device.platform) == "tpu" else None


def create(config: TransformerConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> KVCache:
    """An empty cache for `requests` sequences of `capacity` tokens; in pages of `page` tokens, or as the devices want it."""
    page, size = native_page() if page is None else page, config.head_dim
    if page is None:
        columns = None
        k_shape = (requests, config.num_kv_heads, size, capacity)
        v_shape = (requests, config.num_kv_heads, capacity, size)
    else:
        columns = -(-capacity // page)
        k_shape = v_shape = (requests * columns, config.num_kv_heads, page, size)
        if 2 * size <= _LANES:
            k_shape, v_shape = (*k_shape[:3], 2 * size), None
    layers = config.num_layers
    if config.scan_layers:
        v = None if v_shape is None else jnp.zeros((layers, *v_shape), dtype)
        return KVCache(jnp.zeros((layers, *k_shape), dtype), v, columns)
    k = tuple(jnp.zeros(k_shape, dtype) for _ in range(layers))
    return KVCache(k, tuple(None if v_shape is None else jnp.zeros(v_shape, dtype) for _ in range(layers)), columns)


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
    old_k: Any = cache.k
    old_v: Any = cache.v
    if cache.table is not None:
        write = functools.partial(kernels.cache_commit, table=cache.table, request=request, positions=positions, accepted=accepted)
        if not isinstance(old_k, tuple):
            return KVCache(*_write_pages(write, old_k, old_v, new_k, new_v), cache.columns)
        written = [_write_pages(write, *layer) for layer in zip(old_k, old_v, new_k, new_v, strict=True)]
        return KVCache(tuple(k for k, _ in written), tuple(v for _, v in written), cache.columns)
    column = jnp.where(accepted, positions, cache.capacity)  # out of bounds: dropped
    write_k = functools.partial(_write_slots, request=request, column=column, axis=3)
    write_v = functools.partial(_write_slots, request=request, column=column, axis=2)
    if isinstance(old_k, tuple):
        k = tuple(write_k(old, new) for old, new in zip(old_k, new_k, strict=True))
        v = tuple(write_v(old, new) for old, new in zip(old_v, new_v, strict=True))
    else:
        k, v = jax.vmap(write_k)(old_k, new_k), jax.vmap(write_v)(old_v, new_v)
    return KVCache(k, v)


def _write_pages(write, k_pages, v_pages, new_k, new_v):
    if v_pages is None:
        return write(k_pages, jnp.concatenate([new_k, new_v], axis=-1)), None
    return write(k_pages, new_k), write(v_pages, new_v)


def _write_slots(slots, new: Float[Array, "N G E"], *, request: Int[Array, "N"], column: Int[Array, "N"], axis: int):
    """Rows into their request's slot; `axis` is where the slot keeps its positions."""
    new = new.astype(slots.dtype)
    if axis == 2:
        return slots.at[request, :, column].set(new, mode="drop")
    return slots.at[request, :, :, column].set(new, mode="drop")
