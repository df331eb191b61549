"""The walk over chains and trees against a walk written out by hand."""

import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding.acceptance import accept
from angelspec_jax.drafter.types import Draft, OneHot


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
