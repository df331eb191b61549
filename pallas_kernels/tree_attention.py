"""Attention of packed tree rows to a paged prefix and to each other, for TPU. Twin: `reference.tree_attention`.

Grid: requests x blocks of kv heads x blocks of rows x key steps. The query heads that share a kv head are folded next to the rows, so one
fetch of a page serves all of them; draft trees have at most 64 rows and fit one block of rows, so a request's cache is read once. A prefix
step fetches several pages of several kv heads, each page through its own BlockSpec whose index_map looks it up in the scalar-prefetched
table; steps that no row can see repeat the index of a neighbour, which Pallas does not fetch again, and compute nothing. The last steps
(one for a tree) take the keys of the rows in flight, masked by two words of ancestor bits per row, through the same online softmax.

Pages of small heads (2E <= 128) hold a token's key and value in one row, because a TPU moves rows of 128 numbers. Scores then multiply
queries followed by zeros, and of the weighted sum of rows only the values' half is kept. Pages of int8 carry float32 scales, per token and
head or per page and head; they multiply scores and weights, so that the products themselves read the int8 numbers as they are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num, UInt32

from pallas_kernels import online_softmax as softmax

MAX_TREE_ROWS = 64  # two words of ancestor bits
_SUBLANES = 16  # rows of a packed bfloat16 tile; float32 tiles (8) divide it
_VMEM_BUDGET = 12 * 2**20  # bytes; every generation grants a kernel 16 MiB unasked
_STEP_BYTES = 2 * 2**20  # of pages; a grid step costs about as much time as moving a quarter of this
_MAX_KEYS = 1024  # of a step


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Static sizes of one call: rows of a block, in-flight keys of a block, padded rows of a request, pages and kv heads of a step."""

    rows: int
    own_keys: int
    width: int
    pages: int
    groups: int


