"""One training step: frozen target features, anchors, blocks or chains, loss, update. One jitted, donated program.

With a feature cache the batch carries the target's features; without one the target runs inside the step and its features never leave the
device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.config import OptimizationSection
from angelspec_jax.data.features import target_features
from angelspec_jax.drafter import block, registry
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.registry import AnyDrafter, TrainableConfig
from angelspec_jax.target import narrow
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import TargetParams
from angelspec_jax.training import dealing, opd, ttt
from angelspec_jax.training.anchors import block_targets, gather_rows, sample_anchors
from angelspec_jax.training.objective import Objective, block_loss

VALIDATION_KEY = 0x7E57  # the anchors of a held-out batch are the same at every evaluation


@struct.dataclass
class TrainState:
    step: Int[Array, ""]
    params: AnyDrafter  # float32 masters
    opt_state: optax.OptState
    key: jax.Array


@struct.dataclass
class Frozen:
    """What training reads and never changes."""

    target: TargetParams | None  # None when features come from a cache
    embed: Float[Array, "V D"]
    head: Float[Array, "V' D"]
    vocab_index: Int[Array, "V"] | None  # row of each token in `head`, -1 when it has none; None = identity
    draft_ids: Int[Array, "V'"] | None = None  # its inverse


Batch = dict[str, jax.Array]
Step = Callable[[TrainState, Frozen, Batch, int], tuple[TrainState, dict[str, jax.Array]]]


def vocabulary_index(draft_ids, vocabulary: int) -> Int[Array, "V"] | None:
    """The inverse of a draft vocabulary's id table."""
    if draft_ids is None:
        return None
    rows = jnp.arange(draft_ids.shape[0], dtype=jnp.int32)
    return jnp.full((vocabulary,), -1, jnp.int32).at[draft_ids].set(rows)


def create_state(params: AnyDrafter, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    masters: Any = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return TrainState(jnp.int32(0), masters, optimizer.init(masters), key)


def build(
    settings: OptimizationSection, drafter: TrainableConfig, target: TransformerConfig, optimizer: optax.GradientTransformation
) -> tuple[Step, Callable[[AnyDrafter, Frozen, Batch, int], dict[str, jax.Array]]]:
    """The training step and the held-out evaluation, both jitted.

    `train(state, frozen, batch, stage)` donates the state; `stage` indexes `settings.stages` and is static. `validate(params, frozen,
    batch, stage)` computes the same metrics without an update, on anchors that depend on the batch alone.
    """
    objectives = [stage.objective for stage in settings.stages]
    own = _block_loss if isinstance(drafter, DrafterConfig) else _chain_loss
    loss = functools.partial(own, settings=settings, drafter=drafter, target=target)

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
    def train(state: TrainState, frozen: Frozen, batch: Batch, stage: int):
        key = jax.random.fold_in(state.key, state.step)
        gradient = functools.partial(jax.grad(loss, has_aux=True), state.params, frozen)
        gradients, metrics = accumulated(gradient, batch, key, objectives[stage], settings.accumulate)
        params: Any = state.params
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its float32 scalars freely
            updates, opt_state = optimizer.update(gradients, state.opt_state, params)
            params = optax.apply_updates(params, updates)
            metrics["gradient_norm"] = optax.tree.norm(gradients)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    @functools.partial(jax.jit, static_argnums=3)
    def validate(params: AnyDrafter, frozen: Frozen, batch: Batch, stage: int):
        return loss(params, frozen, batch, jax.random.key(VALIDATION_KEY), objectives[stage])[1]

    return train, validate


def accumulated(gradient: Callable, batch: Batch, key: jax.Array, objective: Objective, parts: int) -> tuple[Any, dict[str, jax.Array]]:
    """Mean gradient and pooled metrics of `parts` equal parts of a batch, one after the other: the memory of one part.

    Part i takes every `parts`-th sequence from the i-th, so that all devices of a sharded batch have their share of every part. Each part's
    loss has denominators of its own, so the mean weighs parts equally, not tokens.
    """
    if parts == 1:
        return gradient(batch, key, objective)
    split = {name: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1) for name, x in batch.items()}

    def body(total, part):
        index, rows = part
        gradients, metrics = gradient(rows, jax.random.fold_in(key, index), objective)
        return jax.tree.map(lambda t, g: t + g / parts, total, gradients), metrics

    first = jax.eval_shape(lambda: gradient({name: x[0] for name, x in split.items()}, key, objective)[0])
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), first)
    gradients, metrics = jax.lax.scan(body, zeros, (jnp.arange(parts), split))
    return gradients, pooled(metrics)


