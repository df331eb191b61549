"""Rounds of autoregressive drafters: prefill, greedy steps, and a second round after some drafts were accepted."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.drafter import layouts, registry
from angelspec_jax.drafter.types import DraftPolicy, Seen, Shared
from angelspec_jax.training import ttt
from parity.case import Case, as_arrays, supported

FULL = DraftPolicy(jnp.float32(0.0), candidates=0)
ROOM = 64  # cache slots for what is drafted and committed after the prefill


def read(case: Case):
    """Parameters, configuration and draft vocabulary; the cases leave open what the references' own code fixes."""
    config = case.config
    open_answers: dict[str, Any] = {"input_postnorm": True}
    if config.get("num_hidden_layers", 1) <= 1:  # nothing says how deep the target is: deep enough for the layer ids
        ids = config.get("target_layer_ids") or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        open_answers["present_layers"] = max([36, *((index + 1) for index in ids or ())])
        width = case.weights()["fc.weight"].shape[1] // config["hidden_size"] if ids is None and "fc.weight" in case.weights() else 0
        if width not in (0, 3):  # where EAGLE-3 leaves the ids to its code, there are three
            open_answers["taps"] = tuple(range(width))
    params, config, _, draft_ids, *_ = supported(layouts.read, case.folder, **open_answers)
    return as_arrays(params), config, draft_ids


def borrowed(case: Case, draft_ids) -> Shared:
    """The target's embedding and head: inputs of the case, or copies in the checkpoint."""
    stored = case.weights()
    embed = case.io["in.target_embed_weight"] if "in.target_embed_weight" in case.io else stored["embed_tokens.weight"]
    head = case.io["in.target_lm_head_weight"] if "in.target_lm_head_weight" in case.io else stored["lm_head.weight"]
    ids = None if draft_ids is None else jnp.asarray(draft_ids)
    return Shared(jnp.asarray(embed), jnp.asarray(head), ids)


def check_mtp(case: Case) -> None:
    params, config, draft_ids = read(case)
    shared = borrowed(case, draft_ids)
    if draft_ids is not None:  # it has no head of its own
        shared = shared.replace(head=shared.head[shared.draft_ids])
    for row in case.rows("in.input_ids"):
        tokens, hidden = row.io["in.input_ids"][0], jnp.asarray(row.io["in.target_last_hidden"][0])
        _compare_states(row, params, config, shared, hidden, tokens)
        _compare_round(row, params, config, shared, hidden[:, None], hidden, tokens, 0, None, "", _steps(row, "logits"))


def check_eagle3(case: Case) -> None:
    """Llama-layer EAGLE-3: prefill and a chain of steps."""
    params, config, draft_ids = read(case)
    shared = borrowed(case, draft_ids)
    cell = registry.module(config).CELL
    for row in case.rows("in.input_ids"):
        tokens, features = row.io["in.input_ids"][0], _features(row.io["in.target_hidden"], config)
        fused = cell.condition(params, config, features, features[:, 0])
        if "out.fc_out" in row.io:
            row.close("fc_out", fused, row.io["out.fc_out"][0])
        _compare_states(row, params, config, shared, fused, tokens)
        _compare_round(row, params, config, shared, features, features[:, 0], tokens, 0, None, "", _steps(row, "logits"))


def check_deepspec_eagle3(case: Case) -> None:
    """DeepSpec's EAGLE-3: a round, then further ones after committed tokens with their target features."""
    params, config, draft_ids = read(case)
    shared = borrowed(case, draft_ids)
    for row in case.rows("in.input_ids"):
        tokens, features = row.io["in.input_ids"][0], _features(row.io["in.target_hidden"], config)
        state = _compare_round(row, params, config, shared, features, features[:, 0], tokens, 0, None, "r1.", _said(row, 1))
        turn = 2
        while f"in.r{turn}.committed_tokens" in row.io:
            committed = row.io[f"in.r{turn}.committed_tokens"][0]
            features = _features(row.io[f"in.r{turn}.target_hidden"], config)[: len(committed)]
            start, tokens = len(tokens) - 1, np.concatenate([tokens, committed])
            said = _said(row, turn)
            state = _compare_round(row, params, config, shared, features, features[:, 0], tokens, start, state, f"r{turn}.", said)
            turn += 1


