"""Write accepted rows into the paged cache in place, for TPU. Twin: `reference.cache_commit`.

Grid: rows, in the order of their destination. A step holds one register tile of a page (8 or 16 tokens of every kv head), because that is
the least a TPU can move; all rows bound for one tile follow each other, so the tile is read once, changed in VMEM and written once, and no
read of the aliased cache can overtake a write. Rejected rows come last and stay on the last tile, so they move nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int


def tile_tokens(page: int, itemsize: int) -> int:
    """Tokens of one register tile: 8 for float32, 16 for bfloat16 (a whole page if it does not divide into tiles)."""
    tokens = 8 * 4 // itemsize
    return tokens if page % tokens == 0 else page


def cache_commit(
    pages: Float[Array, "P G page E"],
    new: Float[Array, "N G E"],
    table: Int[Array, "R pages"],
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "P G page E"]:
    """Write the accepted rows of `new` at their request's positions; rejected rows and positions outside the table write nothing.

    The result reuses the memory of `pages` (donate it). No two accepted rows may name the same position of the same request, and no two
    requests may share a page that either writes.
    """
    count, groups, page, size = pages.shape
    rows = new.shape[0]
    tokens = tile_tokens(page, pages.dtype.itemsize)
    tiles = page // tokens

    accepted = accepted & (positions >= 0) & (positions < page * table.shape[1])
    place = table[request, jnp.clip(positions // page, 0, table.shape[1] - 1)]
    place = jnp.clip(place, 0, count - 1) * tiles + positions % page // tokens
    order = jnp.argsort(jnp.where(accepted, place, jnp.iinfo(jnp.int32).max), stable=True).astype(jnp.int32)
    written = jnp.sum(accepted, dtype=jnp.int32)
    source = order[jnp.minimum(jnp.arange(rows, dtype=jnp.int32), jnp.maximum(written - 1, 0))]
    schedule = jnp.stack([source, place[source], (positions % tokens)[source], jnp.broadcast_to(written, (rows,))]).astype(jnp.int32)

    tile = pl.BlockSpec((None, groups, tokens, size), lambda i, s: (s[1, i] // tiles, 0, s[1, i] % tiles, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, groups, 1, size), lambda i, s: (s[0, i], 0, 0, 0)), tile],
        out_specs=tile,
    )
    moved = 2 * rows * groups * tokens * size * pages.dtype.itemsize
    return pl.pallas_call(
        _kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved + new.size * new.dtype.itemsize),
        name=f"cache_commit-rows_{rows}-tile_{groups}x{tokens}x{size}",
        interpret=interpret,
    )(schedule, new.astype(pages.dtype)[:, :, None, :], pages)


def _kernel(schedule, new, old, out):
    step = pl.program_id(0)
    arrived = (step == 0) | (schedule[1, step] != schedule[1, jnp.maximum(step - 1, 0)])

    @pl.when(arrived)
    def _():
        out[...] = old[...]

    @pl.when(step < schedule[3, step])
    def _():
        token = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
        out[...] = jnp.where(token == schedule[2, step], jnp.broadcast_to(new[...], out.shape), out[...])
