"""From hidden states of drafted blocks to one loss, never holding more than a chunk of vocabulary-sized rows.

Every objective is a sum over blocks divided by a number that carries no gradient:

    loss = sum(w row) / sum(w)  +  e2e_tv_weight * mean over blocks of (1 - expected accepted drafts / valid slots)

with `row` a mix of cross entropy, L1, KL and LK terms and `w` the position weights times the mask (AngelSpec, arXiv 2607.25852; DSpark,
arXiv 2607.05147). A chunk is a whole number of blocks, so products along a block stay inside it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from angelspec_jax.training import chunks, losses
from angelspec_jax.training.anchors import check_layout

STEPWISE = ("steps", "steps_all")
POSITION_WEIGHTINGS = ("uniform", "decay", "dpace", "dpace_masked", *STEPWISE)
E2E_CHAINS = ("valid", "whole")
LK_TYPES = ("hybrid", "alpha", "batch")
NOT_NEGATIVE = ("ce_weight", "l1_weight", "e2e_tv_weight", "confidence_weight", "kl_topk", "teacher_topk", "lk_eta", "step_decay")
NOT_NEGATIVE += ("opd_weight", "opd_decay")
BACKWARDS = ("fused", "recompute", "save")
NEEDS_TEACHER = "this objective compares with the target: give block_loss the target's hidden states (teacher)"

Head = Callable[[PyTree], Array]  # rows (leaves [N, ...]) -> logits [N, V]


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a drafter is trained on.

    base = ce_weight CE + l1_weight L1 (L1 = twice the total variation). With `lk_weight` w > 0 the row is w LK + (1 - w) base; else with
    `kl_weight` w > 0 it is w KL + (1 - w) base: w = 1 means no cross entropy at all. End-to-end TV is added on top, outside the position
    weights; so is the confidence head's loss, inside them. "dpace" takes AngelSpec's products over every slot; "dpace_masked" passes
    over unsupervised slots, which is right where blocks may run over the end of a sequence (anchor rules "label" and "both").

    "steps" gives every draft index a mean of its own over the slots that count, times step_decay ** j, and adds these up (TTT as AngelSpec
    has it); "steps_all" divides by the number of all slots, supervised or not (SafeAILab, SpecForge, DeepSpec), which only scales the
    gradient of a batch by its supervised share.

    End-to-end TV runs over the valid slots of a block (AngelSpec's block drafters) or, with `e2e_chains` "whole", over blocks all of whose
    slots are supervised (AngelSpec's MTP). `e2e_surrogate` replaces it by LK rows with detached weights that have the same direction.

    `lk_type` "batch" weighs KL and TV by the acceptance of the whole batch (SpecForge). `opd_weight` adds half on-policy distillation on
    the drafter's own proposals (`training.opd`), outside the position weights. `teacher_norm` false compares with the target's last
    hidden state before its final norm, as AngelSpec's L1 does although no token is ever drawn from it: only to repeat such a recipe.
    """

    ce_weight: float = 1.0
    l1_weight: float = 0.0
    lk_weight: float = 0.0
    lk_type: str = "hybrid"
    lk_eta: float = 3.0
    kl_weight: float = 0.0
    kl_topk: int = 0  # 0: the whole vocabulary
    kl_renormalize: bool = False  # variant A of the top-k KL; False is variant B
    teacher_topk: int = 0  # LK, L1 and end-to-end TV within the teacher's best tokens, renormalised (AngelSpec's MTP: 10000); 0: all
    e2e_tv_weight: float = 0.0
    e2e_chains: str = "valid"
    e2e_surrogate: bool = False
    confidence_weight: float = 0.0
    position_weighting: str = "decay"
    decay_gamma: float = 7.0
    dpace_alpha: float = 0.5
    step_decay: float = 0.8
    opd_weight: float = 0.0
    opd_decay: float = 0.8
    teacher_norm: bool = True

    def __post_init__(self):
        if self.position_weighting not in POSITION_WEIGHTINGS:
            known = ", ".join(POSITION_WEIGHTINGS)
            raise ValueError(f"objective.position_weighting {self.position_weighting!r} does not exist; choose one of {known}")
        if self.lk_type not in LK_TYPES:
            raise ValueError(f"objective.lk_type {self.lk_type!r} does not exist; choose one of {', '.join(LK_TYPES)}")
        for name in ("lk_weight", "kl_weight", "dpace_alpha"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"objective.{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.e2e_chains not in E2E_CHAINS:
            raise ValueError(f"objective.e2e_chains {self.e2e_chains!r} does not exist; choose one of {', '.join(E2E_CHAINS)}")
        if self.e2e_surrogate and self.e2e_chains != "whole":
            raise ValueError("objective.e2e_surrogate is defined on whole chains only; set objective.e2e_chains to whole")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"objective.{name} must not be negative, got {getattr(self, name)}")
        if self.lk_weight > 0 and self.kl_weight > 0:
            raise ValueError("objective.lk_weight and objective.kl_weight exclude each other; set one of them to 0")
        if not self.teacher_norm and (self.lk_weight or self.kl_weight or self.e2e_tv_weight or self.opd_weight):
            raise ValueError("objective.teacher_norm=false goes with l1_weight and confidence_weight only; every other term needs the norm")
        if self.lk_type == "batch" and self.e2e_surrogate:
            raise ValueError("objective.e2e_surrogate needs an LK of every position; set objective.lk_type to hybrid or alpha")
        if self.decay_gamma <= 0:
            raise ValueError(f"objective.decay_gamma must be positive, got {self.decay_gamma}")
        if not (self.trains_rows or self.e2e_tv_weight or self.confidence_weight or self.opd_weight):
            raise ValueError("the objective has no term: give at least one of its weights a positive value")

    @property
    def base_share(self) -> float:
        return 1.0 - max(self.lk_weight, self.kl_weight)

    @property
    def trains_rows(self) -> bool:
        """Whether a position-weighted term exists."""
        return self.base_share * (self.ce_weight + self.l1_weight) + self.lk_weight + self.kl_weight > 0

    @property
    def needs_teacher(self) -> bool:
        return self.base_share * self.l1_weight + self.lk_weight + self.kl_weight + self.e2e_tv_weight + self.confidence_weight > 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ce", "correct", "kl", "alpha", "top_kl"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class BlockTerms:
    """Per-slot values of blocks; J counts the slots that draft. Terms that need a teacher are None without one."""

    ce: Float[Array, "B A J"]
    correct: Float[Array, "B A J"]
    kl: Float[Array, "B A J"] | None
    alpha: Float[Array, "B A J"] | None
    top_kl: Float[Array, "B A J"] | None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["student", "teacher", "labels", "mask", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Blocks:
    student: PyTree  # leaves [B, A, J, ...]
    teacher: PyTree | None
    labels: Int[Array, "B A J"]
    mask: Float[Array, "B A J"]
    scale: Float[Array, "B A J"] | None = None  # weight of a counted slot of each draft index, where the objective is stepwise


def block_loss(
    objective: Objective,
    student: PyTree[Float[Array, "B A K ..."]],
    teacher: PyTree[Float[Array, "B A K ..."]] | None,
    labels: Int[Array, "B A K"],
    weight_mask: Float[Array, "B A K"],
    head: Head,
    *,
    layout: str,
    chunk: int = 1024,
    teacher_head: Head | None = None,
    confidence_logits: Float[Array, "B A K"] | None = None,
    backward: str = "fused",
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of a batch of blocks and its metrics.

    `head(rows)` turns `student` rows (one array [N, D], or a pytree of arrays when a sequential head needs more than the hidden state)
    into logits [N, V]; `teacher_head` (default `head`) does so for `teacher`, whose row for the label at position P is the target's
    final-normed hidden state at P - 1 (`BlockTargets.teacher_index`). The teacher receives no gradient, and neither does `teacher_head`.

    `labels` index the head's vocabulary. With a draft vocabulary both heads cover its rows only, so the teacher is renormalised within
    it, and a label outside is -1: the probability of such a label is 0. Its slot leaves the position-weighted terms (the renormalised
    teacher says nothing about it), counts as c = 0 in D-PACE and as alpha = 0, never accepted, in the end-to-end loss and in tau.

    `chunk` bounds the rows that have logits at one time (at least one block). Anchors are split first, so a batch axis sharded over
    devices stays sharded; sequences are split only when one anchor of each is already more than a chunk. `backward`:

    * "fused": the gradient of a chunk is taken while its logits exist; the heads run once, nothing of vocabulary size outlives its
      chunk. D-PACE together with end-to-end TV takes one more product per chunk, as two normalisers are unknown until the end.
    * "recompute": `jax.checkpoint` around each chunk; same memory, both heads run twice.
    * "save": keeps the logits of all rows for the backward pass.

    Metrics: "loss", "ce" (position-weighted), "count" / "accuracy" / "alpha" per draft index [J], "tau_greedy" (1 + length of the
    greedy match with the labels) and, with a teacher, "tau" (1 + expected accepted drafts), "l1", "kl" or "lk", "e2e_tv",
    "confidence" where the objective has them. Slots that never draft in this layout are skipped before the head runs.
    """
    first = check_layout(layout)
    if backward not in BACKWARDS:
        raise ValueError(f"backward mode {backward!r} does not exist; choose one of {', '.join(BACKWARDS)}")
    if objective.needs_teacher and teacher is None:
        raise ValueError(NEEDS_TEACHER)
    if objective.confidence_weight > 0 and confidence_logits is None:
        raise ValueError("objective.confidence_weight is set but the drafter has no confidence head; set the weight to 0")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")
    teacher = jax.tree.map(lambda x: jax.lax.stop_gradient(x[:, :, first:]), teacher)
    student = jax.tree.map(lambda x: x[:, :, first:], student)
    labels, mask = labels[:, :, first:], weight_mask[:, :, first:].astype(jnp.float32)
    blocks = _Blocks(student, teacher, labels, mask, _step_scale(objective, labels, mask))
    sequences, anchors, drafts = blocks.labels.shape
    grid = chunks.grid_of(sequences, anchors, drafts, chunk)
    if backward == "fused":
        loss, terms = _fused(objective, blocks, head, teacher_head or head, grid)
    else:
        loss, terms = _chunked(objective, blocks, head, teacher_head or head, grid, backward == "recompute")
    terms = jax.lax.stop_gradient(terms)
    weights = position_weights(objective, terms, blocks)
    metrics = _metrics(objective, terms, blocks, weights)
    if objective.confidence_weight > 0 and confidence_logits is not None:
        bce = losses.confidence_bce(confidence_logits[:, :, first:], _present(terms.alpha))
        confidence = losses.weighted_mean(bce, weights)
        metrics["confidence"] = jax.lax.stop_gradient(confidence)
        loss = loss + objective.confidence_weight * confidence
    metrics["loss"] = jax.lax.stop_gradient(loss)
    return loss, metrics


def position_weights(objective: Objective, terms: BlockTerms | None, blocks: _Blocks) -> Float[Array, "B A J"]:
    """Weight of every slot in the position-weighted mean; `terms` may be None unless the weighting is D-PACE."""
    inside = (blocks.labels >= 0).astype(jnp.float32)
    mask = blocks.mask * inside
    if blocks.scale is not None:
        return mask * blocks.scale
    if objective.position_weighting == "uniform":
        return mask
    if objective.position_weighting == "decay":
        return mask * losses.decay_weights(mask.shape[-1], objective.decay_gamma)[None, None, :]
    if terms is None:
        raise ValueError("D-PACE weights need the cross entropy of every slot: give position_weights the block's terms")
    probability = jnp.exp(-terms.ce) * inside
    if objective.position_weighting == "dpace":
        return losses.dpace_weights(probability, blocks.mask, objective.dpace_alpha) * inside
    return losses.dpace_weights(probability, blocks.mask, objective.dpace_alpha, "masked") * inside


def _step_scale(objective: Objective, labels: Array, mask: Array) -> Array | None:
    if objective.position_weighting not in STEPWISE:
        return None
    counted = jnp.sum(mask * (labels >= 0).astype(mask.dtype), axis=(0, 1))
    total = counted if objective.position_weighting == "steps" else jnp.full_like(counted, mask.shape[0] * mask.shape[1])
    weight = objective.step_decay ** jnp.arange(mask.shape[-1], dtype=jnp.float32)
    return jnp.broadcast_to((weight / jnp.where(total > 0, total, 1.0))[None, None], mask.shape)


def _normalizer(objective: Objective, weights: Array) -> Array:
    """What the sum over weighted rows is divided by; stepwise weights are means already."""
    return jnp.ones((), jnp.float32) if objective.position_weighting in STEPWISE else jnp.sum(weights)


def row_values(objective: Objective, terms: BlockTerms) -> Float[Array, "B A J"]:
    """The position-weighted term of every slot."""
    values = jnp.zeros_like(terms.ce)
    if objective.base_share > 0:
        values = values + objective.base_share * objective.ce_weight * terms.ce
        if objective.l1_weight > 0:
            values = values + objective.base_share * objective.l1_weight * 2.0 * (1.0 - _present(terms.alpha))
    if objective.lk_weight > 0 and objective.lk_type != "batch":
        values = values + objective.lk_weight * _lk(objective, terms)
    if objective.kl_weight > 0:
        values = values + objective.kl_weight * _kl(objective, terms)
    return values


def _lk(objective: Objective, terms: BlockTerms) -> Array:
    if objective.lk_type == "alpha":
        return losses.lk_alpha(_present(terms.alpha))
    return losses.lk_hybrid(_present(terms.kl), _present(terms.alpha), objective.lk_eta)


def _kl(objective: Objective, terms: BlockTerms) -> Array:
    return _present(terms.top_kl if objective.kl_topk else terms.kl)


def _present(value: Array | None) -> Array:
    if value is None:
        raise ValueError(NEEDS_TEACHER)
    return value


def _block_terms(objective: Objective, blocks: _Blocks, head: Head, teacher_head: Head) -> BlockTerms:
    """Logits of some blocks and everything that is read from them."""

    def rows(values):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), values)

    student = head(rows(blocks.student)).astype(jnp.float32)
    teacher = None if blocks.teacher is None else jax.lax.stop_gradient(teacher_head(rows(blocks.teacher)).astype(jnp.float32))
    terms = losses.row_terms(student, teacher, blocks.labels.reshape(-1))
    top_kl = None
    if objective.kl_weight > 0 and objective.kl_topk:
        top_kl = losses.top_kl(student, _present(teacher), objective.kl_topk, renormalize=objective.kl_renormalize)
    compared = terms
    if objective.teacher_topk and teacher is not None and objective.teacher_topk < teacher.shape[-1]:
        none = jnp.full(terms.ce.shape, -1, jnp.int32)
        compared = losses.row_terms(*losses.teacher_top(student, teacher, objective.teacher_topk), none)
    flat = BlockTerms(terms.ce, terms.correct, compared.kl, compared.alpha, top_kl)
    return jax.tree.map(lambda x: x.reshape(blocks.labels.shape), flat)


def _sums(objective: Objective, terms: BlockTerms, blocks: _Blocks) -> tuple[list[Array], list[Array]]:
    """Numerators and denominators of the objective's terms over these blocks; `_coefficients` says how they make the loss."""
    numerators, denominators = [], []
    if objective.trains_rows:
        weights = position_weights(objective, terms, blocks)
        numerators.append(jnp.sum(weights * row_values(objective, terms)))
        denominators.append(_normalizer(objective, weights))
        if objective.lk_weight > 0 and objective.lk_type == "batch":
            numerators += [jnp.sum(weights * _present(terms.kl)), jnp.sum(weights * (1.0 - _present(terms.alpha)))]
            denominators += [denominators[-1]] * 2
    if objective.e2e_tv_weight > 0:
        shortfall, valid = _end_to_end(objective, terms, blocks)
        numerators.append(objective.e2e_tv_weight * jnp.sum(shortfall))
        denominators.append(jnp.sum(valid))
    return numerators, denominators


def _end_to_end(objective: Objective, terms: BlockTerms, blocks: _Blocks) -> tuple[Array, Array]:
    """The end-to-end term of every block, and 1 for blocks that have one."""
    accepted, mask = _accepted(terms, blocks), _end_to_end_mask(objective, blocks.mask)
    if not objective.e2e_surrogate:
        return losses.end_to_end_tv(accepted, mask)
    valid = (jnp.sum(mask, axis=-1) > 0).astype(jnp.float32)
    return valid * jnp.sum(losses.surrogate_weights(accepted) * _lk(objective, terms), axis=-1), valid


def _end_to_end_mask(objective: Objective, mask: Array) -> Array:
    return mask if objective.e2e_chains == "valid" else mask * jnp.all(mask > 0, axis=-1, keepdims=True).astype(mask.dtype)


def _accepted(terms: BlockTerms, blocks: _Blocks) -> Array:
    return jnp.where(blocks.labels >= 0, _present(terms.alpha), 0.0)


def _coefficients(objective: Objective, numerators: list[Array], denominators: list[Array]) -> list[Array]:
    """What each numerator counts for in the loss, without gradient: one over its denominator, and the batch's share in a batch-level LK."""
    inverse = [1.0 / losses.nonzero(denominator) for denominator in denominators]
    if objective.trains_rows and objective.lk_weight > 0 and objective.lk_type == "batch":
        share = jnp.exp(-objective.lk_eta * (1.0 - numerators[2] * inverse[2]))
        inverse[1] = objective.lk_weight * share * inverse[1]
        inverse[2] = objective.lk_weight * (1.0 - share) * inverse[2]
    return jax.lax.stop_gradient(inverse)


def _total(objective: Objective, numerators: list[Array], denominators: list[Array]) -> Array:
    total = jnp.zeros((), jnp.float32)
    for numerator, coefficient in zip(numerators, _coefficients(objective, numerators, denominators), strict=True):
        total = total + numerator * coefficient
    return total


def _chunked(objective, blocks, head, teacher_head, grid, recompute: bool) -> tuple[Array, BlockTerms]:
    """Chunks under ordinary differentiation: their logits are recomputed or kept for the backward pass."""

    def terms_of(part):
        return _block_terms(objective, part, head, teacher_head)

    body = jax.checkpoint(terms_of) if recompute else terms_of
    _, split_terms = chunks.scan(lambda carry, part: (carry, body(part)), None, chunks.split(blocks, grid))
    terms = chunks.join(split_terms, grid)
    return _total(objective, *_sums(objective, terms, blocks)), terms


def _fused(objective, blocks, head, teacher_head, grid) -> tuple[Array, BlockTerms]:
    """Chunks whose gradient is taken in the forward pass, while their logits exist.

    The heads' closed-over parameters become explicit arguments, because a custom derivative may not close over what it differentiates.
    """
    rows = grid.sequences * grid.anchors * blocks.labels.shape[2]

    def example(values):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[3:]), x.dtype), values)

    head, head_consts = jax.closure_convert(head, example(blocks.student))
    teacher_consts: list[Array] = []
    if blocks.teacher is not None:
        teacher_head, teacher_consts = jax.closure_convert(teacher_head, example(blocks.teacher))
    frozen = (jax.lax.stop_gradient(teacher_consts), blocks.teacher, blocks.labels, blocks.mask, blocks.scale)

    def terms_of(student, consts, teacher_consts, part):
        part = dataclasses.replace(part, student=student)
        return _block_terms(objective, part, lambda x: head(x, *consts), lambda x: teacher_head(x, *teacher_consts))

    def value(student, consts, frozen):
        teacher_consts, whole = frozen[0], _Blocks(student, *frozen[1:])

        def body(carry, part):
            return carry, terms_of(part.student, consts, teacher_consts, part)

        terms = chunks.join(chunks.scan(body, None, chunks.split(whole, grid))[1], grid)
        return _total(objective, *_sums(objective, terms, whole)), terms

    def forward(student, consts, frozen):
        trained = [c.perturbed for c in consts]
        student, consts, frozen = jax.tree.map(lambda x: x.value, (student, consts, frozen), is_leaf=lambda x: hasattr(x, "perturbed"))
        teacher_consts, whole = frozen[0], _Blocks(student, *frozen[1:])
        seeds, finish = _seeds(objective, whole)

        def body(carry, part):
            def contributions(rows, moving):
                merged = _merge(consts, moving, trained)
                terms = terms_of(rows, merged, teacher_consts, part)
                return _sums(objective, terms, part)[0], terms

            _, pull, terms = jax.vjp(contributions, part.student, _select(consts, trained), has_aux=True)
            pulled = [pull([jnp.asarray(s, jnp.float32) for s in seed]) for seed in seeds]
            carry = jax.tree.map(lambda c, g: c + g.astype(c.dtype), carry, [g[1] for g in pulled])
            return carry, (terms, [g[0] for g in pulled])

        zeros = [[jnp.zeros(c.shape, jnp.float32) for c in _select(consts, trained)] for _ in seeds]
        const_gradients, (terms, row_gradients) = chunks.scan(body, zeros, chunks.split(whole, grid))
        terms = chunks.join(terms, grid)
        numerators, denominators = _sums(objective, terms, whole)
        scales = finish(numerators, denominators)
        rows_gradient = chunks.join(_combine(scales, row_gradients), grid)
        summed = _combine(scales, const_gradients)
        const_gradient = [g.astype(c.dtype) for g, c in zip(summed, _select(consts, trained), strict=True)]
        filled = _merge([None] * len(consts), const_gradient, trained)
        return (_total(objective, numerators, denominators), terms), (rows_gradient, filled)

    def backward(residuals, cotangents):
        rows_gradient, const_gradient = residuals
        by = cotangents[0]
        by = jnp.zeros((), jnp.float32) if isinstance(by, jax.custom_derivatives.SymbolicZero) else by
        return (*jax.tree.map(lambda g: (g.astype(jnp.float32) * by).astype(g.dtype), (rows_gradient, const_gradient)), None)

    core = jax.custom_vjp(value)
    core.defvjp(forward, backward, symbolic_zeros=True)
    return core(blocks.student, head_consts, frozen)


