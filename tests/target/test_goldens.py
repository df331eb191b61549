"""Hidden states, logits and greedy text of each target family against Hugging Face transformers (fixtures: tests/goldens/targets)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.safetensors_io import open_checkpoint
from angelspec_jax.target.transformer import forward, logits

FOLDER = Path(__file__).parents[1] / "goldens" / "targets"
CASES = sorted(case.parent.name for case in FOLDER.glob("*/case.json"))
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def case(request):
    folder = FOLDER / request.param
    io = open_checkpoint(folder / "io.safetensors")
    return folder, {name: io.read(name) for name in io.names()}


@jax.jit(static_argnames=("config", "taps"))
def step(params, config, tokens, start, cache, taps=()):
    """One causal chunk of one request, committed."""
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = uniform_rows(jnp.full((1,), start, jnp.int32), tokens.shape[0], causal=True)
    features, hidden, new_kv = forward(params, config, tokens, positions, rows, cache, taps)
    return features, hidden, logits(params, hidden), kv_cache.commit(cache, new_kv, rows.request, positions, rows.valid)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_hidden_states_and_logits(case, scan_layers):
    folder, io = case
    target = load_target(folder, scan_layers=scan_layers, need_tokenizer=False)
    tokens = jnp.asarray(io["in.input_ids"][0], jnp.int32)
    layers = target.config.num_layers
    cache = kv_cache.create(target.config, 1, 64)
    features, hidden, scores, _ = step(target.params, target.config, tokens, 0, cache, tuple(range(-1, layers)))
    for index in range(layers):
        np.testing.assert_allclose(features[:, index], io[f"out.hidden_{index}"][0], atol=TOLERANCE, err_msg=f"hidden_{index}")
    np.testing.assert_allclose(features[:, layers], io["out.last_layer_prenorm"][0], atol=TOLERANCE)
    np.testing.assert_allclose(hidden, io[f"out.hidden_{layers}"][0], atol=TOLERANCE)
    np.testing.assert_allclose(scores, io["out.logits"][0], atol=TOLERANCE)


def test_greedy_text(case):
    folder, io = case
    target = load_target(folder, scan_layers=True, need_tokenizer=False)
    tokens = jnp.asarray(io["in.input_ids"][0], jnp.int32)
    cache = kv_cache.create(target.config, 1, 64)
    taps = tuple(range(-1, target.config.num_layers))  # the program of the test above, compiled once
    _, _, scores, cache = step(target.params, target.config, tokens, 0, cache, taps)
    answer = []
    for position in range(tokens.shape[0], tokens.shape[0] + io["out.greedy"].shape[1]):
        token = jnp.argmax(scores[-1])[None].astype(jnp.int32)
        answer.append(int(token[0]))
        _, _, scores, cache = step(target.params, target.config, token, jnp.int32(position), cache)
    assert answer == io["out.greedy"][0].tolist()


@pytest.mark.parametrize("page", [None, 8])
def test_prefill_in_chunks_equals_one_pass(page):
    folder = FOLDER / "llama3_rope_scaled"
    target = load_target(folder, scan_layers=True, need_tokenizer=False)
    tokens = jnp.asarray(open_checkpoint(folder / "io.safetensors").read("in.input_ids")[0], jnp.int32)
    taps = (-1, 0, target.config.num_layers - 1)
    whole = step(target.params, target.config, tokens, 0, kv_cache.create(target.config, 1, 32, page=page), taps)
    cache, parts, start = kv_cache.create(target.config, 1, 32, page=page), [], 0
    for width in (12, 12):  # one program for both; the page of 8 is split
        *part, cache = step(target.params, target.config, tokens[start : start + width], start, cache, taps)
        parts.append(part)
        start += width
    for one, several in zip(whole, zip(*parts, strict=True), strict=False):
        np.testing.assert_allclose(jnp.concatenate(several), one, atol=1e-5)
    stored = [leaf for leaf in jax.tree.leaves(whole[3]) if leaf.dtype == jnp.float32]
    for one, several in zip(stored, [leaf for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.float32], strict=True):
        np.testing.assert_allclose(several, one, atol=1e-5)


def test_bfloat16_weights_load_as_stored():
    folder = FOLDER / "qwen3_bf16"
    target = load_target(folder, dtype=jnp.bfloat16, need_tokenizer=False)
    stored = open_checkpoint(folder).read("model.embed_tokens.weight")
    assert target.params.embed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(target.params.embed), stored)
    assert target.params.final_norm.dtype == jnp.float32  # norms are small and rounding them changes decisions


def test_fingerprint_is_of_the_checkpoint_and_not_of_how_it_was_loaded():
    first = load_target(FOLDER / "qwen3_tied", need_tokenizer=False)
    second = load_target(FOLDER / "qwen3_tied", need_tokenizer=False, scan_layers=True, dtype=jnp.bfloat16)
    other = load_target(FOLDER / "qwen3_untied", need_tokenizer=False)
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert dataclasses.replace(first.config, scan_layers=True) == second.config
