"""Attention of packed tree rows to a paged prefix and to each other, for TPU. Twin: `reference.tree_attention`.

Grid: requests x kv heads x blocks of rows x key steps. The query heads that share a kv head are folded next to the rows, so one fetch of a
page serves all of them; draft trees have at most 64 rows and fit one block of rows, so a request's cache is read once. A prefix step
fetches several pages, each through its own BlockSpec whose index_map looks the page up in the scalar-prefetched table; steps that no row
can see repeat the index of a neighbour, which Pallas does not fetch again, and compute nothing. The last steps (one for a tree) take the
keys of the rows in flight, masked by two words of ancestor bits per row, through the same online softmax.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import online_softmax as softmax

MAX_TREE_ROWS = 64  # two words of ancestor bits
_SUBLANES = 16  # rows of a packed bfloat16 tile; float32 tiles (8) divide it
_VMEM_BUDGET = 12 * 2**20  # bytes; every generation grants a kernel 16 MiB unasked


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Static sizes of one call: rows of a block, in-flight keys of a block, padded rows of a request, pages fetched per prefix step."""

    rows: int
    own_keys: int
    width: int
    pages: int


def block_sizes(max_rows: int, fold: int, head_size: int, page: int, table_pages: int, itemsize: int, causal: bool) -> Blocks:
    """Block sizes from shapes alone.

    `fold` query heads share a kv head. Rows: all of a request if they fold to at most 1024, else about 1024 folded rows. Keys: about 512
    per prefix step, fewer when the scores and the double-buffered pages would overrun the VMEM budget.
    """
    width = _round_up(max_rows, _SUBLANES)
    if width * fold <= 1024:
        rows = own_keys = width
    else:
        rows = max(_SUBLANES, _floor_power_of_two(1024 // fold))
        own_keys = 128 if causal else width
        width = _round_up(width, max(rows, own_keys) if causal else rows)
        own_keys = own_keys if causal else width
    folded = rows * fold
    resident = folded * (3 * head_size * max(itemsize, 4) + 2 * softmax.LANES * 4) + 4 * own_keys * head_size * itemsize
    per_key = 6 * head_size * itemsize + 3 * folded * 4  # K and V double-buffered and joined once; scores, weights, mask
    keys = max(page, min(512, (_VMEM_BUDGET - resident) // per_key))
    return Blocks(rows, own_keys, width, max(1, min(keys // page, table_pages)))


def tree_attention(
    q: Float[Array, "N H E"],
    k: Float[Array, "N G E"],
    v: Float[Array, "N G E"],
    k_cache: Float[Array, "P G page E"],
    v_cache: Float[Array, "P G page E"],
    table: Int[Array, "R pages"],
    row_start: Int[Array, "R+1"],
    ancestors: UInt32[Array, "N 2"],
    prefix_length: Int[Array, "R"],
    positions: Int[Array, "N"],
    *,
    causal: bool,
    max_rows: int,
    scale: float,
    window: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "N H E"]:
    """Attention of packed rows to their request's cached prefix and to the rows in flight that they may see.

    Rows of request r are `row_start[r] .. row_start[r+1]-1` (at most `max_rows`). Row i sees cache entries `s < prefix_length[r]` and its
    request's row j if bit j of `ancestors[i]` is set (`causal`: if j <= i). With `window`, keys at or before `position - window` are
    hidden. Scores and the softmax are float32; rows that see nothing, or belong to no request, return zeros. Table entries past a
    request's prefix are never read as keys and may hold anything.

    Raises ValueError if `max_rows` exceeds 64 without `causal`, or if a page is not a multiple of 8 tokens.
    """
    rows, heads, size = q.shape
    groups, page = k.shape[1], k_cache.shape[2]
    if not causal and max_rows > MAX_TREE_ROWS:
        raise ValueError(f"max_rows is {max_rows}, but ancestor bits name at most {MAX_TREE_ROWS} rows: pass causal=True or fewer rows")
    if page % 8:
        raise ValueError(f"pages of {page} tokens do not tile a TPU register: use a page size that is a multiple of 8")
    fold = heads // groups
    blocks = block_sizes(max_rows, fold, size, page, table.shape[1], k_cache.dtype.itemsize, causal)
    counts = jnp.minimum(jnp.diff(row_start), max_rows).astype(jnp.int32)

    index = row_start[:-1, None] + jnp.arange(blocks.width, dtype=row_start.dtype)[None]
    index = jnp.minimum(index, rows - 1)
    queries = _fold(q[index], blocks, groups)
    position = positions[index].astype(jnp.int32)
    words = jax.lax.bitcast_convert_type(ancestors, jnp.int32)[index]
    row_data = jnp.concatenate([position[..., None], words], axis=-1)  # [R, W, 3]

    out = _call(
        _visible_pages(counts, prefix_length, position, page, blocks, window),
        jnp.clip(table, 0, k_cache.shape[0] - 1).astype(jnp.int32),
        (queries, row_data, position[:, None, :]),
        (jnp.swapaxes(k[index], 1, 2), jnp.swapaxes(v[index], 1, 2)),
        (k_cache, v_cache),
        blocks=blocks,
        causal=causal,
        scale=scale,
        window=window,
        interpret=interpret,
    )
    return _pack(_unfold(out, blocks, fold), row_start, counts, rows)


def _visible_pages(counts, prefix_length, position, page, blocks: Blocks, window) -> Int[Array, "4 R"]:
    """Per request: live rows, visible prefix tokens, first and last prefix step that any row sees (last -1: none)."""
    prefix = jnp.where(counts > 0, prefix_length, 0).astype(jnp.int32)
    step = page * blocks.pages
    first = jnp.zeros_like(prefix)
    if window is not None:
        live = jnp.arange(blocks.width, dtype=jnp.int32)[None] < counts[:, None]
        earliest = jnp.min(jnp.where(live, position, jnp.iinfo(jnp.int32).max), axis=1)
        first = jnp.maximum(jnp.where(counts > 0, earliest, 0) - window + 1, 0) // step
    last = (prefix + step - 1) // step - 1
    return jnp.stack([counts, prefix, jnp.minimum(first, jnp.maximum(last, 0)), last])


def _call(bounds, table, rows, own, caches, *, blocks: Blocks, causal, scale, window, interpret):
    queries, row_data, key_position = rows
    requests, groups, row_blocks, folded, size = queries.shape
    page = caches[0].shape[2]
    prefix_steps = -(-table.shape[1] // blocks.pages)
    own_steps = blocks.width // blocks.own_keys

    def page_index(slot, r, g, b, t, bounds, table):
        # The nearest visible step, and there this slot's page; a slot past the prefix repeats the page of its last visible step.
        last_column = (bounds[1, r] + page - 1) // page - 1
        step = jnp.clip(t, bounds[2, r], jnp.maximum(bounds[3, r], 0))
        column = step * blocks.pages + slot
        column = jnp.where(column > last_column, column - blocks.pages, column)
        return table[r, jnp.clip(column, 0, jnp.maximum(last_column, 0))], g, 0, 0

    def own_index(r, g, b, t, bounds, table):
        last = (b * blocks.rows + blocks.rows - 1) // blocks.own_keys if causal else own_steps - 1
        return jnp.clip(t - prefix_steps, 0, jnp.minimum(last, own_steps - 1))

    pages = [pl.BlockSpec((None, None, page, size), functools.partial(page_index, slot)) for slot in range(blocks.pages)]
    own_spec = pl.BlockSpec((None, None, blocks.own_keys, size), lambda r, g, b, t, *s: (r, g, own_index(r, g, b, t, *s), 0))
    query_spec = pl.BlockSpec((None, None, None, folded, size), lambda r, g, b, t, *s: (r, g, b, 0, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(requests, groups, row_blocks, prefix_steps + own_steps),
        in_specs=[
            query_spec,
            pl.BlockSpec((None, blocks.rows, row_data.shape[2]), lambda r, g, b, t, *s: (r, b, 0)),
            pl.BlockSpec((None, 1, blocks.own_keys), lambda r, g, b, t, *s: (r, 0, own_index(r, g, b, t, *s))),
            own_spec,
            own_spec,
            *pages,
            *pages,
        ],
        out_specs=query_spec,
        scratch_shapes=softmax.scratch(folded, size),
    )
    kernel = functools.partial(_kernel, blocks=blocks, page=page, prefix_steps=prefix_steps, causal=causal, scale=scale, window=window)
    return pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(queries, own[0], caches[0], table),
        name=f"tree_attention-rows_{blocks.rows}x{folded // blocks.rows}-own_{blocks.own_keys}-keys_{blocks.pages}x{page}",
        interpret=interpret,
    )(bounds, table, queries, row_data, key_position, *own, *[caches[0]] * blocks.pages, *[caches[1]] * blocks.pages)


def _kernel(bounds, table, queries, row_data, key_position, k_own, v_own, *refs, blocks, page, prefix_steps, causal, scale, window):
    k_pages, v_pages = refs[: blocks.pages], refs[blocks.pages : 2 * blocks.pages]
    out, *state = refs[2 * blocks.pages :]
    request, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    live, prefix, first, last = (bounds[field, request] for field in range(4))
    first_row = block * blocks.rows
    has_rows = first_row < live

    @pl.when(step == 0)
    def _():
        softmax.reset(state)

    @pl.when(has_rows & (step >= first) & (step <= last))
    def _():
        keys = blocks.pages * page
        start = step * keys
        key = start + jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, keys), 1)
        seen = key < prefix
        if window is not None:
            seen = seen & (key > row_data[:, :1] - window)
        _attend(state, queries, _joined(k_pages), _joined(v_pages), seen, prefix - start, scale)

    own_step = step - prefix_steps
    reachable = (own_step * blocks.own_keys < first_row + blocks.rows) if causal else True

    @pl.when(has_rows & (own_step >= 0) & reachable)
    def _():
        shape = (blocks.rows, blocks.own_keys)
        start = own_step * blocks.own_keys
        key = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        if causal:
            seen = key <= first_row + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        else:
            word = jnp.where(key < 32, row_data[:, 1:2], row_data[:, 2:3])
            seen = (jax.lax.shift_right_logical(word, key & 31) & 1) == 1
        seen = seen & (key < live)
        if window is not None:
            seen = seen & (key_position[...] > row_data[:, :1] - window)
        _attend(state, queries, k_own[...], v_own[...], seen, live - start, scale)

    @pl.when(softmax.is_last(3))
    def _():
        out[...] = softmax.output(state).astype(out.dtype)


def _attend(state, queries, keys, values, seen, valid, scale) -> None:
    """One block of keys; only the first `valid` hold meaningful numbers (the rest may be NaN, and 0 * NaN is NaN)."""
    scores = softmax.product(queries[...], keys.astype(queries.dtype), (1, 1)) * scale
    key = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    values = jnp.where(key < valid, values, jnp.zeros((), values.dtype))
    softmax.update(state, softmax.masked(scores, seen), values)


def _joined(pages):
    return pages[0][...] if len(pages) == 1 else jnp.concatenate([page[...] for page in pages], axis=0)


def _cost(queries, own, cache, table) -> pl.CostEstimate:
    """Upper bound: every request fills its table. Pages are read once per block of rows, everything else once."""
    groups, row_blocks, size = queries.shape[1], queries.shape[2], queries.shape[4]
    row_keys = queries.size // size * (table.shape[1] * cache.shape[2] + own.shape[2])
    page_bytes = 2 * table.size * groups * row_blocks * cache.shape[2] * size * cache.dtype.itemsize
    row_bytes = 2 * queries.size * queries.dtype.itemsize + 2 * own.size * own.dtype.itemsize
    return pl.CostEstimate(flops=4 * row_keys * size, transcendentals=row_keys, bytes_accessed=page_bytes + row_bytes)


def _fold(q, blocks: Blocks, groups: int):
    """[R, W, H, E] -> [R, G, row blocks, fold * rows, E], query-major inside a block so that the mask of a row is shared."""
    requests, width, heads, size = q.shape
    q = q.reshape(requests, width // blocks.rows, blocks.rows, groups, heads // groups, size)
    return q.transpose(0, 3, 1, 4, 2, 5).reshape(requests, groups, width // blocks.rows, -1, size)


def _unfold(out, blocks: Blocks, fold: int):
    requests, groups, row_blocks, _, size = out.shape
    out = out.reshape(requests, groups, row_blocks, fold, blocks.rows, size).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(requests, blocks.width, groups * fold, size)


def _pack(out, row_start, counts, rows: int):
    """[R, W, H, E] -> [N, H, E]; zeros for rows that belong to no request."""
    row = jnp.arange(rows, dtype=row_start.dtype)
    request = jnp.minimum(jnp.searchsorted(row_start[1:], row, side="right"), counts.shape[0] - 1)
    offset = row - row_start[request]
    owned = (offset >= 0) & (offset < counts[request])
    return jnp.where(owned[:, None, None], out[request, jnp.clip(offset, 0, out.shape[1] - 1)], jnp.zeros((), out.dtype))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _floor_power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1)
