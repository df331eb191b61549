"""Whole sequences of a target that can be enumerated: every way of speculating has the distribution computed in closed form.

Under the coupled rule a way of speculating must give plain decoding's text, request by request; plain decoding and the rejection rule are
held against the closed form by chi-square tests, each of which a correct program fails once in 10,000 times. One batch holds all options.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from angelspec_jax.decoding.dcut import MODES, Policy
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import Text, make_sampling, transform
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import forward, logits, target_specs

TOKENS, NEW, REQUESTS = 5, 3, 2500  # requests for each of the options
PROMPT = [1, 3, 1]
OPTIONS = {
    "hot": {"temperature": 1.3},
    "cut": {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalized": {"temperature": 0.8, "repetition": 1.5, "frequency": 0.7, "presence": 0.4, "bias": {2: 0.8, 0: -np.inf}},
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0, "bias": {}}
CUT = Policy(  # budgets by what the round before expected, so that rounds differ in how much they verify
    jnp.asarray([1.0, 1.1, 1.3], jnp.float32), jnp.float32(0.05), jnp.float32(0.0), mode=jnp.int32(MODES.index("lagged"))
)
WAYS = {  # drafter, plan, policy
    "chain": ("dflash", {}, None),
    "tree": ("dflash", {"tree": 6}, None),
    "lookup": ("lookup:3", {}, None),
    "early exit, cut": ("early_exit:1:3", {"budgets": (0, 1, 3)}, CUT),
}


@pytest.fixture(scope="module")
def target():
    config = TransformerConfig(TOKENS + 1, 8, 8, 2, 1, 1, 8)
    params = initialize(target_specs(config), jax.random.key(2))
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)  # far from uniform
    return types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0")


@pytest.fixture(scope="module")
def plans(target):
    """name -> plan and weights of a drafter with one of the ways."""
    block = create_drafter(target, jax.random.key(5), family="dflash", num_layers=1, block_size=4, taps=1, mask_token=TOKENS)

    def make(name, rule="coupled"):
        if name == "plain":
            return Plan(target.config, prefill_chunk=4), Weights(target.params)
        kind, options, _ = WAYS[name]
        drafter = block if kind == "dflash" else load_drafter(kind, target)
        plan = Plan(target.config, drafter.config, prefill_chunk=4, rule=rule, **options)
        return plan, Weights(target.params, drafter.params, drafter.shared)

    return make


def sequences(plan, weights, policy=None):
    """Option -> what its requests said, and what the rounds counted."""
    given = [OFF | options for options in OPTIONS.values() for _ in range(REQUESTS)]
    sampling = make_sampling(len(given), seed=11, **{name: [options[name] for options in given] for name in OFF})
    found = generate(plan, weights, [PROMPT] * len(given), NEW, sampling=sampling, policy=policy, capacity=8)
    said = np.asarray(found.tokens)[:, len(PROMPT) : len(PROMPT) + NEW].reshape(len(OPTIONS), REQUESTS, NEW)
    return dict(zip(OPTIONS, said, strict=True)), found.statistics


@pytest.fixture(scope="module")
def plain(plans):
    return sequences(*plans("plain"))[0]


@pytest.fixture(scope="module")
def probabilities(target):
    return {name: closed_form(target, options) for name, options in OPTIONS.items()}


def closed_form(target, options):
    """Probability of every continuation: products of conditionals, each after one plain pass over its own context."""
    probability = np.ones((TOKENS + 1,) * NEW)
    for length in range(NEW):
        contexts = np.array([[*PROMPT, *said] for said in itertools.product(range(TOKENS + 1), repeat=length)], np.int32)
        count, width = contexts.shape
        rows = uniform_rows(jnp.zeros(count, jnp.int32), width, causal=True)
        positions = jnp.tile(jnp.arange(width, dtype=jnp.int32), count)
        cache = kv_cache.create(target.config, count, 1)
        _, hidden, _ = forward(target.params, target.config, jnp.asarray(contexts.reshape(-1)), positions, rows, cache)
        last = logits(target.params, hidden.reshape(count, width, -1)[:, -1])
        same = lambda number, count=count: jnp.full((count,), number, jnp.int32)  # noqa: E731
        nothing = jnp.zeros((count, 0), jnp.int32), jnp.arange(count, dtype=jnp.int32), jnp.zeros((count, 2), jnp.uint32)
        text = Text(jnp.asarray(contexts), same(width), same(len(PROMPT)), *nothing)
        p = jax.nn.softmax(transform(last, make_sampling(count, **options), text), axis=-1)
        shape = (TOKENS + 1,) * (length + 1) + (1,) * (NEW - length - 1)
        probability = probability * np.asarray(p, np.float64).reshape(shape)
    return probability


def holds(found, probability):
    """Chi-square over all sequences, those expected fewer than five times taken together."""
    counts = np.zeros(probability.shape)
    np.add.at(counts, tuple(found.T), 1)
    assert (counts[probability == 0] == 0).all()
    expected = probability * len(found)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert len(expected) > 10
    assert statistic < scipy.stats.chi2.isf(1e-4, len(expected) - 1), statistic


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_decoding_has_the_distribution(plain, probabilities, name):
    holds(plain[name], probabilities[name])


@pytest.mark.parametrize("way", WAYS)
def test_the_coupled_rule_gives_plain_text(plans, plain, way):
    drafted, statistics = sequences(*plans(way), WAYS[way][2])
    for name in OPTIONS:
        np.testing.assert_array_equal(drafted[name], plain[name])
    assert np.asarray(statistics.accepted).sum() > 0


@pytest.mark.parametrize("way", ["chain"])
def test_the_rejection_rule_has_the_distribution(plans, plain, probabilities, way):
    drafted, statistics = sequences(*plans(way, "rejection"), WAYS[way][2])
    for name in OPTIONS:
        holds(drafted[name], probabilities[name])
    assert (drafted["hot"] != plain["hot"]).any()
    accepted, reached = (np.asarray(getattr(statistics, name)).sum() for name in ("accepted", "reached"))
    assert 0 < accepted < reached
