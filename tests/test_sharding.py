"""A toy model on a mesh of 8 virtual devices (data 2 x fsdp 2 x tensor 2) trains and generates as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from angelspec_jax import mesh as meshes
from angelspec_jax.config import OptimizationSection
from angelspec_jax.decoding import slots
from angelspec_jax.decoding.engine import Engine, Settings
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.target.loading import load_target
from angelspec_jax.training import step as training

pytest_plugins = ["toy_model"]
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(2, 2, 2, jax.devices()[:8])


@pytest.fixture(scope="module")
def alone(toy_directory, drafter_directory):
    """Target and drafter on one device."""
    target = load_target(toy_directory)
    return target, load_drafter(drafter_directory, target)


@pytest.fixture(scope="module")
def spread(toy_directory, drafter_directory, mesh):
    """The same numbers over the mesh."""
    target = load_target(toy_directory, mesh=mesh)
    return target, load_drafter(drafter_directory, target, mesh=mesh)


def test_parameters_lie_on_all_devices(spread):
    for model in spread:
        qkv = model.params.layers[0].qkv
        assert qkv.sharding.spec == PartitionSpec("fsdp", "tensor", None, None)
        assert {shard.data.shape for shard in qkv.addressable_shards} == {(16, 1, 4, 8)}
        assert len({shard.device for shard in qkv.addressable_shards}) == 8
    assert spread[0].params.embed.sharding.spec == PartitionSpec("tensor", "fsdp")


def test_training_gives_the_same_losses(alone, spread, mesh):
    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 250, (8, 24)).astype(np.int32),
        "loss_mask": np.ones((8, 24), np.int32),
        "lengths": np.full(8, 24, np.int32),
    }
    rows = {name: meshes.sharding(mesh, ("batch",) + (None,) * (value.ndim - 1), value.shape) for name, value in batch.items()}
    losses, params = _train(*alone, jax.tree.map(jnp.asarray, batch))
    sharded_losses, sharded = _train(*spread, jax.device_put(batch, rows))
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(sharded_losses, losses, rtol=0, atol=1e-5)
    jax.tree.map(lambda one, many: np.testing.assert_allclose(many, one, rtol=0, atol=1e-4), params, sharded)
    before, after = spread[1].params.layers[0].qkv.sharding, sharded.layers[0].qkv.sharding
    assert after.is_equivalent_to(before, 4), "an update must not move parameters"


def _train(target, drafter, batch, steps: int = 3):
    settings = OptimizationSection(steps=steps, batch_size=8, anchors=3, chunk=64)
    optimizer = optax.sgd(0.3, momentum=0.9)  # Adam's first steps divide rounding by rounding, which would say nothing about the mesh
    train, _ = training.build(settings, drafter.config, target.config, optimizer)
    # The step donates its state, and other tests use these parameters.
    state = training.create_state(jax.tree.map(jnp.copy, drafter.params), optimizer, jax.random.key(7))
    frozen = training.Frozen(target.params, drafter.shared.embed, drafter.shared.head, None)
    losses = []
    for _ in range(steps):
        state, metrics = train(state, frozen, batch, 0)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state.params


def test_the_engine_serves_from_a_mesh(spread, alone, monkeypatch):
    """Texts are those of one device, greedily and by seed, while slots lie on the batch axes and heads on the tensor axis throughout."""
    target, drafter = spread
    random, lies = np.random.default_rng(2), []
    prompts, options = [random.integers(0, 250, size).tolist() for size in (3, 9)], {"temperature": [0.0, 0.9], "seed": 5}
    plan = Plan(target.config, stop_ids=tuple(target.eos_ids))
    expected = generate(plan, Weights(alone[0].params), prompts, 8, sampling=make_sampling(2, **options), capacity=32).texts()
    step = slots.step

    def watched(*arguments):
        state, emitted = step(*arguments)
        lies.append([x.sharding.spec for x in (state.cache.k[0], state.cache.v[3], state.drafter.cache.k[0], state.tokens)])
        return state, emitted

    monkeypatch.setattr(slots, "step", watched)
    with Engine(target, drafter, Settings(slots=2, capacity=32, prefill_chunk=8)) as engine:
        with engine._lock:  # both are there before either is served
            streams = [engine.submit(p, max_new_tokens=8, temperature=0.9 * i, seed=5 + i) for i, p in enumerate(prompts)]
        assert [[token for delta in stream for token in delta.tokens] for stream in streams] == expected
    heads, rows = PartitionSpec("fsdp", "tensor"), PartitionSpec("fsdp")  # two slots cannot lie on all four parts of data x fsdp
    assert [heads, heads, heads, rows] in lies
    alone = PartitionSpec(None, "tensor")
    assert all(found in ([heads, heads, heads, rows], [alone, alone, alone, PartitionSpec()]) for found in lies)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generation_gives_the_same_tokens(alone, spread, temperature):
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 250, size).tolist() for size in (3, 9, 5, 1)]

    def say(target, drafter):
        plan = Plan(target.config, drafter.config, prefill_chunk=8)
        weights = Weights(target.params, drafter.params, drafter.shared)
        sampling = make_sampling(len(prompts), temperature=temperature, seed=3)
        return generate(plan, weights, prompts, 12, sampling=sampling, capacity=32).texts()

    assert say(*spread) == say(*alone)
