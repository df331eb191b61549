"""TTT of autoregressive drafters against the trainers they come from: states, losses and gradients, with chains at every position."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.drafter import layouts_eagle3, layouts_mtp, registry
from angelspec_jax.training import ttt
from angelspec_jax.training.anchors import block_targets, gather_rows
from angelspec_jax.training.objective import Objective, block_loss
from parity.case import GRADIENTS, LOSSES, Case, Unsupported
from parity.chain_drafts import borrowed, read

STEP_DECAY = 0.8  # of the references, unless a case says otherwise
Terms = list[tuple[float, Objective]]  # to be added up, each times its factor


def check_mtp(case: Case) -> None:
    """AngelSpec's MTP: unpacked and packed, teacher-forced and on-policy, every objective."""
    params, config, draft_ids = read(case)
    shared = borrowed(case, draft_ids)
    steps = int(case.params["ttt_length"])
    stepwise = {"position_weighting": "steps", "step_decay": _step_decay(case, steps)}
    for variant in sorted({name.split(".")[1] for name in case.io if name.startswith("in.") and name.endswith(".input_ids")}):
        given = {name.removeprefix(f"in.{variant}."): value for name, value in case.io.items() if name.startswith(f"in.{variant}.")}
        for policy in ("offpolicy", "onpolicy"):
            chains = _chains(given, steps, shared, given["last_hidden"], given["loss_mask"])
            objectives = {name: _mtp_terms(setting, stepwise) for name, setting in case.params["objectives"].items()}
            labels = {
                name: chains.labels if setting["m"].get("ce_use_ground_truth") else chains.teacher_labels
                for name, setting in case.params["objectives"].items()
            }
            states, losses, gradients = _run(params, config, shared, chains, given["last_hidden"], objectives, labels, policy == "onpolicy")
            prefix = f"out.{variant}.{policy}."
            for step in range(steps):
                mask = case.io[f"{prefix}step{step}.mask"] > 0
                case.same(f"{prefix}step{step}.count", np.sum(chains.mask[:, :, step]), case.io[f"{prefix}step{step}.count"])
                _states(case, f"{prefix}step{step}", states[:, :, step], shared.head, mask)
            for name, loss in losses.items():
                expected = case.io[f"{prefix}{name}.total_loss"]
                case.close(f"{prefix}{name}.total_loss", loss, expected, LOSSES, relative=bool(abs(expected) > 1))
                ours = layouts_mtp.drafter_tensors(gradients[name], config)
                if gradients[name].layer.moe is not None:
                    ours["mlp.experts_down_proj"] = gradients[name].layer.moe.down
                for parameter in case.params["grad_params"]:
                    what, plain = f"{prefix}{name}.grad.{parameter}", parameter.removeprefix("midlayer.")
                    case.close(what, ours[plain], case.io[what], GRADIENTS, relative=True)


