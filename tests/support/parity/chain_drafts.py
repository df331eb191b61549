"""Rounds of autoregressive drafters: prefill, greedy steps, and a second round after some drafts were accepted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.drafter import layouts, registry
from angelspec_jax.drafter.types import DraftPolicy, Seen, Shared
from angelspec_jax.training import ttt
from parity.case import Case, supported

FULL = DraftPolicy(jnp.float32(0.0), candidates=0)
WIDE = 48  # cache slots, enough for every case


def read(case: Case):
    """Parameters, configuration and draft vocabulary; the cases leave open what the references' own code fixes."""
    depth = {} if "num_hidden_layers" in case.config and case.config["num_hidden_layers"] > 1 else {"present_layers": 36}
    params, config, _, draft_ids, *_ = supported(layouts.read, case.folder, input_postnorm=True, **depth)
    return jax.tree.map(jnp.asarray, params), config, draft_ids


def borrowed(case: Case, draft_ids) -> Shared:
    """The target's embedding and head: inputs of the case, or copies in the checkpoint."""
    stored = case.weights()
    embed = case.io["in.target_embed_weight"] if "in.target_embed_weight" in case.io else stored["embed_tokens.weight"]
    head = case.io["in.target_lm_head_weight"] if "in.target_lm_head_weight" in case.io else stored["lm_head.weight"]
    ids = None if draft_ids is None else jnp.asarray(draft_ids)
    return Shared(jnp.asarray(embed), jnp.asarray(head), ids)


def check_mtp(case: Case) -> None:
    params, config, draft_ids = read(case)
    shared, io = borrowed(case, draft_ids), case.io
    tokens = io["in.input_ids"][0]
    hidden = jnp.asarray(io["in.target_last_hidden"][0])
    _compare_states(case, params, config, shared, hidden, tokens, [io[f"out.step{k}.hidden"] for k in range(4)])
    logits = [io[f"out.step{k}.logits"] for k in range(4)]
    _compare_round(case, params, config, shared, hidden[:, None], hidden, tokens, 0, None, "", logits, io["out.draft_tokens"])


def check_eagle3(case: Case) -> None:
    """Llama-layer EAGLE-3: prefill and four steps."""
    params, config, draft_ids = read(case)
    shared, io = borrowed(case, draft_ids), case.io
    tokens, features = io["in.input_ids"][0], _features(io["in.target_hidden"], config)
    cell = registry.module(config).CELL
    fused = cell.condition(params, config, features, features[:, 0])
    case.close("fc_out", fused, io["out.fc_out"][0])
    logits = [io[f"out.step{k}.logits"] for k in range(5)]
    _compare_states(case, params, config, shared, fused, tokens, [io[f"out.step{k}.hidden"] for k in range(4)])
    _compare_round(case, params, config, shared, features, features[:, 0], tokens, 0, None, "", logits, io["out.draft_tokens"])


def check_deepspec_eagle3(case: Case) -> None:
    """DeepSpec's EAGLE-3: a round, three committed tokens with their target features, and a second round."""
    params, config, draft_ids = read(case)
    shared, io = borrowed(case, draft_ids), case.io
    tokens, features = io["in.input_ids"][0], _features(io["in.target_hidden"], config)
    state = _compare_round(case, params, config, shared, features, features[:, 0], tokens, 0, None, "r1.", *_said(io, "r1"))
    committed = io["in.r2.committed_tokens"][0]
    features = _features(io["in.r2.target_hidden"], config)[: len(committed)]
    tokens = np.concatenate([tokens, committed])
    start = len(tokens) - len(committed) - 1
    _compare_round(case, params, config, shared, features, features[:, 0], tokens, start, state, "r2.", *_said(io, "r2"))


def _said(io, turn: str):
    expected = io[f"out.{turn}.logits"]
    return [expected[:, k : k + 1] for k in range(expected.shape[1])], io[f"out.{turn}.draft_tokens"]


def _compare_round(case: Case, params, config, shared, features, hidden, tokens, start, state, turn, logits, drafts):
    """Digest the rows from position `start` on and draft: tokens, and the probability of each under the drafter."""
    module = registry.module(config)
    config = dataclasses.replace(config, num_drafts=len(logits))
    tokens, count = jnp.asarray(tokens, jnp.int32), features.shape[0]
    positions = jnp.arange(start, start + count, dtype=jnp.int32)
    state = module.create_state(config, 1, WIDE) if state is None else state
    extend, draft = jax.jit(module.extend, static_argnums=1), jax.jit(module.draft, static_argnums=1)
    rows = jnp.zeros(count, jnp.int32), positions, jnp.ones(count, bool)
    state = extend(params, config, shared, features, hidden, tokens[start + 1 : start + 1 + count], *rows, state)
    seen = Seen(tokens[-1:], jnp.asarray([start + count], jnp.int32), tokens[None])
    chain = draft(params, config, shared, seen, state, None, FULL)
    case.same(f"{turn}draft_tokens", chain.tokens, drafts)
    probabilities = jax.nn.softmax(jnp.concatenate([jnp.asarray(x)[0] for x in logits]), axis=-1)
    rows = chain.tokens[0] if shared.draft_ids is None else jnp.searchsorted(shared.draft_ids, chain.tokens[0])
    expected = jnp.cumprod(jnp.take_along_axis(probabilities, rows[:, None], axis=1)[:, 0])
    case.close(f"{turn}survival", chain.survival[0], expected)
    return state


def _compare_states(case: Case, params, config, shared, condition, tokens, expected) -> None:
    """Hidden states of the unrolled chain: at the last position at every step, and of the first step at all positions."""
    cell = registry.module(config).CELL
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
