"""The block-parallel drafter: context keys and values in a cache, one pass over a block of masks, a sequential head.

One code path serves every family: `DrafterConfig` chooses the context, the head and the confidence.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from angelspec_jax.drafter import confidence
from angelspec_jax.drafter.confidence import Confidence
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.context import Context, conditions, context_kv, context_specs
from angelspec_jax.drafter.drawing import shortlist
from angelspec_jax.drafter.heads import HEADS, head_specs, propose, row_logits, teacher_rows
from angelspec_jax.drafter.types import Draft, DrafterState, DraftPolicy, Noise, Seen, Shared
from angelspec_jax.params import Param
from angelspec_jax.target import kernels, kv_cache
from angelspec_jax.target.attention import attend, block_ancestors, uniform_rows
from angelspec_jax.target.layers import Layer, decoder_layer, layer_specs, rms_norm, rotation


@struct.dataclass
class BlockDrafter:
    context: Context
    layers: tuple[Layer, ...]
    norm: jax.Array  # [D]
    head: Any = None  # of the kind that `config.head` names
    confidence: Confidence | None = None


def drafter_specs(config: DrafterConfig) -> BlockDrafter:
    """Declaration of every trainable parameter; embedding and LM head are the target's."""
    width = config.transformer.hidden_size
    return BlockDrafter(
        context=context_specs(config),
        layers=(layer_specs(config.transformer),) * config.transformer.num_layers,
        norm=Param((width,), (None,), "ones", dtype=jnp.float32),
        head=head_specs(config),
        confidence=confidence.specs(config),
    )


def create_state(config: DrafterConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> DrafterState:
    return DrafterState(kv_cache.create(config.transformer, requests, capacity, dtype, page))


def extend(
    params: BlockDrafter,
    config: DrafterConfig,
    shared: Shared,
    features: Float[Array, "N T D"],
    hidden: Float[Array, "N D"],
    next_tokens: Int[Array, "N"],
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
    state: DrafterState,
) -> DrafterState:
    """Digest the features of tokens the target has committed; rows not `accepted` leave no trace.

    Every drafter gets the tapped features, the hidden state after the final norm and the token that follows; a block drafter reads the
    features alone.
    """
    del shared, hidden, next_tokens
    with jax.named_scope("draft_extend"):
        contexts = conditions(params.context, config, features.astype(params.layers[0].o.dtype))
        turned = rotation(config.transformer, positions)
        kv = [
            context_kv(params.context, config, index, layer, context, turned)
            for index, (layer, context) in enumerate(zip(params.layers, contexts, strict=True))
        ]
        new_kv = tuple(k for k, _ in kv), tuple(v for _, v in kv)
        return DrafterState(kv_cache.commit(state.cache, new_kv, request, positions, accepted))


def draft(
    params: BlockDrafter,
    config: DrafterConfig,
    shared: Shared,
    seen: Seen,
    state: DrafterState,
    noise: Noise | None,
    policy: DraftPolicy,
) -> Draft:
    """Propose a chain after each request's anchor, the last emitted token, which stands at `seen.prefix_length`."""
    anchor, prefix_length = seen.anchor, seen.prefix_length
    with jax.named_scope("draft_block"):
        hidden = block_hidden(params, config, shared, anchor, prefix_length, state)
    slots = hidden[:, config.first_slot :]
    offsets = jnp.arange(1, config.num_drafts + 1, dtype=jnp.int32)
    with jax.named_scope("draft_head"):
        positions = prefix_length[:, None] + offsets[None]
        return propose(params.head, config, shared, slots, anchor, positions, noise, policy, judge(params, config))


def start_tree(
    params: BlockDrafter, config: DrafterConfig, shared: Shared, seen: Seen, state: DrafterState, policy: DraftPolicy, lanes: int
) -> tuple[tuple[Float[Array, "R K D"], Float[Array, "R K M"], Int[Array, "R K M"]], Any]:
    """The slots' hidden states, base scores and candidates (rows of the head), and the head's state in every lane."""
    with jax.named_scope("draft_block"):
        slots = block_hidden(params, config, shared, seen.anchor, seen.prefix_length, state)[:, config.first_slot :]
    base = jnp.einsum("rkd,vd->rkv", slots, shared.head, preferred_element_type=jnp.float32)
    return (slots, *shortlist(base, policy.candidates)), HEADS[config.head].start(params.head, (seen.anchor.shape[0], lanes))


def expand(
    params: BlockDrafter, config: DrafterConfig, shared: Shared, seen: Seen, state, fixed, memory, depth, tokens, origin, policy
) -> tuple[Int[Array, "R W M"], Float[Array, "R W M"], Any]:
    """Children of all lanes at once: the slot's marginals, or the head's conditionals after each lane's last token."""
    del seen, state, policy
    slots, base, ids = (jax.lax.dynamic_index_in_dim(x, depth, axis=1) for x in fixed)  # [R, 1, ..]
    memory = jax.tree.map(lambda x: jnp.take_along_axis(x, origin.reshape(*origin.shape, *(1,) * (x.ndim - 2)), axis=1), memory)
    spread = lambda x: jnp.broadcast_to(x, (*tokens.shape, x.shape[-1]))  # noqa: E731
    slots, base, ids = spread(slots), spread(base), spread(ids)
    everything = ids.shape[-1] == shared.head.shape[0]
    scores, memory = HEADS[config.head].score(params.head, config, shared, slots, tokens, None if everything else ids, base, memory)
    return ids if shared.draft_ids is None else shared.draft_ids[ids], scores, memory


def judge(params: BlockDrafter, config: DrafterConfig):
    """The confidence strategy of this drafter, for `heads.propose`."""

    def by_probability(draft, hidden, previous, own):
        del hidden, previous
        return confidence.from_probability(own, config, draft)

    def by_head(draft, hidden, previous, own):
        del own
        return confidence.from_logits(confidence_logits(params, config, hidden, previous), config, draft)

    return by_probability if params.confidence is None else by_head


def confidence_logits(
    params: BlockDrafter, config: DrafterConfig, hidden: Float[Array, "*N D"], previous: Int[Array, "*N"]
) -> Float[Array, "*N"]:
    """Logits of the trained confidence head for slots whose previous tokens are known, before any temperature."""
    assert params.confidence is not None, "this drafter has no confidence head"
    embedding = params.head.w1[previous] if config.confidence == "hidden_markov" else None
    return confidence.logits(params.confidence, hidden, embedding)


def block_hidden(params, config: DrafterConfig, shared: Shared, anchor, prefix_length, state) -> Float[Array, "R K D"]:
    """Hidden states of a block [anchor, mask, ...] after the final norm, before any correction."""
    requests, width = anchor.shape[0], config.block_size
    rows = uniform_rows(prefix_length, width, ancestors=block_ancestors(width))
    tokens = jnp.full((requests, width), config.mask_token, jnp.int32).at[:, 0].set(anchor).reshape(-1)
    positions = (prefix_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]).reshape(-1)
    x = shared.embed[tokens].astype(params.layers[0].o.dtype)
    model = config.transformer
    turned = rotation(model, positions)
    for index, layer in enumerate(params.layers):

        k_cache, v_cache = state.cache.layer(index)

        def see(q, k, v, k_cache=k_cache, v_cache=v_cache):
            return attend(
                q, k, v, k_cache, v_cache, state.cache.table, rows, positions,
                scale=model.attention_scale, window=model.sliding_window,
            )  # fmt: skip

        x, _ = decoder_layer(layer, model, x, turned, see)
    return rms_norm(x, params.norm, model.rms_norm_eps).reshape(requests, width, -1)


