"""The anchor attention kernels, forward and backward, against their plain-JAX twin and the twin against a dense softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import reference
from pallas_kernels.anchor_attention import Blocks, anchor_attention, block_sizes

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
NAMES = ("out", "q", "k_context", "v_context", "k_block", "v_block")
DOCUMENTS = pytest.mark.parametrize("documents", [False, True], ids=["plain", "packed"])


def _case(*, batch=2, count=5, slots=4, heads=4, groups=2, size=64, length=150, documents=False, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((batch, *shape, size)), dtype)  # noqa: E731
    arrays = (draw(count, slots, heads), *(draw(length, groups) for _ in "kv"), *(draw(count, slots, groups) for _ in "kv"))
    anchors = np.sort(rng.integers(0, length, (batch, count)), axis=1)
    anchors[0, 0], anchors[-1, -1] = 0, length  # a block without context, one that sees all of it
    keep = rng.random((batch, count)) < 0.7
    keep[:, [0, -1]] = True
    ends = np.sort(rng.integers(1, length, (batch, 2)), axis=1)
    context_documents = (np.arange(length)[None, :, None] >= ends[:, None, :]).sum(-1)
    anchor_documents = np.take_along_axis(context_documents, np.minimum(anchors, length - 1), axis=1)
    packed = [jnp.asarray(x, jnp.int32) if documents else None for x in (context_documents, anchor_documents)]
    return arrays, (jnp.asarray(anchors, jnp.int32), jnp.asarray(keep), *packed)


def _dense(arrays, places, causal, scale):
    q, k_context, v_context, k_block, v_block = (np.asarray(x, np.float64) for x in arrays)
    anchors, keep, context_documents, anchor_documents = (x if x is None else np.asarray(x) for x in places)
    out = np.zeros(q.shape)
    for b, a, k, h in np.ndindex(*q.shape[:4]):
        if not keep[b, a]:
            continue
        seen = np.arange(k_context.shape[1]) < anchors[b, a]
        if context_documents is not None:
            seen &= context_documents[b] == anchor_documents[b, a]
        group, own = h * k_context.shape[2] // q.shape[3], k + 1 if causal else q.shape[2]
        keys = np.concatenate([k_context[b, seen, group], k_block[b, a, :own, group]])
        values = np.concatenate([v_context[b, seen, group], v_block[b, a, :own, group]])
        score = keys @ q[b, a, k, h] * scale
        weight = np.exp(score - score.max())
        out[b, a, k, h] = weight / weight.sum() @ values
    return out


def _value_and_gradients(function, arrays, places, options):
    def loss(*arrays):
        out = function(*arrays, *places, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32) * 3)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))(*arrays)
    return out, gradients


def _compare(case, interpret=True, tolerance=5e-6, **options):
    options = {"scale": 0.125} | options
    got = _value_and_gradients(functools.partial(anchor_attention, interpret=interpret), *case, options)
    want = _value_and_gradients(reference.anchor_attention, *case, options)
    for name, ours, theirs in zip(NAMES, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max()), err_msg=name)
    return got


@DOCUMENTS
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_twin_matches_a_dense_softmax(documents, causal):
    arrays, places = _case(documents=documents, length=20, size=8)
    got = reference.anchor_attention(*arrays, *places, causal=causal, scale=0.3)
    np.testing.assert_allclose(got, _dense(arrays, places, causal, 0.3), atol=2e-6)


@DOCUMENTS
def test_values_and_gradients_match_the_twin(documents):
    _compare(_case(documents=documents), causal=documents)


@DOCUMENTS
def test_several_blocks_of_rows_and_context_without_races(documents):
    """20 anchors of 8 slots are two blocks of rows; 300 tokens are three context blocks, some of them invisible."""
    case = _case(batch=1, count=20, slots=8, groups=1, heads=2, length=300, documents=documents)
    assert block_sizes(8, 2, 300) == Blocks(slots=8, padded_slots=8, rows=128, keys=128)
    _compare(case, RACES)


@pytest.mark.parametrize("slots", [1, 7])
def test_block_lengths(slots):
    _compare(_case(slots=slots, count=3, length=128))


def test_other_queries_than_the_slots():
    """One more row per block, or fewer, that sees all of the block's slots."""
    arrays, places = _case(slots=8, count=3)
    for queries in (arrays[0][:, :, :3], jnp.concatenate([arrays[0], arrays[0][:, :, :1] * 0.5], axis=2)):
        _compare(((queries, *arrays[1:]), places))
    with pytest.raises(ValueError, match="its own 8 slots, got 3"):
        anchor_attention(arrays[0][:, :, :3], *arrays[1:], *places, causal=True, scale=1.0, interpret=True)


def test_unsorted_anchors():
    arrays, (anchors, keep, *rest) = _case(batch=1, count=20, slots=8, heads=2, length=300)
    _compare((arrays, (anchors[:, ::-1], keep[:, ::-1], *rest)))


def test_blocks_that_are_not_kept_are_zero_and_pass_no_gradient():
    arrays, (anchors, keep, *rest) = _case()
    out, gradients = _compare((arrays, (anchors, jnp.zeros_like(keep), *rest)))
    assert not np.any(out) and not any(np.any(gradient) for gradient in gradients)


def test_bfloat16():
    _compare(_case(dtype=jnp.bfloat16, size=128), tolerance=2e-2)


def test_one_kind_of_documents_is_refused():
    arrays, (anchors, keep, context_documents, _) = _case(documents=True)
    for function in (functools.partial(anchor_attention, interpret=True), reference.anchor_attention):
        with pytest.raises(ValueError, match="both context_documents and anchor_documents"):
            function(*arrays, anchors, keep, context_documents, None, scale=1.0)
