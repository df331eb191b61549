"""What the parts of a round cost on this device: verification by width, drafting, a plain step, and the floor that memory sets.

A decode step at batch 1 reads every weight once, so it cannot be faster than their bytes over the memory's bandwidth. What a whole round
takes beyond drafting and verifying (the cut, acceptance, counters) is its overhead; whole and parts are timed in turns, so that what else
the machine does weighs on all of them alike.
"""

import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.generate import generate, start
from angelspec_jax.decoding.step import DecodeState, Plan, Weights, speculative_step
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.drafter.types import DraftPolicy, Seen, Shared
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.loading import Target
from angelspec_jax.target.transformer import TargetParams, forward, logits

WIDTHS = (1, 2, 4, 8, 16)
ROUNDS = 4  # in one compiled loop, so that the host's part of a measurement is a fraction of what it is for a single step


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds, each the median of the repeats."""

    requests: int
    context: int  # tokens each request had in its cache
    capacity: int
    verify: dict[int, float]  # rows per request -> seconds of one pass with head, choice and commit
    plain: float  # one plain step inside `generate`
    draft: float | None  # one draft with the digestion of a full round's features; None without a drafter
    round: float | None  # one whole round that drafts and verifies all it can; None without a drafter
    overhead: float | None  # what the round took beyond its draft and its verification; below 0 where the parts cost more alone
    weight_bytes: int  # what one pass reads
    bandwidth: float  # bytes per second, streaming

    @property
    def floor(self) -> float:
        """Seconds the weights alone take to stream."""
        return self.weight_bytes / self.bandwidth

    def break_even(self, width: int) -> float:
        """Tokens a round of this width must emit to be as fast as plain steps."""
        return (self.verify[width] + (self.draft or 0.0 if width > 1 else 0.0)) / self.plain

    @property
    def overhead_share(self) -> float | None:
        """Share of a round that is neither drafting nor verifying; None without a drafter."""
        return None if self.round is None or self.overhead is None else self.overhead / self.round

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"floor": self.floor, "overhead_share": self.overhead_share}


def measure_widths(
    target: Target,
    drafter: Drafter | None = None,
    *,
    widths: Sequence[int] = WIDTHS,
    requests: int = 1,
    context: int = 256,
    capacity: int = 512,
    repeats: int = 15,
) -> StepCosts:
    """Measure on the default device. Raises ValueError for widths or contexts that do not fit."""
    if not widths or min(widths) < 1 or max(widths) > 64:
        raise ValueError(f"widths must lie between 1 and 64, got {', '.join(map(str, widths))}")
    deepest = ROUNDS * (drafter.config.num_drafts + 1) if drafter is not None else 0
    longest = context + max(max(widths), 32, deepest)
    if context < 1 or longest > capacity:
        raise ValueError(f"a context of {context} tokens and what is measured after it need a capacity of {longest}, got {capacity}")
    taps = drafter.config.taps if drafter is not None else ()
    shape = (requests, context, capacity)
    passes = {width: _median(_verify_runner(target, taps, width, *shape), repeats) / ROUNDS for width in sorted(set(widths))}
    whole = draft = overhead = None
    if drafter is not None:
        parts = (
            _round_runner(drafter, target, *shape),
            _draft_runner(drafter, target, *shape),
            _verify_runner(target, taps, drafter.config.num_drafts + 1, *shape),
        )
        turns = _in_turns(parts, repeats)
        whole, draft = (statistics.median(times) / ROUNDS for times in turns[:2])
        overhead = statistics.median(one - two - three for one, two, three in zip(*turns, strict=True)) / ROUNDS
    return StepCosts(
        requests=requests,
        context=context,
        capacity=capacity,
        verify=passes,
        plain=_time_plain(target, requests, context, capacity, repeats),
        draft=draft,
        round=whole,
        overhead=overhead,
        weight_bytes=weight_bytes(target.params),
        bandwidth=streaming_bandwidth(),
    )


def weight_bytes(params: TargetParams) -> int:
    """Bytes of parameters that one pass reads: all, but of an embedding that is not the head only single rows."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total if params.lm_head is None else total - params.embed.nbytes


