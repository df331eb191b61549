"""One draft step of a block drafter, or two that share the draft cache: context, layers, hidden states, logits, chains."""

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.drafter import block, context, layouts
from angelspec_jax.drafter.types import DraftPolicy, Seen, Shared
from angelspec_jax.target.layers import rms_norm
from parity.case import Case, as_arrays, supported

# One compilation each instead of one per operation.
block_hidden = jax.jit(block.block_hidden, static_argnums=1)
conditions = jax.jit(context.conditions, static_argnums=1)
confidence_logits = jax.jit(block.confidence_logits, static_argnums=1)
draft = jax.jit(block.draft, static_argnums=1)
extend = jax.jit(block.extend, static_argnums=1)
slot_logits = jax.jit(block.slot_logits, static_argnums=1)
teacher_forced = jax.jit(block.teacher_forced, static_argnums=1)
FULL = DraftPolicy(jnp.float32(0.0), candidates=0)


def read(case: Case):
    """Parameters, configuration and draft vocabulary of the case's drafter."""
    params, config, _, draft_ids, *_ = supported(layouts.read, case.folder)
    return as_arrays(params), config, draft_ids


def shared(case: Case, draft_ids=None) -> Shared:
    """The target's embedding and head, its rows of the draft vocabulary: inputs of the case, or copies in the checkpoint."""
    stored = case.weights()

    def find(key: str, name: str):
        if key in case.io:
            return case.io[key]
        found = [value for stored_name, value in stored.items() if stored_name.endswith(name)]
        if len(found) != 1:
            raise AssertionError(f"{case.folder} has neither {key} nor one tensor {name}")
        return found[0]

    embed = find("in.target_embed_weight", "embed_tokens.weight")
    head = jnp.asarray(find("in.target_lm_head_weight", "lm_head.weight"))
    if draft_ids is None:
        return Shared(jnp.asarray(embed), head)
    ids = jnp.asarray(draft_ids, jnp.int32)
    return Shared(jnp.asarray(embed), head if len(head) == len(ids) else head[ids], ids)


def check_one_round(case: Case) -> None:
    """AngelSpec: a context and one block after it."""
    params, config, draft_ids = read(case)
    if "block_size" in case.params:
        case.same("block_size", config.block_size, case.params["block_size"])
    for row in case.rows("in.target_hidden"):
        features = _features(row.io["in.target_hidden"], config)
        state = _digest(params, config, features, 0, block.create_state(config, 1, features.shape[0]))
        _compare_block(row, params, config, shared(case, draft_ids), features, features.shape[0], state, "")


def check_rounds(case: Case) -> None:
    """z-lab and DeepSpec: rounds that extend one draft cache."""
    params, config, draft_ids = read(case)
    turns = sorted({name.split(".")[1] for name in case.io if name.startswith("in.r") and name.count(".") > 1}, key=lambda x: int(x[1:]))
    for row in case.rows(f"in.{turns[0]}.target_hidden"):
        _compare_rounds(row, params, config, shared(case, draft_ids), turns)


def _compare_rounds(case: Case, params, config, borrowed: Shared, turns: list[str]) -> None:
    given = [_features(case.io[f"in.{turn}.target_hidden"], config) for turn in turns]
    state, seen = block.create_state(config, 1, sum(features.shape[0] for features in given)), 0
    for turn, features in zip(turns, given, strict=True):
        state = _digest(params, config, features, seen, state)
        seen += features.shape[0]
        case.same(f"{turn}.start", seen, case.io[f"in.{turn}.start"][0])
        _compare_block(case, params, config, borrowed, features, seen, state, f"{turn}.")


