"""Several processes on one run: found, lost, stopped together, resumed in another number, and the mesh they span."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from angelspec_jax import config as configs
from angelspec_jax import mesh as meshes
from angelspec_jax import processes
from angelspec_jax.training import trainer

pytest_plugins = ["toy_model"]
ROOT = Path(trainer.__file__).parents[2]
WORDS = ("one", "two", "three", "four", "five")


@pytest.fixture(scope="module")
def job(toy_directory, tmp_path_factory):
    """Folder of a config whose run takes forty short steps."""
    folder = tmp_path_factory.mktemp("job")
    turns = [[(role, " ".join(WORDS[(i + j) % 5] for j in range(3))) for role in ("user", "assistant")] for i in range(20)]
    lines = [json.dumps({"id": i, "messages": [{"role": r, "content": c} for r, c in t]}) for i, t in enumerate(turns)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    values = {
        "target": {"source": str(toy_directory)},
        "drafter": {"family": "dflash", "layers": 1, "block_size": 3, "taps": [0, 2], "mask_token": "<mask>"},
        "data": {"paths": str(folder / "answers.jsonl"), "validation_modulus": 5, "max_length": 64},
        "train": {
            "steps": 40,
            "batch_size": 4,
            "anchors": 2,
            "learning_rate": 1e-2,
            "min_learning_rate": 1e-3,
            "save_every": 4,
            "log_every": 4,
        },
        "evaluation": {"every": 0},
        "export_dtype": "float32",
        "output": "unset",
    }
    (folder / "job.yaml").write_text(json.dumps(values))
    return folder


def losses(folder: Path) -> list[tuple[int, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in found if record["kind"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(job):
    folder = job / "undisturbed"
    trainer.train(configs.load(job / "job.yaml", [f"output={folder}", "mesh.data=1"]))
    return losses(folder)


class Command:
    """`angelspec train` as a user starts it on every host; `direct` leaves out the supervisor, so that a kill hits the worker itself."""

    def __init__(self, job: Path, count: int, *overrides: str, direct: int | None = None):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.logs = [job / f"log-{port}-{index}" for index in range(count)]
        self.running = []
        for index, log in enumerate(self.logs):
            call = [sys.executable, "-m", "angelspec_jax", "train", str(job / "job.yaml"), *overrides]
            call += ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process-id", str(index), "--timeout", "120"]
            environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
            environment["ANGELSPEC_COMPILATION_CACHE"] = str(jax.config.jax_compilation_cache_dir)
            if index == direct:
                environment[processes.SUPERVISED] = "0"
            with log.open("w") as out:
                self.running.append(subprocess.Popen(call, env=environment, stdout=out, stderr=out))

    def wait(self, seconds: float = 400) -> list[int]:
        return [process.wait(seconds) for process in self.running]

    def text(self, index: int) -> str:
        return self.logs[index].read_text()


def until(condition, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_a_killed_process_ends_the_other_with_a_sentence_and_one_process_continues(job, undisturbed):
    folder = job / "killed"
    both = Command(job, 2, f"output={folder}", direct=1)
    until(lambda: (folder / "checkpoints" / "4").exists() or None not in [p.poll() for p in both.running])
    both.running[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert both.wait()[0] == 1, both.text(0)
    assert time.monotonic() - killed < 150
    assert "another process of the run was lost" in both.text(0)
    assert "step" not in both.text(1), "only process 0 prints"
    trainer.train(configs.load(job / "job.yaml", [f"output={folder}", "mesh.data=1"]))
    found = losses(folder)
    assert [step for step, _ in found] == [step for step, _ in undisturbed]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in undisturbed], rtol=2e-3)


@pytest.mark.slow
def test_four_processes_stop_together_and_two_continue(job, undisturbed):
    folder = job / "four"
    four = Command(job, 4, f"output={folder}", "mesh.data=2", "mesh.fsdp=2")
    until(lambda: (folder / "checkpoints" / "4").exists() or None not in [p.poll() for p in four.running])
    four.running[2].send_signal(signal.SIGTERM)
    assert four.wait() == [128 + signal.SIGTERM] * 4, four.text(0)
    assert "the same command continues from there" in four.text(0)
    two = Command(job, 2, f"output={folder}")
    assert two.wait() == [0, 0], two.text(0)
    assert "continuing after step" in two.text(0)
    np.testing.assert_allclose([v for _, v in losses(folder)][-5:], [v for _, v in undisturbed][-5:], rtol=2e-3)


@pytest.mark.slow
def test_two_processes_repeat_themselves_bit_for_bit(job):
    served = ("evaluation.every=20", "evaluation.prompts=1", "evaluation.max_new_tokens=4")  # decoded by both together
    folders = [job / "first", job / "second"]
    assert Command(job, 2, f"output={folders[0]}", *served).wait() == [0, 0]
    stopped = Command(job, 2, f"output={folders[1]}", *served)
    until(lambda: (folders[1] / "checkpoints" / "8").exists())
    stopped.running[1].send_signal(signal.SIGTERM)
    assert stopped.wait() == [143, 143]
    assert Command(job, 2, f"output={folders[1]}", *served).wait() == [0, 0]
    first, second = ((folder / "drafter" / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
    records = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "speculative"] == [20, 40]


@pytest.mark.slow
def test_two_processes_share_every_sequence(job):
    """Both read the whole batch, and each holds half of every text."""
    mtp = ("drafter.family=mtp", "drafter.taps=null", "train.steps=8", "mesh.data=1")
    trainer.train(configs.load(job / "job.yaml", [f"output={job / 'whole'}", *mtp]))
    both = Command(job, 2, f"output={job / 'halves'}", *mtp, "mesh.sequence=2")
    assert both.wait() == [0, 0], both.text(0)
    whole, halves = losses(job / "whole"), losses(job / "halves")
    assert [step for step, _ in whole] == [step for step, _ in halves] == [4, 8]
    np.testing.assert_allclose([v for _, v in halves], [v for _, v in whole], rtol=1e-4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("localhost", None, 0), "belong together"),
        (("localhost", 2, 2), "--process-id must be from 0 to 1"),
        ((None, None, None, 0), "--timeout must be at least 1"),
    ],
)
def test_a_cluster_that_cannot_be_is_named(values, words):
    with pytest.raises(ValueError, match=words):
        processes.Cluster(*values)


def test_addresses_and_lost_connections():
    assert processes.Cluster("host", 2, 0).address == f"host:{processes.PORT}"
    assert processes.Cluster("host:1", 2, 0).address == "host:1"
    assert processes.lost(ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"))
    assert not processes.lost(ValueError("train.batch_size 3 must be a multiple of the 2 shards"))


def test_tpu_vms_find_each_other_and_a_lone_one_stays_alone(monkeypatch):
    calls = []

    def initialize(*arguments, **limits):
        calls.append((arguments, limits["heartbeat_timeout_seconds"]))
        if len(calls) > 1:
            raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(processes, "on_tpu_vm", lambda: True)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    processes.start(processes.Cluster(timeout=7))
    processes.start(processes.Cluster(timeout=7))
    assert calls == [((), 7)] * 2


def test_a_violent_end_is_told(capfd):
    assert processes.supervise(["-c", "import os; os.abort()"]) == 1
    assert "another process of the run was lost" in capfd.readouterr().err
    assert processes.supervise(["-c", "raise SystemExit(7)"]) == 7


def device(number: int, slices: int, count: int) -> types.SimpleNamespace:
    share = count // slices
    within = number % share
    return types.SimpleNamespace(
        id=number,
        slice_index=number // share,
        process_index=number // 4,
        platform="tpu",
        device_kind="TPU v5p",
        coords=(within % 4, within // 4, 0),
        core_on_chip=0,
    )


@pytest.mark.parametrize(("sizes", "across"), [((4, 2, 2), 0), ((1, 8, 2), 1)])
def test_slices_are_joined_on_the_outermost_axis_that_allows_it(sizes, across):
    devices = [device(i, 2, 16) for i in range(16)]
    grid = np.vectorize(lambda d: d.slice_index)(meshes.device_grid(sizes, devices))
    assert grid.shape == sizes
    halves = np.split(grid, 2, axis=across)
    assert [set(half.ravel().tolist()) for half in halves] == [{0}, {1}]


def test_an_axis_that_would_cut_tensors_across_slices_is_refused():
    with pytest.raises(ValueError, match=r"mesh 1x1x16 .* 2 slices; make mesh.data a multiple of 2"):
        meshes.device_grid((1, 1, 16), [device(i, 2, 16) for i in range(16)])


GCLOUD = """#!/usr/bin/env bash
echo "$@" >> {log}
case "$4" in
  ssh) [ $(grep -c ' ssh ' {log}) -lt {good} ] && exit 1 || exit 0 ;;
  describe) echo {state} ;;
esac
"""


@pytest.mark.parametrize(
    ("good", "state", "code", "calls"),
    [
        (3, "READY", 0, ["ssh", "describe", "ssh", "describe", "ssh"]),
        (3, "PREEMPTED", 0, ["ssh", "describe", "delete", "create", "ssh", "describe", "delete", "create", "ssh"]),
        (99, "READY", 1, ["ssh", "describe"] * 2 + ["ssh"]),
    ],
)
def test_the_loop_for_tpu_vms_starts_again_until_the_run_is_done(tmp_path, good, state, code, calls):
    script = configs.packaged() / "tpu" / "train.sh"
    log, fake = tmp_path / "log", tmp_path / "gcloud"
    fake.write_text(GCLOUD.format(log=log, good=good, state=state))
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NAME": "toy", "ZONE": "z", "PAUSE": "0"}
    environment["CREATE"] = "gcloud compute tpus tpu-vm create"
    command = ["bash", str(script), "run.yaml", "train.stages=[{until: 1.0}]"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    lines = log.read_text().splitlines()
    assert [line.split()[3] for line in lines] == calls
    assert "--worker=all --command=python3 -m angelspec_jax train run.yaml train.stages" in lines[0]