def streaming_bandwidth(size: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes per second at which the default device reads memory: the best of a few ways to sum `size` bytes."""
    values = jnp.ones(size // 4, jnp.float32)
    square = values.reshape(-1, 4096)
    vector = jnp.ones(4096, jnp.float32)
    ways: list[Callable[[], Any]] = [
        functools.partial(jax.jit(jnp.sum), values),
        functools.partial(jax.jit(jnp.matmul), square, vector),
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        if jax.default_backend() == "cpu":  # XLA may sum on one core only
            parts = np.array_split(np.asarray(values), os.cpu_count() or 1)
            ways.append(lambda: list(pool.map(np.max, parts)))
        seconds = _fastest(ways, repeats)
    return values.nbytes / seconds


def _fastest(ways: Sequence[Callable[[], Any]], repeats: int) -> float:
    best = float("inf")
    for way in ways:
        jax.block_until_ready(way())
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(way())
            best = min(best, time.perf_counter() - begin)
    return best


def _median(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, the first one (which compiles) aside."""
    return statistics.median(_in_turns([run], repeats)[0])


def _in_turns(runs: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of every call of every function, called in turns; the first calls, which compile, aside."""
    for run in runs:
        jax.block_until_ready(run())
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, found, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
    return found


def _round_runner(drafter: Drafter, target: Target, requests: int, context: int, capacity: int) -> Callable[[], Any]:
    """Whole rounds of greedy requests without stop tokens, from the same lengths in every call."""
    plan = Plan(target.config, drafter.config)
    weights = Weights(target.params, drafter.params, drafter.shared)
    state, policy = start(plan, weights, [[0] * context] * requests, capacity - context, capacity=capacity)

    def run():
        nonlocal state
        state = _whole_rounds(plan, weights, policy, state, context)
        return state.length

    return run


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def _whole_rounds(plan: Plan, weights: Weights, policy: Policy, state: DecodeState, context: int) -> DecodeState:
    state = dataclasses.replace(state, length=jnp.full_like(state.length, context), finished=jnp.zeros_like(state.finished))
    return jax.lax.fori_loop(0, ROUNDS, lambda _, state: speculative_step(plan, weights, policy, state)[0], state)


def _verify_runner(target: Target, taps, width: int, requests: int, context: int, capacity: int) -> Callable[[], Any]:
    cache = kv_cache.create(target.config, requests, capacity, target.params.embed.dtype)
    tokens = jnp.zeros((requests, width), jnp.int32)
    prefix = jnp.full((requests,), context, jnp.int32)

    def run():
        nonlocal cache, tokens
        cache, tokens = _verify_rounds(target.config, taps, target.params, cache, tokens, prefix)
        return tokens

    return run


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _verify_rounds(
    config: TransformerConfig,
    taps: tuple[int, ...],
    params: TargetParams,
    cache: KVCache,
    tokens: Int[Array, "R W"],
    prefix: Int[Array, "R"],
) -> tuple[KVCache, Int[Array, "R W"]]:
    """`ROUNDS` passes over W rows a request, each fed what the one before chose."""
    requests, width = tokens.shape
    rows = uniform_rows(prefix, width)
    positions = (prefix[:, None] + jnp.arange(width, dtype=jnp.int32)[None]).reshape(-1)

    def once(_, carry):
        cache, tokens, used = carry
        features, hidden, new_kv = forward(params, config, tokens.reshape(-1), positions, rows, cache, taps)
        chosen = jnp.argmax(logits(params, hidden), axis=-1).astype(jnp.int32)
        used = used + jnp.sum(features.astype(jnp.float32))  # features must not be optimized away
        # As in a step, what is written depends on what was chosen; otherwise XLA copies the cache, which it could read after the write.
        cache = kv_cache.commit(cache, new_kv, rows.request, positions, rows.valid & (chosen >= 0))
        return cache, chosen.reshape(requests, width), used

    cache, tokens, used = jax.lax.fori_loop(0, ROUNDS, once, (cache, tokens, jnp.float32(0.0)))
    return cache, jnp.where(jnp.isnan(used), 0, tokens)


def _time_plain(target: Target, requests: int, context: int, capacity: int, repeats: int) -> float:
    plan, weights = Plan(target.config), Weights(target.params)  # without stop tokens, so that the count of steps is known
    prompts, steps = [[0] * context] * requests, 16

    def run(new_tokens: int):
        return generate(plan, weights, prompts, new_tokens, capacity=capacity).length

    prefill = _median(lambda: run(0), repeats)
    return max(_median(lambda: run(steps), repeats) - prefill, 1e-9) / steps


def time_draft(drafter: Drafter, target: Target, requests: int, context: int, capacity: int, repeats: int) -> float:
    """Seconds of one draft to full depth, the digestion of a full round's features included."""
    return _median(_draft_runner(drafter, target, requests, context, capacity), repeats) / ROUNDS


def _draft_runner(drafter: Drafter, target: Target, requests: int, context: int, capacity: int) -> Callable[[], Any]:
    dtype = target.params.embed.dtype
    state = registry.module(drafter.config).create_state(drafter.config, requests, capacity, dtype)
    cache = kv_cache.create(target.config, requests, capacity, dtype)
    tokens, prefix = jnp.zeros((requests, capacity), jnp.int32), jnp.full((requests,), context, jnp.int32)
    seen = Seen(tokens[:, 0], prefix, tokens, target.params, cache)
    width = drafter.config.num_drafts + 1
    features = jnp.ones((requests * width, len(drafter.config.taps), target.config.hidden_size), dtype)
    hidden = jnp.ones((requests * width, target.config.hidden_size), dtype)

    def run():
        nonlocal state, seen
        state, anchor = _draft_rounds(drafter.config, drafter.params, drafter.shared, state, seen, features, hidden)
        seen = dataclasses.replace(seen, anchor=anchor)
        return anchor

    return run


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _draft_rounds(
    config: registry.AnyConfig, params: registry.AnyDrafter, shared: Shared, state: Any, seen: Seen, features, hidden
) -> tuple[Any, Int[Array, "R"]]:
    module = registry.module(config)
    requests = seen.anchor.shape[0]
    width = hidden.shape[0] // requests
    request = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), width)
    positions = (seen.prefix_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]).reshape(-1)
    accepted = jnp.ones_like(request, bool)

    def once(_, carry):
        state, anchor = carry
        draft = module.draft(params, config, shared, dataclasses.replace(seen, anchor=anchor), state, None, DraftPolicy(jnp.float32(0.0)))
        state = module.extend(params, config, shared, features, hidden, request, request, positions, accepted, state)
        return state, draft.tokens[:, -1]

    return jax.lax.fori_loop(0, ROUNDS, once, (state, seen.anchor))
