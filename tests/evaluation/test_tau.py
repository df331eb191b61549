"""Arithmetic of tau and acceptance, and the rule by which two decodings count as the same."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import text
from angelspec_jax.decoding.generate import Generation, generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Statistics
from angelspec_jax.evaluation import tau
from angelspec_jax.evaluation.tau import Acceptance, Comparison, agreement, compare, next_scores, pool

pytest_plugins = ["toy_model"]

PROMPT = [72, 105, 33, 60, 61]


def test_counters_become_rates():
    found = Acceptance(rounds=12, emitted=25, verified=(10, 10, 5), reached=(10, 8, 2), accepted=(8, 4, 0))
    assert found.tau == 25 / 12
    assert found.drafted == 10
    assert found.survival == (0.8, 0.4, 0.0)
    assert found.conditional == (0.8, 0.5, 0.0)
    assert found.verified_accepted == 12 / 25
    assert found.to_dict()["tau"] == 25 / 12


def test_positions_that_were_never_reached_have_no_rate():
    found = Acceptance(rounds=4, emitted=4, verified=(4, 4), reached=(4, 0), accepted=(0, 0))
    assert found.conditional == (0.0, None)
    assert Acceptance(rounds=3, emitted=3).verified_accepted is None
    assert Acceptance().tau == 0.0


def test_pooling_adds_counters_so_long_texts_weigh_more():
    together = pool([Acceptance(1, 4, (1, 1, 1), (1, 1, 1), (1, 1, 1)), Acceptance(9, 9, (9,), (9,), (0,))])
    assert together == Acceptance(10, 13, (10, 1, 1), (10, 1, 1), (1, 1, 1))
    assert together.tau == 1.3


def test_counters_of_a_generation_are_pooled_over_requests():
    statistics = Statistics(jnp.array([2, 3]), jnp.array([[2, 2], [3, 1]]), jnp.array([[2, 1], [3, 1]]), jnp.array([[1, 0], [2, 1]]))
    generation = Generation(jnp.zeros((2, 16), jnp.int32), jnp.array([4, 5]), jnp.array([7, 11]), statistics)
    assert tau.acceptance(generation) == Acceptance(5, 9, (5, 3), (5, 2), (3, 1))


def test_same_texts_are_equal(toy_target):
    assert compare(toy_target, PROMPT, [1, 2, 3], [1, 2, 3]) == Comparison("equal", 3)


def test_a_text_that_ends_early_is_different(toy_target):
    assert compare(toy_target, PROMPT, [1, 2, 3], [1, 2]) == Comparison("different", 2, 2)


@pytest.fixture(scope="module")
def twins(toy_target):
    """The toy target with token 7 as a copy of the token it would choose after PROMPT; that token."""
    best = int(next_scores(toy_target, PROMPT, make_sampling(1)).argmax())
    head = toy_target.params.lm_head
    params = toy_target.params.replace(lm_head=head.at[7].set(head[best]))
    return dataclasses.replace(toy_target, params=params), best


def test_two_choices_of_equal_score_are_a_near_tie(twins):
    target, best = twins
    found = compare(target, PROMPT, [best, 1], [7, 2])
    assert (found.verdict, found.position, found.compared) == ("near_tie", 0, 1)
    assert found.margin < 1e-6


def test_a_choice_below_the_best_is_different_though_two_others_tie(twins):
    target, best = twins
    worst = int(next_scores(target, PROMPT, make_sampling(1)).argmin())
    found = compare(target, PROMPT, [best], [worst])
    assert found.verdict == "different"
    assert found.margin > tau.NEAR_TIE


def test_recomputed_scores_choose_what_sampling_chose(toy_target):
    plan, weights = text.prepare(toy_target)
    sampling = make_sampling(1, temperature=1.3, top_k=50, top_p=0.9, seed=5)
    (said,) = generate(plan, weights, [PROMPT], 6, sampling=sampling).texts()
    chosen = [int(next_scores(toy_target, PROMPT + said[:i], sampling).argmax()) for i in range(len(said))]
    assert chosen == said


def test_one_near_tie_is_tolerated_and_a_difference_is_not():
    equal, tie, bad = Comparison("equal", 100), Comparison("near_tie", 10, 9, 1e-6), Comparison("different", 3, 2, 0.5)
    assert agreement([equal, tie]).holds
    assert agreement([equal, tie]).tokens == 110
    assert not agreement([equal, tie, tie]).holds
    assert agreement([Comparison("equal", 60_000), tie, tie]).holds
    assert not agreement([equal, bad]).holds
    assert "1 of 2 texts differ" in str(agreement([equal, bad]))
    assert np.all([word in str(agreement([equal])) for word in ("all 1 texts", "100 tokens")])
