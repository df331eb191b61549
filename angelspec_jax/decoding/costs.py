"""What a round costs at every budget on this device, measured with the very program that will run."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding.dcut import PROBE, Policy
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.step import Plan, Weights

CONTEXT = 64  # tokens before the measured rounds
NEVER = 1e9  # a cost that no budget is chosen at


def default_budgets(num_drafts: int) -> tuple[int, ...]:
    """No draft, all of them, and half where that is many: each budget is a program of its own inside the step, so they are few."""
    return tuple(sorted({0, num_drafts} | ({num_drafts // 2} if num_drafts > 5 else set())))


def measure(plan: Plan, weights: Weights, *, requests: int = 1, capacity: int = 512, repeats: int = 3) -> Policy:
    """A policy with the measured costs, in seconds, of every budget of `plan` and of drafting, for a batch of this size.

    The policy is traced, so each budget is forced in turn and nothing but `generate` itself is compiled, whose loop leaves the host no
    part in a round. Call it when the device is idle.
    """

    def forced(index: int, draft_cost: float) -> float:
        costs = np.full(len(plan.budgets), NEVER, np.float32)
        costs[index] = 1.0
        return _seconds(plan, weights, Policy(jnp.asarray(costs), jnp.float32(draft_cost), jnp.float32(0.0)), requests, capacity, repeats)

    # A draft that seems to save half a round is always made, one that seems to cost another round only as a probe.
    drafted = [forced(index, -0.5 if index == 0 else 0.0) for index in range(len(plan.budgets))]
    if plan.budgets[0] > 0:
        return Policy(jnp.asarray(drafted, jnp.float32), jnp.float32(0.0), jnp.float32(0.0))
    plain = (PROBE * forced(0, 1.0) - drafted[0]) / (PROBE - 1)
    plain = min(max(plain, 1e-9), drafted[0])
    draft = drafted[0] - plain
    costs = np.maximum.accumulate([max(seconds - draft, plain) for seconds in drafted])  # more rows never cost less
    return Policy(jnp.asarray(costs, jnp.float32), jnp.float32(draft), jnp.float32(0.0))


def _seconds(plan: Plan, weights: Weights, policy: Policy, requests: int, capacity: int, repeats: int) -> float:
    """Median seconds of a round under a policy: whole generations less their prefill, by their rounds."""
    context = min(CONTEXT, capacity // 2)
    random = np.random.default_rng(0)
    found = []
    for repeat in range(repeats + 1):
        prompts = random.integers(0, plan.target.vocab_size, (requests, context)).tolist()
        seconds, rounds = [], 0
        for new_tokens in (0, min(capacity - context, 6 * PROBE)):
            begin = time.perf_counter()
            generation = generate(plan, weights, prompts, new_tokens, policy=policy, capacity=capacity)
            jax.block_until_ready(generation.length)
            seconds.append(time.perf_counter() - begin)
            rounds = int(np.max(np.asarray(generation.statistics.rounds)))
        if repeat > 0:  # the first one may compile
            found.append((seconds[1] - seconds[0]) / max(rounds, 1))
    return max(statistics.median(found), 1e-9)
