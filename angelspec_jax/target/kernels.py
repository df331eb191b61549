"""The kernels as models call them: Pallas on TPU, the plain-JAX twin elsewhere, each device on its own part of the mesh.

A compiler cannot partition a kernel, so on a mesh of several devices a call is mapped: requests, with their rows and pages, over the batch
axes and heads over the tensor axis. What does not divide stays whole, and every device computes it alike. A mesh is known only where the
program is traced under `jax.set_mesh`; without one, or inside another map, a call stays as it is.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from angelspec_jax import mesh as meshes
from pallas_kernels import reference
from pallas_kernels.anchor_attention import anchor_attention as anchor_attention_kernel
from pallas_kernels.cache_commit import cache_commit as cache_commit_kernel
from pallas_kernels.tree_attention import tree_attention as tree_attention_kernel

_PAGE = 128  # tokens, as in `kv_cache`
_TWIN_ROWS = 512


def tree_attention(q, k, v, k_cache, v_cache, table, rows, positions, layer=None, *, scale: float, window: int | None):
    """Attention of packed rows (`attention.Rows`) over their prefix and each other, arguments as `attention.attend` has them.

    With `layer` the pages are those of all layers stacked, [L, P, G, page, E]. A kernel reads them in place, where a slice would be a copy.
    """
    arrays = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "table": table, "positions": positions, "layer": layer}
    arrays |= {"start": rows.row_start[:-1], "end": rows.row_start[1:], "ancestors": rows.ancestors, "prefix_length": rows.prefix_length}
    options = {"causal": rows.causal, "max_rows": rows.max_rows, "uniform": rows.uniform, "scale": scale, "window": window}
    pages = k_cache.shape[0 if layer is None else 1]
    batch, heads = _spread((rows.prefix_length.shape[0], pages), k.shape[1])
    # Rows of unequal number do not split where requests do: every device has all of them, answers its own, and the answers are added up.
    own = batch if rows.uniform else None
    row, cache = PartitionSpec(own, heads), PartitionSpec(*(() if layer is None else (None,)), batch, heads)
    specs = dict.fromkeys(arrays, PartitionSpec(own)) | dict.fromkeys("qkv", row) | {"k_cache": cache, "v_cache": cache}
    specs |= dict.fromkeys(("table", "prefix_length", "start", "end"), PartitionSpec(batch)) | {"layer": PartitionSpec()}
    return _mapped(functools.partial(_tree_attention, batch, options), arrays, specs, row)


def _tree_attention(batch, options, arrays):
    """One device's requests, whose pages are numbered from 0; rows of equal number are its own, others are everyone's."""
    q, k_cache, v_cache, table = (arrays.get(name) for name in ("q", "k_cache", "v_cache", "table"))
    row_start = jnp.concatenate([arrays["start"], arrays["end"][-1:]]) - (_index(batch) * q.shape[0] if options["uniform"] else 0)
    if "layer" in arrays:
        pages = k_cache.shape[1]
        k_cache, v_cache = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        table = jnp.clip(table - _index(batch) * pages, 0, pages - 1) + arrays["layer"] * pages
    elif table is not None:
        table = table - _index(batch) * k_cache.shape[0]
    inputs = (q, arrays["k"], arrays["v"], k_cache, v_cache, table)
    inputs += (row_start, arrays["ancestors"], arrays["prefix_length"], arrays["positions"])
    twin = functools.partial(reference.tree_attention, **options)
    if table is None:  # slots are the layout of CPU and GPU; the kernel reads pages
        out = twin(*inputs)
    else:
        out = jax.lax.platform_dependent(*inputs, tpu=functools.partial(tree_attention_kernel, **options), default=twin)
    return out if batch is None or options["uniform"] else jax.lax.psum(out, batch)


def cache_commit(pages, new, table, request, positions, accepted):
    """Accepted rows into their request's pages, [P, G, page, E] or, stacked, [L, P, G, page, E] with rows [L, N, G, E]."""
    stacked = pages.ndim == 5
    lead = (None,) if stacked else ()
    batch, heads = _spread((table.shape[0], request.shape[0], pages.shape[len(lead)]), pages.shape[len(lead) + 1])
    arrays = {"pages": pages, "new": new, "table": table, "request": request, "positions": positions, "accepted": accepted}
    specs = dict.fromkeys(arrays, PartitionSpec(batch)) | dict.fromkeys(("pages", "new"), PartitionSpec(*lead, batch, heads))
    return _mapped(functools.partial(_cache_commit, batch, stacked), arrays, specs, PartitionSpec(*lead, batch, heads))


