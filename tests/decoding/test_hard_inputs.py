"""Inputs on which other decoders have failed: rows that only pad."""

import types

import jax
import numpy as np
from decoding_bench import PROMPTS, Bench

from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs


def bench_of(**options) -> Bench:
    """A target of 3 layers and a drafter of blocks of 8, which reads what `options` change of the target."""
    config = TransformerConfig(96, 32, 48, 3, 4, 2, 8, **options)
    params = initialize(target_specs(config), jax.random.key(0))
    target = types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0")
    drafter = create_drafter(target, jax.random.key(1), family="dflash", num_layers=2, block_size=8, taps=2, mask_token=95)
    weights = Weights(params, drafter.params, drafter.shared)
    return Bench(Plan(config, prefill_chunk=8), Plan(config, drafter.config, prefill_chunk=8), weights)


def test_requests_that_only_pad_change_nothing():
    """A fourth request that is over from the start, with options that would flip any logits: the others' bits stay."""
    bench = bench_of()
    options = {"temperature": [0.0, 0.7, 1.0], "top_k": [0, 8, 0], "top_p": [1.0, 0.9, 0.5]}
    strange = {"temperature": 100.0, "top_k": 1, "top_p": 0.0}
    alone = bench.drafted(PROMPTS[:3], options=options)
    padded = bench.drafted(new=[24, 24, 24, 0], options={name: [*values, strange[name]] for name, values in options.items()})
    assert padded.texts() == [*alone.texts(), []]
    for name in ("rounds", "verified", "accepted"):
        np.testing.assert_array_equal(getattr(padded.statistics, name)[:3], getattr(alone.statistics, name))
    assert int(padded.statistics.rounds[3]) == 0
