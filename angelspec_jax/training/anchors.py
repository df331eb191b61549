"""Where drafting starts in a training sequence, and what a block drafter must say there.

Every sequence gives a fixed number `A` of anchors, so shapes never change; slots that found no place carry keep = False and anchor 0.
Two block layouts exist (design: a checkpoint says which). Both feed [anchor token, mask, mask, ...] at positions anchor + k:

* "same_position" (z-lab, AngelSpec): slot k predicts the token at anchor + k; slot 0 is never supervised, so K slots give K - 1 drafts;
* "anchor_first" (DeepSpec): slot k predicts the token at anchor + k + 1; K slots give K drafts, and only the unbroken prefix of
  supervised labels counts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from angelspec_jax.highest import ordered, threshold
from angelspec_jax.training.losses import contiguous_mask

FIRST_DRAFT_SLOT = {"same_position": 1, "anchor_first": 0}
RULES = ("label", "anchor", "both")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["labels", "previous", "weight_mask", "block_tokens", "positions", "teacher_index"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class BlockTargets:
    """Inputs and targets of `A` blocks of `K` slots per sequence."""

    labels: Int[Array, "B A K"]  # token each slot predicts; meaningless where weight_mask is 0
    previous: Int[Array, "B A K"]  # token just before the label (the anchor token for the slot of the first draft)
    weight_mask: Float[Array, "B A K"]  # 1 where the slot is supervised
    block_tokens: Int[Array, "B A K"]  # drafter input: the anchor token, then mask tokens
    positions: Int[Array, "B A K"]  # position of each slot, position of the anchor + k
    teacher_index: Int[Array, "B A K"]  # sequence index whose target hidden state predicts the label


def check_layout(layout: str) -> int:
    """The first slot that drafts a token in this layout."""
    if layout not in FIRST_DRAFT_SLOT:
        raise ValueError(f"block layout {layout!r} does not exist; choose one of {', '.join(FIRST_DRAFT_SLOT)}")
    return FIRST_DRAFT_SLOT[layout]


def eligible_anchors(
    loss_mask: Float[Array, "B S"],
    block_size: int,
    *,
    rule: str = "label",
    valid: Bool[Array, "B S"] | None = None,
    documents: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B S"]:
    """Where a block may start.

    * "label": the token after the anchor is supervised, so the first supervised token of a span is trained too, which is the token
      drafted right after the prompt; blocks may run over the end (their outer slots get weight 0).
    * "anchor" (AngelSpec): the anchor itself is supervised and the whole block fits in the sequence and in its document.
    * "both" (DeepSpec): anchor and next token are supervised; blocks may run over the end.

    `documents` numbers the packed documents (-1 is padding); `valid` marks real tokens.
    """
    if rule not in RULES:
        raise ValueError(f"anchor rule {rule!r} does not exist; choose one of {', '.join(RULES)}")
    length = loss_mask.shape[1]
    supervised = loss_mask > 0.5
    if valid is not None:
        supervised = supervised & valid
    reach = block_size - 1 if rule == "anchor" else 1
    if rule == "anchor":
        eligible = supervised
    else:
        following = _shift(supervised, 1, False)
        eligible = following if rule == "label" else following & supervised
    if valid is not None:
        eligible = eligible & valid
    eligible = eligible & (jnp.arange(length)[None, :] < length - reach)
    if documents is not None:
        eligible = eligible & (documents >= 0) & (documents == _shift(documents, reach, -1))
    return eligible


def sample_anchors(
    key: Key[Array, ""] | Array,
    loss_mask: Float[Array, "B S"],
    count: int,
    block_size: int,
    *,
    rule: str = "label",
    valid: Bool[Array, "B S"] | None = None,
    documents: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` anchors per sequence, uniform without replacement over `eligible_anchors`, sorted, with their keep mask.

    A sequence with fewer eligible positions takes them all; its remaining slots come last with anchor 0 and keep False.
    """
    eligible = eligible_anchors(loss_mask, block_size, rule=rule, valid=valid, documents=documents)
    batch, length = loss_mask.shape
    scores = jnp.where(eligible, jax.random.uniform(key, (batch, length)), -1.0)
    # The highest scores, of equal ones the first, by a threshold and running counts: long sequences would be sorted for them.
    images, wanted = ordered(scores), min(count, length)
    last = threshold(images, lambda above: jnp.sum(above, axis=-1, dtype=jnp.int32) >= wanted)[:, None]
    above, equal = images > last, images == last
    room = wanted - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    chosen = eligible & (above | (equal & (_running(equal) <= room)))
    rank = jnp.arange(1, count + 1, dtype=jnp.int32)
    index = jax.vmap(lambda reached: jnp.searchsorted(reached, rank))(_running(chosen)).astype(jnp.int32)
    keep = index < length
    return jnp.where(keep, index, 0), keep


def _running(which: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """How many there are up to each position."""
    return jnp.cumsum(which, axis=1, dtype=jnp.int32)


def block_targets(
    tokens: Int[Array, "B S"],
    loss_mask: Float[Array, "B S"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    block_size: int,
    layout: str,
    mask_token: int,
    *,
    documents: Int[Array, "B S"] | None,
    positions: Int[Array, "B S"] | None = None,
) -> BlockTargets:
    """Inputs, labels and supervision of every block.

    A slot is supervised when its block is kept, it drafts a token in this layout, its label lies inside the sequence and inside the
    anchor's document, and `loss_mask` is set at the label; "anchor_first" then keeps the unbroken prefix only. `positions` are the
    tokens' own positions (document-local when packed; default 0..S-1).
    """
    first = check_layout(layout)
    length = tokens.shape[1]
    slots = jnp.arange(block_size, dtype=anchors.dtype)[None, None, :]
    at = anchors[:, :, None] + slots + (1 - first)
    inside = at < length
    before = jnp.clip(at - 1, anchors[:, :, None], length - 1)
    at = jnp.minimum(at, length - 1)
    supervised = keep[:, :, None] & inside & (slots >= first) & (_take(loss_mask, at) > 0.5)
    if documents is not None:
        supervised = supervised & (_take(documents, at) == _take(documents, anchors)[:, :, None])
    weight_mask = supervised.astype(jnp.float32)
    if layout == "anchor_first":
        weight_mask = contiguous_mask(weight_mask)
    anchor_token = _take(tokens, anchors)[:, :, None]
    own = anchors if positions is None else _take(positions, anchors)
    return BlockTargets(
        labels=_take(tokens, at),
        previous=_take(tokens, before),
        weight_mask=weight_mask,
        block_tokens=jnp.where(slots == 0, anchor_token, jnp.asarray(mask_token, tokens.dtype)),
        positions=own[:, :, None] + slots.astype(own.dtype),
        teacher_index=jnp.maximum(at - 1, 0),
    )


def gather_rows(values: Float[Array, "B S D"], index: Int[Array, "B *index"]) -> Float[Array, "B *index D"]:
    """`values[b, index[b, ...]]`: for example the target hidden state of every `teacher_index`."""
    return jax.vmap(lambda sequence, at: sequence[at])(values, index)


def _take(values: Array, index: Array) -> Array:
    """values[b, index[b, ...]] for values [B, S] and any index shape [B, ...]."""
    flat = index.reshape(index.shape[0], -1)
    return jnp.take_along_axis(values, flat, axis=1).reshape(index.shape)


def _shift(values: Array, by: int, fill) -> Array:
    """values[:, i + by], and `fill` past the end."""
    moved = values[:, by:]
    return jnp.pad(moved, ((0, 0), (0, values.shape[1] - moved.shape[1])), constant_values=fill)
