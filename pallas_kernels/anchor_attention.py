"""Attention of training blocks at their anchors, forward and backward, for TPU. Twin: `reference.anchor_attention`.

Rows (anchors x slots) of several blocks form one block of rows, with the query heads that share a kv head folded in. Three kernels:

* forward, grid sequences x kv heads x blocks of rows x (context blocks + 1): online softmax over the context, then over the rows
  themselves with a block-diagonal mask; keeps the log-sum-exp of every row.
* backward of the rows, same grid: gradients of the queries and of the blocks' own keys and values.
* backward of the context, grid sequences x kv heads x context blocks x blocks of rows.

Context blocks that no row of a block sees (at or after every anchor, or in other documents) are neither fetched nor computed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import online_softmax as softmax
from pallas_kernels.reference import anchor_visibility

_VMEM_BUDGET = 8 * 2**20  # bytes for the score-sized float32 arrays of a backward step; every generation grants 16 MiB unasked
_SEMANTICS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Static sizes of one call: keys of an anchor, slots padded to a power of two, rows (anchors x padded slots) and context keys."""

    slots: int
    padded_slots: int
    rows: int
    keys: int


@dataclasses.dataclass(frozen=True)
class _Options:
    causal: bool
    scale: float
    interpret: bool | pltpu.InterpretParams


