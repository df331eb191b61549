"""The cache commit kernel against its plain-JAX twin, under both Pallas interpreters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import reference
from pallas_kernels.cache_commit import cache_commit, tile_tokens

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
MODES = pytest.mark.parametrize("interpret", [True, RACES], ids=["interpret", "races"])


def _case(request, positions, accepted, *, page=16, pages=3, groups=2, size=64, dtype=jnp.float32, new_dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    requests = max(request) + 1
    table = rng.permutation(requests * pages + 1)[: requests * pages].reshape(requests, pages)
    return (
        jnp.asarray(rng.standard_normal((requests * pages + 1, groups, page, size)), dtype),
        jnp.asarray(rng.standard_normal((len(request), groups, size)), new_dtype),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(request, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(accepted, bool),
    )


def _compare(case, interpret=True):
    got = jax.jit(functools.partial(cache_commit, interpret=interpret))(*case)
    want = jax.jit(reference.cache_commit)(*case)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    return np.asarray(got, np.float32)


@MODES
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_tree_path_across_a_page_boundary(interpret, dtype):
    """Three requests: accepted rows among rejected ones with the same positions, pages and tiles left and entered, one request idle."""
    request = [0, 0, 0, 0, 0, 2, 2, 2, 2]
    positions = [14, 15, 15, 16, 17, 0, 1, 1, 2]
    accepted = [True, False, True, True, False, True, False, True, True]
    case = _case(request, positions, accepted, dtype=dtype)
    got = _compare(case, interpret)
    row, index = np.asarray(case[1][3], np.float32), int(case[2][0, 1])
    np.testing.assert_array_equal(got[index, :, 0], np.asarray(jnp.asarray(row, dtype), np.float32))


@MODES
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_in_any_order(interpret, seed):
    rng = np.random.default_rng(seed)
    places = rng.permutation(2 * 48)[:24]  # tiles are left and visited again
    _compare(_case([*(places // 48), 1], [*(places % 48), 0], [*(rng.random(24) < 0.6), False], seed=seed), interpret)


@MODES
def test_nothing_accepted_changes_nothing(interpret):
    case = _case([0, 0, 1], [3, 4, 40], [False] * 3)
    np.testing.assert_array_equal(_compare(case, interpret), case[0])


def test_positions_outside_the_table_are_dropped():
    case = _case([0, 0, 1, 1], [47, 48, 1000, -1], [True] * 4)
    changed = np.any(_compare(case) != np.asarray(case[0]), axis=(1, 3))
    assert changed.sum() == 1 and changed[int(case[2][0, 2]), 15]


def test_a_page_smaller_than_a_tile():
    assert tile_tokens(8, 2) == 8 and tile_tokens(64, 2) == 16
    _compare(_case([0, 0, 1], [7, 8, 3], [True, True, True], page=8, dtype=jnp.bfloat16, new_dtype=jnp.bfloat16))


def test_stacked_layers_by_vmap():
    case = _case([0, 0, 1], [15, 16, 3], [True, False, True])
    pages, new = (jnp.stack([x, -x]) for x in case[:2])
    got = jax.vmap(lambda p, n: cache_commit(p, n, *case[2:], interpret=True))(pages, new)
    want = jax.vmap(lambda p, n: reference.cache_commit(p, n, *case[2:]))(pages, new)
    np.testing.assert_array_equal(got, want)
