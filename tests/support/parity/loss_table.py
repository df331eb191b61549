"""Every loss and position weight on tables of logits: values, and gradients with respect to the student's logits.

What a name measures, the numbers in it included (`kl_topk10_a`, `decay_g4`), is read from the name itself.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.training import losses
from parity.case import GRADIENTS, LOSSES, Case

DEEPSPEC = {"default": (0.1, 0.9, 1.0, 4.0), "ce_g7": (1.0, 0.0, 0.0, 7.0), "l1": (0.0, 1.0, 0.0, 4.0), "conf": (0.0, 0.0, 1.0, 4.0)}
DPACE = {
    "dpace_angelspec": "all_slots",
    "sf_dpace": "masked",
    "sf_dpace_cumulative_confidence_only": "prefix",
    "sf_dpace_continuation_value_only": "suffix",
}


def check(case: Case) -> None:
    student, teacher, mask = (jnp.asarray(case.io[f"in.{name}"]) for name in ("student_logits", "teacher_logits", "mask"))
    labels = jnp.asarray(case.io["in.labels"].astype(np.int32))
    eta = float(case.params.get("eta", 3.0))
    left = {name for name in case.io if name.startswith("out.")}

    def compare(name: str, ours, tolerance: float = LOSSES) -> None:
        left.discard(name)
        case.close(name.removeprefix("out."), ours, case.io[name], tolerance, relative=True)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for name in _stems(case, "per_position"):
            function = per_position(name, teacher, labels)
            if function is None:
                continue
            values = function(student)
            mean, gradient = jax.value_and_grad(lambda s, f=function: losses.weighted_mean(f(s), mask))(student)
            compare(f"out.{name}.per_position", values)
            compare(f"out.{name}.mean", mean)
            compare(f"out.{name}.grad", gradient, GRADIENTS)
        for name in _stems(case, "weights"):
            weigh = weights(name.removeprefix("w."), mask)
            if weigh is None:
                continue

            def weighted(s, weigh=weigh):
                ce = losses.cross_entropy(s, labels)
                w = weigh(jnp.exp(-ce))
                return losses.weighted_mean(ce, w), w

            (value, ours), gradient = jax.value_and_grad(weighted, has_aux=True)(student)
            compare(f"out.{name}.weights", ours)
            compare(f"out.{name}.ce_loss", value)
            compare(f"out.{name}.ce_grad", gradient, GRADIENTS)
        _chains(case, student, teacher, mask, eta, compare)
        _deepspec(case, student, teacher, mask, labels, compare)
        _batch_level(case, student, teacher, mask, compare)
        _on_policy(case, student, teacher, compare)
    case.unchecked += sorted({name.split(".")[1] for name in left})


def per_position(name: str, teacher, labels) -> Callable | None:
    """The loss of this name at every position, as a function of the student's logits; None where there is none."""
    stem, top, variant = re.fullmatch(r"(.*?)(?:_topk(\d+))?(?:_([ab]))?", name).groups()  # type: ignore[union-attr]
    if variant is not None:
        return None if top is None else lambda s: losses.top_kl(s, teacher, int(top), renormalize=variant == "a")
    if top is not None:  # within the teacher's best tokens, renormalised
        stem = "kl_full" if stem == "single_kl" else stem
        if per_position(stem, teacher, labels) is None:
            return None

        def within(s):
            student, best = losses.teacher_top(s, teacher, int(top))
            return per_position(stem, best, labels)(student)  # pyright: ignore[reportOptionalCall]

        return within
    if (hybrid := re.fullmatch(r"lk_hybrid_eta([\d.]+)", stem)) is not None:
        return lambda s: lk_hybrid(s, teacher, float(hybrid[1]))
    simple: dict[str, Callable] = {
        "ce": lambda s: losses.cross_entropy(s, labels),
        "ce_teacher_argmax": lambda s: losses.cross_entropy(s, jnp.argmax(teacher, axis=-1).astype(jnp.int32)),
        "soft_ce": lambda s: losses.soft_cross_entropy(s, teacher),
        "kl_full": lambda s: losses.forward_kl(s, teacher),
        "l1": lambda s: losses.l1_distance(s, teacher),
        "tv": lambda s: losses.total_variation(s, teacher),
        "lk_alpha": lambda s: losses.lk_alpha(losses.acceptance(s, teacher)),
    }
    return simple.get(stem)


def weights(name: str, mask) -> Callable | None:
    """Position weights of this name as a function of the student's confidence in the labels; None where there are none."""
    if (decay := re.fullmatch(r"decay_g([\d.]+)", name)) is not None:
        gamma = losses.decay_weights(mask.shape[-1], float(decay[1]))
        return lambda confidence: mask * gamma.reshape((1,) * (mask.ndim - 1) + gamma.shape)
    dpace = re.fullmatch(r"(.+)_a(\d)(\d)", name)
    if dpace is None or dpace[1] not in DPACE:
        return None
    return lambda confidence: losses.dpace_weights(confidence, mask, float(f"{dpace[2]}.{dpace[3]}"), DPACE[dpace[1]])


def lk_hybrid(student, teacher, eta: float):
    return losses.lk_hybrid(losses.forward_kl(student, teacher), losses.acceptance(student, teacher), eta)


