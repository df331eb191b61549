"""D-cut's choices on small cases that can be enumerated, and the estimator that learns while serving."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.decoding import costs, dcut, margins
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.drafter.types import Draft, OneHot

BUDGETS = (0, 1, 2, 4)


def policy(table, draft_cost=0.0, **names) -> Policy:
    return costs.dcut_policy(Policy(jnp.asarray(table, jnp.float32), jnp.float32(draft_cost), jnp.float32(0.0)), BUDGETS, **names)


def chains(confidence) -> Draft:
    survival = jnp.cumprod(jnp.asarray(confidence, jnp.float32), axis=1)
    return Draft(jnp.zeros(survival.shape, jnp.int32), OneHot(), survival)


choose = jax.jit(dcut.choose, static_argnums=1)


def cut(given, draft, running=None, memory=None):
    running = jnp.ones((draft.tokens.shape[0],), bool) if running is None else jnp.asarray(running)
    memory = dcut.create_memory(BUDGETS) if memory is None else memory
    return jax.tree.map(np.asarray, choose(given, BUDGETS, draft, running, jnp.bool_(True), memory))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_choices_within_the_rooms_is_found(seed):
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.1, 1, (3, 4)), axis=1)
    running = np.array([True, seed % 2 == 0, True])
    table = np.sort(random.uniform(1, 3, 4))
    found = cut(policy(table, 0.2), chains(survival / np.concatenate([np.ones((3, 1)), survival[:, :-1]], axis=1)), running)
    best, alive = (-1.0, None), int(running.sum())
    for lengths in itertools.product(range(5), repeat=3):
        if any(n and not live for n, live in zip(lengths, running, strict=True)):
            continue
        index = next((i for i, b in enumerate(BUDGETS) if sum(lengths) + alive <= 3 * (1 + b)), None)
        if index is not None:
            expected = alive + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
            best = max(best, (expected / (table[index] + 0.2), lengths))
    kept = found.keep.sum(axis=1)
    assert (np.diff(found.keep.astype(int), axis=1) <= 0).all()  # prefixes
    index = int(found.budget)
    rate = (alive + (survival * found.keep).sum()) / (table[index] + 0.2)
    assert rate == pytest.approx(best[0], rel=1e-5)
    assert kept.sum() + alive <= 3 * (1 + BUDGETS[index])
    assert not kept[~running].any()


def test_stairs_stop_a_climb_but_not_a_search():
    draft = chains([[0.9] * 4])
    stairs = [1.0, 2.1, 2.15, 2.2]
    assert cut(policy(stairs), draft).keep.sum() == 4
    assert cut(policy(stairs, budget="causal"), draft).keep.sum() == 0


def test_ties_go_to_the_shallower():
    found = cut(policy([1, 1, 1, 1], budget=0.25), chains([[1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0]]))
    assert found.keep.sum(axis=1).tolist() == [1, 1]


def test_a_tree_keeps_parents_and_moves_them_to_the_front():
    parents = jnp.asarray([[-1, -1, 1, 2]])
    draft = Draft(jnp.asarray([[10, 20, 21, 22]]), OneHot(), jnp.asarray([[0.3, 0.6, 0.5, 0.2]], jnp.float32), parents)
    found = choose(policy([1, 1, 1, 9], budget=0.5), BUDGETS, draft, jnp.ones((1,), bool), jnp.bool_(True), dcut.create_memory(BUDGETS))
    assert np.asarray(found.keep).tolist() == [[False, True, True, False]]
    packed, count = dcut.compact(draft, found.keep)
    assert int(count[0]) == 2
    assert packed.tokens[0, :2].tolist() == [20, 21]
    assert packed.parents is not None and packed.parents[0, :2].tolist() == [-1, 0]
    assert np.asarray(dcut.depths(draft)).tolist() == [[0, 0, 1, 2]]


def test_lagged_budgets_look_at_earlier_rounds_only():
    given = policy([1.0, 1.5, 2.0, 3.0], budget="lagged")
    hopeless = dataclasses.replace(dcut.create_memory(BUDGETS), expected=jnp.zeros((4,), jnp.float32))
    sure, unsure = chains([[1.0] * 4]), chains([[0.01] * 4])
    assert [int(cut(given, draft, memory=hopeless).budget) for draft in (sure, unsure)] == [0, 0]
    assert [int(cut(given, draft).budget) for draft in (sure, unsure)] == [3, 3]
    assert cut(given, sure).expected.tolist() == [0, 1, 2, 4]


def test_without_the_bonus_more_is_verified():
    draft, table = chains([[0.5, 0.5, 0.5, 0.5]]), [1.0, 1.6, 2.0, 3.0]
    assert int(cut(policy(table), draft).budget) < int(cut(policy(table, bonus=False), draft).budget)


def test_early_stop_admits_nothing_in_the_counter_example():
    """DSpark, appendix A: with steps per second 1, 0.5, 0.45 and a first survival of 0.8 no draft may be verified, whatever follows it;
    a search over all lengths would let the second draft decide about the first."""
    table = [1.0, 2.0, 1 / 0.45, 1 / 0.45]
    for second in (0.9, 0.0):
        draft = chains([[0.8, second, 0.0, 0.0]])
        assert cut(policy(table, budget="causal"), draft).keep.sum() == 0
    kept = [cut(policy(table), chains([[0.8, second, 0.0, 0.0]])).keep.sum() for second in (0.9, 0.0)]
    assert kept == [2, 0]


def test_drafting_stops_where_no_budget_would_verify():
    given = policy([1.0, 1.5, 2.0, 3.0])
    least = float(dcut.min_survival(given, BUDGETS, 2, jnp.int32(2)))
    assert least == pytest.approx(_least([1.0, 1.5, 2.0, 3.0], 2))
    below, above = chains([[least * 0.99, 1.0, 1.0, 1.0]] * 2), chains([[0.6, 1.0, 1.0, 1.0]] * 2)
    assert int(cut(given, below).budget) == 0
    assert int(cut(given, above).budget) > 0
    assert float(dcut.min_survival(policy([1, 2, 3, 4], budget="off"), BUDGETS, 2, jnp.int32(2))) == 0.0


def _least(table, requests):
    pairs = [(i, j) for j in range(4) for i in range(j)]
    return min(requests * (table[j] / table[i] - 1) / (requests * (BUDGETS[j] - BUDGETS[i])) for i, j in pairs)


@pytest.mark.parametrize("names", [{"budget": "best"}, {"budget": 1.5}, {"confidence": "guess"}, {"rule": "rejection"}])
def test_unknown_policies_are_named(names):
    with pytest.raises(ValueError, match="budget|confidence"):
        policy([1, 1, 1, 1], **names)


def test_the_margin_estimator_finds_the_logistic_it_is_shown():
    random = np.random.default_rng(0)
    slope, offset = np.array([0.8, 0.3]), np.array([-1.0, 0.5])
    fitted = margins.create(2)
    observe = jax.jit(margins.observe)
    depth = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (32, 2))
    for _ in range(8 * margins.EVERY):
        margin = random.uniform(0, 6, (32, 2)).astype(np.float32)
        accepted = random.random((32, 2)) < 1 / (1 + np.exp(-(slope * margin + offset)))
        tried = np.stack([np.ones(32, bool), accepted[:, 0]], axis=1)
        fitted = observe(fitted, jnp.asarray(margin), depth, jnp.asarray(tried), jnp.asarray(accepted))
    assert int(fitted.refits) == 8
    np.testing.assert_allclose(fitted.slope, slope, atol=0.1)
    np.testing.assert_allclose(fitted.offset, offset, atol=0.2)
    estimate = margins.survival(fitted, jnp.asarray([[2.0, 3.0]], jnp.float32), None, depth[:1])
    np.testing.assert_allclose(estimate[0, 1] / estimate[0, 0], 1 / (1 + np.exp(-(0.9 + 0.5))), atol=0.05)
    tree = margins.survival(fitted, jnp.asarray([[2.0, 3.0]], jnp.float32), jnp.asarray([[-1, 0]]), depth[:1])
    np.testing.assert_allclose(tree, estimate, rtol=1e-6)


def test_a_drafter_that_is_never_right_is_found_out_and_may_be_right_again():
    random, observe, fitted = np.random.default_rng(1), jax.jit(margins.observe), margins.create(1)
    depth, tried = jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1), bool)
    for right, low, high in ((False, 0.0, 0.05), (True, 0.95, 1.0), (False, 0.0, 0.05)):
        for _ in range(6 * margins.EVERY):
            fitted = observe(fitted, jnp.asarray(random.uniform(0, 6, (8, 1)), jnp.float32), depth, tried, tried & right)
        estimate = margins.survival(fitted, jnp.asarray([[0.5], [5.0]], jnp.float32), None, depth[:2])
        assert low <= float(estimate.min()) <= float(estimate.max()) <= high


def test_few_trials_fit_nothing():
    fitted = margins.create(1)
    ones = jnp.ones((1, 1), bool)
    for _ in range(margins.EVERY):
        fitted = margins.observe(fitted, jnp.ones((1, 1), jnp.float32), jnp.zeros((1, 1), jnp.int32), ones & False, ones)
    assert int(fitted.rounds) == 0
    assert float(fitted.offset[0]) == 1.5


def looks(table, tokens, rounds, requests=1, memory=None):
    """Which of so many rounds draft, when a draft brings every request `tokens` of them; and what is remembered at the end."""
    given, running = policy(table, draft_cost=0.5), jnp.ones((requests,), bool)
    kept = dcut.Cut(jnp.int32(3), jnp.ones((requests, 4), bool), jnp.ones((requests, 4)), jnp.zeros((4,)))

    def round(memory, _):
        drafting = dcut.worth_drafting(given, BUDGETS, True, memory)
        count = jnp.where(drafting, jnp.float32(tokens), 1.0) * running.astype(jnp.float32)
        return dcut.remember(given, memory, kept, drafting, count, running), drafting

    memory, drafting = jax.lax.scan(round, dcut.create_memory(BUDGETS) if memory is None else memory, length=rounds)
    return np.asarray(drafting), memory


def test_looking_at_a_drafter_that_does_not_pay_costs_next_to_nothing():
    table = [1.0, 1.1, 1.2, 1.3]  # with the draft 1.8
    useless, memory = looks(table, 1, 600)
    assert useless[0] and useless[300:].any()
    assert 0.8 * useless[200:].mean() < 2 * dcut.LOOKING  # plain rounds lost, of all
    almost, _ = looks(table, 1.75, 600)
    assert almost[200:].mean() == pytest.approx(1 / dcut.PROBE, abs=0.02)  # hardly anything is lost: often
    again, memory = looks(table, 4, 600, memory=memory)
    assert again[-300:].all()
    slower, _ = looks([5 * cost for cost in (1.0, 1.1, 1.2, 1.3)], 4, 20, memory=memory)  # a larger state: what was learned still holds
    assert slower.all()
    for requests, rounds in ((1, 12), (8, 3)):  # a round of many requests says more
        drafting, _ = looks(table, 1, 40, requests, memory)
        assert not drafting[rounds + 1] and drafting[: rounds // 3].all()
