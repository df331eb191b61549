"""Plain-JAX twins of the kernels: the same signatures and the same numbers, on any backend.

They are what CPU and GPU run, and what the kernels are tested against. No twin gathers a whole cache: slots are read in place and pages
one column of the table at a time.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that a fully masked row stays free of NaN


def tree_attention(
    q: Float[Array, "N H E"],
    k: Float[Array, "N G E"],
    v: Float[Array, "N G E"],
    k_cache: Num[Array, "P G page C"] | Float[Array, "R G E S"],
    v_cache: Num[Array, "P G page E"] | Float[Array, "R G S E"] | None,
    table: Int[Array, "R pages"] | None,
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
) -> Float[Array, "N H E"]:
    """Attention of packed rows to their request's cached prefix and to the rows in flight that they may see.

    Rows of request r are `row_start[r] .. row_start[r+1]-1` (at most `max_rows`); with `table=None` request r owns slot r of the cache, and
    its keys are transposed. Row i sees cache entries `s < prefix_length[r]` and its request's row j if bit j of `ancestors[i]` is set
    (`causal`: if j <= i). With `window`, keys at or before `position - window` are hidden. Scores and the softmax are float32; rows that
    see nothing return zeros. Pages may hold keys and values side by side (`v_cache=None`, C = 2E) and may be int8 with scales per token or
    per page, as the kernel has it.
    """
    requests = prefix_length.shape[0]
    rows, heads, size = q.shape
    groups = k.shape[1]

    def spread(x):  # packed [N, ...] -> per request [R, W, ...]
        if uniform:
            return x.reshape(requests, max_rows, *x.shape[1:])
        index = row_start[:-1, None] + jnp.arange(max_rows, dtype=jnp.int32)[None]
        return x[jnp.minimum(index, rows - 1)]

    counts = jnp.diff(row_start)
    live = jnp.arange(max_rows, dtype=jnp.int32)[None] < counts[:, None]  # [R, W]
    # [R, G, W, Q, E]: the queries that share a kv head are folded next to the rows
    queries = jnp.swapaxes(spread(q).reshape(requests, max_rows, groups, heads // groups, size), 1, 2)
    position = spread(positions)

    own = _own_scores(queries, jnp.swapaxes(spread(k), 1, 2), spread(ancestors), position, live, causal, scale, window)
    statistics = _accumulate(None, own, jnp.swapaxes(spread(v), 1, 2))

    if table is None:
        assert v_cache is not None, "slots hold keys and values apart"

        def leading(length, statistics):
            seen = _prefix_mask(prefix_length, position, 0, length, window)
            scores = _scores(queries, k_cache[..., :length], seen, scale, "rges")
            return _accumulate(statistics, scores, v_cache[:, :, :length])

        capacity = v_cache.shape[2]
        lengths = (capacity,) if causal else _prefix_lengths(capacity)  # a prefill chunk has other costs, and every branch is compiled
        used = jnp.sum(jnp.asarray(lengths, jnp.int32) < jnp.max(prefix_length), dtype=jnp.int32)  # a search would be a loop
        branches = [functools.partial(leading, length) for length in lengths]
        statistics = jax.lax.switch(used, branches, statistics) if len(branches) > 1 else branches[0](statistics)
    else:
        page = k_cache.shape[2]

        def one_page(column, statistics):
            index = table[:, column]
            seen = _prefix_mask(prefix_length, position, column * page, page, window)
            keys, values = (k_cache[index], v_cache[index]) if v_cache is not None else jnp.split(k_cache[index], 2, axis=-1)
            k_factor, v_factor = (None if x is None else x[index][:, :, None] for x in (k_scale, v_scale))
            values = values if v_factor is None else values.astype(q.dtype)
            return _accumulate(statistics, _scores(queries, keys, seen, scale, factor=k_factor), values, v_factor)

        used = jnp.max((prefix_length + page - 1) // page)
        statistics = jax.lax.fori_loop(0, used, one_page, statistics)

    _, normalizer, weighted = statistics
    out = weighted / jnp.where(normalizer > 0, normalizer, 1.0)[..., None]
    out = jnp.swapaxes(out, 1, 2).reshape(requests, max_rows, heads, size).astype(q.dtype)
    if uniform:
        return out.reshape(rows, heads, size)
    request = jnp.searchsorted(row_start[1:], jnp.arange(rows, dtype=row_start.dtype), side="right")
    request = jnp.minimum(request, requests - 1)
    offset = jnp.arange(rows, dtype=jnp.int32) - row_start[request]
    owned = (offset >= 0) & (offset < max_rows) & (jnp.arange(rows) < row_start[-1])
    return jnp.where(owned[:, None, None], out[request, jnp.clip(offset, 0, max_rows - 1)], jnp.zeros((), q.dtype))


def _prefix_lengths(capacity: int) -> tuple[int, ...]:
    """How many keys of a slot can be read: a short text must not pay for all of its slot, nor every length be a program of its own."""
    return tuple(sorted({max(capacity // 4, min(128, capacity)), max(capacity // 2, min(128, capacity)), capacity}))


def _scores(queries, keys, seen, scale, layout="rgse", factor=None):
    """[R, G, W, Q, S] float32 scores, masked where `seen` [R, W, S] is false."""
    product = jnp.einsum(f"rgwqe,{layout}->rgwqs", queries, keys.astype(queries.dtype), preferred_element_type=jnp.float32) * scale
    return jnp.where(seen[:, None, :, None, :], product if factor is None else product * factor, MASKED)


def _own_scores(queries, keys, ancestors, position, live, causal, scale, window):
    width = live.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)
    if causal:
        seen = jnp.broadcast_to(index[None, :] <= index[:, None], (live.shape[0], width, width))
    else:
        bits = jax.lax.shift_right_logical(
            ancestors[:, :, index // 32], jnp.broadcast_to((index % 32).astype(jnp.uint32), (*ancestors.shape[:2], width))
        )
        seen = (bits & jnp.uint32(1)) == 1
    seen = seen & live[:, None, :]
    if window is not None:
        seen = seen & (position[:, None, :] > position[:, :, None] - window)
    return _scores(queries, keys, seen, scale)


def _prefix_mask(prefix_length, position, start, length, window) -> Bool[Array, "R W S"]:
    key = (start + jnp.arange(length, dtype=jnp.int32))[None, None, :]
    seen = jnp.broadcast_to(key < prefix_length[:, None, None], (*position.shape, length))
    if window is not None:
        seen = seen & (key > position[:, :, None] - window)
    return seen


def _accumulate(statistics, scores, values, factor=None):
    """Merge one block of keys, values times `factor`, into the running (maximum, normalizer, weighted values) of an online softmax."""
    top = jnp.max(scores, axis=-1)
    previous = None
    if statistics is not None:
        previous, normalizer, weighted = statistics
        top = jnp.maximum(top, previous)
    weights = jnp.where(scores > 0.5 * MASKED, jnp.exp(scores - top[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    weights = weights if factor is None else weights * factor
    out = jnp.einsum("rgwqs,rgse->rgwqe", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    if previous is None:
        return top, total, out
    shrink = jnp.exp(previous - top)
    return top, normalizer * shrink + total, weighted * shrink[..., None] + out


def cache_commit(
    pages: Float[Array, "P G page E"],
    new: Float[Array, "N G E"],
    table: Int[Array, "R pages"],
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
) -> Float[Array, "P G page E"]:
    """Write the accepted rows of `new` at their request's positions; rejected rows and positions outside the table write nothing.

    No two accepted rows may name the same position of the same request.
    """
    page = pages.shape[2]
    accepted = accepted & (positions >= 0) & (positions < page * table.shape[1])
    index = table[request, jnp.clip(positions // page, 0, table.shape[1] - 1)]
    offset = jnp.where(accepted, positions % page, page)  # out of bounds: dropped
    return pages.at[index, :, offset].set(new.astype(pages.dtype), mode="drop")


def anchor_attention(
    q: Float[Array, "B A Q H E"],
    k_context: Float[Array, "B S G E"],
    v_context: Float[Array, "B S G E"],
    k_block: Float[Array, "B A K G E"],
    v_block: Float[Array, "B A K G E"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    context_documents: Int[Array, "B S"] | None,
    anchor_documents: Int[Array, "B A"] | None,
    *,
    causal: bool = False,
    scale: float,
) -> Float[Array, "B A Q H E"]:
    """Attention of training blocks: each of `A` blocks of `K` queries sees the context strictly before its anchor, and itself.

    Without `causal` the queries may be others than the block's own slots (Q != K): one more row that sees all `K` of them.

    With documents, only context of the anchor's own document is seen. Within a block all slots see each other (`causal`: slot j sees
    0..j). Blocks never see each other, so no mask between blocks exists. Blocks that are not kept see nothing and return zeros. Scores and
    the softmax are float32; gradients come from plain automatic differentiation.
    """
    batch, blocks, slots, heads, size = q.shape
    groups = k_context.shape[2]
    queries = q.reshape(batch, blocks, slots, groups, heads // groups, size)

    seen = anchor_visibility(anchors, keep, context_documents, anchor_documents, k_context.shape[1])
    context = jnp.einsum("bakgqe,bsge->bgakqs", queries, k_context.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    context = jnp.where(seen[:, None, :, None, None, :], context, MASKED)

    in_block = jnp.tril(jnp.ones((slots, slots), bool)) if causal else jnp.ones((slots, k_block.shape[2]), bool)
    in_block = keep[:, :, None, None] & in_block[None, None]
    own = jnp.einsum("bakgqe,bajge->bgakqj", queries, k_block.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    own = jnp.where(in_block[:, None, :, :, None, :], own, MASKED)

    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(context, axis=-1), jnp.max(own, axis=-1)))[..., None]
    context = jnp.where(context > 0.5 * MASKED, jnp.exp(context - top), 0.0)
    own = jnp.where(own > 0.5 * MASKED, jnp.exp(own - top), 0.0)
    normalizer = jnp.sum(context, axis=-1) + jnp.sum(own, axis=-1)

    out = jnp.einsum("bgakqs,bsge->bgakqe", context.astype(v_context.dtype), v_context, preferred_element_type=jnp.float32)
    out = out + jnp.einsum("bgakqj,bajge->bgakqe", own.astype(v_block.dtype), v_block, preferred_element_type=jnp.float32)
    out = out / jnp.where(normalizer > 0, normalizer, 1.0)[..., None]
    return jnp.moveaxis(out, 1, 3).reshape(q.shape).astype(q.dtype)


def anchor_visibility(
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    context_documents: Int[Array, "B S"] | None,
    anchor_documents: Int[Array, "B A"] | None,
    length: int,
) -> Bool[Array, "B A S"]:
    """Which context positions the block of each anchor sees: before the anchor, in its document, and only if the block is kept."""
    seen = jnp.arange(length, dtype=anchors.dtype)[None, None, :] < anchors[:, :, None]
    if (context_documents is None) != (anchor_documents is None):
        raise ValueError("give both context_documents and anchor_documents, or neither")
    if context_documents is not None and anchor_documents is not None:
        seen = seen & (context_documents[:, None, :] == anchor_documents[:, :, None])
    return seen & keep[:, :, None]