def block_sizes(slots: int, fold: int, length: int, queries: int = 0) -> Blocks:
    """Block sizes from shapes alone: at most 128 rows that fold (`fold` query heads a kv head) to about 1024, and the most context keys
    (512, 256 or 128) that divide the padded context and keep five score-sized float32 arrays inside the VMEM budget. `queries` of a block
    where they are not its `slots`."""
    padded_slots = max(8, 1 << (max(slots, queries) - 1).bit_length())
    rows = max(128, padded_slots)
    while rows * fold > 1024 and rows > max(16, padded_slots):
        rows //= 2
    padded_length = -(-length // 128) * 128
    fits = [keys for keys in (512, 256) if padded_length % keys == 0 and 5 * 4 * rows * fold * keys <= _VMEM_BUDGET]
    return Blocks(slots, padded_slots, rows, fits[0] if fits else 128)


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
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B A Q H E"]:
    """Attention of training blocks: each of `A` blocks of `K` queries sees the context strictly before its anchor, and itself.

    Without `causal` the queries may be others than the block's own slots (Q != K), each of which sees all `K` of them.

    With documents, only context of the anchor's own document is seen. Within a block all slots see each other (`causal`: slot j sees
    0..j). Blocks never see each other. Blocks that are not kept see nothing and return zeros. Scores and the softmax are float32.
    Differentiable in the queries, keys and values. Fastest when anchors are sorted, because neighbours then see the same context blocks.
    """
    if (context_documents is None) != (anchor_documents is None):
        raise ValueError("give both context_documents and anchor_documents, or neither")
    if causal and q.shape[2] != k_block.shape[2]:
        raise ValueError(f"a causal block asks with its own {k_block.shape[2]} slots, got {q.shape[2]} queries")
    places = (anchors, keep, context_documents, anchor_documents)
    return _attention(_Options(causal, scale, interpret), q, k_context, v_context, k_block, v_block, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, q, k_context, v_context, k_block, v_block, places):
    return _attention_forward(options, q, k_context, v_context, k_block, v_block, places)[0]


def _attention_forward(options, q, k_context, v_context, k_block, v_block, places):
    blocks = block_sizes(k_block.shape[2], q.shape[3] // k_context.shape[2], k_context.shape[1], q.shape[2])
    arrays = _arrays(blocks, q, k_context, v_context, k_block, v_block)
    out, logsumexp = _forward(blocks, options, _visibility(blocks, places, k_context.shape[1]), arrays)
    folded = (q.shape, k_context.shape[2])
    return _unfold_queries(out, blocks, *folded), (q, k_context, v_context, k_block, v_block, places, out, logsumexp)


def _attention_backward(options, residuals, d_out):
    q, k_context, v_context, k_block, v_block, places, out, logsumexp = residuals
    groups, length = k_context.shape[2], k_context.shape[1]
    blocks = block_sizes(k_block.shape[2], q.shape[3] // groups, length, q.shape[2])
    arrays = _arrays(blocks, q, k_context, v_context, k_block, v_block)
    visibility = _visibility(blocks, places, length)
    d_out = _fold_queries(d_out, blocks, groups)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[..., None, :]
    gradient_inputs = (d_out, logsumexp, delta)
    d_q, d_k_block, d_v_block = _backward_rows(blocks, options, visibility, arrays, gradient_inputs)
    d_k_context, d_v_context = _backward_context(blocks, options, visibility, arrays, gradient_inputs)
    return (
        _unfold_queries(d_q, blocks, q.shape, groups),
        jnp.swapaxes(d_k_context, 1, 2)[:, :length],
        jnp.swapaxes(d_v_context, 1, 2)[:, :length],
        _unfold_block_keys(d_k_block, blocks, k_block.shape),
        _unfold_block_keys(d_v_block, blocks, v_block.shape),
        None,
    )


_attention.defvjp(_attention_forward, _attention_backward)


# Kernels -----------------------------------------------------------------------------------------------------------------------------


def _forward(blocks: Blocks, options: _Options, visibility, arrays):
    specs = _RowSpecs(blocks, visibility, arrays)
    queries = arrays[0]
    batch, groups, row_blocks, folded, size = queries.shape
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=specs.grid,
            in_specs=specs.inputs,
            out_specs=[specs.queries, specs.statistics],
            scratch_shapes=softmax.scratch(folded, size),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((batch, groups, row_blocks, 1, folded), jnp.float32),
        ],
        compiler_params=_SEMANTICS,
        cost_estimate=_cost(blocks, arrays, products=2),
        name=_name("anchor_attention", blocks, folded),
        interpret=options.interpret,
    )(*visibility[:2], *visibility[2:4], *arrays)


def _forward_kernel(first, end, rows, documents, queries, k_context, v_context, k_block, v_block, out, logsumexp, *state, blocks, options):
    sequence, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        softmax.reset(state)

    def attend(keys, values, seen):
        scores = softmax.product(queries[...], keys[...].astype(queries.dtype), (1, 1)) * options.scale
        softmax.update(state, softmax.masked(scores, seen), values[...])

    @pl.when((step >= first[sequence, block]) & (step < end[sequence, block]))
    def _():
        attend(k_context, v_context, _context_seen(rows, documents, step, blocks))

    @pl.when(softmax.is_last(3))
    def _():
        attend(k_block, v_block, _block_seen(rows, blocks, options.causal))
        top, normalizer, _ = (array[...] for array in state)
        out[...] = softmax.output(state).astype(out.dtype)
        logsumexp[...] = _to_lanes(jnp.where(normalizer > 0, top + jnp.log(jnp.maximum(normalizer, 1e-37)), 0.0))


def _backward_rows(blocks: Blocks, options: _Options, visibility, arrays, gradient_inputs):
    specs = _RowSpecs(blocks, visibility, arrays)
    queries, k_block, v_block = arrays[0], arrays[3], arrays[4]
    folded, size = queries.shape[3:]
    column = pltpu.VMEM((folded, softmax.LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_backward_rows_kernel, blocks=blocks, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=specs.grid,
            in_specs=[*specs.inputs, specs.queries, specs.statistics, specs.statistics],
            out_specs=[specs.queries, specs.block_keys, specs.block_keys],
            scratch_shapes=[pltpu.VMEM((folded, size), jnp.float32), column, column],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (queries, k_block, v_block)],
        compiler_params=_SEMANTICS,
        cost_estimate=_cost(blocks, arrays, products=3),
        name=_name("anchor_attention_backward_rows", blocks, folded),
        interpret=options.interpret,
    )(*visibility[:2], *visibility[2:4], *arrays, *gradient_inputs)


def _backward_rows_kernel(
    first, end, rows, documents, queries, k_context, v_context, k_block, v_block, d_out, logsumexp, delta, *refs, blocks, options
):
    d_queries, d_k_block, d_v_block, accumulated, logsumexp_column, delta_column = refs
    sequence, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        accumulated[...] = jnp.zeros(accumulated.shape, jnp.float32)
        logsumexp_column[...] = _to_column(logsumexp[...])
        delta_column[...] = _to_column(delta[...])

    def gradients(keys, values, seen):
        columns = logsumexp_column[...], delta_column[...]
        weights, d_scores = _score_gradients(queries[...], keys[...], values[...], d_out[...], *columns, seen, options.scale)
        accumulated[...] += softmax.product(d_scores, keys[...].astype(d_scores.dtype), (1, 0))
        return weights, d_scores

    @pl.when((step >= first[sequence, block]) & (step < end[sequence, block]))
    def _():
        gradients(k_context, v_context, _context_seen(rows, documents, step, blocks))

    @pl.when(softmax.is_last(3))
    def _():
        weights, d_scores = gradients(k_block, v_block, _block_seen(rows, blocks, options.causal))
        d_k_block[...] = softmax.product(d_scores, queries[...], (0, 0)).astype(d_k_block.dtype)
        d_v_block[...] = softmax.product(weights, d_out[...], (0, 0)).astype(d_v_block.dtype)
        d_queries[...] = accumulated[...].astype(d_queries.dtype)


def _backward_context(blocks: Blocks, options: _Options, visibility, arrays, gradient_inputs):
    queries, k_context, v_context = arrays[:3]
    batch, groups, row_blocks, folded, size = queries.shape
    context_blocks = k_context.shape[2] // blocks.keys

    def row_block(b, s, t, first, end, first_row, end_row):  # the nearest block of rows that sees context block s
        return jnp.clip(t, first_row[b, s], jnp.maximum(end_row[b, s] - 1, first_row[b, s]))

    query_spec = pl.BlockSpec((None, None, None, folded, size), lambda b, g, s, t, *p: (b, g, row_block(b, s, t, *p), 0, 0))
    statistics = pl.BlockSpec((None, None, None, 1, folded), lambda b, g, s, t, *p: (b, g, row_block(b, s, t, *p), 0, 0))
    keys = pl.BlockSpec((None, None, blocks.keys, size), lambda b, g, s, t, *p: (b, g, s, 0))
    return pl.pallas_call(
        functools.partial(_backward_context_kernel, blocks=blocks, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, groups, context_blocks, row_blocks),
            in_specs=[
                pl.BlockSpec((None, blocks.rows, 2), lambda b, g, s, t, *p: (b, row_block(b, s, t, *p), 0)),
                pl.BlockSpec((None, 1, blocks.keys), lambda b, g, s, t, *p: (b, 0, s)),
                query_spec,
                keys,
                keys,
                query_spec,
                statistics,
                statistics,
            ],
            out_specs=[keys, keys],
            scratch_shapes=[pltpu.VMEM((blocks.keys, size), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_context, v_context)],
        compiler_params=_SEMANTICS,
        cost_estimate=_cost(blocks, arrays, products=4),
        name=_name("anchor_attention_backward_context", blocks, folded),
        interpret=options.interpret,
    )(*visibility[:2], *visibility[4:], *visibility[2:4], queries, k_context, v_context, *gradient_inputs)


def _backward_context_kernel(
    first, end, first_row, end_row, rows, documents, queries, k_context, v_context, d_out, logsumexp, delta, *refs, blocks, options
):
    d_k_context, d_v_context, d_keys, d_values = refs
    sequence, context_block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        d_keys[...] = jnp.zeros(d_keys.shape, jnp.float32)
        d_values[...] = jnp.zeros(d_values.shape, jnp.float32)

    @pl.when((context_block >= first[sequence, step]) & (context_block < end[sequence, step]))
    def _():
        seen = _context_seen(rows, documents, context_block, blocks)
        columns = _to_column(logsumexp[...]), _to_column(delta[...])
        weights, d_scores = _score_gradients(queries[...], k_context[...], v_context[...], d_out[...], *columns, seen, options.scale)
        d_keys[...] += softmax.product(d_scores, queries[...], (0, 0))
        d_values[...] += softmax.product(weights, d_out[...], (0, 0))

    @pl.when(softmax.is_last(3))
    def _():
        d_k_context[...] = d_keys[...].astype(d_k_context.dtype)
        d_v_context[...] = d_values[...].astype(d_v_context.dtype)


def _score_gradients(queries, keys, values, d_out, logsumexp, delta, seen, scale):
    """Softmax weights and gradients of the raw scores [folded rows, keys] of one block of keys, in the dtype of the queries."""
    scores = softmax.masked(softmax.product(queries, keys.astype(queries.dtype), (1, 1)) * scale, seen)
    weights = jnp.exp(scores - logsumexp[:, :1])  # masked scores underflow to zero
    d_weights = softmax.product(d_out, values.astype(d_out.dtype), (1, 1))
    d_scores = weights * (d_weights - delta[:, :1]) * scale
    return weights.astype(d_out.dtype), d_scores.astype(queries.dtype)


def _context_seen(rows, documents, context_block, blocks: Blocks):
    key = context_block * blocks.keys + jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.keys), 1)
    return (key < rows[:, :1]) & (documents[...] == rows[:, 1:2])


