"""The parts that block drafters are composed of: Markov heads, confidence, the gated sum of layers, and a head with a way of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.drafter import block, confidence, context, heads
from angelspec_jax.drafter.loading import drafter_config
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen, Shared
from angelspec_jax.params import abstract
from angelspec_jax.target.config import TransformerConfig

V, D, R, K = 64, 16, 2, 5
TARGET = TransformerConfig(V, D, 24, 6, 4, 2, 4)
OPTIONS = {"mask_token": 63, "taps": 2, "num_layers": 1, "block_size": K + 1, "rank": 4}
propose = jax.jit(heads.propose, static_argnums=1, static_argnames="judge")
POSITIONS = jnp.broadcast_to(jnp.arange(20, 20 + K, dtype=jnp.int32), (R, K))
ANCHOR = jnp.array([3, 9], jnp.int32)


def _config(head: str, temperatures=(), **options):
    config = drafter_config(TARGET, family="dspark", head=head, **{"confidence": "none"} | OPTIONS | options)
    return dataclasses.replace(config, confidence_temperatures=temperatures)


def _given(randomize, config, seed=0):
    """Random parameters of the head, the target's weights, and hidden states of the slots."""
    head = randomize(heads.head_specs(config), seed)
    rng = np.random.default_rng(seed + 1)
    embed, rows, hidden = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((V, D), (V, D), (R, K, D)))
    return head.replace(w1=head.w1 * 10, w2=head.w2 * 5), Shared(embed, rows * 0.3), hidden


def _teacher_forced(head, config, shared, hidden, tokens):
    """Logits of the slots along a chain, by the path that training takes; a slot before the first draft is filled with noise."""
    first = config.first_slot
    before = [ANCHOR[:, None]] * (first + 1)
    previous = jnp.concatenate([*before, tokens[:, :-1]], axis=1)
    whole = jnp.concatenate([jnp.full((R, first, D), 7.0, jnp.float32), hidden], axis=1)
    rows = heads.teacher_rows(head, config, shared.embed, whole, previous)
    return heads.row_logits(head, config, rows, shared.head)[:, first:]


