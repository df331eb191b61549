"""Every block family drafts for the toy target, greedily and by seed, and the text is the target's own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import NEW, OPTIONS

from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import drafter_config
from angelspec_jax.params import map_params

FAMILIES = {
    "dflare": {"family": "dflare"},
    "gated_sum": {"family": "dflash", "context": "gated_sum"},
    "dspark": {"family": "dspark", "rank": 4},
    "dspark_gated": {"family": "dspark", "rank": 4, "head": "markov_gated", "confidence": "none"},
    "dspark_rnn": {"family": "dspark", "rank": 4, "head": "markov_rnn", "confidence": "hidden", "layout": "anchor_first"},
    "anchor_first_dfly": {"family": "dfly", "layout": "anchor_first"},
}


def bench_of(make_bench, family: str):
    """The toy bench with a drafter of this family whose every parameter is random, so that each part has its say."""
    bench, rng = make_bench(), np.random.default_rng(0)
    options = {"mask_token": 95, "num_layers": 1, "block_size": 4, "taps": 2} | FAMILIES[family]
    config = drafter_config(bench.plain.target, **options)
    specs = registry.module(config).drafter_specs(config)
    params = map_params(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.3, jnp.float32), specs)
    plan = dataclasses.replace(bench.speculative, drafter=config, budgets=())
    return dataclasses.replace(bench, speculative=plan, weights=dataclasses.replace(bench.weights, drafter=params))


SLOW = ("gated_sum", "dspark_gated", "anchor_first_dfly")


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES])
def test_the_text_is_the_targets_own(make_bench, family):
    bench = bench_of(make_bench, family)
    for name in ("greedy", "all"):
        alone = bench.alone(options=OPTIONS[name])
        drafted = bench.drafted(options=OPTIONS[name])
        assert drafted.texts() == alone
        assert all(len(text) == NEW for text in alone)
        assert np.asarray(drafted.statistics.verified).sum() > 0


def test_the_confidence_head_decides_how_far_drafts_go(make_bench):
    """A head that trusts nothing ends the loop after one draft; the text stays."""
    bench = bench_of(make_bench, "dspark")
    confidence = bench.weights.drafter.confidence
    doubt = confidence.replace(weight=jnp.zeros_like(confidence.weight), bias=jnp.full((1,), -9.0, jnp.float32))
    params = bench.weights.drafter.replace(confidence=doubt)
    doubtful = dataclasses.replace(bench, weights=dataclasses.replace(bench.weights, drafter=params))
    policy = Policy(jnp.asarray([1.0], jnp.float32), jnp.float32(0.0), jnp.float32(0.01))
    drafted = doubtful.drafted(policy=policy)
    assert drafted.texts() == doubtful.alone()
    verified = np.asarray(drafted.statistics.verified)
    assert (verified[:, 0] > 0).all()
    assert (verified[:, 1:] == 0).all()