def _stems(case: Case, ending: str) -> list[str]:
    return sorted(name[4 : -len(ending) - 1] for name in case.io if name.startswith("out.") and name.endswith(f".{ending}"))


def _chains(case: Case, student, teacher, mask, eta: float, compare) -> None:
    def alpha(s):
        return losses.acceptance(s, teacher)

    totals: dict[str, Callable] = {
        "e2e_tv": lambda s: losses.weighted_mean(*losses.end_to_end_tv(alpha(s), mask)),
        "mtp_e2e_direct_tv": lambda s: losses.chain_tv(alpha(s), mask),
        "mtp_e2e_surrogate_tv": lambda s: losses.chain_surrogate(losses.total_variation(s, teacher), alpha(s), mask),
        "mtp_e2e_surrogate_lk": lambda s: losses.chain_surrogate(lk_hybrid(s, teacher, eta), alpha(s), mask),
    }
    for name, function in totals.items():
        if f"out.{name}.loss" in case.io:
            value, gradient = jax.value_and_grad(function)(student)
            compare(f"out.{name}.loss", value)
            compare(f"out.{name}.grad", gradient, GRADIENTS)
    if "out.alpha" in case.io:
        compare("out.alpha", alpha(student))
    if "out.e2e_tv.accept_length" in case.io:
        lengths, slots = losses.expected_lengths(alpha(student), mask)
        compare("out.e2e_tv.accept_length", losses.weighted_mean(lengths, (slots > 0).astype(jnp.float32)))


def _deepspec(case: Case, student, teacher, mask, labels, compare) -> None:
    if "out.deepspec.eval_mask" not in case.io:
        return
    contiguous, confidence = losses.contiguous_mask(mask), jnp.asarray(case.io["in.confidence_logits"])
    compare("out.deepspec.eval_mask", contiguous)
    for name, (ce, l1, conf, gamma) in DEEPSPEC.items():
        if f"out.deepspec.{name}.loss" not in case.io:
            continue
        decay = losses.decay_weights(mask.shape[-1], gamma)
        weight = contiguous * decay.reshape((1,) * (mask.ndim - 1) + decay.shape)

        def total(s, c, ce=ce, l1=l1, conf=conf, weight=weight):
            terms = losses.row_terms(s, teacher, labels)
            row = ce * terms.ce + l1 * 2.0 * (1.0 - terms.alpha) + conf * losses.confidence_bce(c, terms.alpha)
            return losses.weighted_mean(row, weight)

        value, (gradient, confidence_gradient) = jax.value_and_grad(total, argnums=(0, 1))(student, confidence)
        compare(f"out.deepspec.{name}.loss", value)
        compare(f"out.deepspec.{name}.grad", gradient, GRADIENTS)
        compare(f"out.deepspec.{name}.conf_grad", confidence_gradient, GRADIENTS)


def _batch_level(case: Case, student, teacher, mask, compare) -> None:
    """SpecForge's LK of EAGLE-3: one share of the KL for the batch, falling with `eta`, or the negative log of acceptance."""
    for name in _stems(case, "loss"):
        found = re.fullmatch(r"sf_eagle_lk\.(alpha|lambda)(?:_d([\d.]+))?", name)
        if found is None:
            continue

        def loss(s, kind=found[1], eta=float(found[2] or 1.0)):
            alpha = losses.acceptance(s, teacher)
            if kind == "alpha":
                return losses.weighted_mean(losses.lk_alpha(alpha), mask)
            return losses.lk_batch(losses.soft_cross_entropy(s, teacher), alpha, mask, eta, over_all=True)

        value, gradient = jax.value_and_grad(loss)(student)
        compare(f"out.{name}.loss", value)
        compare(f"out.{name}.grad", gradient, GRADIENTS)


def _on_policy(case: Case, student, teacher, compare) -> None:
    """AngelSpec's half on-policy distillation of given proposals, all of them scored."""
    if "out.opd.loss" not in case.io:
        return
    proposed = jnp.asarray(case.io["in.proposed_ids"].astype(np.int32))
    hits = jnp.argmax(teacher, axis=-1) == proposed

    def loss(s):
        told = [-losses.cross_entropy(logits, proposed) for logits in (s, teacher)]
        k3, weights = losses.two_stream_k3(*told, hits, jnp.ones(proposed.shape, jnp.float32))
        return losses.weighted_mean(k3, weights), (k3, weights)

    (value, (k3, weights)), gradient = jax.value_and_grad(loss, has_aux=True)(student)
    compare("out.opd.loss", value)
    compare("out.opd.grad", gradient, GRADIENTS)
    accepted = jnp.cumprod(hits.astype(jnp.float32), axis=-1)
    metrics = {
        "scored_cnt": jnp.float32(k3.size),
        "accepted_cnt": accepted.sum(),
        "rejected_cnt": (1 - accepted).sum(),
        "resp_kl_sum": (accepted * k3).sum(),
        "rej_kl_wsum": ((1 - accepted) * weights * k3).sum(),
        "rej_eff_w_sum": ((1 - accepted) * weights).sum(),
        "clamp_frac_sum": jnp.sum(k3 >= 10.0),
    }
    for name, ours in metrics.items():
        if f"out.opd.metric.{name}" in case.io:
            compare(f"out.opd.metric.{name}", ours)