def _steps(case: Case, what: str) -> list[np.ndarray]:
    """What the case holds of every step, from the first on."""
    names = itertools.takewhile(lambda name: name in case.io, (f"out.step{step}.{what}" for step in itertools.count()))
    return [case.io[name] for name in names]


def _said(case: Case, turn: int) -> list[np.ndarray]:
    expected = case.io[f"out.r{turn}.logits"]
    return [expected[:, k : k + 1] for k in range(expected.shape[1])]


def _compare_round(case: Case, params, config, shared, features, hidden, tokens, start, state, turn, logits):
    """Digest the rows from position `start` on and draft: tokens, and the probability of each under the drafter."""
    module = registry.module(config)
    config = dataclasses.replace(config, num_drafts=len(logits))
    tokens, count = jnp.asarray(tokens, jnp.int32), features.shape[0]
    positions = jnp.arange(start, start + count, dtype=jnp.int32)
    state = module.create_state(config, 1, ROOM + len(tokens)) if state is None else state
    extend, draft = jax.jit(module.extend, static_argnums=1), jax.jit(module.draft, static_argnums=1)
    rows = jnp.zeros(count, jnp.int32), positions, jnp.ones(count, bool)
    state = extend(params, config, shared, features, hidden, tokens[start + 1 : start + 1 + count], *rows, state)
    seen = Seen(tokens[-1:], jnp.asarray([start + count], jnp.int32), tokens[None])
    chain = draft(params, config, shared, seen, state, None, FULL)
    case.same(f"{turn}draft_tokens", chain.tokens, case.io[f"out.{turn}draft_tokens"])
    probabilities = jax.nn.softmax(jnp.concatenate([jnp.asarray(x)[0] for x in logits]), axis=-1)
    rows = chain.tokens[0] if shared.draft_ids is None else jnp.searchsorted(shared.draft_ids, chain.tokens[0])
    expected = jnp.cumprod(jnp.take_along_axis(probabilities, rows[:, None], axis=1)[:, 0])
    case.close(f"{turn}survival", chain.survival[0], expected)
    if f"out.{turn}draft_ids_draft_vocab" in case.io:
        case.same(f"{turn}draft_ids_draft_vocab", rows[None], case.io[f"out.{turn}draft_ids_draft_vocab"])
    return state


def _compare_states(case: Case, params, config, shared, condition, tokens) -> None:
    """Hidden states of the unrolled chain: at the last position at every step, and of the first step at all positions."""
    cell, expected = registry.module(config).CELL, _steps(case, "hidden")
    if not expected:
        return
    tokens = jnp.asarray(tokens, jnp.int32)
    padded = jnp.concatenate([condition, jnp.zeros_like(condition[:1])])[None]
    anchors = jnp.arange(1, tokens.shape[0], dtype=jnp.int32)[None]
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    head = cell.head(params, config, shared.head)
    said = jax.jit(
        lambda params: ttt.unroll(
            cell, params, config, shared.embed, padded, tokens[None], positions, anchors, jnp.ones(anchors.shape, bool), len(expected),
            say=lambda scored: ttt.greedy_tokens(scored, head, shared.draft_ids, 64),
        )
    )(params)  # fmt: skip
    for step, values in enumerate(expected):
        ours = said[0, :, step]
        normed = _scored(params, config, jnp.asarray(values[0]))
        case.close(f"step{step}.hidden", ours if step == 0 else ours[-1:], normed)


def _scored(params, config, hidden):
    """What the head reads of the reference's hidden state: MTP's is normed already, and EAGLE-3's where the normed output is fed back."""
    if config.family.startswith("mtp"):
        return hidden
    return registry.module(config).CELL.write(params, config, hidden)[1]


def _features(values: np.ndarray, config) -> jax.Array:
    """[S, T, D], from features stacked or concatenated over the tapped layers."""
    return jnp.asarray(values[0]).reshape(-1, len(config.taps), config.transformer.hidden_size)
