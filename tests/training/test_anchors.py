"""Anchor eligibility, uniform sampling with static shapes, and block targets of both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.training import anchors as A

BLOCK = 4


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def mask_of(*rows):
    return jnp.asarray([[float(c) for c in row] for row in rows], jnp.float32)


@pytest.mark.parametrize(
    "rule, loss_mask, expected",
    [
        ("label", "0001110011", "0011100110"),
        ("anchor", "0001100111", "0001100000"),
        ("both", "0001110011", "0001100010"),
    ],
)
def test_eligible_positions(rule, loss_mask, expected):
    eligible = A.eligible_anchors(mask_of(loss_mask), BLOCK, rule=rule)
    assert "".join(str(int(e)) for e in eligible[0]) == expected


def test_packed_documents_and_padding():
    documents = jnp.asarray([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1]])
    everywhere = jnp.ones((1, 11), jnp.float32)
    label = A.eligible_anchors(everywhere, BLOCK, documents=documents)
    anchor = A.eligible_anchors(everywhere, BLOCK, rule="anchor", documents=documents)
    assert np.flatnonzero(label[0]).tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert np.flatnonzero(anchor[0]).tolist() == [0, 1, 5]
    valid = jnp.arange(11)[None, :] < 7
    assert np.flatnonzero(A.eligible_anchors(everywhere, BLOCK, valid=valid)[0]).tolist() == [0, 1, 2, 3, 4, 5]


def test_sampling_is_sorted_distinct_and_takes_all_when_few():
    loss_mask = mask_of("0" * 20, "00011" + "0" * 15, "1" * 20)
    chosen, keep = jax.jit(A.sample_anchors, static_argnums=(2, 3))(jax.random.key(0), loss_mask, 6, BLOCK)
    assert chosen.shape == keep.shape == (3, 6) and chosen.dtype == jnp.int32 and keep.dtype == jnp.bool_
    assert keep.sum(axis=1).tolist() == [0, 2, 6]
    assert chosen[0].tolist() == [0] * 6
    assert chosen[1].tolist() == [2, 3, 0, 0, 0, 0] and keep[1].tolist() == [True, True] + [False] * 4
    assert (np.diff(np.asarray(chosen[2])) > 0).all()


def test_more_slots_than_positions():
    chosen, keep = A.sample_anchors(jax.random.key(1), mask_of("0111"), 9, BLOCK)
    assert chosen[0].tolist() == [0, 1, 2] + [0] * 6 and keep[0].tolist() == [True] * 3 + [False] * 6


@pytest.mark.parametrize("count", [1, 7, 64, 90])
def test_sampling_takes_the_highest_scores_and_of_equal_ones_the_first(monkeypatch, count):
    """As a sort would choose them, with draws so coarse that most are equal."""
    draw = np.random.default_rng(4).integers(0, 5, (3, 64)).astype(np.float32) / 5
    monkeypatch.setattr(A.jax.random, "uniform", lambda key, shape: jnp.asarray(draw))
    loss_mask = jnp.asarray(np.random.default_rng(5).random((3, 64)) < 0.6, jnp.float32)
    chosen, keep = A.sample_anchors(jax.random.key(0), loss_mask, count, BLOCK)
    eligible = np.asarray(A.eligible_anchors(loss_mask, BLOCK))
    for row in range(3):
        best = np.argsort(np.where(eligible[row], -draw[row], 1.0), kind="stable")[:count]
        expected = np.sort(best[eligible[row][best]])
        np.testing.assert_array_equal(chosen[row][keep[row]], expected)
        assert keep[row, : len(expected)].all() and not keep[row, len(expected) :].any() and not chosen[row, len(expected) :].any()


def test_sampling_is_uniform():
    loss_mask = jnp.tile(mask_of("0111111111110"), (4000, 1))
    chosen, keep = A.sample_anchors(jax.random.key(2), loss_mask, 3, BLOCK)
    counts = np.bincount(np.asarray(chosen).ravel(), minlength=13)
    assert keep.all() and not counts[11:].any()
    expected = 4000 * 3 / 11
    assert np.abs(counts[:11] - expected).max() < 5 * np.sqrt(expected)


def test_same_position_targets():
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 15, 16]], jnp.int32)
    loss_mask = mask_of("0011011")
    starts, keep = jnp.asarray([[1, 4, 0]], jnp.int32), jnp.asarray([[True, True, False]])
    out = A.block_targets(tokens, loss_mask, starts, keep, BLOCK, "same_position", 99, documents=None)
    assert out.labels[0, 0].tolist() == [11, 12, 13, 14]
    assert out.previous[0, 0].tolist() == [11, 11, 12, 13]
    assert out.weight_mask[0].tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert out.block_tokens[0, :2].tolist() == [[11, 99, 99, 99], [14, 99, 99, 99]]
    assert out.positions[0, :2].tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert out.teacher_index[0, 0, 1:].tolist() == [1, 2, 3]


def test_anchor_first_targets_keep_the_unbroken_prefix():
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 15, 16]], jnp.int32)
    starts, keep = jnp.asarray([[1, 4]], jnp.int32), jnp.asarray([[True, True]])
    out = A.block_targets(tokens, mask_of("0011011"), starts, keep, BLOCK, "anchor_first", 99, documents=None)
    assert out.labels[0, 0].tolist() == [12, 13, 14, 15]
    assert out.previous[0, 0].tolist() == [11, 12, 13, 14]
    assert out.weight_mask[0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert out.teacher_index[0, 0].tolist() == [1, 2, 3, 4]


def test_labels_of_another_document_are_not_supervised():
    tokens = jnp.arange(8, dtype=jnp.int32)[None, :]
    documents = jnp.asarray([[0, 0, 0, 1, 1, 1, -1, -1]], jnp.int32)
    local = jnp.asarray([[0, 1, 2, 0, 1, 2, 0, 0]], jnp.int32)
    starts, keep = jnp.asarray([[1, 3]], jnp.int32), jnp.asarray([[True, True]])
    out = A.block_targets(tokens, jnp.ones((1, 8)), starts, keep, BLOCK, "same_position", 99, documents=documents, positions=local)
    assert out.weight_mask[0].tolist() == [[0, 1, 0, 0], [0, 1, 1, 0]]
    assert out.positions[0].tolist() == [[1, 2, 3, 4], [0, 1, 2, 3]]


def test_gather_rows():
    values = jnp.arange(24, dtype=jnp.float32).reshape(2, 4, 3)
    index = jnp.asarray([[[0, 3]], [[2, 1]]], jnp.int32)
    np.testing.assert_array_equal(A.gather_rows(values, index)[1, 0, 0], values[1, 2])


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="'nearest'.*label, anchor, both"):
        A.eligible_anchors(jnp.ones((1, 5)), BLOCK, rule="nearest")
    with pytest.raises(ValueError, match="'diagonal'.*same_position"):
        A.check_layout("diagonal")