def _seeds(objective: Objective, blocks: _Blocks):
    """Cotangents to pull back through a chunk's numerators, and how the results combine once all denominators are known.

    A denominator that only the mask decides is known beforehand; those of D-PACE need the cross entropy of every slot, and the share of the
    KL in a batch-level LK the acceptance of every slot.
    """
    batch = objective.lk_weight > 0 and objective.lk_type == "batch"
    terms = int(objective.trains_rows) * (3 if batch else 1) + int(objective.e2e_tv_weight > 0)
    if objective.trains_rows and (batch or objective.position_weighting.startswith("dpace")):
        seeds = [[float(i == j) for j in range(terms)] for i in range(terms)]
        return seeds, functools.partial(_coefficients, objective)
    seed = []
    if objective.trains_rows:
        seed.append(1.0 / losses.nonzero(_normalizer(objective, position_weights(objective, None, blocks))))
    if objective.e2e_tv_weight > 0:
        valid = jnp.sum(_end_to_end_mask(objective, blocks.mask), axis=-1) > 0
        seed.append(1.0 / losses.nonzero(jnp.sum(valid.astype(jnp.float32))))
    return [seed], lambda numerators, denominators: [jnp.ones((), jnp.float32)]


def _combine(scales, gradients):
    """sum_i scales[i] * gradients[i] over a list of equal pytrees."""

    def add(*leaves):
        scaled = [s * g.astype(jnp.float32) for s, g in zip(scales, leaves, strict=True)]
        return functools.reduce(jnp.add, scaled).astype(leaves[0].dtype)

    return jax.tree.map(add, *gradients)


