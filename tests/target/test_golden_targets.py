"""Golden targets loaded and run in other ways; tests/goldens checks their numbers."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.targets import step

from angelspec_jax.target import kv_cache
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.safetensors_io import open_checkpoint

FOLDER = Path(__file__).parents[1] / "goldens" / "targets"


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
