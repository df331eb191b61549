"""Sequences spread over the devices of a mesh axis train as whole ones do: same loss, same gradient, nothing of length times length."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run

from angelspec_jax import mesh as meshes
from angelspec_jax.config import OptimizationSection, Stage, TTTSection
from angelspec_jax.data.features import target_features
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target.config import MoEConfig
from angelspec_jax.target.transformer import target_specs
from angelspec_jax.training import dealing, step
from angelspec_jax.training.objective import Objective
from angelspec_jax.training.trainer import train

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
LENGTH = 48
OBJECTIVE = Objective(ce_weight=0.1, lk_weight=0.5, e2e_tv_weight=1.0, position_weighting="steps")
SETTINGS = OptimizationSection(batch_size=4, anchors=6, chunk=16, ttt=TTTSection(on_policy=True), stages=(Stage(objective=OBJECTIVE),))
MOE = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16, normalize=True)
FAMILIES = {"mtp": {}, "eagle3": {"taps": (0, 1)}, "mtp_moe": {"moe": MOE}}


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(1, 2, 2, jax.devices()[:8], sequence=2)


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, 72, (4, LENGTH)).astype(np.int32)
    return {
        "tokens": tokens,
        "loss_mask": (draw.random((4, LENGTH)) < 0.7).astype(np.int32),
        "lengths": np.array([48, 40, 48, 17], np.int32),
    }


def updated(target, drafter, batch):
    """Metrics of one step, and the parameters it leaves: gradient descent at rate one, so their change is the gradient."""
    optimizer = optax.sgd(1.0)
    run, _ = step.build(SETTINGS, drafter.config, target.config, optimizer)
    state = step.create_state(jax.tree.map(jnp.copy, drafter.params), optimizer, jax.random.key(5))
    frozen = step.Frozen(target.params, drafter.shared.embed, drafter.shared.head, None)
    after, metrics = run(state, frozen, batch, 0)
    return after.params, metrics


def placed(tree, specs, mesh):
    return jax.tree.map(jax.device_put, tree, meshes.shardings(mesh, specs))


@needs_devices
@pytest.mark.parametrize("family", ["mtp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "mtp_moe"))])
def test_loss_and_gradient_are_those_of_whole_sequences(family, target, mesh, batch):
    drafter = create_drafter(target, jax.random.key(1), family=family, num_drafts=3, **FAMILIES[family])
    expected, expected_metrics = updated(target, drafter, batch)
    rows = {name: meshes.sharding(mesh, ("batch",) + (None,) * (value.ndim - 1), value.shape) for name, value in batch.items()}
    spread = dataclasses.replace(target, params=placed(target.params, target_specs(target.config), mesh))
    with jax.set_mesh(mesh):
        found, metrics = updated(spread, drafter, jax.device_put(batch, rows))
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
    jax.tree.map(lambda one, many: np.testing.assert_allclose(many, one, rtol=0, atol=2e-5), expected, found)


@needs_devices
def test_features_are_those_of_whole_sequences(target, mesh, batch):
    """With layers scanned, a window narrower than a device's part, and taps from the embedding on."""
    config = dataclasses.replace(target.config, sliding_window=7, scan_layers=True)
    specs = target_specs(config)
    params = initialize(specs, jax.random.key(4))
    expected = target_features(params, config, batch["tokens"], (-1, 1), jnp.float32)
    with jax.set_mesh(mesh):
        found = target_features(placed(params, specs, mesh), config, batch["tokens"], (-1, 1), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@needs_devices
def test_no_array_has_the_square_of_a_sequence(target, mesh):
    """Neither scores nor masks, on no device."""
    length, anchors = 2048, 8
    drafter = create_drafter(target, jax.random.key(1), family="mtp", num_drafts=2)
    settings = dataclasses.replace(SETTINGS, anchors=anchors)
    run, _ = step.build(settings, drafter.config, target.config, optax.sgd(1.0))
    state = jax.eval_shape(lambda params: step.create_state(params, optax.sgd(1.0), jax.random.key(0)), drafter.params)
    shapes = {"tokens": (2, length), "loss_mask": (2, length), "lengths": (2,)}
    rows = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    with jax.set_mesh(mesh):
        text = run.lower(state, step.Frozen(target.params, drafter.shared.embed, drafter.shared.head, None), rows, 0).as_text()
    sizes = [np.prod([int(n) for n in found.split("x")], dtype=np.int64) for found in re.findall(r"tensor<([0-9x]+)x[a-z]+\d+>", text)]
    assert max(sizes) < length * length


@needs_devices
def test_rows_come_from_the_device_that_holds_them(mesh):
    draw = np.random.default_rng(0)
    values, anchors = draw.normal(size=(4, 16, 3)).astype(np.float32), draw.integers(0, 16, (4, 6)).astype(np.int32)
    with jax.set_mesh(mesh):
        dealt = jax.jit(dealing.deal)(anchors)
        found = jax.jit(dealing.gather_rows)(values, dealt)
    np.testing.assert_array_equal(dealt, np.concatenate([anchors[:, 0::2], anchors[:, 1::2]]))
    np.testing.assert_array_equal(found, np.stack([values[row % 4][at] for row, at in enumerate(np.asarray(dealt))]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter.family=dfly"], "mesh.sequence=2 trains MTP and EAGLE-3 only, not dfly"),
        (["data.max_length=40"], "multiples of 16 tokens, got 40"),
        (["train.anchors=5"], "train.anchors, which must be a multiple of it, got 5"),
        (["train.max_documents=2"], "set train.max_documents=1"),
        (["data.cache=somewhere"], "leave the cache out"),
    ],
)
@needs_devices
def test_what_cannot_be_spread_is_told_before_anything_is_compiled(target, tmp_path, overrides, said):
    mtp = ["drafter.family=mtp", "drafter.taps=null", "mesh={data: 1, fsdp: 1, tensor: 1, sequence: 2}"]
    with pytest.raises(ValueError, match=said):
        train(tiny_run.make_config(tmp_path, [*mtp, *overrides]), target=target)


def test_processes_that_share_sequences_read_the_same_slice():
    apart = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])
    assert [meshes.batch_share(apart, process) for process in (0, 1)] == [(0, 2), (1, 2)]
    shared = np.array([[0, 1], [2, 3]])  # [batch shards, devices of a shard]
    assert [meshes.batch_share(shared, process) for process in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert meshes.batch_share(np.array([[0, 1]]), 1) == (0, 1)
    with pytest.raises(ValueError, match="equal slice"):
        meshes.batch_share(np.array([[0], [1], [1]]), 0)


def test_a_mesh_names_its_sequence_axis():
    mesh = meshes.make_mesh(1, -1, 1, jax.devices()[:4], sequence=2)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 1}
    assert meshes.partition(mesh, ("embed", None), (8, 3))[0] == ("fsdp", "sequence")
    assert "sequence" not in meshes.make_mesh(1, 4, 1, jax.devices()[:4]).shape
    with pytest.raises(ValueError, match="data x fsdp x sequence x tensor. needs 8 devices"):
        meshes.make_mesh(2, 2, 1, jax.devices()[:4], sequence=2)
