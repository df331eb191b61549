"""Weights in 8 bits: rounding, products, loading over a mesh, memory, and what they change of a model."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.targets import step
from safetensors.numpy import load_file

from angelspec_jax import mesh as meshes
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.target import hf, int8, kv_cache
from angelspec_jax.target.int8 import Int8
from angelspec_jax.target.loading import load_target, requirement

GOLDENS = Path(__file__).parents[1] / "goldens"
EQUATIONS = {  # shape of the weight, axes of its inputs
    "...d,dgpe->...gpe": ((12, 2, 4, 6), (0,)),
    "...d,dcf->...cf": ((12, 2, 5), (0,)),
    "...f,fd->...d": ((12, 7), (0,)),
}


def rounded(shape, axes, seed=0):
    weights = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return weights, Int8(*(jnp.asarray(part) for part in int8.round_to(weights, axes)))


def as_floats(weight: Int8) -> np.ndarray:
    return np.asarray(weight.values, np.float32) * np.asarray(weight.scale)


def test_rounding_is_to_the_nearest_and_keeps_the_largest(monkeypatch):
    weights, weight = rounded((40, 3, 50), (0,))
    assert weight.values.dtype == jnp.int8 and weight.scale.shape == (1, 3, 50)
    assert np.all(np.abs(as_floats(weight) - weights) <= np.asarray(weight.scale) / 2 * 1.0001)
    np.testing.assert_allclose(np.abs(as_floats(weight)).max(0), np.abs(weights).max(0), rtol=1e-6)
    monkeypatch.setattr(int8, "AT_ONCE", 200)
    for ours, other in zip(int8.round_to(weights, (0,)), (weight.values, weight.scale), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_a_channel_of_zeros_stays_zero():
    values, scale = int8.round_to(np.zeros((4, 3), np.float32), (0,))
    assert not values.any() and np.all(scale == 1.0)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_are_those_of_the_rounded_weights(equation):
    _, weight = rounded(*EQUATIONS[equation])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 12)), jnp.float32)
    expected = jnp.einsum(equation, x, jnp.asarray(as_floats(weight)))
    np.testing.assert_allclose(int8.product(equation, x, weight), expected, rtol=1e-5, atol=1e-5)
    assert int8.product(equation, x.astype(jnp.bfloat16), weight).dtype == jnp.bfloat16


def test_experts_have_scales_of_their_own():
    _, weight = rounded((3, 12, 7), (1,))
    assert weight.scale.shape == (3, 1, 7)
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(5, 12)), jnp.float32)
    expert, sizes = jnp.asarray([0, 0, 2, 2, 2], jnp.int32), jnp.asarray([2, 0, 3], jnp.int32)
    out = int8.grouped(rows, weight, sizes, expert)
    np.testing.assert_allclose(out, jnp.einsum("nd,ndf->nf", rows, jnp.asarray(as_floats(weight))[expert]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("case", "scan_layers"), [("targets/qwen3_untied", False), ("targets/hy_v3_moe", True)])
def test_a_model_is_that_of_its_rounded_weights(case, scan_layers):
    tokens = jnp.asarray(load_file(GOLDENS / case / "io.safetensors")["in.input_ids"][0], jnp.int32)
    small, plain = (load_target(GOLDENS / case, need_tokenizer=False, quantize=kind, scan_layers=scan_layers) for kind in ("int8", None))
    same = jax.tree.map(lambda w: jnp.asarray(as_floats(w)) if int8.is_int8(w) else w, small.params, is_leaf=int8.is_int8)

    def states(params, config):
        return np.asarray(step(params, config, tokens, 0, kv_cache.create(config, 1, 64))[1])

    ours, expected = states(small.params, small.config), states(same, plain.config)
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    error = np.linalg.norm(ours - states(plain.params, plain.config)) / np.linalg.norm(ours)
    assert error > 1e-4  # it is another model than the one in floats
    assert error < 0.05 or plain.config.moe is not None  # and close to it, unless a rounding sends a row to another expert


def test_fingerprint_and_drafters_are_those_of_the_model_in_floats():
    folder = GOLDENS / "e2e" / "target_qwen3"
    plain, small = (load_target(folder, need_tokenizer=False, quantize=quantize) for quantize in (None, "int8"))
    assert plain.fingerprint == small.fingerprint
    assert isinstance(small.params.layers[0].qkv, Int8) and small.params.embed.dtype == plain.params.embed.dtype
    drafter = create_drafter(small, jax.random.key(0), mask_token=3, num_layers=1, taps=2, block_size=4)
    assert drafter.config.transformer.quantize is None
    prompts = [[5, 6, 7, 8], [9]]
    alone = generate(Plan(small.config), Weights(small.params), prompts, 12, capacity=64).texts()
    weights = Weights(small.params, drafter.params, drafter.shared)
    assert generate(Plan(small.config, drafter.config), weights, prompts, 12, capacity=64).texts() == alone


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize("case", ["targets/qwen3_wide_heads_sharded", "targets/hy_v3_moe"])
def test_shards_are_parts_of_the_same_numbers(case):
    whole = load_target(GOLDENS / case, need_tokenizer=False, quantize="int8")
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    spread = load_target(GOLDENS / case, need_tokenizer=False, quantize="int8", mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, spread.params, whole.params)
    assert len({str(shard.index) for shard in spread.params.layers[-1].qkv.values.addressable_shards}) > 1


def test_an_8b_model_fits_one_small_chip():
    settings = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    }  # fmt: skip
    config = hf.parse_config(settings, "config.json")
    plain = requirement(config, jnp.bfloat16)
    small = requirement(dataclasses.replace(config, quantize="int8"), jnp.bfloat16)
    assert plain.total > 16e9 > 10e9 > small.total  # leaves a 16 GB chip 6 GB for caches and a drafter
    assert "GiB in int8 and bfloat16" in str(small)


def test_what_is_not_offered():
    with pytest.raises(ValueError, match="quantize must be one of int8 or nothing, got 'int4'"):
        load_target(GOLDENS / "targets" / "qwen3_tied", need_tokenizer=False, quantize="int4")
