"""The walk over chains and trees against a walk by hand; the rejection rule against its distribution (its table: tests/goldens)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.decoding.acceptance import accept, accept_by_ratio, count_accepted, known_before
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.drafter.drawing import draw
from angelspec_jax.drafter.types import Draft, Noise, OneHot, Sparse
from angelspec_jax.noise import ACCEPT, BONUS, DRAFT, RESIDUAL, SHARED, reseed, uniform


def by_hand(tokens, parents, chosen, verified):
    row, path = 0, [0]
    while True:
        children = [k for k in range(len(tokens)) if parents[k] == row - 1 and tokens[k] == chosen[row] and verified[k]]
        if not children:
            return path
        row = children[0] + 1
        path.append(row)


def test_random_trees():
    random = np.random.default_rng(0)
    for _ in range(40):
        requests, drafts = 3, 7
        parents = np.stack([[random.integers(-1, k) if k else -1 for k in range(drafts)] for _ in range(requests)])
        tokens = random.permuted(np.tile(np.arange(drafts), (requests, 1)), axis=1)  # all distinct: siblings never collide
        chosen = random.integers(0, drafts, (requests, drafts + 1))
        for row in range(requests):  # make matches likely
            for k in range(drafts):
                if random.random() < 0.6:
                    chosen[row, parents[row, k] + 1] = tokens[row, k]
        verified = random.random((requests, drafts)) < 0.9
        draft = Draft(jnp.asarray(tokens, jnp.int32), OneHot(), jnp.ones(tokens.shape), jnp.asarray(parents, jnp.int32))
        found = accept(draft, jnp.asarray(chosen, jnp.int32), jnp.asarray(verified))
        for row in range(requests):
            path = by_hand(tokens[row], parents[row], chosen[row], verified[row])
            assert int(found.count[row]) == len(path) - 1
            np.testing.assert_array_equal(np.asarray(found.path)[row, : len(path)], path)
            np.testing.assert_array_equal(np.asarray(found.tokens)[row, : len(path)], chosen[row][path])


def test_a_chain_and_the_same_chain_as_a_tree_agree():
    random = np.random.default_rng(1)
    tokens = jnp.asarray(random.integers(0, 2, (512, 5)), jnp.int32)
    chosen = jnp.asarray(random.integers(0, 2, (512, 6)), jnp.int32)
    chain = accept(Draft(tokens, OneHot(), jnp.ones(tokens.shape)), chosen)
    parents = jnp.broadcast_to(jnp.arange(-1, 4, dtype=jnp.int32), tokens.shape)
    tree = accept(Draft(tokens, OneHot(), jnp.ones(tokens.shape), parents), chosen)
    np.testing.assert_array_equal(np.asarray(chain.count), np.asarray(tree.count))
    assert len(set(np.asarray(chain.count).tolist())) == 6
    for row, count in enumerate(np.asarray(chain.count)):
        np.testing.assert_array_equal(np.asarray(chain.tokens)[row, : count + 1], np.asarray(tree.tokens)[row, : count + 1])


def proposals(kind: str, requests: int, prefix, seeds):
    """A chain of two over five tokens, drawn from conditionals of its own or fixed, with noise of its own."""
    logits = jnp.asarray([[1.5, 0.0, -1.0, 0.5, -2.0], [0.0, 1.0, 0.5, -1.0, 0.2]])
    ids = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (requests, 5))
    noise = Noise(reseed(seeds, DRAFT), jnp.ones(requests, jnp.float32))
    drawn = []
    for k in range(2):
        scores = jnp.broadcast_to(logits[k], (requests, 5))
        if k:
            scores = scores + 0.7 * jax.nn.one_hot(drawn[0][0], 5)
        choice, p, own = draw(scores, ids, prefix + 1 + k, noise)
        drawn.append((choice, p, own))
    tokens, p, own = (jnp.stack([part[i] for part in drawn], axis=1) for i in range(3))
    if kind == "one-hot":
        return Draft(jnp.broadcast_to(jnp.asarray([3, 1], jnp.int32), (requests, 2)), OneHot(), jnp.full((requests, 2), 0.5))
    return Draft(tokens, Sparse(jnp.broadcast_to(ids[:, None], (requests, 2, 5)), p), jnp.cumprod(own, axis=1))


@pytest.mark.parametrize("kind", ["sampled", "one-hot"])
def test_the_rejection_rule_keeps_the_distribution(kind):
    """Of the first two tokens and of the first one after a rejection, over 30,000 requests.

    The target's second distribution depends on the first token. Chi-square with 24 degrees of freedom exceeds 51.2 once in 1,000 runs,
    with 4 it exceeds 18.5 as rarely.
    """
    requests = 30_000
    p1 = np.array([0.4, 0.1, 0.2, 0.25, 0.05])
    p2 = np.random.default_rng(3).dirichlet(np.ones(5), size=5)
    seeds, prefix = jnp.arange(requests, dtype=jnp.uint32), jnp.full((requests,), 7, jnp.int32)

    @jax.jit
    def run(seeds):
        draft = proposals(kind, requests, prefix, seeds)
        log = jnp.log(jnp.asarray(np.concatenate([p1[None], p2]), jnp.float32))
        first = jnp.broadcast_to(log[0], (requests, 1, 5))
        second = log[1 + draft.tokens[:, 0]][:, None]
        third = jnp.broadcast_to(log[0], (requests, 1, 5))
        scores = jnp.concatenate([first, second, third], axis=1)
        options = make_sampling(1, temperature=1.0).rows(jnp.zeros(requests, jnp.int32)).replace(seeds=seeds)
        return accept_by_ratio(draft, scores, options, prefix), draft

    accepted, draft = run(seeds)
    count, tokens = np.asarray(accepted.count), np.asarray(accepted.tokens)
    assert set(count.tolist()) == {0, 1, 2}
    first = np.bincount(tokens[:, 0], minlength=5)
    assert ((first - requests * p1) ** 2 / (requests * p1)).sum() < 18.5
    # Pairs where the second token exists; where it does not, plain sampling would draw it from p2: weigh by what is left.
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (tokens[count > 0, 0], tokens[count > 0, 1]), 1)
    went_on = pairs.sum(axis=1, keepdims=True)
    expected, seen = went_on * p2, went_on[:, 0] > 0
    assert ((pairs - expected)[seen] ** 2 / expected[seen]).sum() < 51.2
    rejected = tokens[count == 0, 0]
    assert (rejected != np.asarray(draft.tokens)[count == 0, 0]).all() or kind == "sampled"


def test_draft_judge_residual_and_bonus_share_no_noise():
    """Of 20,000 requests, at one place: correlations of independent numbers exceed 0.035 once in a million pairs."""
    seeds, at, ids = jnp.arange(20_000, dtype=jnp.uint32), jnp.full((20_000,), 7, jnp.int32), jnp.zeros((20_000, 1), jnp.int32)
    drawn = [uniform(seeds, at, ids, role)[:, 0] for role in (SHARED, ACCEPT, RESIDUAL, BONUS)]
    drawn += [uniform(reseed(seeds, DRAFT, at - back), at, ids)[:, 0] for back in (1, 2)]  # in two rounds that pass over the place
    drawn.append(uniform(reseed(seeds, DRAFT), at, ids)[:, 0])
    found = np.abs(np.corrcoef(np.stack(drawn)) - np.eye(len(drawn)))
    assert found.max() < 0.035


def test_a_token_of_no_probability_is_never_accepted():
    zero, one = jnp.zeros((1, 1)), jnp.ones((1, 1))
    assert int(count_accepted(zero, one, zero, one > 0)[0]) == 0  # even when the uniform number is 0
    assert int(count_accepted(zero, zero, zero, one > 0)[0]) == 0


def test_greedy_requests_keep_the_best_token():
    scores = jnp.asarray([[[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]])
    for token, expected in ((1, [1, 0]), (2, [1])):
        draft = Draft(jnp.asarray([[token]], jnp.int32), OneHot(), jnp.ones((1, 1)))
        found = accept_by_ratio(draft, scores, make_sampling(1), jnp.zeros(1, jnp.int32))
        assert np.asarray(found.tokens)[0, : int(found.count[0]) + 1].tolist() == expected


def test_what_is_verified_was_known_before_it_was_drawn():
    """The counter-example of DSpark's appendix A: c2 says which of A and B the first draft was.

    A scheduler that looks at c2 before it decides on the first draft emits A with probability 0.85; what was known before keeps 0.70.
    """
    p, q = jnp.asarray([0.7, 0.3]), jnp.asarray([0.5, 0.5])
    requests = 40_000
    seeds, prefix = jnp.arange(requests, dtype=jnp.uint32), jnp.zeros(requests, jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (requests, 2))
    noise = Noise(reseed(seeds, DRAFT), jnp.ones(requests, jnp.float32))
    first, drawn, own = draw(jnp.log(jnp.broadcast_to(q, (requests, 2))), ids, prefix + 1, noise)
    second = jnp.where((first == 0)[:, None], jnp.asarray([0.9, 0.1]), jnp.asarray([0.5, 0.5]))
    draft = Draft(
        jnp.stack([first, jnp.zeros_like(first)], axis=1),
        Sparse(jnp.broadcast_to(ids[:, None], (requests, 2, 2)), jnp.stack([drawn, second], axis=1)),
        jnp.stack([own, own * second[:, 0]], axis=1),
    )
    before = np.asarray(known_before(draft))
    assert len(set(before[:, 0].tolist())) == 1  # the same whatever was drawn
    assert len(set(before[:, 1].tolist())) == 2
    scores = jnp.log(jnp.broadcast_to(p, (requests, 3, 2)))
    options = make_sampling(1, temperature=1.0).rows(jnp.zeros(requests, jnp.int32)).replace(seeds=seeds)

    def share_of_a(verify):
        verified = jnp.stack([verify, verify], axis=1)
        return float(jnp.mean(accept_by_ratio(draft, scores, options, prefix, verified).tokens[:, 0] == 0))

    # Standard error 0.0023: a correct rule lies outside 0.69 .. 0.71 once in 50,000 runs.
    assert abs(share_of_a(jnp.asarray(before[:, 0] > 0.4)) - 0.7) < 0.01
    assert share_of_a(draft.survival[:, 1] > 0.3) > 0.8  # what this test must be able to see
