"""Whole generations: one jitted program for notebooks and batch jobs, or step by step for streaming."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.decoding import deferral
from angelspec_jax.decoding.dcut import Policy, create_memory
from angelspec_jax.decoding.sampling import Sampling, make_sampling
from angelspec_jax.decoding.step import DecodeState, Plan, Statistics, Weights, prefill, speculative_step
from angelspec_jax.drafter import registry
from angelspec_jax.target import kv_cache


@struct.dataclass
class Generation:
    """`tokens[r, prompt_length[r] : length[r]]` is what request r said, its stop token included."""

    tokens: Int[Array, "R S"]
    prompt_length: Int[Array, "R"]
    length: Int[Array, "R"]
    statistics: Statistics
    logprobs: Float[Array, "R S"] | None = None  # where `plan.logprobs`: of the tokens, from the model's logits at temperature 1

    def texts(self) -> list[list[int]]:
        """The generated token ids of every request."""
        tokens, start, end = (np.asarray(x) for x in (self.tokens, self.prompt_length, self.length))
        return [tokens[r, start[r] : end[r]].tolist() for r in range(len(start))]

    def text_logprobs(self) -> list[list[float]]:
        """The log-probability of every generated token. ValueError where the plan did not ask for them."""
        if self.logprobs is None:
            raise ValueError("log-probabilities were not recorded; decode with Plan(logprobs=True)")
        found, start, end = (np.asarray(x) for x in (self.logprobs, self.prompt_length, self.length))
        return [found[r, start[r] : end[r]].tolist() for r in range(len(start))]


def generate(
    plan: Plan,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    capacity: int | None = None,
) -> Generation:
    """Decode a batch of prompts to their ends in one compiled program.

    `capacity` (tokens a request can hold, prompt included) is a static shape: fix it to serve prompts of any length without recompiling.
    Raises ValueError for an empty prompt, a token id outside the vocabulary, or a request that does not fit.
    """
    state, policy = start(plan, weights, prompts, max_new_tokens, sampling=sampling, policy=policy, capacity=capacity)
    prompt_length = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    state = _run(plan, weights, policy, state)
    return Generation(state.tokens, prompt_length, state.length, state.statistics, state.logprobs)


def stream(
    plan: Plan,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    capacity: int | None = None,
) -> Iterator[list[list[int]]]:
    """Decode step by step; yields the new tokens of every request after each step. Same step, same text as `generate`."""
    state, policy = start(plan, weights, prompts, max_new_tokens, sampling=sampling, policy=policy, capacity=capacity)
    state = jitted_prefill(plan, weights, state)
    pending = None
    while True:
        state, emitted = jitted_step(plan, weights, policy, state)
        # One step ahead of the device: the next step is queued before this one's tokens are read.
        current = (emitted, jnp.all(state.finished))
        if pending is not None:
            yield _split(pending[0])
            if bool(pending[1]):
                return
        pending = current


def start(
    plan: Plan,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    capacity: int | None = None,
) -> tuple[DecodeState, Policy]:
    """Check the prompts and lay out the state of a generation that has not begun."""
    requests = len(prompts)
    if requests == 0:
        raise ValueError("prompts is empty; give at least one")
    new_tokens = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (requests,))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    needed = int((lengths + new_tokens).max())
    capacity = _bucket(needed) if capacity is None else capacity
    for row, prompt in enumerate(prompts):
        check_prompt(plan, prompt, int(new_tokens[row]), capacity=capacity, name=f"prompt {row}")
    tokens = np.zeros((requests, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    state = dataclasses.replace(
        create_state(plan, weights.target.embed.dtype, requests, capacity),
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(lengths),
        prompt_length=jnp.asarray(lengths),
        limit=jnp.asarray(lengths + new_tokens),
        finished=jnp.asarray(new_tokens <= 0),
        sampling=make_sampling(requests) if sampling is None else jax.tree.map(jnp.copy, sampling),  # the state is donated
    )
    # On the device once, so that no step brings numbers from the host.
    return state, jax.tree.map(jnp.asarray, even_policy(plan) if policy is None else policy)


def create_state(plan: Plan, dtype, requests: int, capacity: int) -> DecodeState:
    """Slots that hold nothing: every request is finished, every cache empty."""
    drafts = plan.budgets[-1]
    return DecodeState(
        tokens=jnp.zeros((requests, capacity), jnp.int32),
        length=jnp.ones((requests,), jnp.int32),
        prompt_length=jnp.ones((requests,), jnp.int32),
        limit=jnp.ones((requests,), jnp.int32),
        finished=jnp.ones((requests,), bool),
        sampling=make_sampling(requests, bias_slots=plan.bias_slots),
        cache=kv_cache.create(plan.target, requests, capacity, dtype),
        drafter=None if plan.drafter is None else registry.module(plan.drafter).create_state(plan.drafter, requests, capacity, dtype),
        statistics=Statistics(jnp.zeros(requests, jnp.int32), *(jnp.zeros((requests, drafts), jnp.int32) for _ in range(3))),
        memory=create_memory(plan.budgets),
        pending=_pending(plan, dtype, requests),
        logprobs=jnp.zeros((requests, capacity), jnp.float32) if plan.logprobs else None,
    )


def _pending(plan: Plan, dtype, requests: int) -> deferral.Pending | None:
    """Room for what a drafter with a memory digests later, where a round may go without it."""
    drafter = plan.drafter
    if drafter is None or plan.budgets[0] > 0 or plan.budgets[-1] == 0:
        return None
    memory = jax.eval_shape(lambda: registry.module(drafter).create_state(drafter, 1, 1, dtype))
    return deferral.create(requests, len(plan.taps), plan.target.hidden_size, dtype) if jax.tree.leaves(memory) else None


def even_policy(plan: Plan) -> Policy:
    """Always the largest budget, drafting to full depth."""
    last = len(plan.budgets) - 1
    return Policy(jnp.ones((last + 1,), jnp.float32), jnp.float32(0.0), jnp.float32(0.0), forced=jnp.int32(last))


def check_prompt(plan: Plan, prompt: Sequence[int], new_tokens: int, *, capacity: int | None = None, name: str = "the prompt") -> None:
    """Raise ValueError, naming the prompt, when it cannot be decoded: empty, tokens that do not exist, or no room for its answer."""
    length = len(prompt)
    if length == 0:
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= plan.target.vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{name} holds token id {bad}, outside the vocabulary of {plan.target.vocab_size} tokens")
    if new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {new_tokens} for {name}")
    if length + new_tokens > plan.target.max_positions:
        raise ValueError(
            f"{name} has {length} tokens and asks for {new_tokens} more, over the model's context of "
            f"{plan.target.max_positions}; shorten it or lower max_new_tokens"
        )
    if capacity is not None and length + new_tokens > capacity:
        raise ValueError(
            f"{name} has {length} tokens and asks for {new_tokens} more, over the capacity of {capacity}; "
            "shorten it, lower max_new_tokens or raise capacity"
        )


def _bucket(length: int) -> int:
    """Few distinct capacities, so that few programs are compiled."""
    size = 128
    while size < length:
        size += size // 2 if size >= 256 else size
    return size


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _run(plan: Plan, weights: Weights, policy: Policy, state: DecodeState) -> DecodeState:
    state = prefill(plan, weights, state)
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.finished), lambda state: speculative_step(plan, weights, policy, state)[0], state
    )


jitted_step = jax.jit(speculative_step, static_argnums=0, donate_argnums=3)
jitted_prefill = jax.jit(prefill, static_argnums=0, donate_argnums=2)


def _split(emitted) -> list[list[int]]:
    tokens, count = np.asarray(emitted.tokens), np.asarray(emitted.count)
    return [tokens[row, : count[row]].tolist() for row in range(len(count))]