def training_hidden(
    params: BlockDrafter,
    config: DrafterConfig,
    embed: Float[Array, "V D"],
    features: Float[Array, "B S T D"],
    positions: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    block_tokens: Int[Array, "B A K"],
    documents: Int[Array, "B S"] | None = None,
) -> Float[Array, "B A K D"]:
    """Hidden states of A blocks per sequence at once, before the correction (AngelSpec training forward).

    Each block sees the context strictly before its anchor (same document when packed) and itself; `positions` restart per document.
    """
    model, width = config.transformer, config.block_size
    contexts = conditions(params.context, config, features)
    start = jnp.take_along_axis(positions, anchors, axis=1)
    block_positions = start[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    anchor_documents = None if documents is None else jnp.take_along_axis(documents, anchors, axis=1)
    context_turned, block_turned = rotation(model, positions), rotation(model, block_positions)
    x = embed[block_tokens].astype(features.dtype)
    for index, (layer, context) in enumerate(zip(params.layers, contexts, strict=True)):
        k_context, v_context = context_kv(params.context, config, index, layer, context, context_turned)

        def see(q, k, v, k_context=k_context, v_context=v_context):
            return kernels.anchor_attention(
                q, k_context, v_context, k, v, anchors, keep, documents, anchor_documents, causal=False, scale=model.attention_scale
            )

        x, _ = decoder_layer(layer, model, x, block_turned, see)
    return rms_norm(x, params.norm, model.rms_norm_eps)


def teacher_forced(
    params: BlockDrafter, config: DrafterConfig, embed: Float[Array, "V D"], hidden: Float[Array, "*N K D"], previous: Int[Array, "*N K"]
) -> PyTree:
    """What the logits of slots are made of with the true previous tokens; leaves [.., K, ...], for `slot_logits`."""
    return teacher_rows(params.head, config, embed, hidden, previous)


def slot_logits(params: BlockDrafter, config: DrafterConfig, rows: PyTree, head: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    """Logits of `teacher_forced` rows over the head's rows."""
    return row_logits(params.head, config, rows, head)
