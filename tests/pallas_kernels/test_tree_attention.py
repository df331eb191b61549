"""The tree attention kernel against its plain-JAX twin and against a dense softmax, under both Pallas interpreters."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import reference
from pallas_kernels.tree_attention import Blocks, block_sizes, tree_attention

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def _ancestors(rng, lengths):
    """Random trees: every row sees itself and the ancestors of a random earlier row of its request."""
    words = []
    for length in lengths:
        seen = np.zeros((length, 64), bool)
        for row in range(length):
            if row:
                seen[row] = seen[rng.integers(0, row)]
            seen[row, row % 64] = True  # prefill chunks may be longer; they ignore the bits
        words.append(np.packbits(seen.reshape(length, 2, 32), axis=-1, bitorder="little").view(np.uint32).reshape(length, 2))
    return np.concatenate(words)


def _case(lengths, prefixes, *, heads=4, groups=2, size=64, page=8, pages=5, dtype=jnp.float32, poison=True, extra=0, seed=0):
    rng = np.random.default_rng(seed)
    requests, rows = len(lengths), sum(lengths) + extra
    total = requests * pages + 2
    cache = [rng.standard_normal((total, groups, page, size)).astype(np.float32) for _ in range(2)]
    table = rng.permutation(total)[: requests * pages].reshape(requests, pages).astype(np.int32)
    clean = [np.array(x) for x in cache]
    for request, prefix in enumerate(prefixes):
        for column in range(pages):
            used = min(max(prefix - column * page, 0), page)
            for array in cache:
                array[table[request, column], :, used:] = np.nan if poison else 0.0
    draw = lambda count: jnp.asarray(rng.standard_normal((rows, count, size)), dtype)  # noqa: E731
    positions = np.concatenate([[*(prefix + np.arange(n))] for n, prefix in zip(lengths, prefixes, strict=True)] + [np.zeros(extra)])
    ancestors = np.concatenate([_ancestors(rng, lengths), np.zeros((extra, 2), np.uint32)])
    shared = (
        jnp.asarray(table),
        jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        jnp.asarray(ancestors),
        jnp.asarray(prefixes, jnp.int32),
        jnp.asarray(positions, jnp.int32),
    )
    packed = (draw(heads), draw(groups), draw(groups))
    poisoned = (*packed, *(jnp.asarray(x, dtype) for x in cache), *shared)
    return poisoned, (*packed, *(jnp.asarray(x, dtype) for x in clean), *shared)


@functools.cache
def _jitted(kernel, **options):
    return jax.jit(functools.partial(kernel, **options))


def _compare(case, interpret=True, tolerance=2e-6, **options):
    poisoned, clean = case
    options = {"causal": False, "scale": 0.125, "max_rows": 8} | options
    got = _jitted(tree_attention, interpret=interpret, **options)(*poisoned)
    want = _jitted(reference.tree_attention, **options)(*clean)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance)
    return np.asarray(got)


def _dense(case, causal, scale, window):
    q, k, v, k_cache, v_cache, table, row_start, _, prefix, positions = (np.asarray(x, np.float64) for x in case)
    table, row_start, prefix, positions = (x.astype(int) for x in (table, row_start, prefix, positions))
    bits = np.asarray(case[7])
    out, fold = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for request in range(len(prefix)):
        first, end = row_start[request], row_start[request + 1]
        cached = [
            np.swapaxes(x[table[request]], 0, 1).reshape(k.shape[1], -1, q.shape[2])[:, : prefix[request]] for x in (k_cache, v_cache)
        ]
        where = np.concatenate([np.arange(prefix[request]), positions[first:end]])
        for row in range(first, end):
            own = np.arange(end - first)
            visible = own <= row - first if causal else (bits[row][own // 32] >> (own % 32).astype(np.uint32)) & 1 == 1
            seen = np.concatenate([np.ones(prefix[request], bool), visible])
            if window is not None:
                seen &= where > positions[row] - window
            for head in range(q.shape[1]):
                keys, values = (
                    np.concatenate([c[head // fold], x[first:end, head // fold]])[seen] for c, x in zip(cached, (k, v), strict=True)
                )
                if len(keys):
                    score = keys @ q[row, head] * scale
                    weight = np.exp(score - score.max())
                    out[row, head] = weight / weight.sum() @ values
    return out


@pytest.mark.parametrize("interpret", [True, RACES], ids=["interpret", "races"])
@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("window", [None, 11])
def test_ragged_requests_match_the_twin_and_a_dense_softmax(interpret, causal, window):
    case = _case([0, 3, 7], [9, 0, 21], extra=2)
    got = _compare(case, interpret, causal=causal, window=window)
    np.testing.assert_allclose(got, _dense(case[1], causal, 0.125, window), atol=2e-6)
    assert not got[-2:].any()  # rows of no request


@pytest.mark.parametrize("prefix", [0, 1, 7, 8, 9, 16, 39, 40])
def test_page_boundaries(prefix):
    _compare(_case([4, 1], [prefix, 40 - prefix]))


@pytest.mark.parametrize("window", [8])
def test_window_across_the_block(window):
    _compare(_case([5, 8], [17, 33]), window=window)
    _compare(_case([5, 8], [17, 33]), window=window, causal=True)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_head_sizes_and_dtypes(size, dtype):
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    _compare(_case([3, 6], [19, 8], size=size, dtype=dtype, page=16, pages=2, poison=False), tolerance=tolerance)


def test_float32_rows_over_bfloat16_pages():
    poisoned, clean = _case([3, 6], [19, 8])
    half = [tuple(x.astype(jnp.bfloat16) if 3 <= i <= 4 else x for i, x in enumerate(c)) for c in (poisoned, clean)]
    _compare(half, tolerance=2e-2)


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (8, 1), (9, 3)])
def test_query_groups(heads, groups):
    _compare(_case([3, 6], [19, 8], heads=heads, groups=groups))


def test_sixty_four_tree_rows_use_both_words():
    _compare(_case([64, 40], [10, 3]), max_rows=64)


def test_a_tree_in_several_blocks_of_rows():
    case = _case([50, 64], [10, 3], heads=32, groups=1)
    assert block_sizes(64, 32, 1, 512, 8, 5, False).rows < 64
    _compare(case, max_rows=64)


def test_long_causal_prefill_in_several_blocks():
    case = _case([300, 0, 130], [12, 5, 0], heads=8, groups=1)
    blocks = block_sizes(300, 8, 1, 512, 8, 5, True)
    assert blocks.width // blocks.own_keys > 1 and blocks.width // blocks.rows > 1
    _compare(case, max_rows=300, causal=True)
    _compare(case, max_rows=300, causal=True, window=70)


@pytest.mark.parametrize("window", [None, 11])
def test_several_prefix_steps(monkeypatch, window):
    """Steps of two pages over five: full, partly visible, repeated and skipped ones, also before the window."""
    module = importlib.import_module("pallas_kernels.tree_attention")
    monkeypatch.setattr(module, "block_sizes", lambda *shapes: dataclasses.replace(block_sizes(*shapes), pages=2))
    options = {"causal": False, "max_rows": 8, "scale": 0.125, "window": window}
    poisoned, clean = _case([3, 2, 4, 0], [31, 0, 40, 12], heads=2, groups=1)
    got = jax.jit(functools.partial(tree_attention, interpret=RACES, **options))(*poisoned)
    np.testing.assert_allclose(got, reference.tree_attention(*clean, **options), atol=2e-6)


def test_block_sizes_follow_the_shapes():
    both = 2 * 128 * 2  # bytes of a key and a value in bfloat16
    assert block_sizes(8, 4, 8, both, 128, 64, False) == Blocks(rows=8, own_keys=8, width=8, pages=4, groups=8)
    assert block_sizes(8, 3, 8, both, 128, 64, False).rows == 16  # an odd number of folded heads needs whole tiles
    assert block_sizes(8, 4, 8, both, 128, 2, False).pages == 2  # never more than the table holds
    assert block_sizes(8, 4, 1, both, 128, 64, False) == Blocks(rows=8, own_keys=8, width=8, pages=8, groups=1)  # longer steps instead
    assert block_sizes(512, 4, 8, both, 128, 64, True) == Blocks(rows=256, own_keys=128, width=512, pages=4, groups=1)


def _packed(case):
    """The same case with a token's key and value side by side in one row of a page."""
    return (*case[:3], jnp.concatenate(case[3:5], axis=-1), None, *case[5:])


