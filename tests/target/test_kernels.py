"""Kernels on a mesh of 8 virtual devices (data 2 x fsdp 2 x tensor 2) compute what they compute on one; each device sees only its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import mesh as meshes
from angelspec_jax.target import kernels
from angelspec_jax.target.attention import uniform_rows

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
REQUESTS, WIDTH, HEADS, GROUPS, SIZE, PAGE, COLUMNS = 4, 3, 4, 2, 8, 8, 2


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(2, 2, 2, jax.devices()[:8])


def _draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def _on(mesh, function, *arguments):
    with jax.set_mesh(mesh):
        return jax.jit(function)(*arguments)


def _compare(mesh, function, *arguments):
    got, want = _on(mesh, function, *arguments), jax.jit(function)(*arguments)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=2e-6)
    with jax.set_mesh(mesh):
        program = str(jax.make_jaxpr(function)(*arguments))
    assert "shard_map" in program and "shard_map" not in str(jax.make_jaxpr(function)(*arguments))
    return got


def _paged(layers=()):
    pages = [_draw(*layers, REQUESTS * COLUMNS, GROUPS, PAGE, SIZE, seed=i) for i in range(2)]
    return pages, jnp.arange(REQUESTS * COLUMNS, dtype=jnp.int32).reshape(REQUESTS, COLUMNS)


@pytest.mark.parametrize("layout", ["slots", "pages", "stacked pages"])
def test_tree_attention(mesh, layout):
    rows = uniform_rows(jnp.array([0, 3, 11, 16 - WIDTH], jnp.int32), WIDTH)
    q, k, v = (_draw(REQUESTS * WIDTH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    positions = jnp.arange(REQUESTS * WIDTH, dtype=jnp.int32)
    caches, table, layer = [_draw(REQUESTS, GROUPS, SIZE, 16), _draw(REQUESTS, GROUPS, 16, SIZE)], None, None
    if layout == "pages":
        caches, table = _paged()
    if layout == "stacked pages":
        (caches, table), layer = _paged((3,)), jnp.int32(1)
    run = functools.partial(kernels.tree_attention, scale=0.3, window=None)
    got = _compare(mesh, run, q, k, v, *caches, table, rows, positions, layer)
    assert not np.allclose(got[:WIDTH], got[WIDTH : 2 * WIDTH])
    if layer is not None:
        alone = run(q, k, v, caches[0][1], caches[1][1], table, rows, positions)
        np.testing.assert_allclose(got, alone, atol=2e-6)


def test_rows_of_unequal_number(mesh):
    """Requests with 3, 0, 1 and 2 rows, and rows of no request behind: nothing splits by the four batch shards but the pages."""
    rows = uniform_rows(jnp.array([9, 3, 11, 12], jnp.int32), WIDTH)
    counts = np.array([3, 0, 1, 2])
    start = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    picked = np.concatenate([np.arange(3), [6], [9, 10]])  # the same rows where every request has three
    ragged = rows.replace(uniform=False, row_start=start, ancestors=rows.ancestors[np.pad(picked, (0, 1))])
    q, k, v = (_draw(REQUESTS * WIDTH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    positions = jnp.arange(REQUESTS * WIDTH, dtype=jnp.int32)
    pages, table = _paged()
    run = functools.partial(kernels.tree_attention, scale=0.3, window=None)
    few = (x[np.pad(picked, (0, 1))] for x in (q, k, v))
    got = _compare(mesh, run, *few, *pages, table, ragged, positions[:7])
    np.testing.assert_allclose(got[:6], run(q, k, v, *pages, table, rows, positions)[picked], atol=2e-6)
    assert not np.any(got[6])


@pytest.mark.parametrize("layers", [(), (3,)], ids=["one layer", "stacked"])
def test_cache_commit(mesh, layers):
    (pages, _), table = _paged(layers)
    new = _draw(*layers, REQUESTS * WIDTH, GROUPS, SIZE, seed=7)
    request = jnp.repeat(jnp.arange(REQUESTS, dtype=jnp.int32), WIDTH)
    positions = jnp.tile(jnp.arange(6, 6 + WIDTH, dtype=jnp.int32), REQUESTS)
    accepted = jnp.arange(REQUESTS * WIDTH) % 3 != 1
    got = _compare(mesh, kernels.cache_commit, pages, new, table, request, positions, accepted)
    changed = np.any(np.asarray(got != pages), axis=-1)
    assert changed.sum() == int(accepted.sum()) * GROUPS * int(np.prod(layers))


@pytest.mark.parametrize("documents", [False, True])
def test_anchor_attention_and_gradients(mesh, documents):
    batch, count, length = 4, 3, 12
    arrays = [_draw(batch, count, WIDTH, HEADS, SIZE), *(_draw(batch, length, GROUPS, SIZE, seed=i) for i in range(2))]
    arrays += [_draw(batch, count, WIDTH, GROUPS, SIZE, seed=i) for i in range(2)]
    anchors = jnp.tile(jnp.array([0, 5, 9], jnp.int32), (batch, 1))
    keep = jnp.ones((batch, count), bool).at[1, 2].set(False)
    named = jnp.tile((jnp.arange(length, dtype=jnp.int32) > 6).astype(jnp.int32), (batch, 1)) if documents else None
    at = None if named is None else jnp.take_along_axis(named, anchors, axis=1)

    def loss(*arrays):
        out = kernels.anchor_attention(*arrays, anchors, keep, named, at, causal=False, scale=0.3)
        return jnp.sum(jnp.sin(3 * out))

    _compare(mesh, jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)), *arrays)
