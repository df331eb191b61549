"""Every kernel compiles with the real TPU compiler of every generation. Needs libtpu (`pip install "jax[tpu]"`), no TPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.cache_commit import cache_commit
from pallas_kernels.tree_attention import tree_attention

MIB = 2**20
needs_compiler = pytest.mark.skipif(not aot.available(), reason="libtpu, the TPU compiler, is not installed")
every_chip = pytest.mark.parametrize("chip", aot.TOPOLOGIES)


def _tree_arguments(rows, requests, heads, groups, size, page, pages, dtype, cache_dtype):
    """Small heads keep a token's key and value in one row."""
    array = jax.ShapeDtypeStruct
    packed = size < 128
    cache = array((requests * pages, groups, page, size * (1 + packed)), cache_dtype)
    row = array((rows, groups, size), dtype)
    return (
        array((rows, heads, size), dtype),
        *(row, row, cache, None if packed else cache),
        array((requests, pages), jnp.int32),
        array((requests + 1,), jnp.int32),
        array((rows, 2), jnp.uint32),
        array((requests,), jnp.int32),
        array((rows,), jnp.int32),
    )


@pytest.mark.tpu_aot
@needs_compiler
@every_chip
@pytest.mark.parametrize(
    ("heads", "groups", "size", "dtype", "cache_dtype", "window", "scaled"),
    [
        (32, 8, 128, jnp.bfloat16, jnp.bfloat16, None, None),
        (32, 8, 128, jnp.bfloat16, jnp.bfloat16, 1024, None),
        (32, 8, 128, jnp.float32, jnp.float32, None, None),
        (32, 8, 128, jnp.float32, jnp.bfloat16, None, None),
        (32, 8, 128, jnp.bfloat16, jnp.int8, None, "token"),
        (32, 8, 128, jnp.bfloat16, jnp.int8, None, "page"),
        (8, 8, 64, jnp.bfloat16, jnp.bfloat16, None, None),
        (8, 8, 64, jnp.bfloat16, jnp.int8, None, "token"),
        (16, 8, 256, jnp.bfloat16, jnp.bfloat16, None, None),
        (4, 1, 128, jnp.bfloat16, jnp.bfloat16, None, None),
    ],
)
def test_tree_attention(chip, heads, groups, size, dtype, cache_dtype, window, scaled):
    """8 drafts of 8 requests over 8192 tokens: the visible cache is read once, and nothing is stored on the way."""
    arguments = _tree_arguments(8 * 8, 8, heads, groups, size, 128, 64, dtype, cache_dtype)
    options = {"causal": False, "max_rows": 8, "uniform": True, "scale": 0.1, "window": window}
    pages = arguments[3]
    factors = [] if scaled is None else [jax.ShapeDtypeStruct((*pages.shape[:2], 1, 128 if scaled == "token" else 1), jnp.float32)] * 2

    def attend(factors, *arguments):
        return tree_attention(*arguments, **options, **dict(zip(("k_scale", "v_scale"), factors, strict=False)))

    report = aot.compile_kernel(attend, factors, *arguments, topology=chip)
    cache_bytes = sum(x.size * x.dtype.itemsize for x in (*arguments[3:5], *factors) if x is not None)
    assert report.temporary_bytes < MIB
    # Rows are rearranged on their way in and out; scales per page are gathered by request.
    assert report.bytes_accessed < 1.1 * cache_bytes


@pytest.mark.tpu_aot
@needs_compiler
@every_chip
@pytest.mark.parametrize(
    ("max_rows", "heads", "groups", "causal", "page"), [(512, 32, 8, True, 128), (64, 64, 1, False, 16), (1, 32, 8, False, 64)]
)
def test_tree_attention_shapes(chip, max_rows, heads, groups, causal, page):
    arguments = _tree_arguments(max_rows * 2, 2, heads, groups, 128, page, 16, jnp.bfloat16, jnp.bfloat16)
    aot.compile_kernel(functools.partial(tree_attention, causal=causal, max_rows=max_rows, scale=0.1), *arguments, topology=chip)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs its compiler, libtpu.*pip install"):
        aot.compile_kernel(lambda x: x, jnp.zeros(8))


@pytest.mark.tpu_aot
@needs_compiler
@every_chip
@pytest.mark.parametrize("layers", [None, 4])
@pytest.mark.parametrize(("page", "size", "dtype"), [(128, 128, jnp.bfloat16), (64, 256, jnp.float32)])
def test_cache_commit(chip, layers, page, size, dtype):
    array, rows, requests, pages = jax.ShapeDtypeStruct, 128, 8, 4096 // page
    lead = () if layers is None else (layers,)
    cache, new = array((*lead, requests * pages, 8, page, size), dtype), array((*lead, rows, 8, size), dtype)
    row = array((rows,), jnp.int32)
    arguments = (cache, new, array((requests, pages), jnp.int32), row, row, array((rows,), jnp.bool_))
    commit = cache_commit if layers is None else jax.vmap(cache_commit, in_axes=(0, 0, None, None, None, None))
    report = aot.compile_kernel(commit, *arguments, topology=chip, donate=(0,))
    assert report.aliased_bytes == cache.size * cache.dtype.itemsize  # written in place
    assert report.temporary_bytes < 8 * MIB


@pytest.mark.tpu_aot
@needs_compiler
@every_chip
@pytest.mark.parametrize(
    ("slots", "heads", "groups", "size", "dtype", "documents"),
    [
        (16, 32, 8, 128, jnp.bfloat16, True),
        (7, 9, 3, 64, jnp.float32, False),
        (8, 64, 4, 128, jnp.bfloat16, True),
        (8, 16, 8, 256, jnp.bfloat16, True),
    ],
)
def test_anchor_attention_and_gradients(chip, slots, heads, groups, size, dtype, documents):
    array, batch, count, length = jax.ShapeDtypeStruct, 2, 64, 2048
    context, block = array((batch, length, groups, size), dtype), array((batch, count, slots, groups, size), dtype)
    places = (array((batch, count), jnp.int32), array((batch, count), jnp.bool_))
    packed = (array((batch, length), jnp.int32), array((batch, count), jnp.int32)) if documents else (None, None)

    def loss(*arguments):
        return jnp.sum(anchor_attention(*arguments, scale=0.1).astype(jnp.float32))

    queries = array((batch, count, slots, heads, size), dtype)
    gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    report = aot.compile_kernel(gradients, queries, context, context, block, block, *places, *packed, topology=chip)
    assert report.temporary_bytes < batch * count * slots * heads * length  # a quarter of the scores, which are never stored