def _compare_block(case: Case, params, config, borrowed: Shared, features, seen: int, state, turn: str) -> None:
    expected = case.io.under(f"out.{turn}")
    anchor, prefix = jnp.asarray(case.io[f"in.{turn}anchor_token"], jnp.int32), jnp.asarray([seen], jnp.int32)
    for name in sorted(name for name in expected if name.startswith("ctx")):
        ours = conditions(params.context, config, features)[int(name[3:] or 0)]
        case.close(f"{turn}{name}", ours, expected[name][0])
    for index in range(config.transformer.num_layers):
        if f"cache_k{index}" in expected:
            case.close(f"{turn}cache_k{index}", jnp.swapaxes(state.cache.k[index], 2, 3)[:, :, :seen], expected[f"cache_k{index}"])
            case.close(f"{turn}cache_v{index}", state.cache.v[index][:, :, :seen], expected[f"cache_v{index}"])
        if f"layer{index}" in expected:  # after the final norm: a drafter of the first layers alone gives them
            first = params.replace(layers=params.layers[: index + 1])
            normed = rms_norm(jnp.asarray(expected[f"layer{index}"]), params.norm, config.transformer.rms_norm_eps)
            case.close(f"{turn}layer{index}", block_hidden(first, config, borrowed, anchor, prefix, state), normed)
    hidden = block_hidden(params, config, borrowed, anchor, prefix, state)
    if "hidden" in expected:
        case.close(f"{turn}hidden", hidden, expected["hidden"])
    if "block_ids" in expected:
        masks = np.full((1, config.block_size - 1), config.mask_token)
        case.same(f"{turn}block_ids", np.concatenate([anchor[:, None], masks], axis=1), expected["block_ids"])
    if "base_logits" in expected:
        case.close(f"{turn}base_logits", hidden @ borrowed.head.T, expected["base_logits"])
    chain = draft(params, config, borrowed, Seen(anchor, prefix, anchor[:, None]), state, None, FULL)
    case.same(f"{turn}draft_tokens", chain.tokens, expected["draft_tokens"])
    first = config.first_slot
    # Slot 0 of the same-position layout yields nothing: what stands before it is not looked at.
    previous = jnp.concatenate([anchor[:, None]] * (1 + first) + [chain.tokens[:, :-1]], axis=1)
    rows = teacher_forced(params, config, borrowed.embed, hidden, previous)
    if "corrected_hidden" in expected:
        case.close(f"{turn}corrected_hidden", rows[:, first:], expected["corrected_hidden"])
    if "logits" in expected:
        case.close(f"{turn}logits", slot_logits(params, config, rows, borrowed.head)[:, first:], expected["logits"])
    if "confidence_logits" in expected:
        ours = confidence_logits(params, config, hidden[:, first:], previous[:, first:])
        case.close(f"{turn}confidence_logits", ours, expected["confidence_logits"])
        confidence = jax.nn.sigmoid(ours)
        if "confidence" in expected:
            case.close(f"{turn}confidence", confidence, expected["confidence"])
            case.close(f"{turn}survival", chain.survival, np.cumprod(expected["confidence"], axis=1))
        thresholds = case.params.get("thresholds", case.params.get("confidence_thresholds", []))
        if thresholds and "proposal_lengths" in expected:
            high = [np.cumprod(np.asarray(confidence)[0] >= threshold).sum() for threshold in thresholds]
            case.same(f"{turn}proposal_lengths", high, expected["proposal_lengths"])
    if "teacher_forced_logits" in expected:
        own = f"in.{turn}teacher_forced_prev"
        before = case.io[own if own in case.io else "in.teacher_forced_prev"]
        rows = teacher_forced(params, config, borrowed.embed, hidden, jnp.asarray(before, jnp.int32))
        case.close(f"{turn}teacher_forced_logits", slot_logits(params, config, rows, borrowed.head), expected["teacher_forced_logits"])


def _features(values: np.ndarray, config) -> jax.Array:
    """[S, T, D], from features stacked or concatenated over the tapped layers."""
    return jnp.asarray(values[0]).reshape(-1, len(config.taps), config.transformer.hidden_size)


def _digest(params, config, features, start: int, state):
    """Extend the draft cache with one request's features [S, T, D] from position `start` on."""
    count = features.shape[0]
    positions = jnp.arange(start, start + count, dtype=jnp.int32)
    return extend(
        params, config, None, features, features[:, 0], positions, jnp.zeros(count, jnp.int32), positions, jnp.ones(count, bool), state
    )
