"""Whole sequences of a target that can be enumerated: every way of speculating has the distribution computed in closed form.

Drafter kinds x sampling options x acceptance rules x budget policies share one program a rule: a batch holds requests of all drafters and
all options, and policies are numbers. Under the coupled rule every request must get plain decoding's text; plain decoding and the
rejection rule are held against the closed form by chi-square tests, each of which a correct program fails for one seed in 10,000.
"""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import threefry2x32_p

from angelspec_jax import noise
from angelspec_jax.decoding import costs, generate
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.sampling import Text, make_sampling, transform
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import block
from angelspec_jax.drafter.drawing import draw
from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.drafter.several import SeveralConfig
from angelspec_jax.drafter.types import Draft, Sparse
from angelspec_jax.params import initialize
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import forward, logits, target_specs

TOKENS, NEW = 5, 3
REQUESTS, BATCHES = 200, 4  # requests for each drafter and each of the options in a batch, and batches
PROMPT = [1, 3, 1]
OPTIONS = {
    "hot": {"temperature": 1.3},
    "cut": {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalized": {"temperature": 0.8, "repetition": 1.5, "frequency": 0.7, "presence": 0.4, "bias": {2: 0.8, 0: -np.inf}},
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0, "bias": {}}
KINDS = ("dspark", "mtp", "lookup", "early exit")  # a block with a sequential head, autoregressive, a copy of the text, the target itself
BUDGETS, TREE_BUDGETS = (0, 1, 3), (0, 2, 6)
POLICIES = ("off", 0.34, "lagged", "causal", "retrospective")


@pytest.fixture(scope="module")
def target():
    config = TransformerConfig(TOKENS + 1, 8, 8, 2, 1, 1, 8)
    params = initialize(target_specs(config), jax.random.key(2))
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)  # far from uniform
    return types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0")


@pytest.fixture(scope="module")
def drafters(target):
    options = {"num_layers": 1, "block_size": 4, "taps": 1, "mask_token": TOKENS, "rank": 2}
    made = (
        create_drafter(target, jax.random.key(5), family="dspark", **options),
        create_drafter(target, jax.random.key(6), family="mtp", num_drafts=3),
        load_drafter("lookup:3", target),
        load_drafter("early_exit:1:3", target),
    )
    return dict(zip(KINDS, made, strict=True))


@pytest.fixture(scope="module")
def chains(target, drafters):
    """All drafters in one plan, for a rule."""
    helpers = drafters.values()
    config = SeveralConfig(tuple(helper.config for helper in helpers))
    weights = Weights(target.params, tuple(helper.params for helper in helpers), tuple(helper.shared for helper in helpers))
    return lambda rule: (Plan(target.config, config, prefill_chunk=4, budgets=BUDGETS, rule=rule), weights)


def policy(plan, budget):
    # Admitted one by one, a draft of one among hundreds of requests never pays for a stair, so there the first one is free.
    table = jnp.asarray([1.0, 1.0 if budget == "causal" else 1.1, 1.3], jnp.float32)
    return costs.dcut_policy(Policy(table, jnp.float32(0.05), jnp.float32(0.0)), plan.budgets, budget, rule=plan.rule)


def sequences(plan, weights, policy=None):
    """What the requests said, [kind, option, request, NEW], and what the rounds counted."""
    given = [OFF | options for _ in KINDS for options in OPTIONS.values() for _ in range(REQUESTS)]
    options = {name: [options[name] for options in given] for name in OFF}
    said, counted = [], []
    for batch in range(BATCHES):
        sampling = make_sampling(len(given), seed=11 + batch * len(given), **options)
        state, own = generate.start(plan, weights, [PROMPT] * len(given), NEW, sampling=sampling, policy=policy, capacity=8)
        if isinstance(plan.drafter, SeveralConfig):
            choice = jnp.repeat(jnp.arange(len(KINDS), dtype=jnp.int32), len(given) // len(KINDS))
            state = dataclasses.replace(state, drafter=dataclasses.replace(state.drafter, choice=choice))
        state = generate._run(plan, weights, own, state)
        tokens = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + NEW]
        said.append(tokens.reshape(len(KINDS), len(OPTIONS), REQUESTS, NEW))
        counted.append(jax.tree.map(np.asarray, state.statistics))
    return np.concatenate(said, axis=2), jax.tree.map(lambda *parts: sum(parts), *counted)


@pytest.fixture(scope="module")
def plain(target):
    return sequences(Plan(target.config, prefill_chunk=4), Weights(target.params))[0]


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


def holds(found, probability, classes=10):
    """Chi-square over all sequences, of which more than `classes` must be left when those expected fewer than five times are one."""
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
    assert len(expected) > classes
    assert statistic < scipy.stats.chi2.isf(1e-4, len(expected) - 1), statistic


def test_plain_decoding_has_the_distribution(plain, probabilities):
    for index, name in enumerate(OPTIONS):
        holds(plain[:, index].reshape(-1, NEW), probabilities[name])


