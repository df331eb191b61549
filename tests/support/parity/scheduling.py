"""How many drafts of every request are verified: DSpark's algorithm 1, the search over every number of rows, and what the latter costs.

Our costs go by rows per request. Here a whole batch is one request that holds every request's drafts, so that they go by single rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding import dcut
from angelspec_jax.decoding.acceptance import residual
from angelspec_jax.drafter.types import Draft, OneHot
from parity.case import LOSSES, Case

RULES = {"early_stop": "causal", "global": "retrospective"}
choose = jax.jit(dcut.choose, static_argnums=1)


def check(case: Case) -> None:
    for name in sorted(name.split(".")[1] for name in case.io if name.startswith("in.c") and name.endswith(".confidence")):
        survival = np.cumprod(case.io[f"in.{name}.confidence"].astype(np.float64), axis=1)
        for rule, mode in RULES.items():
            speed = case.io[f"in.{name}.sps"]
            lengths = _lengths(survival, speed, mode)
            case.same(f"{name}.{rule}.lengths", lengths, case.io[f"out.{name}.{rule}.lengths"])
            tokens = len(lengths) + sum(survival[request, :length].sum() for request, length in enumerate(lengths))
            rate = tokens * speed[len(lengths) + lengths.sum()]
            case.close(f"{name}.{rule}.theta", rate, case.io[f"out.{name}.{rule}.theta"], LOSSES, relative=True)
    if "in.appendix.c1" in case.io:
        _counter_example(case)


def _counter_example(case: Case) -> None:
    """DSpark's appendix A: the second draft's confidence says which token was drawn first.

    A rule that looks at it before it decides on the first draft does not keep the target's distribution of the first token. That is worked
    out here from the rule's lengths and from what acceptance leaves: a draft of x stays with probability min(1, p(x) / q(x)), what replaces
    it comes from the residual, and without a draft the token comes from p.
    """
    p, q, speed = (case.io[f"in.appendix.{name}"].astype(np.float64) for name in ("target_probs", "draft_probs", "sps"))
    second, ids = case.io["in.appendix.c2_given_x1"].astype(np.float64), np.arange(len(p))
    rows = [jnp.asarray(np.broadcast_to(x, (len(p), len(p))), jnp.float32) for x in (p, q)]
    replaced = np.asarray(residual(*rows, jnp.ones(len(p), bool)))[0]
    left = replaced / replaced.sum()
    first = float(case.io["in.appendix.c1"])
    for rule, mode in RULES.items():
        lengths, said = [], np.zeros(len(p))
        for drawn in ids:
            survival = np.array([[first, first * second[drawn]]])
            (length,) = _lengths(survival, speed, mode)
            lengths.append(length)
            stays = min(1.0, p[drawn] / q[drawn])
            said += q[drawn] * (stays * (ids == drawn) + (1 - stays) * left if length else p)
            rates = case.io.get(f"out.appendix.{rule}.theta_x1_{'AB'[drawn]}", np.zeros(0))
            reached = np.concatenate([[1.0], 1.0 + np.cumsum(survival[0])])[: len(rates)]
            case.close(f"appendix.{rule}.theta_x1_{'AB'[drawn]}", reached * speed[1 : 1 + len(rates)], rates, LOSSES, relative=True)
        case.same(f"appendix.{rule}.lengths_given_x1", lengths, case.io[f"out.appendix.{rule}.lengths_given_x1"])
        case.close(f"appendix.{rule}.first_token_dist", said, case.io[f"out.appendix.{rule}.first_token_dist"], LOSSES)


def _lengths(survival: np.ndarray, speed: np.ndarray, mode: str) -> np.ndarray:
    requests, longest = survival.shape
    count = survival.size
    budgets = tuple(range(count + 1))
    costs = 1.0 / np.maximum(speed[requests : requests + count + 1], 1e-30)
    policy = dcut.Policy(
        jnp.asarray(costs, jnp.float32), jnp.float32(0.0), jnp.float32(0.0),
        mode=jnp.int32(dcut.MODES.index(mode)), forced=jnp.int32(dcut.FREE), bonus=jnp.float32(requests), margin=jnp.bool_(False),
    )  # fmt: skip
    draft = Draft(jnp.zeros((1, count), jnp.int32), OneHot(), jnp.asarray(survival.reshape(1, -1), jnp.float32))
    cut = choose(policy, budgets, draft, jnp.ones(1, bool), jnp.bool_(True), dcut.create_memory(budgets))
    return np.asarray(cut.keep).reshape(requests, longest).sum(axis=1)
