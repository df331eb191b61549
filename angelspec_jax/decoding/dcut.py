"""D-cut: whether a round drafts at all, and how many of the drafts are worth verifying (AngelSpec section on D-cut)."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.drafter.types import Draft

PROBE = 4  # rounds between two looks at a drafter that has not paid lately
MEMORY = 0.9  # of the running mean of what drafting rounds yield


@struct.dataclass
class Policy:
    """Numbers the step weighs drafts with; traced, so changing them compiles nothing.

    `costs[b]` is the duration of a round at budget b without its draft, `draft_cost` that of drafting, in any unit. The step takes the
    budget with the most expected tokens per unit of cost. Where budget 0 exists and drafting has not paid lately, rounds go without a
    draft but for a probe every `PROBE` rounds. The loop over draft depth ends when no chain survives with `min_survival`.
    """

    costs: Float[Array, "budgets"]
    draft_cost: Float[Array, ""]
    min_survival: Float[Array, ""]


def worth_drafting(policy: Policy, budgets: tuple[int, ...], has_drafter: bool, pace, round) -> Bool[Array, ""] | bool:
    """Whether this round drafts: always, unless plain rounds are allowed and have been the better use of time."""
    if not has_drafter or budgets[-1] == 0:
        return False
    if budgets[0] > 0:
        return True
    return (pace * policy.costs[0] > 1.0) | (round % PROBE == 0)


def choose_budget(policy: Policy, budgets: tuple[int, ...], draft: Draft | None, finished, drafting) -> Int[Array, ""]:
    """Index of the budget with the most expected tokens per cost over the batch; every edge is evaluated."""
    if draft is None or len(budgets) == 1:
        return jnp.int32(0)
    survival = jnp.where(finished[:, None], 0.0, draft.survival)
    reach = jnp.cumsum(jnp.sum(survival, axis=0))
    running = jnp.sum(~finished).astype(jnp.float32)
    expected = jnp.stack([running + (reach[edge - 1] if edge else 0.0) for edge in budgets])
    costs = policy.costs + jnp.where(drafting, policy.draft_cost, 0.0)
    return jnp.argmax(expected / costs).astype(jnp.int32)


def update_pace(policy: Policy, pace, budget, drafting, count, running) -> Float[Array, ""]:
    """Update the running mean of what a drafting round yields per request and unit of cost."""
    requests = jnp.maximum(jnp.sum(running), 1).astype(jnp.float32)
    yielded = jnp.sum(count).astype(jnp.float32) / requests / (policy.costs[budget] + policy.draft_cost)
    # The first measured round replaces the start value.
    return jnp.where(drafting, jnp.where(jnp.isinf(pace), yielded, MEMORY * pace + (1 - MEMORY) * yielded), pace)