def check_eagle3(case: Case, weighting: str = "steps") -> None:
    """EAGLE-3 of AngelSpec: soft cross entropy, which is KL and the teacher's entropy, gated by the unshifted mask."""
    params, config, draft_ids = read(case)
    shared = borrowed(case, draft_ids)
    steps = int(case.params.get("ttt_length", config.num_drafts))
    given = {name.removeprefix("in."): value for name, value in case.io.items() if name.startswith("in.")}
    mask = given["loss_mask"].copy()
    if weighting == "steps_all":  # DeepSpec drops the last real position of every row
        last = given["attention_mask"].sum(axis=1).astype(int) - 1
        mask[np.arange(len(mask)), last] = 0
    # Two places past the end, where the labels of the last counted predictions would stand.
    padded = {name: np.pad(value, [(0, 0), (0, 2)] + [(0, 0)] * (value.ndim - 2)) for name, value in given.items() if value.ndim >= 2}
    gated = np.asarray(ttt.gate(jnp.pad(jnp.asarray(mask), ((0, 0), (0, 2))), "input"))
    rows = shared.head if shared.draft_ids is None else shared.head[shared.draft_ids]
    teacher = padded["last_hidden_postnorm"]
    chains = _chains(padded, steps, shared, teacher, gated, last=given["input_ids"].shape[1])
    decay = _step_decay(case, steps)
    objective = Objective(ce_weight=0.0, kl_weight=1.0, position_weighting=weighting, step_decay=decay)
    states, losses, gradients = _run(
        params, config, shared, chains, teacher, {"total": [(1.0, objective)]}, {"total": chains.teacher_labels}, False,
        features=padded["target_hidden"],
    )  # fmt: skip
    logits = jnp.einsum("bakd,vd->bakv", gather_rows(jnp.asarray(teacher), chains.teacher_index), rows)
    entropy = -np.sum(np.exp(jax.nn.log_softmax(logits)) * np.asarray(jax.nn.log_softmax(logits)), axis=-1)
    counted = chains.mask * (np.asarray(chains.teacher_labels) >= 0)
    total = counted.sum(axis=(0, 1)) if weighting == "steps" else np.full(steps, counted.shape[0] * counted.shape[1])
    loss = float(losses["total"]) + float(np.sum(decay ** np.arange(steps) * (counted * entropy).sum(axis=(0, 1)) / total))
    for step in range(steps):
        expected = case.io[f"out.step{step}.mask"]
        case.same(f"step{step}.mask", counted[:, :, step] > 0, expected > 0)
        normed = registry.module(config).CELL.write(params, config, jnp.asarray(case.io[f"out.step{step}.hidden"]))[1]
        case.close(f"step{step}.hidden", states[:, :, step][expected > 0], np.asarray(normed)[expected > 0])
        if f"out.step{step}.logits" in case.io:
            head = np.asarray(shared.head if params.head is None else params.head)
            case.close(f"step{step}.logits", states[:, :, step][expected > 0] @ head.T, case.io[f"out.step{step}.logits"][expected > 0])
    case.close("total_loss", loss, case.io["out.total_loss"], LOSSES, relative=bool(abs(case.io["out.total_loss"]) > 1))
    ours = layouts_eagle3.drafter_tensors(gradients["total"], config)
    for parameter in case.params["grad_params"]:
        plain = layouts_eagle3.plain_name(parameter)
        case.close(f"grad.{parameter}", ours[plain], case.io[f"out.grad.{parameter}"], GRADIENTS, relative=True)


check_deepspec_eagle3 = functools.partial(check_eagle3, weighting="steps_all")


def _step_decay(case: Case, steps: int) -> float:
    """By how much each step counts less than the one before it: from the case's weights, a list or words such as `0.8**k`."""
    weights = case.params.get("step_weights", case.config.get("step_loss_decay", STEP_DECAY))
    if isinstance(weights, str):
        weights = float(weights.partition("**")[0])
    if isinstance(weights, (int, float)):
        return float(weights)
    decay = weights[1] / weights[0] if steps > 1 else STEP_DECAY
    if not np.allclose(weights, decay ** np.arange(steps)):
        raise Unsupported(f"steps that are weighted {weights}, which is no geometric decay from 1")
    return decay


class _Chains:
    """Chains at every position: inputs, labels and masks, the row of position j first."""

    def __init__(self, given, steps: int, shared, teacher, loss_mask, last: int | None = None):
        tokens = jnp.asarray(given["input_ids"], jnp.int32)
        batch, length = tokens.shape
        self.tokens, self.steps = tokens, steps
        self.documents = jnp.asarray(given["ctx_doc_ids"], jnp.int32) if "ctx_doc_ids" in given else None
        chain = np.broadcast_to(np.arange(length), tokens.shape)
        self.positions = jnp.asarray(given.get("base_position_ids", chain), jnp.int32)
        end = length - 1 if last is None else last
        self.anchors = jnp.broadcast_to(jnp.arange(1, end + 1, dtype=jnp.int32), (batch, end))
        same = True if self.documents is None else self.documents[:, 1 : end + 1] == self.documents[:, :end]
        self.keep = jnp.broadcast_to(jnp.asarray(same), self.anchors.shape)
        targets = block_targets(
            tokens, jnp.asarray(loss_mask, jnp.float32), self.anchors, self.keep, steps + 1, "same_position", 0,
            documents=self.documents, positions=self.positions,
        )  # fmt: skip
        self.mask, self.labels = np.asarray(targets.weight_mask[:, :, 1:]), targets.labels[:, :, 1:]
        self.teacher_index = targets.teacher_index[:, :, 1:]
        logits = jnp.einsum("bakd,vd->bakv", gather_rows(jnp.asarray(teacher), self.teacher_index), shared.head)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if shared.draft_ids is not None:
            index = np.full(shared.head.shape[0], -1, np.int32)
            index[np.asarray(shared.draft_ids)] = np.arange(len(shared.draft_ids))
            best = jnp.asarray(index)[best]
        self.teacher_labels = best