@pytest.mark.parametrize("budget", POLICIES)
def test_the_coupled_rule_gives_plain_text(chains, plain, budget):
    plan, weights = chains("coupled")
    drafted, statistics = sequences(plan, weights, policy(plan, budget))
    np.testing.assert_array_equal(drafted, plain)
    assert statistics.accepted.sum() > 0
    if budget == "off":
        each = statistics.accepted.sum(axis=1).reshape(len(KINDS), -1).sum(axis=1)
        assert (each > 0).all(), "a drafter of which nothing was accepted tests nothing"


@pytest.mark.parametrize("kind", ["dspark", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp", "early exit"))])
def test_trees_under_the_coupled_rule_give_plain_text(target, drafters, plain, kind):
    helper = drafters[kind]
    plan = Plan(target.config, helper.config, prefill_chunk=4, tree=6, budgets=TREE_BUDGETS)
    for budget in POLICIES:
        drafted, statistics = sequences(plan, Weights(target.params, helper.params, helper.shared), policy(plan, budget))
        np.testing.assert_array_equal(drafted, plain)
        assert statistics.accepted.sum() > 0


@pytest.mark.parametrize("budget", [budget for budget in POLICIES if budget != "retrospective"])
def test_the_rejection_rule_has_the_distribution(chains, plain, probabilities, budget):
    plan, weights = chains("rejection")
    drafted, statistics = sequences(plan, weights, policy(plan, budget))
    for index, name in enumerate(OPTIONS):
        holds(drafted[:, index].reshape(-1, NEW), probabilities[name])
        for by_kind in drafted[:, index]:  # of the first two tokens, for there are fewer requests
            holds(by_kind[:, :2], probabilities[name].sum(axis=2), classes=3)
    assert statistics.accepted.sum() > 0
    assert (drafted != plain).any(axis=(1, 2, 3)).all()
    if budget == "off":
        accepted, reached = (x.sum(axis=1).reshape(len(KINDS), -1).sum(axis=1) for x in (statistics.accepted, statistics.reached))
        assert ((accepted > 0) & (accepted < reached)).all()


def test_what_fell_behind_a_rejected_draft_decides_nothing_later(target, probabilities, monkeypatch):
    """Noise that a drafter saw in one round is not drawn from again in the next (as in vLLM's pull requests 47386 and 54282).

    The third draft says how sure the fourth is. Where the first is rejected, the round after chooses its budget by what this one expected
    of all four, and draws at the place of the third again: with the same noise, whether its second draft is verified would depend on what
    it is, and token 0 would come too often. Each request decides alone.
    """
    helper = create_drafter(target, jax.random.key(5), family="dflash", num_layers=1, block_size=5, taps=1, mask_token=TOKENS)

    def two_tokens(params, config, shared, seen, state, drawing, policy):
        requests = seen.anchor.shape[0]
        ids = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (requests, 2))
        drawn = []
        for k in range(4):
            even = jnp.zeros((requests, 2), jnp.float32)
            scores = even if k < 3 else jnp.where((drawn[2][0] == 0)[:, None], jnp.asarray([[9.0, 0.0]], jnp.float32), even)
            drawn.append(draw(scores, ids, seen.prefix_length + k + 1, drawing))
        tokens, p, own = (jnp.stack(parts, axis=1) for parts in zip(*drawn, strict=True))
        return Draft(tokens, Sparse(jnp.broadcast_to(ids[:, None], (requests, 4, 2)), p), jnp.cumprod(own, axis=1))

    def hashed(seeds, positions, counter, role):  # the primitive's operands must all be mapped, or none
        none = jnp.min(seeds) & jnp.uint32(0)
        words = [jnp.broadcast_to(word.astype(jnp.uint32)[..., None], counter.shape) for word in (seeds, positions)]
        return threefry2x32_p.bind(*(word + none for word in (*words, counter, jnp.full(counter.shape, role, jnp.uint32))))

    monkeypatch.setattr(noise, "_hash", hashed)
    monkeypatch.setattr(block, "draft", two_tokens)
    plan = Plan(target.config, helper.config, prefill_chunk=4, budgets=(1, 4), rule="rejection")
    weights = Weights(target.params, helper.params, helper.shared)
    # Four drafts pay where the fourth is sure: 1.996 expected tokens against 1.938, beside 1.5 with one draft.
    table = Policy(jnp.asarray([1.0, 1.311], jnp.float32), jnp.float32(0.0), jnp.float32(0.0))
    sampling = make_sampling(1, **OPTIONS["hot"])
    state, lagged = generate.start(
        plan, weights, [PROMPT], NEW, sampling=sampling, policy=costs.dcut_policy(table, (1, 4), "lagged", rule="rejection"), capacity=8
    )

    def one(seed, state):
        own = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, seeds=seed[None]))
        after = generate._run.__wrapped__(plan, weights, lagged, own)
        return after.tokens[0, len(PROMPT) : len(PROMPT) + NEW], after.statistics.verified[0]

    said, verified = jax.jit(jax.vmap(one, in_axes=(0, None)))(jnp.arange(6000, dtype=jnp.uint32), state)
    assert len(np.unique(np.asarray(verified), axis=0)) > 2, "budgets are meant to differ"
    holds(np.asarray(said), probabilities["hot"])
