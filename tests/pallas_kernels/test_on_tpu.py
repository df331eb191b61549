"""The kernels on a real TPU against their twins on the same device. `JAX_PLATFORMS=tpu pytest -m tpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.cache_commit import cache_commit
from pallas_kernels.tree_attention import tree_attention

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU")]
PAGE, COLUMNS, REQUESTS = 128, 4, 3


def _draw(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _close(got, want, dtype):
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("pages", ["apart", "together", "int8"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_tree_attention(size, dtype, pages, causal, window):
    rng, width, heads, groups = np.random.default_rng(size), 8, 8, 2
    rows, shape = REQUESTS * width, (REQUESTS * COLUMNS, groups, PAGE, size)
    cache, factors = [_draw(rng, *shape, dtype=dtype) for _ in "kv"], {}
    if pages == "int8":
        factors = {name: jnp.full((*shape[:2], 1, PAGE), 0.02, jnp.float32) for name in ("k_scale", "v_scale")}
        cache = [jnp.clip(jnp.round(x.astype(jnp.float32) * 50), -127, 127).astype(jnp.int8) for x in cache]
    if pages == "together":
        cache = [jnp.concatenate(cache, axis=-1), None]
    table = jnp.asarray(rng.permutation(REQUESTS * COLUMNS).reshape(REQUESTS, COLUMNS), jnp.int32)
    prefix = jnp.array([0, 130, PAGE * COLUMNS], jnp.int32)
    ancestors = jnp.tile(jnp.stack([(2 << jnp.arange(width, dtype=jnp.uint32)) - 1, jnp.zeros(width, jnp.uint32)], axis=1), (REQUESTS, 1))
    positions = (prefix[:, None] + jnp.arange(width, dtype=jnp.int32)[None]).reshape(-1)
    packed = [_draw(rng, rows, count, size, dtype=dtype) for count in (heads, groups, groups)]
    inputs = (*packed, *cache, table, jnp.arange(REQUESTS + 1, dtype=jnp.int32) * width, ancestors, prefix, positions)
    for uniform in (False, True):
        options = {"causal": causal, "max_rows": width, "uniform": uniform, "scale": 0.1, "window": window} | factors
        with jax.default_matmul_precision("highest"):
            want = jax.jit(functools.partial(reference.tree_attention, **options))(*inputs)
        _close(jax.jit(functools.partial(tree_attention, **options))(*inputs), want, jnp.bfloat16 if pages == "int8" else dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8], ids=["bfloat16", "float32", "int8"])
def test_cache_commit(dtype):
    rng, rows = np.random.default_rng(0), 24
    whole = dtype == jnp.int8
    draw = lambda *shape: jnp.asarray(rng.integers(-100, 100, shape), dtype) if whole else _draw(rng, *shape, dtype=dtype)  # noqa: E731
    pages, new = draw(REQUESTS * COLUMNS, 2, PAGE, 128), draw(rows, 2, 128)
    table = jnp.asarray(rng.permutation(REQUESTS * COLUMNS).reshape(REQUESTS, COLUMNS), jnp.int32)
    places = rng.permutation(REQUESTS * COLUMNS * PAGE)[:rows]
    request, positions = (jnp.asarray(x, jnp.int32) for x in divmod(places, COLUMNS * PAGE))
    inputs = (new, table, request, positions, jnp.asarray(rng.random(rows) < 0.7))
    want = jax.jit(reference.cache_commit)(pages, *inputs)
    got = jax.jit(cache_commit, donate_argnums=0)(pages, *inputs)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_anchor_attention_and_gradients(size, dtype, documents):
    rng, batch, count, slots, heads, groups, length = np.random.default_rng(size), 2, 20, 8, 4, 2, 600
    shapes = [(batch, count, slots, heads, size), *[(batch, length, groups, size)] * 2, *[(batch, count, slots, groups, size)] * 2]
    arrays = [_draw(rng, *shape, dtype=dtype) for shape in shapes]
    anchors = jnp.asarray(np.sort(rng.integers(0, length, (batch, count)), axis=1), jnp.int32)
    named = jnp.tile((jnp.arange(length, dtype=jnp.int32) // 200)[None], (batch, 1)) if documents else None
    at = None if named is None else jnp.take_along_axis(named, anchors, axis=1)
    places = (anchors, jnp.asarray(rng.random((batch, count)) < 0.8), named, at)

    def loss(function, *arrays):
        out = function(*arrays, *places, causal=documents, scale=0.1).astype(jnp.float32)
        return jnp.sum(jnp.sin(out)), out

    with jax.default_matmul_precision("highest"):
        run = jax.value_and_grad(functools.partial(loss, reference.anchor_attention), argnums=(0, 1, 2, 3, 4), has_aux=True)
        (_, want), wanted = jax.jit(run)(*arrays)
    run = jax.value_and_grad(functools.partial(loss, anchor_attention), argnums=(0, 1, 2, 3, 4), has_aux=True)
    (_, got), found = jax.jit(run)(*arrays)
    _close(got, want, dtype)
    for ours, theirs in zip(found, wanted, strict=True):
        top = np.abs(np.asarray(theirs, np.float32)).max()
        _close(np.asarray(ours, np.float32) / top, np.asarray(theirs, np.float32) / top, dtype)