def _select(values: list, chosen: list[bool]) -> list:
    return [v for v, c in zip(values, chosen, strict=True) if c]


def _merge(values: list, some: list, chosen: list[bool]) -> list:
    """`values` with the chosen places taken from `some`, in order."""
    replacements = iter(some)
    return [next(replacements) if c else v for v, c in zip(values, chosen, strict=True)]


def _metrics(objective: Objective, terms: BlockTerms, blocks: _Blocks, weights: Array) -> dict[str, Array]:
    mask = blocks.mask
    count = jnp.sum(mask, axis=(0, 1))
    per_slot = jnp.where(count > 0, count, 1.0)
    has_slot = (jnp.sum(mask, axis=-1) > 0).astype(jnp.float32)
    hits, _ = losses.expected_lengths(terms.correct, mask)
    metrics = {
        "ce": losses.weighted_mean(terms.ce, weights),
        "count": count,
        "accuracy": jnp.sum(terms.correct * mask, axis=(0, 1)) / per_slot,
        "tau_greedy": 1.0 + losses.weighted_mean(hits, has_slot),
    }
    if terms.alpha is None:
        return metrics
    accepted = _accepted(terms, blocks)
    metrics["alpha"] = jnp.sum(accepted * mask, axis=(0, 1)) / per_slot
    metrics["tau"] = 1.0 + losses.weighted_mean(losses.expected_lengths(accepted, mask)[0], has_slot)
    metrics["l1"] = losses.weighted_mean(2.0 * (1.0 - terms.alpha), weights)
    if objective.lk_weight > 0:
        batch = objective.lk_type == "batch"
        eta, kl, alpha = objective.lk_eta, _present(terms.kl), _present(terms.alpha)
        metrics["lk"] = losses.lk_batch(kl, alpha, weights, eta) if batch else losses.weighted_mean(_lk(objective, terms), weights)
    if objective.kl_weight > 0:
        metrics["kl"] = losses.weighted_mean(_kl(objective, terms), weights)
    if objective.e2e_tv_weight > 0:
        metrics["e2e_tv"] = losses.weighted_mean(*_end_to_end(objective, terms, blocks))
    return metrics
