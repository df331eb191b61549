"""Schedule, clipping, decay mask and averaging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.config import OptimizationSection
from angelspec_jax.drafter.block import drafter_specs
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.params import abstract, initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.training.optimizer import averaged, decay_mask, freeze_labels, make_optimizer, make_schedule


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax mixes Python scalars and counters freely."""
    with jax.numpy_dtype_promotion("standard"):
        yield


PARAMS = {"weight": jnp.ones((2, 2)), "norm": jnp.ones(2)}


def test_schedule_warms_up_and_falls_to_the_minimum():
    schedule = make_schedule(OptimizationSection(steps=100, warmup=0.04, learning_rate=1e-3, min_learning_rate=1e-4))
    rates = np.array([schedule(step) for step in range(100)])
    np.testing.assert_allclose(rates[:5], [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3], rtol=1e-5)
    assert (np.diff(rates[4:]) <= 0).all()
    np.testing.assert_allclose(rates[-1], 1e-4, rtol=2e-2)
    np.testing.assert_allclose(make_schedule(OptimizationSection(steps=10, warmup=0.0, learning_rate=1e-3))(0), 1e-3)


def test_norms_biases_and_fusion_are_not_decayed():
    model = TransformerConfig(16, 8, 8, 1, 2, 1, 4, qk_norm="before_rope", attention_bias=True)
    config = DrafterConfig("dfly", model, 4, 15, (0, 1), 2, context="fc_fusion", head="hidden_correction")
    mask = decay_mask(abstract(drafter_specs(config), jnp.float32))
    assert mask.context.fc and mask.layers[0].qkv and mask.layers[0].down and mask.head.gate_up and mask.head.down
    kept = (mask.context.norm, mask.context.fusion, mask.layers[0].q_norm, mask.layers[0].qkv_bias, mask.norm, mask.head.embed_norm)
    assert not any(kept)


def test_decay_shrinks_matrices_only():
    optimizer, _ = make_optimizer(OptimizationSection(steps=10, warmup=0.0, weight_decay=0.5, learning_rate=0.1))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["weight"], -0.05, rtol=1e-5)
    np.testing.assert_array_equal(updates["norm"], 0)


@pytest.mark.parametrize("clip", [1.0, None])
def test_clipping_bounds_what_adam_sees(clip):
    optimizer, _ = make_optimizer(OptimizationSection(steps=10, warmup=0.0, clip_norm=clip, betas=(0.5, 0.5)))
    gradients = jax.tree.map(lambda p: jnp.full_like(p, 100.0), PARAMS)
    _, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    (adam,) = [s for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu")]
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(m))) for m in jax.tree.leaves(adam.mu)))
    expected = 0.5 if clip else 0.5 * 100 * np.sqrt(6)
    np.testing.assert_allclose(norm, expected, rtol=1e-5)


def test_average_follows_the_parameters():
    optimizer, _ = make_optimizer(OptimizationSection(steps=10, warmup=0.0, ema=0.9))
    params, state = PARAMS, optimizer.init(PARAMS)
    expected = np.ones((2, 2))
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        expected = 0.9 * expected + 0.1 * np.asarray(params["weight"])
    np.testing.assert_allclose(averaged(state, params)["weight"], expected, rtol=1e-6)
    plain, _ = make_optimizer(OptimizationSection())
    assert averaged(plain.init(PARAMS), PARAMS) is PARAMS


def test_updates_are_float32():
    optimizer, _ = make_optimizer(OptimizationSection(steps=10, ema=0.5))
    state = optimizer.init(PARAMS)
    updates, _ = jax.jit(optimizer.update)(PARAMS, state, PARAMS)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(updates))


MODEL = TransformerConfig(16, 8, 12, 1, 2, 1, 4, qk_norm="before_rope")
DFLY = DrafterConfig("dfly", MODEL, 4, 15, (0, 1), 2, context="fc_fusion", head="hidden_correction")


def test_stable_rate_falls_in_the_last_part_of_the_run():
    settings = OptimizationSection(steps=100, warmup=0.1, schedule="wsd", decay=0.2, learning_rate=1e-3, min_learning_rate=1e-4)
    rates = np.array([make_schedule(settings)(step) for step in range(101)])
    np.testing.assert_allclose(rates[9:81], 1e-3, rtol=1e-6)
    assert (np.diff(rates[80:]) < 0).all()
    np.testing.assert_allclose(rates[[90, 100]], [5.5e-4, 1e-4], rtol=1e-5)
    constant = make_schedule(OptimizationSection(steps=100, warmup=0.1, schedule="constant", learning_rate=1e-3))
    assert constant(9) == constant(99) == np.float32(1e-3)


def singular_values(update, inputs: int) -> np.ndarray:
    """Of a weight as a matrix, without the scale that Muon gives its shape."""
    matrix = np.asarray(update, np.float64).reshape(np.prod(update.shape[:inputs]), -1)
    return np.linalg.svd(matrix / (0.2 * np.sqrt(max(matrix.shape))), compute_uv=False)


def test_muon_orthogonalizes_matrices_and_leaves_the_rest_to_adamw():
    specs = drafter_specs(DFLY)
    params = initialize(specs, jax.random.key(0))
    gradients = jax.tree.map(lambda p, k: jax.random.normal(jax.random.key(k), p.shape), params, numbered(params))
    plain = {"steps": 10, "warmup": 0.0, "learning_rate": 1.0, "weight_decay": 0.0, "clip_norm": None}
    muon, _ = make_optimizer(OptimizationSection(optimizer="muon", **plain), specs)
    adamw, _ = make_optimizer(OptimizationSection(**plain), specs)
    found, _ = jax.jit(muon.update)(gradients, muon.init(params), params)
    usual, _ = jax.jit(adamw.update)(gradients, adamw.init(params), params)
    for update, inputs in ((found.context.fc, 2), (found.layers[0].qkv, 1), (found.head.down, 1), (found.head.gate_up[:, 0], 1)):
        values = singular_values(update, inputs)
        assert values.min() > 0.5 and values.max() < 1.3, values
    for name in ("norm", "fusion"):
        np.testing.assert_allclose(getattr(found.context, name), getattr(usual.context, name), rtol=1e-5)
    with pytest.raises(ValueError, match="declaration of the drafter's parameters"):
        make_optimizer(OptimizationSection(optimizer="muon"))


def numbered(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(range(len(leaves)))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_frozen_parameters_keep_their_value_and_do_not_count_in_the_norm(kind):
    specs = drafter_specs(DFLY)
    params = initialize(specs, jax.random.key(0))
    gradients = jax.tree.map(jnp.ones_like, params)
    settings = OptimizationSection(optimizer=kind, freeze=("context", "layers.0.down"), weight_decay=0.5, ema=0.5)
    optimizer, _ = make_optimizer(settings, specs)
    loud = gradients.replace(context=jax.tree.map(lambda g: g * 1e6, gradients.context))
    updates, state = jax.jit(optimizer.update)(loud, optimizer.init(params), params)
    quiet, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    assert not any(np.any(leaf) for leaf in (*jax.tree.leaves(updates.context), updates.layers[0].down))
    assert np.all(updates.head.gate_up) and np.all(updates.norm)
    np.testing.assert_array_equal(updates.norm, quiet.norm)
    np.testing.assert_array_equal(averaged(state, params).context.fc, params.context.fc)
    with pytest.raises(ValueError, match="train.freeze names 'layers.7', which is no parameter of the drafter; it has context, head"):
        freeze_labels(params, ("norm", "layers.7"))
