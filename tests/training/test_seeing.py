"""What a run shows: TensorBoard events, throughput and memory, taus side by side, a trace for xprof."""

import json
import sys

import pytest
import tiny_run

from angelspec_jax.training import trainer
from angelspec_jax.training.progress import Board, scalars


def test_numbers_of_any_nesting_have_a_place():
    values = {"loss": 1.5, "accuracy": [0.5, 0.25], "domains": {"chat": {"tau": 2.0}}, "name": "run", "left": None, "on": True}
    assert dict(scalars("train", values)) == {
        "train/loss": 1.5, "train/accuracy/1": 0.5, "train/accuracy/2": 0.25, "train/domains/chat/tau": 2.0,
    }  # fmt: skip


def test_taus_that_part_are_told():
    pairs = trainer.side_by_side({"chat": 2.0, "": 3.0, "code": 1.0}, {"chat": 1.2, "all": 2.9})
    assert pairs == {"chat": {"simulated": 2.0, "served": 1.2}, "all": {"simulated": 3.0, "served": 2.9}}
    (warning,) = trainer.apart(pairs, 0.25)
    assert warning.startswith("chat is served at tau 1.20, simulated 2.00; are the training answers the target's own")
    assert len(trainer.apart(pairs, 0.01)) == 2


def test_a_run_writes_events_and_a_trace(tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 (the package is whole)

    overrides = ["evaluation.tensorboard=true", "train.steps=4", "train.stages=[{until: 1.0}]", "drafter.family=dflash"]
    config = tiny_run.make_config(tmp_path, [*overrides, "evaluation.prompts=1"])
    target = tiny_run.make_target()
    trainer.train(config, target=target, evaluate=lambda job: lambda drafter, step: {"tau": {"math": 1.0}}, profile=1)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert all(record["tokens_per_second"] > 0 and record["peak_memory_bytes"] > 1e6 for record in train)
    (taus,) = [record for record in records if record["kind"] == "tau"]
    assert taus["math"]["served"] == 1.0 and taus["math"]["simulated"] >= 1.0
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    tags = set()
    data = events.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        tags.update(value.tag for value in event.summary.value)
        data = data[16 + length :]
    assert {"train/loss", "train/accuracy/1", "train/tokens_per_second", "validation/domains/math/tau_greedy", "tau/math/served"} <= tags
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert "steps up to 3 were traced" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'angelspec-jax\[tensorboard\]'"):
        Board(tmp_path, 0, True)
    Board(tmp_path, 0, False).write("train", 1, {"loss": 1.0})
