"""Early exit drafts what a model of the target's first layers would say; with such a drafter, as with lookup, the text stays the same."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.decoding import generate as generation
from angelspec_jax.decoding.generate import generate, start
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import early_exit
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.drafter.types import DraftPolicy, Noise, Seen
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
LAYERS, DRAFTS = 2, 5
draft = jax.jit(early_exit.draft, static_argnums=1)


@pytest.fixture(scope="module", params=[False, True], ids=["unrolled", "scanned"])
def target(request):
    config = TransformerConfig(96, 32, 48, 5, 4, 2, 8, scan_layers=request.param)
    return types.SimpleNamespace(params=initialize(target_specs(config), jax.random.key(3)), config=config, name="toy")


def proposal(target, noise=None, min_survival=0.0):
    drafter = load_drafter(f"early_exit:{LAYERS}:{DRAFTS}", target)
    state, _ = start(Plan(target.config), Weights(target.params), PROMPTS, 1, capacity=32)
    state = generation.jitted_prefill(Plan(target.config, prefill_chunk=8), Weights(target.params), state)
    anchor = jnp.asarray([prompt[-1] for prompt in PROMPTS], jnp.int32)
    seen = Seen(anchor, state.length - 1, state.tokens, target.params, state.cache)
    return draft(None, drafter.config, drafter.shared, seen, None, noise, DraftPolicy(jnp.float32(min_survival), candidates=0))


def shallow(target, **options):
    """What the first layers say when they are a model of their own."""
    first = jax.tree.map(lambda x: x[:LAYERS], target.params.layers) if target.config.scan_layers else target.params.layers[:LAYERS]
    plan = Plan(dataclasses.replace(target.config, num_layers=LAYERS))
    weights = Weights(dataclasses.replace(target.params, layers=first))
    return generate(plan, weights, PROMPTS, DRAFTS, sampling=make_sampling(len(PROMPTS), **options), capacity=32).texts()


def test_drafts_are_what_the_first_layers_would_say(target):
    found = proposal(target)
    assert np.asarray(found.tokens).tolist() == shallow(target)
    survival = np.asarray(found.survival)
    assert ((survival > 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()


def test_drafts_use_the_noise_of_their_position(target):
    noise = Noise(jnp.asarray([5, 6, 7], jnp.uint32), jnp.full((3,), 1.3, jnp.float32))
    found = proposal(target, noise)
    assert np.asarray(found.tokens).tolist() == shallow(target, temperature=1.3, seed=5)
    np.testing.assert_allclose(np.asarray(found.q.p).sum(axis=-1), 1.0, rtol=1e-5)


def test_the_loop_stops_when_no_chain_survives(target):
    whole = np.asarray(proposal(target).survival)
    threshold = float(whole.max(axis=0)[2]) * 1.001
    cut = np.asarray(proposal(target, min_survival=threshold).survival)
    last = int(np.argmax(whole.max(axis=0) < threshold))
    np.testing.assert_allclose(cut[:, : last + 1], whole[:, : last + 1], rtol=1e-6)
    assert (cut[:, last + 1 :] == 0).all()


@pytest.mark.parametrize("name", ["lookup", "lookup:3", "early_exit:4:3"])
def test_the_text_stays_the_same(target, name):
    drafter = load_drafter(name, target)
    plan = Plan(target.config, drafter.config, prefill_chunk=8)
    weights = Weights(target.params, drafter.params, drafter.shared)
    for options in ({}, {"temperature": [0.0, 0.7, 1.2], "top_k": 20, "seed": 4}):
        sampling = make_sampling(3, **options)
        alone = generate(Plan(target.config, prefill_chunk=8), Weights(target.params), PROMPTS, 24, sampling=sampling, capacity=64)
        drafted = generate(plan, weights, PROMPTS, 24, sampling=sampling, capacity=64)
        assert drafted.texts() == alone.texts()
        assert np.asarray(drafted.statistics.accepted).sum() > 0


def test_a_target_cannot_exit_after_its_last_layer(target):
    with pytest.raises(ValueError, match="between 1 and 4 of the target's 5 layers"):
        load_drafter("early_exit:5", target)