def _cache_commit(batch, stacked: bool, arrays):
    pages, table = arrays["pages"], arrays["table"]
    local = (table - _index(batch) * pages.shape[int(stacked)], arrays["request"] - _index(batch) * table.shape[0])
    rest = (*local, arrays["positions"], arrays["accepted"])

    def write(pages, new):
        return jax.lax.platform_dependent(pages, new, *rest, tpu=cache_commit_kernel, default=reference.cache_commit)

    return (jax.vmap(write) if stacked else write)(pages, arrays["new"])


def causal_attention(q, k, v, *, scale: float, window: int | None):
    """Causal attention of whole sequences, [B, S, H or G, E], whose tokens lie over the mesh's sequence axis; for frozen models only.

    A device asks for its own tokens. To them, what came before is a committed prefix: the keys and values of the axis are gathered as pages
    for the time of the call, a small fraction of what one layer's activations take, and the kernel of decoding reads those before them.
    Tokens later than its own cost a device nothing, so the last of the axis works twice as long as their mean.
    """
    batch, heads = _spread((q.shape[0],), k.shape[2])
    spec = PartitionSpec(batch, meshes.SEQUENCE, heads)
    run = functools.partial(_causal_attention, scale, window)
    return _mapped(run, {"q": q, "k": k, "v": v}, dict.fromkeys("qkv", spec), spec)