def pooled(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of several parts, stacked, as one: "count" is summed, means per draft index are weighted by it, the rest is averaged."""
    count = jnp.sum(metrics["count"], axis=0)
    whole = {"count": count}
    for name, values in metrics.items():
        if name != "count" and values.ndim > 1:
            whole[name] = jnp.sum(values * metrics["count"], axis=0) / jnp.where(count > 0, count, 1.0)
        elif name != "count":
            whole[name] = jnp.mean(values)
    return whole


def _block_loss(
    params: block.BlockDrafter,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    objective: Objective,
    *,
    settings: OptimizationSection,
    drafter: DrafterConfig,
    target: TransformerConfig,
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    dtype = jnp.dtype(settings.compute_dtype)
    tokens, loss_mask = batch["tokens"], batch["loss_mask"].astype(jnp.float32)
    features, hidden = _features(frozen, batch, target, drafter.taps, dtype, settings.max_documents, objective.teacher_norm)
    valid, positions, documents = _places(batch)
    anchors, keep = sample_anchors(
        key, loss_mask, settings.anchors, drafter.block_size, rule=settings.anchor_rule, valid=valid, documents=documents
    )
    targets = block_targets(
        tokens, loss_mask, anchors, keep, drafter.block_size, drafter.layout, drafter.mask_token, documents=documents, positions=positions
    )
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    states = block.training_hidden(params, drafter, frozen.embed, features, positions, anchors, keep, targets.block_tokens, documents)
    rows = block.teacher_forced(params, drafter, frozen.embed, states, targets.previous)
    confidence = block.confidence_logits(params, drafter, states, targets.previous) if drafter.confidence else None
    labels = targets.labels if frozen.vocab_index is None else frozen.vocab_index[targets.labels]
    head, teacher_head = functools.partial(_slot_head, params, drafter, frozen.head), functools.partial(_head, rows=frozen.head)
    loss, metrics = block_loss(
        objective,
        rows,
        gather_rows(hidden, targets.teacher_index),
        labels,
        targets.weight_mask,
        head,
        layout=drafter.layout,
        chunk=settings.chunk,
        teacher_head=teacher_head,
        confidence_logits=confidence,
    )
    if objective.opd_weight > 0:
        if frozen.target is None:
            raise ValueError("objective.opd_weight has the target score what the drafter proposes: give the step the target")
        score = opd.scorer(frozen.target, target, tokens, positions, anchors, keep, documents, settings.max_documents)
        own = (params, drafter, frozen.embed, states, jnp.take_along_axis(tokens, anchors, axis=1), keep, head, teacher_head, score)
        options = {"draft_ids": frozen.draft_ids, "decay": objective.opd_decay, "chunk": settings.chunk}
        distilled, accepted = opd.distillation(*own, **options)
        loss = loss + objective.opd_weight * distilled
        metrics |= {"loss": loss, "opd": distilled, "tau_own": 1.0 + accepted}
    return loss, jax.lax.stop_gradient(metrics)


def _chain_loss(
    params: Any,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    objective: Objective,
    *,
    settings: OptimizationSection,
    drafter: Any,
    target: TransformerConfig,
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """TTT of an autoregressive drafter: the same anchors and labels as a block's, drafted one after another."""
    dtype = jnp.dtype(settings.compute_dtype)
    tokens, loss_mask = batch["tokens"], batch["loss_mask"].astype(jnp.float32)
    features, hidden = _features(frozen, batch, target, drafter.taps, dtype, settings.max_documents, objective.teacher_norm)
    steps, cell = settings.ttt.steps or drafter.num_drafts, registry.module(drafter).CELL
    valid, positions, documents = _places(batch)
    gated = ttt.gate(loss_mask, settings.ttt.mask)
    anchors, keep = sample_anchors(key, gated, settings.anchors, steps + 1, rule=settings.anchor_rule, valid=valid, documents=documents)
    keep = keep & (jnp.take_along_axis(positions, anchors, axis=1) > 0)  # nothing precedes the first token
    anchors, keep = dealing.deal(anchors), dealing.deal(keep)
    # Labels from the token after the anchor on: the slots after the first of a block that predicts its own places.
    whole = functools.partial(dealing.everywhere, like=anchors)
    targets = block_targets(
        whole(tokens),
        whole(gated),
        anchors,
        keep,
        steps + 1,
        "same_position",
        0,
        documents=None if documents is None else whole(documents),
        positions=whole(positions),
    )
    labels = targets.labels if frozen.vocab_index is None else frozen.vocab_index[targets.labels]
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    head = cell.head(params, drafter, frozen.head)
    rows = jax.lax.stop_gradient(head)
    states = ttt.unroll(
        cell,
        params,
        drafter,
        frozen.embed,
        cell.condition(params, drafter, features, hidden),
        tokens,
        positions,
        anchors,
        keep,
        steps,
        documents=documents,
        say=(lambda scored: ttt.greedy_tokens(scored, rows, frozen.draft_ids, settings.chunk)) if settings.ttt.on_policy else None,
    )
    return block_loss(
        objective,
        states,
        dealing.gather_rows(hidden, targets.teacher_index[:, :, 1:]),
        labels[:, :, 1:],
        targets.weight_mask[:, :, 1:],
        functools.partial(_head, rows=head),
        layout="anchor_first",
        chunk=settings.chunk,
        teacher_head=functools.partial(_head, rows=frozen.head),
    )


def _slot_head(params, drafter, rows, values):
    return block.slot_logits(params, drafter, values, rows)


def _head(hidden: Float[Array, "N D"], rows: Float[Array, "V' D"]) -> Float[Array, "N V'"]:
    return narrow.einsum("...d,vd->...v", hidden, rows.astype(hidden.dtype), jnp.float32)


def _places(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(real tokens [B, S], positions [B, S], documents [B, S] or None) of a batch, packed or not."""
    shape = batch["tokens"].shape
    valid = jnp.arange(shape[1])[None] < batch["lengths"][:, None]
    if "documents" in batch:
        return valid, batch["positions"], batch["documents"]
    return valid, jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape), None


def _features(frozen: Frozen, batch: Batch, target: TransformerConfig, taps: Sequence[int], dtype, most: int, norm: bool):
    """Tapped features and the teacher's hidden state, after the final norm or (`norm` false) before it."""
    if "features" in batch:
        if not norm:
            raise ValueError("objective.teacher_norm=false needs the target: cached features hold the normed hidden state only")
        return batch["features"].astype(dtype), batch["hidden"].astype(dtype)
    packed = (batch["documents"], batch["positions"], most) if "documents" in batch else ()
    read = tuple(taps) if norm else (*taps, target.num_layers - 1)
    both = jax.lax.stop_gradient(target_features(frozen.target, target, batch["tokens"], read, dtype, *packed))
    return both[:, :, : len(taps)], both[:, :, -1 if norm else -2]
