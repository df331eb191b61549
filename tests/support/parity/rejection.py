"""The rejection rule on a table of distributions and uniform numbers, edge cases included: u at the ratio, disjoint supports."""

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding.acceptance import count_accepted, residual
from angelspec_jax.decoding.sampling import make_sampling, transform
from angelspec_jax.training.losses import acceptance
from parity.case import LOSSES, Case

EDGE = 1e-6  # float32's rounding of a ratio or of a sum of probabilities, with room


def check(case: Case) -> None:
    io = case.io
    target, drafted, uniforms = (io[f"in.{name}"] for name in ("target_probs", "draft_probs", "uniforms"))
    tokens = io["in.draft_tokens"][..., None]
    p, q = (np.take_along_axis(x, tokens, axis=2)[..., 0] for x in (target[:, :-1], drafted))
    count = _accepted(p, q, uniforms)
    case.same("accepted", count, io["out.accepted"])
    case.same("final_is_bonus", count == p.shape[1], io["out.final_is_bonus"])
    row = count[:, None, None]
    none = np.zeros_like(drafted[:, :1])
    rows = [np.take_along_axis(x, row, axis=1)[:, 0] for x in (target, np.concatenate([drafted, none], axis=1))]
    left = np.asarray(residual(*map(jnp.asarray, rows), jnp.asarray(count < p.shape[1])), np.float64)
    left /= left.sum(axis=1, keepdims=True)
    case.close("final_dist", left, io["out.final_dist"], LOSSES)
    if "out.accept_prob" in io:
        _each_alone(case, p.reshape(-1, 1), q.reshape(-1, 1), uniforms.reshape(-1, 1), io["out.accept_prob"].reshape(-1, 1))
    if "out.alpha" in io:
        case.close("alpha", acceptance(*(jnp.log(jnp.asarray(x)) for x in (drafted, target[:, :-1]))), io["out.alpha"], LOSSES)
    if "out.final_token_inverse_cdf" in io:
        summed, u = np.cumsum(left, axis=1), io["in.uniform_final"].astype(np.float64)[:, None]
        clear = (np.abs(summed - u) > EDGE).all(axis=1)
        case.same("final_token_inverse_cdf", np.argmax(summed > u, axis=1)[clear], io["out.final_token_inverse_cdf"][clear])
    for index, temperature in enumerate(case.params.get("temperatures", [])):
        logits = jnp.asarray(io["in.logits"].reshape(-1, io["in.logits"].shape[-1]))
        scores = transform(logits, make_sampling(len(logits), temperature=temperature))
        best = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1])
        ours = jax.nn.softmax(scores, axis=-1) if temperature else best
        case.close(f"probs_T{index}", ours, io[f"out.probs_T{index}"].reshape(ours.shape), LOSSES)


def _accepted(p, q, uniforms) -> np.ndarray:
    return np.asarray(count_accepted(*(jnp.asarray(x, jnp.float32) for x in (p, q, uniforms)), jnp.ones(p.shape, bool)))


def _each_alone(case: Case, p, q, uniforms, expected) -> None:
    """Every draft as a chain of one: accepted at its own number, just below its probability, and not just above it."""
    case.same("accepted alone", _accepted(p, q, uniforms), (uniforms < expected)[:, 0])
    some, less = expected[:, 0] > EDGE, expected[:, 0] < 1 - EDGE
    case.same("accepted below accept_prob", _accepted(p, q, expected * (1 - EDGE))[some], np.ones(some.sum()))
    case.same("accepted above accept_prob", _accepted(p, q, expected * (1 + EDGE))[less], np.zeros(less.sum()))
