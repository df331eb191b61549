"""The candidate shortlist: same drafts as the whole vocabulary, exact sparse q, survival, and the loop that stops early."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import noise as noise_lib
from angelspec_jax.drafter import heads
from angelspec_jax.drafter.correction import correct
from angelspec_jax.drafter.loading import drafter_config
from angelspec_jax.drafter.types import DraftPolicy, Noise, OneHot, Shared, Sparse
from angelspec_jax.target.config import TransformerConfig

V, D, R, K = 256, 32, 3, 7
CONFIG = drafter_config(TransformerConfig(V, D, 48, 6, 4, 2, 8), mask_token=255, taps=2)
propose = jax.jit(heads.propose, static_argnums=1)


@pytest.fixture(scope="module")
def setup(randomize):
    """A correction large enough to change the chain, but not to lift a token into it from far down the base logits."""
    rng = np.random.default_rng(1)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    ones = jnp.ones(D, jnp.float32)
    head = randomize(heads.head_specs(CONFIG)).replace(hidden_norm=ones, embed_norm=ones, down=normal(D, D, scale=0.05))
    shared = Shared(normal(V, D), normal(V, D, scale=0.3))
    positions = jnp.broadcast_to(jnp.arange(20, 20 + K, dtype=jnp.int32), (R, K))
    anchor = jnp.arange(R, dtype=jnp.int32)
    return types.SimpleNamespace(head=head, shared=shared, hidden=normal(R, K, D), anchor=anchor, positions=positions)


def _propose(setup, *, candidates, noise=None, min_survival=0.0, head=True, shared=None):
    policy = DraftPolicy(jnp.float32(min_survival), candidates=candidates)
    config, own = (CONFIG, setup.head) if head else (dataclasses.replace(CONFIG, head=None), None)
    return propose(own, config, shared or setup.shared, setup.hidden, setup.anchor, setup.positions, noise, policy)


def _hot(temperature):
    return Noise(jnp.arange(7, 7 + R, dtype=jnp.uint32), jnp.full(R, temperature, jnp.float32))


def _logits(setup, tokens):
    """Corrected logits of the whole vocabulary along a chain."""
    previous = jnp.concatenate([setup.anchor[:, None], tokens[:, :-1]], axis=1)
    return correct(setup.head, CONFIG, setup.hidden, setup.shared.embed[previous]) @ setup.shared.head.T


def test_shortlist_gives_the_drafts_of_the_whole_vocabulary(setup):
    full, short = _propose(setup, candidates=0), _propose(setup, candidates=64)
    base = np.asarray(setup.hidden @ setup.shared.head.T)
    rank = (base > np.take_along_axis(base, np.asarray(full.tokens)[..., None], -1)).sum(-1)
    assert rank.max() < 64, "the case is meant to keep the corrected argmax among the candidates"
    assert rank.max() > 0, "the correction is meant to matter"
    np.testing.assert_array_equal(short.tokens, full.tokens)
    np.testing.assert_array_equal(full.tokens, jnp.argmax(_logits(setup, full.tokens), axis=-1))
    assert isinstance(short.q, OneHot)


def test_survival_is_the_product_of_the_heads_own_probabilities(setup):
    chain = _propose(setup, candidates=0)
    p = np.asarray(jax.nn.softmax(_logits(setup, chain.tokens), axis=-1))
    own = np.take_along_axis(p, np.asarray(chain.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chain.survival, np.cumprod(own, axis=1), rtol=1e-4)
    short = np.asarray(_propose(setup, candidates=64).survival)
    assert np.all(np.diff(short, axis=1) <= 0) and np.all(short >= np.asarray(chain.survival) - 1e-6)


@pytest.mark.parametrize("candidates", [0, 64])
def test_q_is_the_distribution_the_draft_was_drawn_from(setup, candidates):
    noise = _hot(0.7)
    chain = _propose(setup, candidates=candidates, noise=noise)
    assert isinstance(chain.q, Sparse)
    np.testing.assert_allclose(np.asarray(chain.q.p).sum(-1), 1.0, rtol=1e-5)
    assert np.all((np.asarray(chain.q.ids) == np.asarray(chain.tokens)[..., None]).sum(-1) == 1)
    scores = np.take_along_axis(np.asarray(_logits(setup, chain.tokens)), np.asarray(chain.q.ids), -1)
    np.testing.assert_allclose(chain.q.p, jax.nn.softmax(scores / 0.7, axis=-1), atol=1e-5)


def test_drafts_share_the_noise_of_the_target(setup):
    """A drafted token is argmax(logits / temperature + Gumbel noise of its place), whatever the shortlist."""
    noise = _hot(0.7)
    chain = _propose(setup, candidates=0, noise=noise)
    seeds = jnp.broadcast_to(noise.seeds[:, None], setup.positions.shape)
    gumbel = noise_lib.gumbel_all(seeds, setup.positions, V)
    np.testing.assert_array_equal(chain.tokens, jnp.argmax(_logits(setup, chain.tokens) / 0.7 + gumbel, axis=-1))


def test_temperature_zero_among_noisy_requests_is_greedy(setup):
    mixed = Noise(jnp.arange(R, dtype=jnp.uint32), jnp.array([0.0, 1.0, 0.0], jnp.float32))
    chain, greedy = _propose(setup, candidates=64, noise=mixed), _propose(setup, candidates=64)
    np.testing.assert_array_equal(chain.tokens[::2], greedy.tokens[::2])
    assert np.all(np.asarray(chain.q.p).max(-1)[::2] == 1.0)


def test_loop_stops_when_no_chain_survives(setup):
    full = _propose(setup, candidates=64)
    best = np.asarray(full.survival).max(axis=0)
    threshold = float(np.sqrt(best[2] * best[3]))  # the first three drafts of some request reach it, no fourth does
    short = _propose(setup, candidates=64, min_survival=threshold)
    made = 4  # the draft that falls below is made before it is known to
    np.testing.assert_array_equal(short.tokens[:, :made], full.tokens[:, :made])
    np.testing.assert_array_equal(short.survival[:, :made], full.survival[:, :made])
    assert np.all(np.asarray(short.survival)[:, made:] == 0) and np.all(np.asarray(short.tokens)[:, made:] == 0)


def test_without_a_head_the_slots_are_independent(setup):
    chain = _propose(setup, candidates=64, head=False)
    np.testing.assert_array_equal(chain.tokens, jnp.argmax(setup.hidden @ setup.shared.head.T, axis=-1))


@pytest.mark.parametrize("candidates", [0, 16])
def test_draft_vocabulary_proposes_target_ids(setup, candidates):
    ids = jnp.arange(0, V, 3, dtype=jnp.int32)
    reduced = Shared(setup.shared.embed, setup.shared.head[ids], ids)
    chain = _propose(setup, candidates=candidates, noise=_hot(1.0), shared=reduced)
    assert np.all(np.asarray(chain.tokens) % 3 == 0) and np.all(np.asarray(chain.q.ids) % 3 == 0)
    greedy = _propose(setup, candidates=0, shared=reduced)
    np.testing.assert_array_equal(greedy.tokens, ids[jnp.argmax(_logits(setup, greedy.tokens)[..., ::3], axis=-1)])