_chains = _Chains


def _run(params, config, shared, chains, hidden, objectives: dict[str, Terms], labels, on_policy: bool, features=None):
    """States of the chains, and of every objective its loss and the gradient of the parameters."""
    cell, hidden = registry.module(config).CELL, jnp.asarray(hidden)
    features = hidden[:, :, None] if features is None else jnp.asarray(features).reshape(*hidden.shape[:2], -1, hidden.shape[2])
    teacher = gather_rows(hidden, chains.teacher_index)
    teacher_head = shared.head if shared.draft_ids is None else shared.head[shared.draft_ids]

    @jax.jit
    def forward(params):
        head = cell.head(params, config, shared.head)
        rows = jax.lax.stop_gradient(head)
        condition = cell.condition(params, config, features, hidden)
        states = ttt.unroll(
            cell, params, config, shared.embed, condition, chains.tokens, chains.positions, chains.anchors, chains.keep, chains.steps,
            chains.documents, (lambda scored: ttt.greedy_tokens(scored, rows, shared.draft_ids, 16)) if on_policy else None,
        )  # fmt: skip
        return states, head

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        (states, head), back = jax.vjp(forward, params)
        losses, gradients = {}, {}
        for name, terms in objectives.items():
            given = teacher, labels[name], jnp.asarray(chains.mask), teacher_head
            parts = [(factor, *_loss(objective, states, head, *given)) for factor, objective in terms]
            losses[name] = sum(factor * loss for factor, loss, _ in parts)
            cotangents = jax.tree.map(lambda *x: sum(x), *(jax.tree.map(lambda x, f=f: f * x, gradient) for f, _, gradient in parts))
            gradients[name] = jax.tree.map(np.asarray, back(cotangents)[0])
    return np.asarray(states), losses, gradients


@functools.partial(jax.jit, static_argnums=0)
def _loss(objective: Objective, states, head, teacher, labels, mask, teacher_head):
    """A loss and its gradient by the chains' states and by the head; its own program, which several cases share."""

    def loss(states, head):
        return block_loss(
            objective, states, teacher, labels, mask, lambda x: x @ head.T, layout="anchor_first", chunk=24,
            teacher_head=lambda x: x @ teacher_head.T,
        )[0]  # fmt: skip

    return jax.value_and_grad(loss, argnums=(0, 1))(states, head)


def _mtp_terms(setting: dict[str, Any], stepwise: dict[str, Any]) -> Terms:
    """AngelSpec's loss: ce_scale times the cross entropy, and kl_scale or e2e_scale times the distillation or end-to-end loss."""
    how, terms = setting["m"], []
    if setting["ce"]:
        terms.append((setting["ce"], Objective(ce_weight=1.0, **stepwise)))
    topk, form = int(how.get("kl_topk", 0)), how.get("single_step_form")
    if how.get("e2e_weighting"):
        direct = {"e2e_tv_weight": 1.0, "e2e_chains": "whole", "e2e_surrogate": not how["e2e_direct"], "teacher_topk": topk}
        terms.append((setting["e2e"], Objective(ce_weight=0.0, **direct, **stepwise)))
    elif form == "tv":
        terms.append((setting["kl"], Objective(ce_weight=0.0, l1_weight=0.5, teacher_topk=topk, **stepwise)))
    elif form == "kl":
        terms.append((setting["kl"], Objective(kl_weight=1.0, kl_topk=topk, kl_renormalize=True, **stepwise)))
    elif form == "lk":
        eta = how.get("single_step_eta", 3.0)
        terms.append((setting["kl"], Objective(lk_weight=1.0, lk_eta=eta, teacher_topk=topk, **stepwise)))
    elif how.get("use_kl"):
        variant = {"kl_topk": topk, "kl_renormalize": how.get("kl_variant") == "a"}
        terms.append((setting["kl"], Objective(kl_weight=1.0, **variant, **stepwise)))
    return terms


def _states(case: Case, name: str, ours, head, mask) -> None:
    """Hidden states and logits of the positions that count; the last one starts no chain and never counts."""
    mask = mask[:, : ours.shape[1]]
    case.close(f"{name}.hidden", ours[mask], case.io[f"{name}.hidden"][:, : ours.shape[1]][mask])
    if f"{name}.logits" in case.io:
        case.close(f"{name}.logits", ours[mask] @ np.asarray(head).T, case.io[f"{name}.logits"][:, : ours.shape[1]][mask])