def _block_seen(rows, blocks: Blocks, causal: bool):
    row = jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.rows), 0)
    key = jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.rows), 1)
    shift = blocks.padded_slots.bit_length() - 1
    seen = (row >> shift == key >> shift) & ((key & (blocks.padded_slots - 1)) < blocks.slots) & (rows[:, :1] >= 0)
    return seen & (key <= row) if causal else seen


def _to_lanes(column):
    """Lane-replicated [rows, 128] -> [1, rows]: what is stored takes no lane padding."""
    return jnp.transpose(column)[:1]


def _to_column(lanes):
    """[1, rows] -> lane-replicated [rows, 128]."""
    return jnp.transpose(jnp.broadcast_to(lanes, (softmax.LANES, lanes.shape[1])))


# Layout ------------------------------------------------------------------------------------------------------------------------------


class _RowSpecs:
    """Grid and block specs that the two kernels over blocks of rows share."""

    def __init__(self, blocks: Blocks, visibility, arrays):
        queries, k_context = arrays[:2]
        batch, groups, row_blocks, folded, size = queries.shape
        self.grid = (batch, groups, row_blocks, k_context.shape[2] // blocks.keys + 1)

        def context_block(b, a, t, first, end):  # the nearest context block that the rows see: a repeated index is not fetched again
            return jnp.clip(t, first[b, a], jnp.maximum(end[b, a] - 1, first[b, a]))

        context = pl.BlockSpec((None, None, blocks.keys, size), lambda b, g, a, t, *p: (b, g, context_block(b, a, t, *p), 0))
        self.queries = pl.BlockSpec((None, None, None, folded, size), lambda b, g, a, t, *p: (b, g, a, 0, 0))
        self.statistics = pl.BlockSpec((None, None, None, 1, folded), lambda b, g, a, t, *p: (b, g, a, 0, 0))
        self.block_keys = pl.BlockSpec((None, None, blocks.rows, size), lambda b, g, a, t, *p: (b, g, a, 0))
        self.inputs = [
            pl.BlockSpec((None, blocks.rows, 2), lambda b, g, a, t, *p: (b, a, 0)),
            pl.BlockSpec((None, 1, blocks.keys), lambda b, g, a, t, *p: (b, 0, context_block(b, a, t, *p))),
            self.queries,
            context,
            context,
            self.block_keys,
            self.block_keys,
        ]


def _visibility(blocks: Blocks, places, length: int):
    """What the kernels know about who sees what.

    Returns the half-open ranges of context blocks seen by each block of rows [B, row blocks], per row the end of its visible context (-1:
    not kept) and its document [B, rows, 2], the documents of the context [B, 1, S], and the half-open ranges of blocks of rows that see
    each context block [B, context blocks].
    """
    anchors, keep, context_documents, anchor_documents = places
    batch, count = anchors.shape
    seen = anchor_visibility(anchors, keep, context_documents, anchor_documents, length)  # only reduced, never stored
    position = jnp.arange(length, dtype=jnp.int32)[None, None, :]
    first_key = jnp.min(jnp.where(seen, position, length), axis=-1)
    end_key = jnp.max(jnp.where(seen, position + 1, 0), axis=-1)

    anchors_per_block = blocks.rows // blocks.padded_slots
    padding = -count % anchors_per_block
    grouped = lambda x, fill: jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill).reshape(batch, -1, anchors_per_block)  # noqa: E731
    end = -(-jnp.max(grouped(end_key, 0), axis=-1) // blocks.keys)
    first = jnp.minimum(jnp.min(grouped(first_key, length), axis=-1) // blocks.keys, jnp.maximum(end - 1, 0))

    limit = jnp.where(keep, jnp.minimum(anchors, length), -1)
    document = jnp.zeros_like(anchors) if anchor_documents is None else anchor_documents
    rows = jnp.stack([grouped(limit, -1).reshape(batch, -1), grouped(document, 0).reshape(batch, -1)], axis=-1)
    rows = jnp.repeat(rows, blocks.padded_slots, axis=1)
    documents = jnp.zeros((batch, length), jnp.int32) if context_documents is None else context_documents
    documents = jnp.pad(documents, ((0, 0), (0, -length % blocks.keys)))[:, None, :]

    context_block = jnp.arange(documents.shape[-1] // blocks.keys, dtype=jnp.int32)[None, None, :]
    overlap = (context_block >= first[..., None]) & (context_block < end[..., None])  # [B, row blocks, context blocks]
    row_block = jnp.arange(first.shape[1], dtype=jnp.int32)[None, :, None]
    end_row = jnp.max(jnp.where(overlap, row_block + 1, 0), axis=1)
    first_row = jnp.minimum(jnp.min(jnp.where(overlap, row_block, first.shape[1]), axis=1), jnp.maximum(end_row - 1, 0))
    return tuple(x.astype(jnp.int32) for x in (first, end, rows, documents, first_row, end_row))


def _arrays(blocks: Blocks, q, k_context, v_context, k_block, v_block):
    groups = k_context.shape[2]
    padding = ((0, 0), (0, -k_context.shape[1] % blocks.keys), (0, 0), (0, 0))
    context = (jnp.swapaxes(jnp.pad(x, padding), 1, 2) for x in (k_context, v_context))
    own = (_fold_block_keys(x, blocks) for x in (k_block, v_block))
    return (_fold_queries(q, blocks, groups), *context, *own)


def _pad_rows(x, blocks: Blocks):
    """[B, A, K, heads, E] -> [B, row blocks, anchors of a block, padded slots, heads, E]"""
    batch, count, slots, heads, size = x.shape
    anchors = blocks.rows // blocks.padded_slots
    x = jnp.pad(x, ((0, 0), (0, -count % anchors), (0, blocks.padded_slots - slots), (0, 0), (0, 0)))
    return x.reshape(batch, -1, blocks.rows, heads, size)


def _fold_queries(q, blocks: Blocks, groups: int):
    """[B, A, K, H, E] -> [B, G, row blocks, fold * rows, E], query-major so that the mask of a row is shared by its folded queries."""
    q = _pad_rows(q, blocks)
    batch, row_blocks, rows, heads, size = q.shape
    q = q.reshape(batch, row_blocks, rows, groups, heads // groups, size)
    return q.transpose(0, 3, 1, 4, 2, 5).reshape(batch, groups, row_blocks, -1, size)


def _unfold_queries(x, blocks: Blocks, shape, groups: int):
    batch, count, slots, heads, size = shape
    x = x.reshape(batch, groups, -1, heads // groups, blocks.rows, size).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, -1, blocks.padded_slots, heads, size)[:, :count, :slots]


def _fold_block_keys(x, blocks: Blocks):
    """[B, A, K, G, E] -> [B, G, all padded rows, E]"""
    x = _pad_rows(x, blocks)
    return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[3:]), 1, 2)


def _unfold_block_keys(x, blocks: Blocks, shape):
    batch, count, slots, groups, size = shape
    return jnp.swapaxes(x, 1, 2).reshape(batch, -1, blocks.padded_slots, groups, size)[:, :count, :slots]


def _cost(blocks: Blocks, arrays, products: int) -> pl.CostEstimate:
    """Upper bound: every row sees the whole context. Context is read once per block of rows, everything else once."""
    queries, k_context = arrays[:2]
    row_blocks, size = queries.shape[2], queries.shape[4]
    row_keys = queries.size // size * (k_context.shape[2] + blocks.rows)
    moved = 2 * queries.size * queries.dtype.itemsize + 2 * row_blocks * k_context.size * k_context.dtype.itemsize
    return pl.CostEstimate(flops=2 * products * row_keys * size, transcendentals=row_keys, bytes_accessed=moved)


def _name(kernel: str, blocks: Blocks, folded: int) -> str:
    return f"{kernel}-rows_{blocks.rows}x{folded // blocks.rows}-slots_{blocks.padded_slots}-keys_{blocks.keys}"
