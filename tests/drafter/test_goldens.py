"""Block drafters against numbers of the public references: context, layers, hidden states, logits, chains, draft cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax.drafter import block, context, layouts
from angelspec_jax.drafter.types import DraftPolicy, Seen, Shared
from angelspec_jax.target.layers import rms_norm

TOLERANCE = 1e-4
# One compilation each instead of one per operation.
block_hidden = jax.jit(block.block_hidden, static_argnums=1)
confidence_logits = jax.jit(block.confidence_logits, static_argnums=1)
conditions = jax.jit(context.conditions, static_argnums=1)
draft = jax.jit(block.draft, static_argnums=1)
extend = jax.jit(block.extend, static_argnums=1)
slot_logits = jax.jit(block.slot_logits, static_argnums=1)
teacher_forced = jax.jit(block.teacher_forced, static_argnums=1)
training_hidden = jax.jit(block.training_hidden, static_argnums=1)
FULL = DraftPolicy(jnp.float32(0.0), candidates=0)
ZLAB = ["zlab_dflash", "zlab_dflash_wide_heads"]
ANGELSPEC = ["angelspec_dflash", "angelspec_dflare", "angelspec_dfly", "angelspec_dfly_wide_heads", "angelspec_dspark"]
DEEPSPEC = ["deepspec_dflash", *(f"deepspec_dspark_{name}" for name in ("vanilla", "gated", "rnn", "conf_nomarkov"))]


def _load(folder):
    params, config, *_ = layouts.read(folder)
    return jax.tree.map(jnp.asarray, params), config


def _digest(params, config, features, start, state):
    """Extend the draft cache with one request's features [S, T, D] from position `start` on."""
    count = features.shape[0]
    positions = jnp.arange(start, start + count, dtype=jnp.int32)
    return extend(
        params, config, None, features, features[:, 0], positions, jnp.zeros(count, jnp.int32), positions, jnp.ones(count, bool), state
    )


def _close(ours, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(ours), expected, rtol=0, atol=tolerance)


def _check_layers(params, config, shared, anchor, prefix, state, expected):
    """Outputs of each draft layer, compared after the final norm: a drafter of the first layers alone gives them."""
    for index, layer in enumerate(expected):
        first = params.replace(layers=params.layers[: index + 1])
        hidden = block_hidden(first, config, shared, anchor, prefix, state)
        _close(hidden, rms_norm(jnp.asarray(layer), params.norm, config.transformer.rms_norm_eps))


def _check_confidence(params, config, chain, hidden, previous, logits, confidence):
    """Logits of the trained head along the chain, and the survival that comes of them."""
    if logits is None:
        return
    first = config.first_slot
    _close(confidence_logits(params, config, hidden[:, first:], previous[:, first:]), logits)
    _close(chain.survival, np.cumprod(confidence, axis=1))


@pytest.mark.parametrize("case", ANGELSPEC)
def test_angelspec_block(golden, case):
    folder, io, settings = golden(f"drafters/{case}")
    params, config = _load(folder)
    assert config.block_size == settings["block_size"] and config.family == settings["family"]
    embed = jnp.asarray(load_file(folder / "model.safetensors")["embed_tokens.weight"])
    shared = Shared(embed, jnp.asarray(io["in.target_lm_head_weight"]))
    features = jnp.asarray(io["in.target_hidden"][0])
    contexts = conditions(params.context, config, features)
    for index, ours in enumerate(contexts):
        _close(ours, io["out.ctx" if "out.ctx" in io else f"out.ctx{index if f'out.ctx{index}' in io else 0}"][0])

    length = features.shape[0]
    state = _digest(params, config, features, 0, block.create_state(config, 1, length))
    anchor, prefix = jnp.asarray(io["in.anchor_token"], jnp.int32), jnp.asarray([length], jnp.int32)
    _check_layers(params, config, shared, anchor, prefix, state, [io["out.layer0"], io["out.layer1"]])
    hidden = block_hidden(params, config, shared, anchor, prefix, state)
    _close(hidden, io["out.hidden"])
    if "out.base_logits" in io:
        _close(hidden @ shared.head.T, io["out.base_logits"])

    chain = draft(params, config, shared, Seen(anchor, prefix, anchor[:, None]), state, None, FULL)
    np.testing.assert_array_equal(chain.tokens, io["out.draft_tokens"])
    previous = jnp.concatenate([anchor[:, None], anchor[:, None], chain.tokens[:, :-1]], axis=1)
    rows = teacher_forced(params, config, embed, hidden, previous)
    if "out.corrected_hidden" in io:
        _close(rows[:, 1:], io["out.corrected_hidden"])
    _close(slot_logits(params, config, rows, shared.head)[:, 1:], io["out.logits"])
    _check_confidence(params, config, chain, hidden, previous, io.get("out.confidence_logits"), io.get("out.confidence"))


