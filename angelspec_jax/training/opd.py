"""Half on-policy distillation: the drafter proposes, the target says how likely each proposal was, and the drafter moves towards that.

The other objectives look at what stands in the data; this one at what the drafter itself would have said there (AngelSpec, arXiv
2607.25852). Every block becomes a branch that hangs off its anchor: anchor, first proposal, second, ... The target scores all branches of a
sequence in one pass: a branch sees the text before its anchor and, causally, itself, which is anchor attention. Proposals and scores carry
no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.data.features import document_rows
from angelspec_jax.drafter import block
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.target import kernels, kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.layers import decoder_layer, rms_norm, rotation
from angelspec_jax.target.transformer import TargetParams, forward, layer_at
from angelspec_jax.training import chunks, losses

Head = Callable[[Any], Array]  # rows (leaves [N, ...]) -> logits [N, V']


def distillation(
    params: block.BlockDrafter,
    drafter: DrafterConfig,
    embed: Float[Array, "V D"],
    states: Float[Array, "B A K D"],
    anchor_tokens: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    head: Head,
    teacher_head: Head,
    score: Callable[[Int[Array, "B A J"]], Float[Array, "B A J D"]],
    *,
    draft_ids: Int[Array, "V'"] | None = None,
    decay: float = 0.8,
    chunk: int = 1024,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(loss, proposals that the target accepts per block) of the drafter's own greedy blocks.

    `states` are the hidden states of the blocks before the sequential head, `score(branch)` the target's hidden states along a branch whose
    first token is the anchor: the j-th is what proposal j is judged by. With a draft vocabulary (`draft_ids`) the target is renormalised
    within it. AngelSpec trains the uncorrected hidden states of DFly here; this takes the rows that the sequential head makes of the
    proposals, which are what the drafter drafts with, so the head is trained as well.
    """
    first = drafter.first_slot
    own, tokens = propose(params, drafter, embed, states, anchor_tokens, head, draft_ids, chunk)
    previous = jnp.concatenate([anchor_tokens[:, :, None], tokens[:, :, :-1]], axis=2)
    branch = score(previous)
    before = jnp.pad(previous, ((0, 0), (0, 0), (first, 0)))
    rows = jax.tree.map(lambda x: x[:, :, first:], block.teacher_forced(params, drafter, embed, states, before))
    batch, anchors, drafts = own.shape
    grid = chunks.grid_of(batch, anchors, drafts, chunk)

    @jax.checkpoint
    def compare(part):
        student, teacher, chosen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), part)
        q, p = head(student).astype(jnp.float32), jax.lax.stop_gradient(teacher_head(teacher).astype(jnp.float32))
        pick = lambda scores: -losses.cross_entropy(scores, chosen)  # noqa: E731
        shape = part[2].shape
        return pick(q).reshape(shape), pick(p).reshape(shape), (jnp.argmax(p, axis=-1) == chosen).reshape(shape)

    _, said = chunks.scan(lambda carry, part: (carry, compare(part)), None, chunks.split((rows, branch, own), grid))
    student, teacher, hits = chunks.join(said, grid)
    mask = jnp.broadcast_to(keep[:, :, None], own.shape).astype(jnp.float32)
    accepted = losses.weighted_mean(jnp.sum(jnp.cumprod(hits.astype(jnp.float32), axis=-1), axis=-1), keep.astype(jnp.float32))
    return losses.weighted_mean(*losses.two_stream_k3(student, teacher, hits, mask, decay)), accepted


def propose(
    params: block.BlockDrafter,
    drafter: DrafterConfig,
    embed: Float[Array, "V D"],
    states: Float[Array, "B A K D"],
    anchor_tokens: Int[Array, "B A"],
    head: Head,
    draft_ids: Int[Array, "V'"] | None,
    chunk: int,
) -> tuple[Int[Array, "B A J"], Int[Array, "B A J"]]:
    """(rows of the head, token ids) of the greedy block of every anchor, each draft given the one before it."""
    states, params = jax.lax.stop_gradient((states, params))
    batch, anchors, width = states.shape[:3]
    grid = chunks.grid_of(batch, anchors, 1, chunk)
    before = jnp.zeros((batch, anchors, width), anchor_tokens.dtype).at[:, :, drafter.first_slot].set(anchor_tokens)

    def best(part):
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), part)
        return jnp.argmax(jax.lax.stop_gradient(head(rows)), axis=-1).astype(jnp.int32).reshape(jax.tree.leaves(part)[0].shape[:2])

    chosen, tokens = [], []
    for slot in range(drafter.first_slot, width):
        rows = block.teacher_forced(params, drafter, embed, states, before)
        one = jax.tree.map(lambda x, slot=slot: x[:, :, slot], rows)
        _, found = chunks.scan(lambda carry, part: (carry, best(part)), None, chunks.split(one, grid))
        chosen.append(chunks.join(found, grid))
        tokens.append(chosen[-1] if draft_ids is None else draft_ids[chosen[-1]])
        if slot + 1 < width:
            before = before.at[:, :, slot + 1].set(tokens[-1])
    return jnp.stack(chosen, axis=2), jnp.stack(tokens, axis=2)


def scorer(
    params: TargetParams,
    config: TransformerConfig,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    documents: Int[Array, "B S"] | None = None,
    most: int = 1,
) -> Callable[[Int[Array, "B A J"]], Float[Array, "B A J D"]]:
    """The `score` of `distillation` for one batch: one pass over the text, whose keys and values the branches then read.

    Raises ValueError for targets with sliding windows, which anchor attention does not know.
    """
    if config.sliding_window is not None:
        raise ValueError("objective.opd_weight needs a target without sliding windows; set it to 0")
    batch, length = tokens.shape
    rows = uniform_rows(jnp.zeros(batch, jnp.int32), length, causal=True) if documents is None else document_rows(documents, most)
    empty = kv_cache.create(config, rows.prefix_length.shape[0], 1, params.embed.dtype)
    _, _, (keys, values) = forward(params, config, tokens.reshape(-1), positions.reshape(-1), rows, empty)
    own_documents = None if documents is None else jnp.take_along_axis(documents, anchors, axis=1)
    start = jnp.take_along_axis(positions, anchors, axis=1)

    def score(branch: Int[Array, "B A J"]) -> Float[Array, "B A J D"]:
        place = start[:, :, None] + jnp.arange(branch.shape[2], dtype=jnp.int32)[None, None]
        turned, x = rotation(config, place), params.embed[branch]
        for index in range(config.num_layers):
            text = [part[index].reshape(batch, length, *part[index].shape[1:]) for part in (keys, values)]
            see = functools.partial(_see, text=text, places=(anchors, keep, documents, own_documents), scale=config.attention_scale)
            x, _ = decoder_layer(layer_at(params.layers, index), config, x, turned, see)
        return jax.lax.stop_gradient(rms_norm(x, params.final_norm, config.rms_norm_eps))

    return score


def _see(q, k, v, *, text, places, scale):
    k_text, v_text = text
    anchors, keep, documents, own_documents = places
    return kernels.anchor_attention(q, k_text, v_text, k, v, anchors, keep, documents, own_documents, causal=True, scale=scale)