@pytest.mark.parametrize("layout", ["same_position", "anchor_first"])
@pytest.mark.parametrize("kind", ["markov_vanilla", "markov_gated", "markov_rnn"])
def test_drafting_and_training_agree(kind, layout, randomize):
    config = _config(kind, layout=layout)
    head, shared, hidden = _given(randomize, config)
    chain = propose(head, config, shared, hidden, ANCHOR, POSITIONS, None, DraftPolicy(jnp.float32(0.0), candidates=0))
    logits = _teacher_forced(head, config, shared, hidden, chain.tokens)
    np.testing.assert_array_equal(chain.tokens, jnp.argmax(logits, axis=-1))
    assert (chain.tokens != jnp.argmax(hidden @ shared.head.T, axis=-1)).any(), "the head is meant to matter"
    own = np.take_along_axis(np.asarray(jax.nn.softmax(logits, axis=-1)), np.asarray(chain.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chain.survival, np.cumprod(own, axis=1), rtol=1e-4)


def test_a_shortlist_is_what_an_rnn_draws_from(randomize):
    config = _config("markov_rnn")
    head, shared, hidden = _given(randomize, config)
    noise = Noise(jnp.arange(R, dtype=jnp.uint32), jnp.full(R, 0.8, jnp.float32))
    chain = propose(head, config, shared, hidden, ANCHOR, POSITIONS, noise, DraftPolicy(jnp.float32(0.0), candidates=8))
    logits = np.asarray(_teacher_forced(head, config, shared, hidden, chain.tokens))
    scores = np.take_along_axis(logits, np.asarray(chain.q.ids), -1)
    np.testing.assert_allclose(chain.q.p, jax.nn.softmax(scores / 0.8, axis=-1), atol=1e-5)
    assert chain.q.ids.shape == (R, K, 8)


def test_temperatures_bend_either_confidence():
    temperatures = (0.5, 1.0, 2.0, 1.0, 4.0)
    plain, scaled = (_config("markov_vanilla", t) for t in ((), temperatures))
    own = jnp.array([0.9, 0.2], jnp.float32)
    np.testing.assert_array_equal(confidence.from_probability(own, plain, 0), own)
    logit = np.log(np.asarray(own) / (1 - np.asarray(own)))
    for draft, temperature in enumerate(temperatures):
        expected = 1 / (1 + np.exp(-logit / temperature))
        np.testing.assert_allclose(confidence.from_probability(own, scaled, draft), expected, rtol=1e-5)
        np.testing.assert_allclose(confidence.from_logits(jnp.asarray(logit), scaled, jnp.int32(draft)), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="confidence_temperatures must be 5 positive numbers"):
        _config("markov_vanilla", (1.0, -1.0, 1.0, 1.0, 1.0))


def test_survival_is_the_trained_heads_word(randomize):
    config = _config("markov_vanilla", confidence="hidden_markov")
    params = randomize(block.drafter_specs(config))
    _, shared, hidden = _given(randomize, config)
    policy = DraftPolicy(jnp.float32(0.0), candidates=0)
    chain = heads.propose(params.head, config, shared, hidden, ANCHOR, POSITIONS, None, policy, block.judge(params, config))
    previous = np.concatenate([np.asarray(ANCHOR)[:, None], np.asarray(chain.tokens)[:, :-1]], axis=1)
    features = np.concatenate([np.asarray(hidden), np.asarray(params.head.w1)[previous]], axis=-1)
    logits = features @ np.asarray(params.confidence.weight) + np.asarray(params.confidence.bias)
    np.testing.assert_allclose(chain.survival, np.cumprod(1 / (1 + np.exp(-logits)), axis=1), rtol=1e-4)


def test_a_head_may_propose_in_a_way_of_its_own(monkeypatch, randomize):
    """All slots at once, as a refining head does: a row in the table is all it takes."""

    def at_once(head, config, shared, hidden, base, anchor, positions, noise, policy, judge):
        tokens = jnp.argmax(base, axis=-1).astype(jnp.int32)
        return Draft(tokens, OneHot(), jnp.ones(tokens.shape, jnp.float32))

    config = dataclasses.replace(_config("markov_vanilla"), head="hidden_correction", rank=None, confidence=None)
    monkeypatch.setitem(heads.HEADS, "hidden_correction", heads.CORRECTION._replace(propose=at_once))
    _, shared, hidden = _given(randomize, _config("markov_vanilla"))
    chain = heads.propose(None, config, shared, hidden, ANCHOR, POSITIONS, None, DraftPolicy(jnp.float32(0.0), candidates=8))
    np.testing.assert_array_equal(chain.tokens, jnp.argmax(hidden @ shared.head.T, axis=-1))


def test_the_gated_sum_mixes_normed_layers(randomize):
    options = {**OPTIONS, "rank": None, "taps": 3, "num_layers": 2}
    config = dataclasses.replace(drafter_config(TARGET, family="dflash", context="gated_sum", **options), gate_temperature=0.5)
    params = randomize(context.context_specs(config))
    features = np.random.default_rng(2).normal(size=(7, 3, D)).astype(np.float32)
    first, second = context.conditions(params, config, jnp.asarray(features))

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.transformer.rms_norm_eps) * np.asarray(weight)

    gate = np.exp(np.asarray(params.fusion_gate) / 0.5)
    mixed = np.einsum("t,ntd->nd", gate / gate.sum(), norm(features, params.candidate_norm))
    np.testing.assert_allclose(first, norm(mixed, params.norm), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(first, second)
    gradient = jax.grad(lambda p: jnp.sum(context.conditions(p, config, jnp.asarray(features))[0]))(params)
    assert np.any(gradient.fusion_gate)


@pytest.mark.parametrize("draft_vocab", [None, 24])
@pytest.mark.parametrize(
    "options",
    [
        {"family": "dflare", "rank": None},
        {"family": "dflash", "context": "gated_sum", "rank": None},
        *({"family": "dspark", "head": head} for head in ("markov_vanilla", "markov_gated", "markov_rnn")),
        {"family": "dspark", "confidence": "hidden", "layout": "anchor_first"},
    ],
)
def test_every_family_drafts_and_trains_in_bfloat16(options, draft_vocab):
    """Shapes and types alone: strict promotion makes a mixture of types an error."""
    config = drafter_config(TARGET, draft_vocab=draft_vocab, **OPTIONS | options)
    half, whole = jnp.bfloat16, jnp.int32
    params = abstract(block.drafter_specs(config), half)
    ids = None if draft_vocab is None else jax.ShapeDtypeStruct((draft_vocab,), whole)
    shared = Shared(jax.ShapeDtypeStruct((V, D), half), jax.ShapeDtypeStruct((draft_vocab or V, D), half), ids)
    noise = Noise(jax.ShapeDtypeStruct((R,), jnp.uint32), jax.ShapeDtypeStruct((R,), jnp.float32))
    seen = Seen(*(jax.ShapeDtypeStruct(shape, whole) for shape in ((R,), (R,), (R, 16))))

    def draft(params, shared, seen, noise):
        state = block.create_state(config, R, 16, half)
        return block.draft(params, config, shared, seen, state, noise, DraftPolicy(jnp.float32(0.0), candidates=8))

    chain = jax.eval_shape(draft, params, shared, seen, noise)
    assert chain.tokens.shape == chain.survival.shape == (R, config.num_drafts)
    assert chain.survival.dtype == jnp.float32
    hidden, previous = jax.ShapeDtypeStruct((R, 3, K + 1, D), half), jax.ShapeDtypeStruct((R, 3, K + 1), whole)

    def train(params, shared, hidden, previous):
        rows = block.teacher_forced(params, config, shared.embed, hidden, previous)
        sure = block.confidence_logits(params, config, hidden, previous) if config.confidence else None
        return block.slot_logits(params, config, rows, shared.head), sure

    logits, sure = jax.eval_shape(train, params, shared, hidden, previous)
    assert (logits.shape, logits.dtype) == ((R, 3, K + 1, draft_vocab or V), jnp.float32)
    assert sure is None or (sure.shape, sure.dtype) == ((R, 3, K + 1), jnp.float32)