def test_keys_and_values_in_one_row():
    options = {"causal": False, "scale": 0.125, "max_rows": 8}
    poisoned, clean = _case([3, 6], [19, 8], heads=9, groups=3, page=16, pages=2)
    got = _jitted(tree_attention, interpret=True, **options)(*_packed(poisoned))
    np.testing.assert_allclose(got, _jitted(reference.tree_attention, **options)(*_packed(clean)), atol=2e-6)
    np.testing.assert_allclose(got, _jitted(reference.tree_attention, **options)(*clean), atol=2e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("scaled", ["token", "page"])
def test_int8_pages(scaled, packed):
    """Against the twin, and the twin against pages that were multiplied out beforehand."""
    (*start, k_pages, v_pages, table, row_start, ancestors, prefix, positions), _ = _case(
        [3, 6], [37, 8], page=32, pages=2, groups=2, poison=False
    )
    axes = -1 if scaled == "token" else (-2, -1)
    scales = [jnp.max(jnp.abs(x), axis=axes) / 127 + 1e-6 for x in (k_pages, v_pages)]
    scales = [x[:, :, None, :] if scaled == "token" else x[:, :, None, None] for x in scales]
    factors = [jnp.swapaxes(x, 2, 3) for x in scales]
    integers = [jnp.round(x / f).astype(jnp.int8) for x, f in zip((k_pages, v_pages), factors, strict=True)]
    wide = [x.astype(jnp.float32) * f for x, f in zip(integers, factors, strict=True)]
    rest = (table, row_start, ancestors, prefix, positions)
    options = {"causal": False, "scale": 0.125, "max_rows": 8}
    pages = _packed((*start, *integers, *rest)) if packed else (*start, *integers, *rest)
    factors = {"k_scale": scales[0], "v_scale": scales[1]}
    twin = reference.tree_attention(*pages, **options, **factors)
    np.testing.assert_allclose(twin, reference.tree_attention(*start, *wide, *rest, **options), atol=1e-5)
    np.testing.assert_allclose(tree_attention(*pages, **options, **factors, interpret=True), twin, atol=1e-5)


def test_rows_of_equal_number_need_no_gather():
    poisoned, clean = _case([6, 6], [19, 8])
    options = {"causal": False, "scale": 0.125, "max_rows": 6}
    got = _jitted(tree_attention, interpret=True, uniform=True, **options)(*poisoned)
    np.testing.assert_allclose(got, _jitted(reference.tree_attention, uniform=True, **options)(*clean), atol=2e-6)
    program = jax.make_jaxpr(functools.partial(tree_attention, uniform=True, **options))(*poisoned)
    assert not any(equation.primitive.name == "gather" for equation in program.eqns)


def test_rows_that_see_nothing_return_zeros():
    poisoned, clean = _case([3, 4], [0, 0])
    blind = jnp.zeros_like(poisoned[7])
    got = _compare([(*c[:7], blind, *c[8:]) for c in (poisoned, clean)])
    assert not got.any()


def test_table_entries_past_the_prefix_may_hold_anything():
    poisoned, clean = _case([3, 4], [9, 0])
    wild = jnp.where(jnp.arange(5)[None] * 8 < poisoned[8][:, None], poisoned[5], 10_000)
    got = tree_attention(*poisoned[:5], wild, *poisoned[6:], causal=False, max_rows=8, scale=0.125, interpret=True)
    want = reference.tree_attention(*clean, causal=False, max_rows=8, scale=0.125)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_bad_shapes_are_one_sentence():
    poisoned, _ = _case([3, 4], [9, 0])
    with pytest.raises(ValueError, match="max_rows is 65"):
        tree_attention(*poisoned, causal=False, max_rows=65, scale=1.0, interpret=True)
    with pytest.raises(ValueError, match="multiple of 8"):
        tree_attention(*_case([3], [2], page=4)[0], causal=False, max_rows=8, scale=1.0, interpret=True)
    integers = [x.astype(jnp.int8) if 3 <= i <= 4 else x for i, x in enumerate(_case([3], [2], page=32)[1])]
    with pytest.raises(ValueError, match="int8 come with k_scale"):
        tree_attention(*integers, causal=False, max_rows=8, scale=1.0, interpret=True)


@pytest.mark.parametrize(
    ("prefixes", "read"), [((0, 0), 128), ((5, 128), 128), ((129, 3), 256), ((256, 0), 256), ((1, 257), 512), ((512, 511), 512)]
)
def test_slots_are_read_as_far_as_the_longest_prefix_needs(prefixes, read):
    _, case = _case([3, 4], prefixes, page=512, pages=1, poison=False)
    k_cache, v_cache = (np.array(cache)[np.asarray(case[5])[:, 0]] for cache in case[3:5])
    k_cache[:, :, read:] = v_cache[:, :, read:] = np.nan
    slots = (*case[:3], jnp.asarray(np.swapaxes(k_cache, 2, 3)), jnp.asarray(v_cache), None, *case[6:])
    got = _jitted(reference.tree_attention, causal=False, scale=0.125, max_rows=8)(*slots)
    np.testing.assert_allclose(got, _dense(case, False, 0.125, None), atol=2e-6)
