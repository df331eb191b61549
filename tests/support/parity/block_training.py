"""A block drafter's training, from checkpoint to gradient: forward, every objective's loss, gradients of the named parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.drafter import block, layouts_block
from angelspec_jax.target.layers import rms_norm
from angelspec_jax.training.anchors import block_targets, gather_rows
from angelspec_jax.training.objective import Objective, block_loss
from parity.block_drafts import read, shared
from parity.case import GRADIENTS, LOSSES, Case, Unsupported

REFERENCE_NAMES = {
    "loss_objective": "position_weighting",
    "loss_decay_gamma": "decay_gamma",
    "ce_loss_alpha": "ce_weight",
    "l1_loss_alpha": "l1_weight",
    "lk_loss_weight": "lk_weight",
    "lk_loss_type": "lk_type",
    "kl_loss_weight": "kl_weight",
    "e2e_tv_loss_weight": "e2e_tv_weight",
    "confidence_head_alpha": "confidence_weight",
    "gamma": "decay_gamma",
    "ce": "ce_weight",
    "l1": "l1_weight",
    "conf": "confidence_weight",
}
Terms = list[tuple[Objective, bool]]  # to be added up; whether the teacher sees the target's state after the final norm


def check_angelspec(case: Case) -> None:
    """AngelSpec's cases: unpacked batches and packed documents, the teacher given before its final norm."""
    for variant in sorted({name.split(".")[1] for name in case.io if name.startswith("in.") and name.endswith(".anchors")}):
        given = {name.removeprefix(f"in.{variant}."): value for name, value in case.io.items() if name.startswith(f"in.{variant}.")}
        _compare(case, f"{variant}.", given, _angelspec_terms)


def check_deepspec(case: Case) -> None:
    """DeepSpec's cases: unpacked, the teacher given after its final norm."""
    given = {name.removeprefix("in."): value for name, value in case.io.items() if name.startswith("in.")}
    _compare(case, "", given, lambda case, setting: [(_objective(setting), True)])


def _angelspec_terms(case: Case, setting: dict[str, Any]) -> Terms:
    """The reference's L1 takes the target's state as it comes, before the norm, unless the case says it was normed; all else norms it."""
    setting = {"ce_loss_alpha": 0.1} | setting if case.params.get("family") == "dspark" else dict(setting)
    normed = setting.pop("_postnorm", False)
    whole = _objective(setting)
    if normed or not whole.l1_weight * whole.base_share:
        return [(whole, True)]
    if whole.base_share != 1.0:
        raise Unsupported("an objective that mixes the reference's L1 with KL or LK")
    rest = dataclasses.replace(whole, ce_weight=0.0, l1_weight=0.0) if whole.confidence_weight or whole.e2e_tv_weight else None
    return [(dataclasses.replace(whole, confidence_weight=0.0, e2e_tv_weight=0.0), False), *([(rest, True)] if rest else [])]


def _objective(setting: dict[str, Any]) -> Objective:
    named = {REFERENCE_NAMES.get(key, key): value for key, value in setting.items()}
    unknown = set(named) - {field.name for field in dataclasses.fields(Objective)}
    if unknown:
        raise Unsupported(f"an objective with {', '.join(sorted(unknown))}")
    return Objective(**named)


def _compare(case: Case, prefix: str, given: dict[str, np.ndarray], terms_of) -> None:
    params, config, draft_ids = read(case)
    if draft_ids is not None:
        raise Unsupported("training of a block drafter over a reduced draft vocabulary")
    borrowed = shared(case)
    tokens, anchors = (jnp.asarray(given[name], jnp.int32) for name in ("input_ids", "anchors"))
    keep, loss_mask, features = jnp.asarray(given["keep"] > 0), jnp.asarray(given["loss_mask"], jnp.float32), given["target_hidden"]
    documents = jnp.asarray(given["ctx_doc_ids"], jnp.int32) if "ctx_doc_ids" in given else None
    chain = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    positions = jnp.asarray(given.get("base_position_ids", chain), jnp.int32)
    targets = block_targets(
        tokens, loss_mask, anchors, keep, config.block_size, config.layout, config.mask_token, documents=documents, positions=positions
    )

    @jax.jit
    def forward(params):
        hidden = block.training_hidden(
            params, config, borrowed.embed, jnp.asarray(features), positions, anchors, keep, targets.block_tokens, documents
        )
        confidence = block.confidence_logits(params, config, hidden, targets.previous) if config.confidence else None
        rows = block.teacher_forced(params, config, borrowed.embed, hidden, targets.previous)
        return (rows, confidence), (hidden, block.slot_logits(params, config, rows, borrowed.head))

    losses, gradients = {}, {}
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        outputs, back, (hidden, logits) = jax.vjp(forward, params, has_aux=True)
        teachers = {normed: gather_rows(teacher, targets.teacher_index) for normed, teacher in _teachers(case, given, config).items()}
        for name, setting in case.params["objectives"].items():
            terms = terms_of(case, setting)
            given_rows = [teachers[normed] for _, normed in terms]
            said = _loss(tuple(objective for objective, _ in terms), config, outputs, params, given_rows, targets, borrowed.head)
            losses[name], (through, direct) = said
            gradients[name] = jax.tree.map(lambda x, y: np.asarray(x) + np.asarray(y), back(through)[0], direct)
    kept = given["keep"] > 0  # what other blocks hold is computed and never used
    for name, ours in (("draft_hidden", hidden), ("logits", logits), ("confidence_logits", outputs[1])):
        if f"out.{prefix}{name}" in case.io:
            expected = case.io[f"out.{prefix}{name}"][kept]
            ours = np.asarray(ours)[kept]
            case.close(f"{prefix}{name}", ours[:, -expected.shape[1] :], expected)
    for name, loss in losses.items():
        ours = layouts_block.drafter_tensors(gradients[name], config)
        expected = case.io[f"out.{prefix}{name}.loss"]
        case.close(f"{prefix}{name}.loss", loss, expected, LOSSES, relative=bool(abs(expected) > 1))
        for parameter in case.params["grad_params"]:
            gradient = ours[layouts_block.plain_name(parameter)]
            what = f"{prefix}{name} gradient of {parameter}"
            case.close(what, gradient, case.io[f"out.{prefix}{name}.grad.{parameter}"], GRADIENTS, relative=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss(objectives: tuple[Objective, ...], config, outputs, params, teachers, targets, head):
    """The sum of some objectives and its gradient by what the forward pass gives and by the heads; a program for each, small and shared."""

    def loss(outputs, params):
        rows, confidence = outputs
        return sum(
            block_loss(
                objective, rows, teacher, targets.labels, targets.weight_mask,
                lambda rows: block.slot_logits(params, config, rows, head),
                layout=config.layout, chunk=24, teacher_head=lambda x: x @ head.T, confidence_logits=confidence,
            )[0]
            for objective, teacher in zip(objectives, teachers, strict=True)
        )  # fmt: skip

    return jax.value_and_grad(loss, argnums=(0, 1))(outputs, params)


def _teachers(case: Case, given: dict[str, np.ndarray], config) -> dict[bool, jax.Array]:
    """The target's states, by whether they are final-normed."""
    if "last_hidden_postnorm" in given:
        return {True: jnp.asarray(given["last_hidden_postnorm"])}
    raw = jnp.asarray(given["last_hidden"])
    return {False: raw, True: rms_norm(raw, jnp.asarray(case.io["in.target_norm_weight"]), config.transformer.rms_norm_eps)}
