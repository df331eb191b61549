"""Packed rows hold every conversation once, stay within their limits, and spread evenly over processes."""

import numpy as np
import pytest

from angelspec_jax.data.packing import pack
from angelspec_jax.data.pipeline import balanced_order, batches

LENGTHS = np.random.default_rng(0).integers(3, 40, 60).tolist()
SOURCE = [{"tokens": np.full(n, i + 1, np.int32), "loss_mask": np.arange(n) % 3 > 0} for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(("length", "most"), [(64, 4), (64, 64), (40, 2)])
def test_every_conversation_is_in_one_row_and_rows_keep_their_limits(length, most):
    packed = pack(SOURCE, length, most)
    assert sorted(index for row in packed.rows for index in row) == list(range(60))
    for row, load in zip(packed.rows, packed.loads, strict=True):
        assert len(row) <= most and sum(LENGTHS[i] for i in row) <= length
        assert load == sum(int(SOURCE[i]["loss_mask"].sum()) for i in row)
    if most == 64:
        assert sum(LENGTHS) / (len(packed) * length) > 0.93


def test_documents_and_positions_begin_anew_in_each_conversation():
    packed = pack(SOURCE, 64, 4)
    batch = batches(packed, 4, 64, seed=0)[0]
    for tokens, documents, positions, length in zip(*(batch[n] for n in ("tokens", "documents", "positions", "lengths")), strict=True):
        for number in range(documents.max() + 1):
            at = np.flatnonzero(documents == number)
            assert len(set(tokens[at])) == 1 and (np.diff(at) == 1).all()
            np.testing.assert_array_equal(positions[at], np.arange(len(at)))
        assert (documents[length:] == -1).all() and (documents[:length] >= 0).all()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_load_of_one_stream(processes):
    packed = pack(SOURCE, 64, 4)
    whole = batches(packed, 8, 64, seed=1)
    parts = [batches(packed, 8, 64, 1, index, processes) for index in range(processes)]
    for step in range(4):
        joined = np.concatenate([part[step]["tokens"] for part in parts])
        np.testing.assert_array_equal(joined, whole[step]["tokens"])


def test_equal_slices_carry_nearly_equal_loads():
    loads = np.random.default_rng(1).integers(1, 1000, 64)
    spread = loads[balanced_order(loads.tolist())]
    for slices in (2, 4, 8, 16):
        shares = spread.reshape(slices, -1).sum(axis=1)
        assert shares.max() < 1.35 * shares.min(), shares
    assert sorted(balanced_order([5, 1, 9, 3, 7])) == list(range(5))
