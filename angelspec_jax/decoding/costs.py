"""What a round costs at every budget on this device, measured with the very step that will run."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.decoding import generate
from angelspec_jax.decoding.step import Plan, Policy, Weights

CONTEXT = 64  # tokens before the measured rounds
ROUNDS = 4  # timed together


def default_budgets(num_drafts: int) -> tuple[int, ...]:
    """No draft, all of them, and half where that is many: each budget is a program of its own inside the step, so they are few."""
    return tuple(sorted({0, num_drafts} | ({num_drafts // 2} if num_drafts > 5 else set())))


def measure(plan: Plan, weights: Weights, *, requests: int = 1, capacity: int = 512, repeats: int = 5) -> Policy:
    """A policy with the measured costs, in seconds, of every budget of `plan` and of drafting, for a batch of this size.

    The policy is traced, so each budget is forced in turn and nothing but the step itself is compiled. Call it when the device is idle.
    """
    timed = [_seconds(plan, weights, index, True, requests, capacity, repeats) for index in range(len(plan.budgets))]
    if plan.budgets[0] > 0:
        return Policy(jnp.asarray(timed, jnp.float32), jnp.float32(0.0), jnp.float32(0.0))
    plain = _seconds(plan, weights, 0, False, requests, capacity, repeats)
    draft = max(timed[0] - plain, 0.0)
    costs = np.maximum.accumulate([max(seconds - draft, plain) for seconds in timed])  # more rows never cost less
    return Policy(jnp.asarray(costs, jnp.float32), jnp.float32(draft), jnp.float32(0.0))


def _seconds(plan: Plan, weights: Weights, index: int, draft: bool, requests: int, capacity: int, repeats: int) -> float:
    """Median seconds of a round that takes one budget, with or without a draft before it."""
    costs = np.full(len(plan.budgets), 1e9, np.float32)
    costs[index] = 1.0
    policy = Policy(jnp.asarray(costs), jnp.float32(0.0), jnp.float32(0.0))
    context = min(CONTEXT, capacity // 2)
    prompts = np.random.default_rng(0).integers(0, plan.target.vocab_size, (requests, context)).tolist()
    state, _ = generate.start(plan, weights, prompts, capacity - context, capacity=capacity)
    state = generate.jitted_prefill(plan, weights, state)
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            # A request that has ended is computed like any other, so its cost is the same.
            state = dataclasses.replace(state, round=jnp.int32(1), pace=jnp.float32(np.inf if draft else 0.0))
            state, _ = generate.jitted_step(plan, weights, policy, state)
        jax.block_until_ready(state.length)
        found.append((time.perf_counter() - begin) / ROUNDS)
    return statistics.median(found[1:])
