"""How many drafts of every request are verified: DSpark's algorithm 1 and the search over every number of rows.

Our costs go by rows per request. Here a whole batch is one request that holds every request's drafts, so that they go by single rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding import dcut
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
    if any(name.startswith("out.appendix.") for name in case.io):
        case.unchecked.append("appendix A, the counter-example")


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