def block_sizes(
    max_rows: int, fold: int, groups: int, row_bytes: int, page: int, table_pages: int, causal: bool, query_bytes: int = 256
) -> Blocks:
    """Block sizes from shapes alone.

    `fold` query heads share each of `groups` kv heads, `row_bytes` is what one token and head takes in the cache, key and value together,
    `query_bytes` what one query takes. Rows: all of a request if they fold to at most 1024, else about 1024 folded rows. Keys: 512 per
    prefix step and as many kv heads as make a step of 2 MiB, or up to 1024 keys where all heads together are less; fewer when scores
    and double-buffered blocks would overrun the VMEM budget.
    """
    multiple = 8 if fold % 2 == 0 else _SUBLANES
    width = _round_up(max_rows, multiple)
    if width * fold <= 1024:
        rows = own_keys = width
    else:
        rows = max(_SUBLANES, _floor_power_of_two(1024 // fold))
        own_keys = 128 if causal else width
        width = _round_up(width, max(rows, own_keys) if causal else rows)
        own_keys = own_keys if causal else width
    folded = rows * fold

    def fits(keys: int, count: int) -> bool:
        resident = count * (folded * (4 * query_bytes + 2 * softmax.LANES * 4 + 512) + 4 * own_keys * query_bytes)
        per_key = 3 * row_bytes * count + 12 * folded  # pages double-buffered and joined; scores, weights and mask of one head
        return resident + keys * per_key <= _VMEM_BUDGET

    keys = max(page, 512)
    while keys > page and not fits(keys, 1):
        keys -= page
    divisors = [count for count in range(1, groups + 1) if groups % count == 0]
    count = max(c for c in divisors if c == 1 or (fits(keys, c) and c * keys * row_bytes <= _STEP_BYTES))
    while count == groups and keys < _MAX_KEYS and 2 * keys * count * row_bytes <= _STEP_BYTES and fits(2 * keys, count):
        keys *= 2
    return Blocks(rows, own_keys, width, max(1, min(keys // page, table_pages)), count)


def tree_attention(
    q: Float[Array, "N H E"],
    k: Float[Array, "N G E"],
    v: Float[Array, "N G E"],
    k_cache: Num[Array, "P G page C"],
    v_cache: Num[Array, "P G page E"] | None,
    table: Int[Array, "R pages"],
    row_start: Int[Array, "R+1"],
    ancestors: UInt32[Array, "N 2"],
    prefix_length: Int[Array, "R"],
    positions: Int[Array, "N"],
    *,
    causal: bool,
    max_rows: int,
    uniform: bool = False,
    scale: float,
    window: int | None = None,
    k_scale: Float[Array, "P G 1 scaled"] | None = None,
    v_scale: Float[Array, "P G 1 scaled"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "N H E"]:
    """Attention of packed rows to their request's cached prefix and to the rows in flight that they may see.

    Rows of request r are `row_start[r] .. row_start[r+1]-1` (at most `max_rows`; `uniform`: exactly that many, and `row_start` is not
    looked at). Row i sees cache entries `s < prefix_length[r]` and its request's row j if bit j of `ancestors[i]` is set (`causal`: if
    j <= i). With `window`, keys at or before `position - window` are hidden. Scores and the softmax are float32; rows that see nothing, or
    belong to no request, return zeros. Table entries past a request's prefix are never read as keys and may hold anything.

    Pages hold keys and values apart, or together in `k_cache` (C = 2E, keys first) with `v_cache=None`. Pages of int8 need `k_scale` and
    `v_scale`: what a stored number is multiplied by, per token (`scaled` = page) or per page (`scaled` = 1).

    Raises ValueError if `max_rows` exceeds 64 without `causal`, if a page is not a multiple of 8 tokens (32 for int8), or if int8 pages
    lack their scales.
    """
    rows, heads, size = q.shape
    groups, page = k.shape[1], k_cache.shape[2]
    if not causal and max_rows > MAX_TREE_ROWS:
        raise ValueError(f"max_rows is {max_rows}, but ancestor bits name at most {MAX_TREE_ROWS} rows: pass causal=True or fewer rows")
    tile = 32 if k_cache.dtype == jnp.int8 else 8
    if page % tile:
        raise ValueError(f"pages of {page} tokens do not tile a TPU register: use a page size that is a multiple of {tile}")
    if (k_cache.dtype == jnp.int8) != (k_scale is not None and v_scale is not None):
        raise ValueError("pages of int8 come with k_scale and v_scale, other pages without")
    caches, own = ((k_cache, v_cache), (k, v)) if v_cache is not None else ((k_cache,), (jnp.concatenate([k, v], axis=-1),))
    if v_cache is None:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, size)))
    fold, requests = heads // groups, table.shape[0]
    row_bytes = sum(cache.shape[3] * cache.dtype.itemsize for cache in caches)
    query_bytes = q.shape[2] * max(q.dtype.itemsize, 2)
    blocks = block_sizes(max_rows, fold, groups, row_bytes, page, table.shape[1], causal, query_bytes)

    if uniform:
        counts = jnp.full((requests,), max_rows, jnp.int32)
        padding = ((0, 0), (0, blocks.width - max_rows))
        spread = lambda x: jnp.pad(x.reshape(requests, max_rows, *x.shape[1:]), (*padding, *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
    else:
        counts = jnp.minimum(jnp.diff(row_start), max_rows).astype(jnp.int32)
        index = row_start[:-1, None] + jnp.arange(blocks.width, dtype=row_start.dtype)[None]
        index = jnp.minimum(index, rows - 1)
        spread = lambda x: x[index]  # noqa: E731
    position = spread(positions).astype(jnp.int32)
    words = spread(jax.lax.bitcast_convert_type(ancestors, jnp.int32))
    row_data = jnp.concatenate([position[..., None], words], axis=-1)  # [R, W, 3]
    table = jnp.clip(table, 0, k_cache.shape[0] - 1).astype(jnp.int32)
    scales = () if k_scale is None or v_scale is None else tuple(_scales(x, table, page, blocks) for x in (k_scale, v_scale))

    out = _call(
        _visible_pages(counts, prefix_length, position, page, blocks, window),
        table,
        (_fold(spread(q), blocks, groups), row_data, position[:, None, :]),
        tuple(jnp.swapaxes(spread(x), 1, 2) for x in own),
        caches,
        scales,
        blocks=blocks,
        causal=causal,
        scale=scale,
        window=window,
        interpret=interpret,
    )
    out = _unfold(out[..., -size:], blocks, fold)
    return out[:, :max_rows].reshape(rows, heads, size) if uniform else _pack(out, row_start, counts, rows)


def _scales(scales, table, page: int, blocks: Blocks):
    """Scales per token as they are, [P, G, 1, page]; those per page as a step needs them, [R, steps, G, 1, pages of a step]."""
    if scales.shape[3] == page:
        return scales.astype(jnp.float32)
    steps = -(-table.shape[1] // blocks.pages)
    columns = jnp.pad(table, ((0, 0), (0, steps * blocks.pages - table.shape[1])))
    gathered = scales[:, :, 0, 0].astype(jnp.float32)[columns].reshape(table.shape[0], steps, blocks.pages, -1)
    return jnp.swapaxes(gathered, 2, 3)[:, :, :, None, :]


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


def _call(bounds, table, rows, own, caches, scales, *, blocks: Blocks, causal, scale, window, interpret):
    queries, row_data, key_position = rows
    requests, groups, row_blocks, folded, size = queries.shape
    page = caches[0].shape[2]
    prefix_steps = -(-table.shape[1] // blocks.pages)
    own_steps = blocks.width // blocks.own_keys

    def prefix_step(r, t, bounds):  # the nearest step that some row sees
        return jnp.clip(t, bounds[2, r], jnp.maximum(bounds[3, r], 0))

    def page_index(slot, r, g, b, t, bounds, table):
        # This slot's page; a slot past the prefix repeats the page of its last visible step.
        last_column = (bounds[1, r] + page - 1) // page - 1
        column = prefix_step(r, t, bounds) * blocks.pages + slot
        column = jnp.where(column > last_column, column - blocks.pages, column)
        return table[r, jnp.clip(column, 0, jnp.maximum(last_column, 0))], g, 0, 0

    def own_index(r, g, b, t, bounds, table):
        last = (b * blocks.rows + blocks.rows - 1) // blocks.own_keys if causal else own_steps - 1
        return jnp.clip(t - prefix_steps, 0, jnp.minimum(last, own_steps - 1))

    def per_slot(height: int, width: int):
        return [pl.BlockSpec((None, blocks.groups, height, width), functools.partial(page_index, slot)) for slot in range(blocks.pages)]

    per_token = len(scales) > 0 and scales[0].ndim == 4
    pages = per_slot(page, size) * len(caches)
    page_scale = pl.BlockSpec(
        (None, None, blocks.groups, 1, blocks.pages), lambda r, g, b, t, bounds, table: (r, prefix_step(r, t, bounds), g, 0, 0)
    )
    scale_specs = per_slot(1, page) * len(scales) if per_token else [page_scale] * len(scales)
    own_spec = pl.BlockSpec((None, blocks.groups, blocks.own_keys, size), lambda r, g, b, t, *s: (r, g, own_index(r, g, b, t, *s), 0))
    query_spec = pl.BlockSpec((None, blocks.groups, None, folded, size), lambda r, g, b, t, *s: (r, g, b, 0, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(requests, groups // blocks.groups, row_blocks, prefix_steps + own_steps),
        in_specs=[
            query_spec,
            pl.BlockSpec((None, blocks.rows, row_data.shape[2]), lambda r, g, b, t, *s: (r, b, 0)),
            pl.BlockSpec((None, 1, blocks.own_keys), lambda r, g, b, t, *s: (r, 0, own_index(r, g, b, t, *s))),
            *[own_spec] * len(own),
            *pages,
            *scale_specs,
        ],
        out_specs=query_spec,
        scratch_shapes=[pltpu.VMEM((blocks.groups, *part.shape), part.dtype) for part in softmax.scratch(folded, size)],
    )
    kernel = functools.partial(
        _kernel, blocks=blocks, page=page, arrays=len(caches), scale_refs=len(scale_specs), per_token=per_token,
        prefix_steps=prefix_steps, causal=causal, scale=scale, window=window,
    )  # fmt: skip
    if per_token and interpret is False:
        # Read once and in the order of the pages: a copy of all of them to on-chip memory, which XLA would make ahead, gains nothing.
        scales = tuple(pltpu.with_memory_space_constraint(part, pltpu.HBM) for part in scales)
    keys = f"keys_{blocks.pages}x{page}-heads_{blocks.groups}"
    return pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(queries, own, caches, scales, table),
        name=f"tree_attention-rows_{blocks.rows}x{folded // blocks.rows}-own_{blocks.own_keys}-{keys}",
        interpret=interpret,
    )(
        bounds, table, queries, row_data, key_position, *own,
        *[cache for cache in caches for _ in range(blocks.pages)],
        *[part for part in scales for _ in range(blocks.pages if per_token else 1)],
    )  # fmt: skip


def _kernel(
    bounds, table, queries, row_data, key_position, *refs,
    blocks, page, arrays, scale_refs, per_token, prefix_steps, causal, scale, window,
):  # fmt: skip
    own, refs = refs[:arrays], refs[arrays:]
    pages, refs = [refs[i * blocks.pages : (i + 1) * blocks.pages] for i in range(arrays)], refs[arrays * blocks.pages :]
    scales, (out, *state) = refs[:scale_refs], refs[scale_refs:]
    k_own, v_own, k_pages, v_pages = own[0], own[-1], pages[0], pages[-1]
    k_scales, v_scales = scales[: scale_refs // 2], scales[scale_refs // 2 :]
    request, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    live, prefix, first, last = (bounds[field, request] for field in range(4))
    first_row = block * blocks.rows
    has_rows = first_row < live

    @pl.when(step == 0)
    def _():
        softmax.reset(state)

    def attend(group, keys, values, seen, valid, factors=(None, None)):
        _attend([part.at[group] for part in state], queries[group], keys, values, seen, valid, scale, *factors)

    @pl.when(has_rows & (step >= first) & (step <= last))
    def _():
        start = step * blocks.pages * page
        key = start + jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.pages * page), 1)
        seen = key < prefix
        if window is not None:
            seen = seen & (key > row_data[:, :1] - window)
        for group in range(blocks.groups):
            factors = [_lanes(refs, group, page, blocks.pages, per_token) for refs in (k_scales, v_scales)]
            keys, values = _joined(k_pages, group), _joined(v_pages, group)
            attend(group, keys, values, seen, prefix - start, factors)

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
        for group in range(blocks.groups):
            attend(group, k_own[group], v_own[group], seen, live - start)

    @pl.when(softmax.is_last(3))
    def _():
        for group in range(blocks.groups):
            out[group] = softmax.output([part.at[group] for part in state]).astype(out.dtype)


def _attend(state, queries, keys, values, seen, valid, scale, key_factors=None, value_factors=None) -> None:
    """One block of keys; only the first `valid` hold meaningful numbers (the rest may be NaN, and 0 * NaN is NaN)."""
    scores = softmax.product(queries, keys.astype(queries.dtype), (1, 1)) * scale
    if key_factors is not None:
        scores = scores * key_factors
    if value_factors is not None:
        lane = jax.lax.broadcasted_iota(jnp.int32, value_factors.shape, 1)
        value_factors = jnp.where(lane < valid, value_factors, 0.0)
        values = values.astype(queries.dtype)  # integers, never NaN
    else:
        key = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(key < valid, values, jnp.zeros((), values.dtype))
    softmax.update(state, softmax.masked(scores, seen), values, value_factors)


def _joined(pages, group: int):
    return pages[0][group] if len(pages) == 1 else jnp.concatenate([page[group] for page in pages], axis=0)


def _lanes(refs, group: int, page: int, count: int, per_token: bool):
    """Factors [1, keys] of a step's keys: one reference per page with a factor per token, or a single one with a factor per page."""
    if not refs:
        return None
    if per_token:
        return jnp.concatenate([part[group] for part in refs], axis=1)
    factors = refs[0][group]
    return jnp.concatenate([jnp.broadcast_to(factors[:, slot : slot + 1], (1, page)) for slot in range(count)], axis=1)


def _cost(queries, own, caches, scales, table) -> pl.CostEstimate:
    """Upper bound: every request fills its table. Pages are read once per block of rows, everything else once."""
    groups, row_blocks, size = queries.shape[1], queries.shape[2], queries.shape[4]
    page = caches[0].shape[2]
    row_keys = queries.size // size * (table.shape[1] * page + own[0].shape[2])
    page_bytes = table.size * groups * row_blocks * page * sum(cache.shape[3] * cache.dtype.itemsize for cache in caches)
    scale_bytes = len(scales) * table.size * groups * row_blocks * (scales[0].shape[3] if scales and scales[0].ndim == 4 else 1) * 4
    row_bytes = 2 * queries.size * queries.dtype.itemsize + sum(part.size * part.dtype.itemsize for part in own)
    return pl.CostEstimate(flops=4 * row_keys * size, transcendentals=row_keys, bytes_accessed=page_bytes + scale_bytes + row_bytes)


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
