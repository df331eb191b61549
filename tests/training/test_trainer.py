"""The whole training job at the smallest size: interrupted runs end like undisturbed ones, mistakes are told before any compile."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run
from safetensors.numpy import load_file

from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.transformer import forward
from angelspec_jax.training import prepare, trainer, warm
from angelspec_jax.training.checkpoint import Checkpoints
from angelspec_jax.training.progress import Clock, Journal

pytest_plugins = ["toy_model"]

QUIET = ("evaluation.every=0",)
ONLINE = ("evaluation.every=1", "evaluation.batches=0", "evaluation.prompts=1")  # a real evaluation after every step, nothing else


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("undisturbed")
    exported = trainer.train(tiny_run.make_config(folder), target=target, command="angelspec train tiny")
    return folder, exported


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path, step: int = 8) -> list[tuple[str, bytes]]:
    """Every array of a checkpoint, as bytes."""
    manager = ocp.CheckpointManager(folder / "run" / "checkpoints")
    found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    manager.close()
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return [(jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves]


def assert_same_run(folder: Path, other: Path) -> None:
    assert state(folder) == state(other)
    ours, theirs = load_file(folder / "run/drafter/model.safetensors"), load_file(other / "run/drafter/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_run_leaves_metrics_checkpoints_and_a_drafter(undisturbed, target):
    folder, exported = undisturbed
    assert sorted(p.name for p in (folder / "run/checkpoints").iterdir()) == ["6", "8"]
    found = records(folder)
    training = [r for r in found if r["kind"] == "train"]
    assert [r["step"] for r in training] == [2, 3, 4, 6, 8]
    assert [r["stage"] for r in training] == [0, 0, 0, 1, 1]
    assert all(np.isfinite(r["loss"]) and r["step_seconds"] > 0 for r in training)
    validation = [r for r in found if r["kind"] == "validation"]
    assert [r["step"] for r in validation] == [4, 8]
    assert set(validation[0]["domains"]) == {"chat", "math"}
    assert validation[0]["tau"] > 1
    drafter = load_drafter(exported, target)
    assert drafter.config.draft_vocab == 48
    assert drafter.card.steps == 8
    assert drafter.card.command == "angelspec train tiny"
    assert drafter.card.data.startswith("answers.jsonl: 12 sequences")
    assert str(folder) not in (exported / "config.json").read_text()


def test_killed_run_resumes_bit_for_bit(undisturbed, target, tmp_path):
    command = [sys.executable, tiny_run.__file__, str(tmp_path), "5", *ONLINE]
    root = Path(trainer.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert not (tmp_path / "run/drafter").exists()
    trainer.train(tiny_run.make_config(tmp_path, QUIET), target=target)
    assert_same_run(undisturbed[0], tmp_path)
    ours = [(r["step"], r["loss"]) for r in records(tmp_path) if r["kind"] == "train" and r["step"] > 3]
    assert ours == [(r["step"], r["loss"]) for r in records(undisturbed[0]) if r["kind"] == "train" and r["step"] > 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_first_and_the_run_continues(undisturbed, target, tmp_path, number):
    config = tiny_run.make_config(tmp_path, ONLINE)
    with pytest.raises(SystemExit) as ended:
        trainer.train(config, target=target, evaluate=tiny_run.killer(tmp_path / "run", 4, number))
    assert ended.value.code == 128 + number
    assert Checkpoints(tmp_path / "run").latest_step() == 5
    exported = trainer.train(config, target=target, evaluate=lambda job: lambda drafter, step: {"tau": {"math": 1.5}})
    assert_same_run(undisturbed[0], tmp_path)
    assert load_drafter(exported, target).card.tau == {"math": 1.5}
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "speculative"] == [1, 2, 3, 4, 6, 7, 8]
    trainer.train(config, target=target)  # a finished run only exports again
    assert_same_run(undisturbed[0], tmp_path)


def test_cached_features_train_like_computed_ones(undisturbed, target, tmp_path):
    """Not bit for bit: the cache holds bfloat16."""
    trainer.train(tiny_run.make_config(tmp_path, [*QUIET, f"data.cache={tmp_path}/features"]), target=target)
    ours, theirs = records(tmp_path), [r for r in records(undisturbed[0]) if r["kind"] == "train"]
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=0.1)
    assert len(list((tmp_path / "features").glob("offsets-*.npy"))) == 1


def test_target_in_eight_bits_teaches_what_it_says(toy_directory, tmp_path):
    """Its features are its own: neither its cache nor its run is that of the weights as they are stored."""
    toy = [*QUIET, f"target.source={toy_directory}", "target.quantize=int8", "drafter.mask_token=258", "drafter.draft_vocab=null"]
    toy += ["data.max_length=256", "train.steps=1", "train.log_every=1", "data.cache=" + str(tmp_path / "features")]
    trainer.train(tiny_run.make_config(tmp_path, toy))
    rounded = load_target(toy_directory, quantize="int8")
    stored = np.load(tmp_path / "features" / "features-00000.npy").view(ml_dtypes.bfloat16).astype(np.float32)
    tokens = np.load(tmp_path / "features" / "tokens-00000.npy")[: np.load(tmp_path / "features" / "offsets-00000.npy")[1], 0]
    rows, places = uniform_rows(jnp.zeros((1,), jnp.int32), len(tokens), causal=True), jnp.arange(len(tokens), dtype=jnp.int32)
    nothing = kv_cache.create(rounded.config, 1, len(tokens))
    tapped, _, _ = forward(rounded.params, rounded.config, jnp.asarray(tokens), places, rows, nothing, (0, 1))
    np.testing.assert_allclose(stored[: len(tokens), :2], tapped, rtol=1e-2, atol=1e-3)  # bfloat16 on disk
    assert rounded.identity == f"{rounded.fingerprint}-int8" and load_target(toy_directory).identity == rounded.fingerprint
    plain = [*toy, "target.quantize=null"]
    with pytest.raises(ValueError, match="feature cache .* was built for another target"):
        trainer.train(tiny_run.make_config(tmp_path, [*plain, f"output={tmp_path}/plain"]))
    with pytest.raises(ValueError, match="target.quantize"):
        trainer.train(tiny_run.make_config(tmp_path, plain))


def test_averaged_parameters_are_exported(target, tmp_path):
    config = tiny_run.make_config(tmp_path, [*QUIET, "train.ema=0.5", "train.steps=2", "drafter.init=target"])
    exported = load_file(trainer.train(config, target=target) / "model.safetensors")
    assert [(r["step"], r["stage"]) for r in records(tmp_path)] == [(1, 0), (2, 1)]  # a record for each objective
    found = {name: np.frombuffer(data, np.float32) for name, data in state(tmp_path, 2) if data and len(data) % 4 == 0}
    last = [value for name, value in found.items() if name.endswith("['fusion']") and "params" in name]
    mean = [value for name, value in found.items() if name.endswith("['fusion']") and "average" in name]
    (name,) = [name for name in exported if "fusion" in name]
    np.testing.assert_array_equal(exported[name].ravel(), mean[0])
    assert (mean[0] != last[0]).any()


def test_another_config_or_other_data_does_not_continue_a_run(undisturbed, target, tmp_path):
    folder = undisturbed[0]
    with pytest.raises(ValueError, match=r"train.learning_rate=0.01, now it is 0.02.*another output folder"):
        trainer.train(tiny_run.make_config(folder, ["train.learning_rate=0.02"]), target=target)
    with pytest.raises(ValueError, match="train.stages.0.lk_weight=1.0, now it is 0.5"):
        trainer.train(tiny_run.make_config(folder, ["train.stages.0.lk_weight=0.5"]), target=target)
    other = tiny_run.write_data(tmp_path / "answers.jsonl", count=18)
    with pytest.raises(ValueError, match="the data differs from that of the run"):
        trainer.train(tiny_run.make_config(folder, [f"data.paths={other}"]), target=target)
    with pytest.raises(ValueError, match="the target differs"):
        trainer.train(tiny_run.make_config(folder), target=dataclasses.replace(target, fingerprint="f" * 16))


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("target.source=nowhere", FileNotFoundError, "nowhere does not exist"),
        ("data.paths=nowhere.jsonl", FileNotFoundError, "nowhere.jsonl does not exist"),
        ("data.domains=[poems]", ValueError, "domain 'poems' occurs in none"),
        ("data.validation_modulus=1", ValueError, "holds out every conversation"),
        ("data.max_length=4", ValueError, "can be trained on"),
        ("drafter.mask_token=<hole>", ValueError, "'<hole>' is not a token of tiny"),
        ("drafter.mask_token=w3", ValueError, "'w3'.*occurs in the data"),
        ("drafter.mask_token=72", ValueError, "mask_token 72 is outside the vocabulary of 72"),
        ("drafter.init=nowhere", FileNotFoundError, "neither random nor target nor the folder of a saved drafter"),
        ("drafter.taps=[0,5]", ValueError, "tapped layer 5 does not exist in a target of 2 layers"),
        ("drafter.taps=[1,1]", ValueError, "some of them twice"),
        ("drafter.draft_vocab=100", ValueError, "draft_vocab must be between 1 and 72"),
        ("drafter.heads=3", ValueError, "num_heads"),
        ("mesh.data=3", ValueError, "multiple of the 3|needs 3 devices"),
        ("mesh.data=64", ValueError, "needs 64 devices"),
    ],
)
def test_mistakes_are_told_before_any_compile(tmp_path, target, override, error, words):
    config = tiny_run.make_config(tmp_path, [override])
    with pytest.raises(error, match=words) as caught:
        trainer.train(config, target=None if override.startswith("target") else target)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run/checkpoints"]


def test_divergence_is_told_and_never_saved(target, tmp_path):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), target.params)
    config = tiny_run.make_config(tmp_path, [*QUIET, "train.log_every=1"])
    with pytest.raises(FloatingPointError, match=r"not finite before step 1; lower train.learning_rate.*last checkpoint: none"):
        trainer.train(config, target=dataclasses.replace(target, params=broken))


def test_answer_cut_by_a_limit_does_not_teach_the_end(target, tmp_path):
    config = tiny_run.make_config(tmp_path)
    data = prepare.encode(config, target, prepare.read_conversations(config), lambda text: None)
    conversations = prepare.read_conversations(config)
    for sample, conversation in zip(data.samples, conversations, strict=True):
        supervised = target.tokenizer.decode(sample["tokens"][sample["loss_mask"]], skip_special_tokens=False)
        ending = " <end>" if conversation.finished else ""
        assert supervised == conversation.messages[1]["content"] + ending
    assert data.validation.indices == (0, 5, 10, 15)
    assert data.validation.domains == ("math", "chat", "math", "chat")


def test_warm_start_copies_target_layers(target, tmp_path):
    section = dataclasses.replace(tiny_run.make_config(tmp_path).drafter, layers=2)
    drafter = create_drafter(target, jax.random.key(0), **prepare.drafter_options(section, target))
    params = warm.start(drafter, target)
    np.testing.assert_array_equal(params.layers[1].down, target.params.layers[1].down)
    np.testing.assert_array_equal(params.layers[0].q_norm, np.ones(4))
    assert params.layers[0].qkv is not target.params.layers[0].qkv
    narrow = create_drafter(target, jax.random.key(0), **prepare.drafter_options(dataclasses.replace(section, heads=2), target))
    with pytest.raises(ValueError, match="drafter.init=target needs draft layers of the target's shape"):
        warm.start(narrow, target)


def test_a_run_may_start_from_a_saved_drafter(undisturbed, target, tmp_path):
    _, exported = undisturbed
    config = tiny_run.make_config(tmp_path, [*QUIET, f"drafter.init={exported}"])
    job = trainer.prepare_job(config, target, lambda text: None)
    drafter = create_drafter(target, jax.random.key(0), draft_ids=job.draft_ids, **prepare.drafter_options(config.drafter, target))
    started = prepare.initial_params(config.drafter.init, drafter, target, job.mesh)
    np.testing.assert_array_equal(started.layers[0].down, load_drafter(exported, target).params.layers[0].down)
    for override, words in (("drafter.layers=3", "num_layers=.*this run trains one with 3"), ("drafter.taps=[1]", "taps=")):
        with pytest.raises(ValueError, match=words):
            trainer.prepare_job(tiny_run.make_config(tmp_path, [f"drafter.init={exported}", override]), target, lambda text: None)


def test_draft_vocabulary_holds_the_end_and_the_answers_words(target, tmp_path):
    config = tiny_run.make_config(tmp_path)
    data = prepare.encode(config, target, prepare.read_conversations(config), lambda text: None)
    model = prepare.drafter_config(config.drafter, target)
    ids = prepare.draft_vocabulary(model, data, target)
    assert len(ids) == 48
    assert 2 in ids
    answers = {int(t) for i in data.training.indices for t in data.samples[i]["tokens"][data.samples[i]["loss_mask"]]}
    assert answers <= set(ids.tolist()) or len(answers) > 48
    assert prepare.draft_vocabulary(dataclasses.replace(model, draft_vocab=None), data, target) is None


@pytest.mark.slow  # the step alone is checked on a mesh in test_sharding.py; this is the whole job
def test_mesh_of_eight_devices_trains_like_one(undisturbed, target, tmp_path):
    overrides = [*QUIET, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    trainer.train(tiny_run.make_config(tmp_path, overrides), target=target)
    ours, theirs = records(tmp_path), [r for r in records(undisturbed[0]) if r["kind"] == "train"]
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-3)


def test_merged_metrics_weigh_slots_by_their_count():
    one = {"count": np.array([2.0, 0.0]), "accuracy": np.array([0.5, 0.0]), "loss": 1.0}
    two = {"count": np.array([6.0, 2.0]), "accuracy": np.array([1.0, 0.5]), "loss": 3.0}
    merged = trainer.merge([one, two])
    np.testing.assert_allclose(merged["accuracy"], [0.875, 0.5])
    assert merged["loss"] == 2.0
    assert merged["count"].tolist() == [8.0, 2.0]


def test_pause_is_not_counted_as_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("angelspec_jax.training.progress.time.monotonic", lambda: now[0])
    clock = Clock(spent=100.0)
    for seconds in (1.0, 1.0, 1.0, 3600.0, 1.0):
        now[0] += seconds
        assert clock.tick() == seconds
    assert clock.spent == 100 + 4 + Clock.PAUSE


def test_journal_takes_back_what_a_resumed_run_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n{"step": 4}\n{"step": 6}\n{"st')
    journal = Journal(tmp_path, 4)
    journal.write("train", 5, {"loss": np.float32(0.123456789), "accuracy": jnp.ones(2)})
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert lines[-1]["loss"] == 0.123457
    assert lines[-1]["accuracy"] == [1.0, 1.0]
