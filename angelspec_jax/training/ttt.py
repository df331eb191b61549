"""Test-time training (TTT) of autoregressive drafters: the chain a drafter will walk, unrolled step by step from sampled anchors.

A chain starts where decoding would draft: at an anchor a, whose token the target has just said and whose features nobody has. Its first row
pairs what the target left at a - 1 with the token at a and predicts the token at a + 1; every further row pairs the next token with the
drafter's own output (EAGLE-3 section 3.1, AngelSpec section on MTP). Row k of a chain sees the keys of the target's features before a and
the keys of its own chain, one per step, in one softmax: what training code that unrolls all positions at once calls a causal block and
diagonals, merged by log-sum-exp. With anchors at every position the two are the same; chains never see each other, so a sample of anchors
costs a sample's share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.drafter.autoregressive import Cell
from angelspec_jax.target import kernels, narrow
from angelspec_jax.target.layers import decoder_layer, project_kv, rotation
from angelspec_jax.target.whole import along_sequence
from angelspec_jax.training import chunks, dealing

MASKS = ("label", "input")


def unroll(
    cell: Cell,
    params: Any,
    config: Any,
    embed: Float[Array, "V D"],
    condition: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    anchors: Int[Array, "dealt A"],
    keep: Bool[Array, "dealt A"],
    steps: int,
    documents: Int[Array, "B S"] | None = None,
    say: Callable[[Float[Array, "dealt A D"]], Int[Array, "dealt A"]] | None = None,
) -> Float[Array, "dealt A K D"]:
    """What the head scores at each of `steps` steps of every chain; chains that are not kept mean nothing.

    `condition` is what the target leaves at every position (`Cell.condition`), `positions` restart per document. Step k reads the token at
    anchor + k; with `say` (on-policy rollout) it reads instead what the drafter itself says after step k - 1, `say(scored)`, without
    gradient. Rows rotate at their own position; MTP's zeroed embedding at position 0 goes by where the chain's first row stands, at every
    step, as in AngelSpec's training (in decoding only that row itself has it, which is the same but for chains that start there). Anchors
    may be dealt over the devices that share a sequence (`training.dealing`), else there are B rows of them.
    """
    model, layer, dtype, length = config.transformer, params.layer, condition.dtype, tokens.shape[1]
    following = along_sequence(jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))))  # the last row has no partner, and no chain sees it
    condition, places = along_sequence(condition), along_sequence(positions)
    _, normed = cell.read(params, config, along_sequence(embed[following]).astype(dtype), condition, places)
    k_context, v_context = project_kv(layer, model, normed, rotation(model, places))
    first = jnp.maximum(anchors - 1, 0)
    positions, tokens = dealing.everywhere(positions, anchors), dealing.everywhere(tokens, anchors)
    start = jnp.take_along_axis(positions, first, axis=1)
    own_documents = None if documents is None else jnp.take_along_axis(dealing.everywhere(documents, anchors), first, axis=1)
    hidden, token = dealing.gather_rows(condition, first), jnp.take_along_axis(tokens, anchors, axis=1)
    keys, values, scored = [], [], []
    for step in range(steps):

        def see(q, k, v):
            keys.append(k)
            values.append(v)
            k_chain, v_chain = jnp.stack(keys, axis=2), jnp.stack(values, axis=2)
            out = kernels.anchor_attention(
                q[:, :, None], k_context, v_context, k_chain, v_chain, first, keep, documents, own_documents,
                causal=False, scale=model.attention_scale,
            )  # fmt: skip
            return out[:, :, 0]

        x, normed = cell.read(params, config, embed[token].astype(dtype), hidden, start)
        y, _ = decoder_layer(layer, model, x, rotation(model, start + step), see, normed)
        hidden, said = cell.write(params, config, y)
        scored.append(said)
        if say is None:
            token = jnp.take_along_axis(tokens, jnp.minimum(anchors + step + 1, length - 1), axis=1)
        elif step + 1 < steps:
            token = say(jax.lax.stop_gradient(said))
    return jnp.stack(scored, axis=2)


def greedy_tokens(
    scored: Float[Array, "B A D"], head: Float[Array, "V' D"], draft_ids: Int[Array, "V'"] | None, chunk: int
) -> Int[Array, "B A"]:
    """The token each row would say, with logits of at most `chunk` rows alive at once."""
    grid = chunks.grid_of(scored.shape[0], scored.shape[1], 1, chunk)

    def best(carry, rows):
        logits = narrow.einsum("...d,vd->...v", rows, head.astype(rows.dtype), jnp.float32)
        return carry, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    found = chunks.join(chunks.scan(best, None, chunks.split(scored, grid))[1], grid)
    return found if draft_ids is None else draft_ids[found]


def gate(loss_mask: Float[Array, "B S"], rule: str) -> Float[Array, "B S"]:
    """The supervision mask at the label's place.

    "label": a prediction counts when its label is supervised (AngelSpec's MTP). "input": when the token two places before it is, which is
    how every public EAGLE-3 trainer aligns its mask (the unshifted mask at step 0): the two first tokens of an answer are not trained and
    two past its end are. Right is "label"; the other is there for recipes that are to be repeated as published.
    """
    if rule not in MASKS:
        raise ValueError(f"the mask rule must be one of {', '.join(MASKS)}, got {rule!r}")
    return loss_mask if rule == "label" else jnp.pad(loss_mask, ((0, 0), (2, 0)))[:, : loss_mask.shape[1]]
