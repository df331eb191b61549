"""SmolLM2 with its shipped drafter: drawn tokens have the target's own distribution, and greedy text is plain decoding's up to near ties.

Every chi-square test fails a correct program for one seed in 10,000; with twelve of them (three positions, two tokens, two rules) a fresh
choice of seeds would raise a false alarm once in 800 runs. The seeds are fixed. `pytest -m smollm2 -s` prints the figures.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from angelspec_jax import models
from angelspec_jax.answers import encode
from angelspec_jax.decoding import generate, slots
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.evaluation import prompts, tau
from angelspec_jax.target.loading import load_target

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

OPENINGS = ("Once upon a time there was a", "My favourite food is", "The best way to learn a language is to")
SEEDS, BATCHES = 64, 8  # requests of each opening in a batch, and batches
ALPHA = 1e-4
CAPACITY = 32


@pytest.fixture(scope="module")
def smollm2():
    try:
        target = load_target(models.smollm2(fetch=False))
        return target, load_drafter(models.shipped_drafter(), target)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def draws(target, drafter, rule) -> tuple[list[list[int]], np.ndarray, int, int]:
    """The openings, two tokens of every request [opening, seed, 2], drafts that were verified and that were accepted."""
    plan = Plan(target.config, drafter.config, budgets=(2,), rule=rule, prefill_chunk=16)
    weights = Weights(target.params, drafter.params, drafter.shared)
    openings, requests = [target.tokenizer.encode(text) for text in OPENINGS], SEEDS * len(OPENINGS)
    one, policy = generate.start(plan, weights, openings, 2, capacity=CAPACITY)
    one = generate.jitted_prefill(plan, weights, one)
    said, verified, accepted = [], 0, 0
    for batch in range(BATCHES):
        state = slots.rearrange(plan, one, jnp.repeat(jnp.arange(len(OPENINGS), dtype=jnp.int32), SEEDS))
        sampling = make_sampling(requests, temperature=1.0, seed=1 + batch * requests)
        state = dataclasses.replace(state, sampling=sampling)
        while not bool(jnp.all(state.finished)):
            state, _ = generate.jitted_step(plan, weights, policy, state)
        start = np.repeat([len(opening) for opening in openings], SEEDS)[:, None]
        said.append(np.take_along_axis(np.asarray(state.tokens), start + np.arange(2), axis=1).reshape(len(OPENINGS), SEEDS, 2))
        verified += int(np.asarray(state.statistics.verified).sum())
        accepted += int(np.asarray(state.statistics.accepted).sum())
    return openings, np.concatenate(said, axis=1), verified, accepted


def chi_square(found: np.ndarray, logits: np.ndarray) -> tuple[float, float, int]:
    """Statistic, limit and classes: tokens that are expected fewer than five times are one class."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    expected = p / p.sum() * len(found)
    counts = np.bincount(found, minlength=len(expected)).astype(float)
    rare = expected < 5
    expected, counts = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(statistic), float(scipy.stats.chi2.isf(ALPHA, len(expected) - 1)), len(expected)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drawn_tokens_have_the_target_s_distribution(smollm2, rule):
    """The first token at each opening, and the second after the first that came most often."""
    target, drafter = smollm2
    openings, said, verified, accepted = draws(target, drafter, rule)
    print(f"\n{rule}: {accepted} of {verified} verified drafts accepted")
    for text, opening, pairs in zip(OPENINGS, openings, said, strict=True):
        first, often = pairs[:, 0], int(np.bincount(pairs[:, 0]).argmax())
        second = pairs[first == often, 1]
        for name, before, found in (("first", opening, first), ("second", [*opening, often], second)):
            logits = tau.next_scores(target, before, make_sampling(1))  # of a greedy request: no noise, no cut
            statistic, limit, classes = chi_square(found, logits)
            print(f"  {text!r}, {name} token: chi-square {statistic:.1f} of {len(found)} draws in {classes} classes, limit {limit:.1f}")
            assert classes >= 2
            assert statistic < limit
    assert 0 < accepted < verified


def test_greedy_text_is_plain_decoding_s_up_to_near_ties(smollm2):
    target, drafter = smollm2
    asked = [encode(target, prompt) for domain in prompts.DOMAINS for prompt in prompts.builtin(domain, 1)]
    weights = Weights(target.params, drafter.params, drafter.shared)
    say = functools.partial(generate.generate, prompts=asked, max_new_tokens=64, capacity=384)
    plain = say(Plan(target.config, stop_ids=tuple(target.eos_ids)), Weights(target.params)).texts()
    for tree in (None, 16):
        plan = Plan(target.config, drafter.config, stop_ids=tuple(target.eos_ids), tree=tree)
        drafted = say(plan, weights)
        found = tau.agreement(
            tau.compare(target, prompt, one, other) for prompt, one, other in zip(asked, plain, drafted.texts(), strict=True)
        )
        print(f"\n{'chains' if tree is None else f'trees of {tree}'}: {found}; tau {tau.acceptance(drafted).tau:.2f}")
        assert found.holds
        assert tau.acceptance(drafted).tau > 1.2