def _causal_attention(scale: float, window: int | None, arrays):
    q, k, v = (arrays[name] for name in "qkv")
    sequences, length, groups, size = k.shape
    page, start = math.gcd(length, _PAGE), jax.lax.axis_index(meshes.SEQUENCE).astype(jnp.int32) * length

    def pages(x):
        own = jnp.swapaxes(x.reshape(sequences, length // page, page, groups, -1), 2, 3)
        return jax.lax.all_gather(own, meshes.SEQUENCE, axis=1, tiled=True)

    packed = 2 * size <= 128  # a token's key and value in one row, as in `kv_cache`
    cached = [pages(jnp.concatenate([k, v], axis=-1))] if packed else [pages(k), pages(v)]
    columns = cached[0].shape[1]
    k_cache, v_cache = (x.reshape(-1, *x.shape[2:]) for x in (cached * 2)[:2])
    table = jnp.arange(sequences * columns, dtype=jnp.int32).reshape(sequences, columns)

    def attend(function, rows: int, first, q, k, v):
        """A run of `rows` tokens of every sequence, the first of which stands at `first`."""
        flat = [x.reshape(sequences * rows, *x.shape[2:]) for x in (q, k, v)]
        places = jnp.tile(first + jnp.arange(rows, dtype=jnp.int32), sequences)
        starts = jnp.arange(sequences + 1, dtype=jnp.int32) * rows
        prefix, ancestors = jnp.broadcast_to(first, (sequences,)), jnp.zeros((sequences * rows, 2), jnp.uint32)
        options = {"causal": True, "max_rows": rows, "uniform": True, "scale": scale, "window": window}
        inputs = (*flat, k_cache, None if packed else v_cache, table, starts, ancestors, prefix, places)
        return function(*inputs, **options).reshape(q.shape)

    def in_blocks(q, k, v):  # the twin holds the scores of all rows it is given, so it gets few at a time
        rows = math.gcd(length, _TWIN_ROWS)
        parts = [jnp.swapaxes(x.reshape(sequences, length // rows, rows, *x.shape[2:]), 0, 1) for x in (q, k, v)]
        firsts = start + jnp.arange(length // rows, dtype=jnp.int32) * rows
        out = jax.lax.map(lambda part: attend(reference.tree_attention, rows, *part), (firsts, *parts))
        return jnp.swapaxes(out, 0, 1).reshape(q.shape)

    kernel = functools.partial(attend, tree_attention_kernel, length, start)
    return jax.lax.platform_dependent(q, k, v, tpu=kernel, default=in_blocks)


def anchor_attention(q, k_context, v_context, k_block, v_block, anchors, keep, documents, anchor_documents, *, causal: bool, scale: float):
    """Attention of training blocks; arguments as `reference.anchor_attention` has them.

    Blocks may be dealt over the mesh's sequence axis (`training.dealing`: [n B, A / n, ...] of n parts). The context then lies over that
    axis, [B, S, ...], and is gathered for the time of the call; its gradient returns to the device that holds the tokens.
    """
    names = ("q", "k_context", "v_context", "k_block", "v_block", "anchors", "keep", "documents", "anchor_documents")
    arrays = dict(zip(names, (q, k_context, v_context, k_block, v_block, anchors, keep, documents, anchor_documents), strict=True))
    batch, heads = _spread((k_context.shape[0],), k_context.shape[2])
    dealt = q.shape[0] != k_context.shape[0]
    rows, along = (meshes.dealt_axes(batch), meshes.SEQUENCE) if dealt else (batch, None)
    specs = dict.fromkeys(names, PartitionSpec(rows)) | {"documents": PartitionSpec(batch)}
    specs |= dict.fromkeys(("k_context", "v_context"), PartitionSpec(batch, along, heads))
    specs |= dict.fromkeys(("q", "k_block", "v_block"), PartitionSpec(rows, None, None, heads))

    def run(arrays):
        if dealt:
            gather = functools.partial(jax.lax.all_gather, axis_name=meshes.SEQUENCE, axis=1, tiled=True)
            arrays = arrays | {name: gather(arrays[name]) for name in ("k_context", "v_context")}
        inputs = tuple(arrays.get(name) for name in names)
        options = {"causal": causal, "scale": scale}
        kernel, twin = (functools.partial(call, **options) for call in (anchor_attention_kernel, reference.anchor_attention))
        return jax.lax.platform_dependent(*inputs, tpu=kernel, cpu=functools.partial(_in_turn, twin), default=twin)

    return _mapped(run, arrays, specs, specs["q"])


def _in_turn(attention, *inputs):
    """One sequence after another, computed again for its gradient: the scores of one stay in a processor's cache, those of all do not."""

    @jax.checkpoint
    def one(arrays):
        return attention(*(None if array is None else array[None] for array in arrays))[0]

    return jax.lax.map(one, inputs)


def _mesh() -> AbstractMesh | None:
    """The mesh of several devices that the program is traced for, unless each device's part is already in hand."""
    mesh = jax.sharding.get_abstract_mesh()
    if not meshes.is_ours(mesh) or mesh.size == 1 or mesh.manual_axes:
        return None
    return mesh


def _spread(counts: tuple[int, ...], groups: int):
    """Mesh axes (or None) for a batch axis whose lengths are all of `counts`, and for `groups` kv heads."""
    mesh = _mesh()
    if mesh is None:
        return None, None
    return tuple(meshes.partition(mesh, ("batch", "kv_heads"), (math.gcd(*counts), groups)))  # pyright: ignore[reportArgumentType]


def _index(batch):
    """Which part of the batch this device holds."""
    return 0 if batch is None else jax.lax.axis_index(batch).astype(jnp.int32)


def _mapped(run, arrays: dict, specs: dict, out: PartitionSpec):
    arrays = {name: array for name, array in arrays.items() if array is not None}
    mesh = _mesh()
    if mesh is None:
        return run(arrays)
    specs = {name: specs[name] for name in arrays}
    # Kernels do not say over which axes their results agree.
    return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)(arrays)