@pytest.mark.parametrize("case", [*ZLAB, *DEEPSPEC])
def test_two_rounds_share_the_draft_cache(golden, case):
    folder, io, _ = golden(f"drafters/{case}")
    params, config = _load(folder)
    stored = load_file(folder / "model.safetensors")
    embed = io["in.target_embed_weight"] if "in.target_embed_weight" in io else stored["embed_tokens.weight"]
    head = io["in.target_lm_head_weight"] if "in.target_lm_head_weight" in io else stored["lm_head.weight"]
    shared = Shared(jnp.asarray(embed), jnp.asarray(head))
    state, seen = block.create_state(config, 1, 40), 0
    for turn in ("r1", "r2"):
        width = config.transformer.hidden_size
        features = jnp.asarray(io[f"in.{turn}.target_hidden"][0]).reshape(-1, len(config.taps), width)
        state = _digest(params, config, features, seen, state)
        seen += features.shape[0]
        assert seen == int(io[f"in.{turn}.start"][0])
        anchor, prefix = jnp.asarray(io[f"in.{turn}.anchor_token"], jnp.int32), jnp.asarray([seen], jnp.int32)
        if f"out.{turn}.ctx" in io:
            _close(conditions(params.context, config, features)[0], io[f"out.{turn}.ctx"][0])
            _check_layers(params, config, shared, anchor, prefix, state, [io[f"out.{turn}.layer0"], io[f"out.{turn}.layer1"]])
            for index in range(config.transformer.num_layers):
                _close(jnp.swapaxes(state.cache.k[index], 2, 3)[:, :, :seen], io[f"out.{turn}.cache_k{index}"])
                _close(state.cache.v[index][:, :, :seen], io[f"out.{turn}.cache_v{index}"])
        hidden = block_hidden(params, config, shared, anchor, prefix, state)
        _close(hidden, io[f"out.{turn}.hidden"])
        if f"out.{turn}.base_logits" in io:
            _close(hidden @ shared.head.T, io[f"out.{turn}.base_logits"])
        chain = draft(params, config, shared, Seen(anchor, prefix, anchor[:, None]), state, None, FULL)
        np.testing.assert_array_equal(chain.tokens, io[f"out.{turn}.draft_tokens"])
        # Slot 0 of the same-position layout yields nothing: what stands before it is not looked at.
        before = [anchor[:, None]] * (1 + config.first_slot)
        previous = jnp.concatenate([*before, chain.tokens[:, :-1]], axis=1)
        logits = slot_logits(params, config, teacher_forced(params, config, shared.embed, hidden, previous), shared.head)
        _close(logits[:, config.first_slot :], io[f"out.{turn}.logits"])
        _check_confidence(
            params, config, chain, hidden, previous, io.get(f"out.{turn}.confidence_logits"), io.get(f"out.{turn}.confidence")
        )
    if "in.teacher_forced_prev" in io:
        rows = teacher_forced(params, config, shared.embed, hidden, jnp.asarray(io["in.teacher_forced_prev"], jnp.int32))
        _close(slot_logits(params, config, rows, shared.head), io["out.r2.teacher_forced_logits"])


@pytest.mark.parametrize("variant", ["unpacked", "packed"])
@pytest.mark.parametrize("case", ["angelspec_dflash", "angelspec_dflare", "angelspec_dfly", "angelspec_dspark"])
def test_training_forward(golden, case, variant):
    folder, io, _ = golden(f"training/{case}")
    params, config = _load(folder)
    embed = jnp.asarray(load_file(folder / "model.safetensors")["embed_tokens.weight"])
    features = jnp.asarray(io[f"in.{variant}.target_hidden"])
    tokens = jnp.asarray(io[f"in.{variant}.input_ids"], jnp.int32)
    anchors, keep = jnp.asarray(io[f"in.{variant}.anchors"], jnp.int32), jnp.asarray(io[f"in.{variant}.keep"], bool)
    documents = positions = None
    if variant == "packed":
        documents = jnp.asarray(io["in.packed.ctx_doc_ids"], jnp.int32)
        positions = jnp.asarray(io["in.packed.base_position_ids"], jnp.int32)
    else:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    first = jnp.where(keep, first, config.mask_token)  # blocks that are not kept hold masks only
    tokens = jnp.full((*anchors.shape, config.block_size), config.mask_token, jnp.int32).at[:, :, 0].set(first)
    hidden = training_hidden(params, config, embed, features, positions, anchors, keep, tokens, documents)
    _close(hidden, io[f"out.{variant}.draft_hidden"])
    rows = teacher_forced(params, config, embed, hidden, jnp.asarray(io[f"out.{variant}.prev_tokens"], jnp.int32))
    _close(slot_logits(params, config, rows, jnp.asarray(io["in.target_lm_head_weight"])), io[f"out.{variant}.logits"])
