"""Batches are a function of (seed, step): resumable, shardable, padded to one shape."""

import threading

import numpy as np
import pytest

from angelspec_jax.data.pipeline import Batches, batches, fit, iterate, pad, sequential


def sample(index, length=None, cached=False):
    length = 3 + index % 4 if length is None else length
    result = {"tokens": np.full(length, index + 1, np.int32), "loss_mask": np.arange(length) > 0}
    if cached:
        result["features"] = np.full((length, 2, 3), index, np.float16)
        result["hidden"] = np.full((length, 3), index, np.float16)
    return result


SOURCE = [sample(i) for i in range(10)]


def rows(batch):
    return batch["tokens"][:, 0].tolist()


def test_every_epoch_holds_every_sequence_once_in_another_order():
    stream = batches(SOURCE, 4, 8, seed=3)
    seen = [row for step in range(5) for row in rows(stream[step])]
    assert sorted(seen[:10]) == list(range(1, 11))
    assert sorted(seen[10:20]) == list(range(1, 11))
    assert seen[:10] != seen[10:20]
    assert stream[0]["tokens"].shape == (4, 8)


def test_stream_depends_on_seed_and_step_alone():
    one, two = batches(SOURCE, 4, 8, seed=3), batches(SOURCE, 4, 8, seed=3)
    assert rows(one[7]) == rows(two[7])
    assert [rows(one[s]) for s in range(5)] != [rows(batches(SOURCE, 4, 8, seed=4)[s]) for s in range(5)]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_read_slices_of_one_global_batch(processes):
    whole = batches(SOURCE, 4, 8, seed=0)[6]
    parts = [batches(SOURCE, 4, 8, 0, index, processes)[6] for index in range(processes)]
    np.testing.assert_array_equal(np.concatenate([part["tokens"] for part in parts]), whole["tokens"])
    with pytest.raises(ValueError, match="multiple of the number of processes"):
        batches(SOURCE, 4, 8, 0, 0, 3)


def test_padding_includes_cached_features():
    batch = pad([sample(1, 2, True), sample(2, 4, True)], 5)
    assert batch["lengths"].tolist() == [2, 4]
    assert batch["features"].shape == (2, 5, 2, 3)
    assert batch["features"].dtype == np.float16
    assert batch["hidden"][0, 2:].sum() == 0
    assert batch["loss_mask"].tolist() == [[False, True, False, False, False], [False, True, True, True, False]]
    with pytest.raises(ValueError, match="more than max_length"):
        pad([sample(1, 6)], 5)


def test_overlong_sequences_are_dropped_truncated_or_split_as_asked():
    samples = [sample(0, 4), sample(1, 11)]
    kept, report = fit(samples, 5, "drop")
    assert (len(kept), report) == (1, {"sequences": 1, "overlong": 1, "unsupervised": 0})
    kept, report = fit(samples, 5, "truncate")
    assert [len(s["tokens"]) for s in kept] == [4, 5]
    kept, report = fit(samples, 5, "split")
    assert [len(s["tokens"]) for s in kept] == [4, 5, 5, 1]
    kept, report = fit(samples, 5, "split", min_supervised=2)
    assert (len(kept), report["unsupervised"]) == (3, 1)
    with pytest.raises(ValueError, match="overlong must be one of"):
        fit(samples, 5, "cut")


def test_sequential_batches_fill_up_with_unsupervised_rows():
    parts = list(sequential(SOURCE, range(10), 4, 8))
    assert [rows(part) for part in parts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 10, 10]]
    assert parts[-1]["loss_mask"].any(axis=1).tolist() == [True, True, False, False]
    assert rows(next(sequential(SOURCE, [7, 2], 2, 8))) == [8, 3]


def test_iterate_reads_ahead_and_stops():
    stream = batches(SOURCE, 2, 8, seed=1)
    got = list(iterate(stream, 3, 7))
    assert [step for step, _ in got] == [3, 4, 5, 6]
    np.testing.assert_array_equal(got[1][1]["tokens"], stream[4]["tokens"])
    assert list(iterate(stream, 5, 5)) == []
    running = iterate(stream, 0, 10**9)
    next(running)
    running.close()
    assert not [t for t in threading.enumerate() if t.name == "batches"]


def test_errors_of_the_reader_reach_the_consumer():
    class Broken(Batches):
        def __getitem__(self, step):
            if step == 1:
                raise ValueError("shard 1 is damaged")
            return super().__getitem__(step)

    running = iterate(Broken(SOURCE, 2, 8, 0), 0, 5)
    next(running)
    with pytest.raises(ValueError, match="shard 1 is damaged"):
        next(running)


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="no sequence to train on"):
        batches([], 2, 8, 0)
