"""One speculative step: draft, choose a width, verify, accept, commit, extend. One program, no host round trip.

Plain decoding is the same step without a drafter. Invariant between steps: a request's last token, the *anchor*, is not in the cache yet;
everything before it is, in the target's cache and in the drafter's memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.decoding.acceptance import accept
from angelspec_jax.decoding.dcut import Policy, choose_budget, update_pace, worth_drafting
from angelspec_jax.decoding.sampling import Sampling, choose
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.registry import AnyConfig, AnyDrafter
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, Seen, Shared
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import Rows, tree_ancestors, uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.transformer import TargetParams, forward, logits


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the step is compiled. `budgets` are the draft counts a request may have verified, ascending."""

    target: TransformerConfig
    drafter: AnyConfig | None = None
    stop_ids: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    candidates: int = 64
    prefill_chunk: int = 128

    def __post_init__(self):
        if self.drafter is None:
            object.__setattr__(self, "budgets", (0,))
        elif not self.budgets:
            object.__setattr__(self, "budgets", (self.drafter.num_drafts,))
        if list(self.budgets) != sorted(set(self.budgets)) or self.budgets[0] < 0:
            raise ValueError(f"budgets must be ascending draft counts, got {self.budgets}")
        if self.drafter is not None and self.budgets[-1] > self.drafter.num_drafts:
            raise ValueError(f"this drafter makes {self.drafter.num_drafts} drafts a round, a budget asks for {self.budgets[-1]}")

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    @property
    def width(self) -> int:
        """Rows of one request at the largest budget."""
        return self.budgets[-1] + 1


@struct.dataclass
class Weights:
    target: TargetParams
    drafter: AnyDrafter | None = None
    shared: Shared | None = None


@struct.dataclass
class Statistics:
    """Counters per request, from which tau and acceptance by position follow."""

    rounds: Int[Array, "R"]
    verified: Int[Array, "R K"]  # rounds in which draft k was verified
    reached: Int[Array, "R K"]  # ... and the draft before it had been accepted
    accepted: Int[Array, "R K"]  # rounds in which draft k was accepted


@struct.dataclass
class DecodeState:
    tokens: Int[Array, "R S"]  # prompt, then what was emitted
    length: Int[Array, "R"]  # tokens known; the last is the anchor
    limit: Int[Array, "R"]  # length at which a request ends
    finished: Bool[Array, "R"]
    sampling: Sampling
    cache: KVCache
    drafter: Any  # the drafter's own memory, None without one
    statistics: Statistics
    round: Int[Array, ""]
    pace: Float[Array, ""]  # running mean of tokens per request and cost in rounds with a draft; starts high, so that the first ones draft


@struct.dataclass
class Report:
    """What the round decided, for whoever watches it; nothing of it is needed to go on."""

    finished: Bool[Array, "R"]
    drafted: Bool[Array, ""]
    budget: Int[Array, ""]  # index into `Plan.budgets`
    kept: Int[Array, "R"]  # drafts that were verified
    accepted: Int[Array, "R"]  # of these, those that became text
    survival: Float[Array, "R K"]  # estimates the choice was made on; zeros without a draft


@struct.dataclass
class Emitted:
    tokens: Int[Array, "R W"]
    count: Int[Array, "R"]  # how many of them are new text
    report: Report | None = None


@struct.dataclass
class Verified:
    chosen: Int[Array, "R W"]
    features: Float[Array, "R W T D"]
    hidden: Float[Array, "R W D"]  # after the final norm
    new_kv: tuple


def speculative_step(plan: Plan, weights: Weights, policy: Policy, state: DecodeState) -> tuple[DecodeState, Emitted]:
    """Advance every unfinished request by one to `plan.width` tokens."""
    running = ~state.finished
    prefix = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, prefix[:, None], axis=1)[:, 0]
    drafting = worth_drafting(policy, plan.budgets, plan.drafter is not None, state.pace, state.round)
    draft = _draft(plan, weights, policy, state, anchor, prefix, drafting)
    budget = choose_budget(policy, plan.budgets, draft, state.finished, drafting)

    with jax.named_scope("verify"):
        branches = [lambda edge=edge: _verify(plan, weights, state, draft, anchor, prefix, edge) for edge in plan.budgets]
        verified = jax.lax.switch(budget, branches) if len(branches) > 1 else branches[0]()

    edge = jnp.asarray(plan.budgets, jnp.int32)[budget]
    drafts = jnp.arange(plan.budgets[-1], dtype=jnp.int32)[None]
    checked = None if draft is None else (drafts < edge) & (draft.survival[:, : plan.budgets[-1]] > 0)
    accepted = accept(draft, verified.chosen, checked)
    emitted, finished = _emit(plan, state, accepted)

    with jax.named_scope("commit"):
        state = _commit(plan, weights, state, verified, accepted.path, emitted, prefix)
    statistics = _count(state.statistics, checked, jnp.minimum(accepted.count, emitted.count), running)
    pace = update_pace(policy, state.pace, budget, drafting, emitted.count, running)
    state = dataclasses.replace(state, finished=finished, statistics=statistics, round=state.round + 1, pace=pace)
    return state, dataclasses.replace(emitted, report=_report(draft, checked, accepted, emitted, finished, running, drafting, budget))


def prefill(plan: Plan, weights: Weights, state: DecodeState) -> DecodeState:
    """Run the prompts, all but their last token, in chunks of `plan.prefill_chunk`; `state.length` holds the prompt lengths."""
    chunk = min(plan.prefill_chunk, state.tokens.shape[1])

    def run(index, caches):
        after = prefill_chunk(plan, weights, dataclasses.replace(state, cache=caches[0], drafter=caches[1]), index * chunk, chunk)
        return after.cache, after.drafter

    chunks = (jnp.max(state.length) - 1 + chunk - 1) // chunk
    cache, drafter = jax.lax.fori_loop(0, chunks, run, (state.cache, state.drafter))
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def prefill_chunk(plan: Plan, weights: Weights, state: DecodeState, start: Int[Array, ""], chunk: int) -> DecodeState:
    """Run the prompt tokens at `start` .. `start + chunk - 1` of every request; those before are in the caches already."""
    requests = state.length.shape[0]
    columns = start + jnp.arange(chunk, dtype=jnp.int32)[None]
    tokens = jnp.take(state.tokens, columns[0], axis=1, mode="clip")
    valid = columns < (state.length - 1)[:, None]
    rows = uniform_rows(jnp.minimum(start, state.length - 1), chunk, valid=valid, causal=True)
    positions = jnp.broadcast_to(columns, (requests, chunk)).reshape(-1)
    features, hidden, new_kv = forward(weights.target, plan.target, tokens.reshape(-1), positions, rows, state.cache, plan.taps)
    cache = kv_cache.commit(state.cache, new_kv, rows.request, positions, rows.valid)
    next_tokens = jnp.take(state.tokens, columns[0] + 1, axis=1, mode="clip").reshape(-1)
    drafter = _extend(plan, weights, features, hidden, next_tokens, rows.request, positions, rows.valid, state.drafter)
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def _draft(plan, weights, policy, state, anchor, prefix, drafting) -> Draft | None:
    if drafting is False:
        return None

    def propose():
        # Drafts use the target's own noise, which raises the coupled rule's hit rate; at temperature 0 they are greedy.
        noise = Noise(state.sampling.seeds, state.sampling.temperature)
        options = DraftPolicy(policy.min_survival, plan.candidates)
        seen = Seen(anchor, prefix, state.tokens, weights.target, state.cache)
        return registry.module(plan.drafter).draft(weights.drafter, plan.drafter, weights.shared, seen, state.drafter, noise, options)

    if drafting is True:
        return propose()
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(propose))
    return jax.lax.cond(drafting, propose, lambda: nothing)


def _verify(plan: Plan, weights: Weights, state: DecodeState, draft: Draft | None, anchor, prefix, edge: int) -> Verified:
    """One target pass over the anchor and `edge` drafts of every request, padded to the widest budget."""
    rows, tokens, positions = _rows(draft, anchor, prefix, edge)
    features, hidden, new_kv = forward(weights.target, plan.target, tokens, positions, rows, state.cache, plan.taps)
    with jax.named_scope("head"):
        chosen = choose(logits(weights.target, hidden), state.sampling.rows(rows.request), positions + 1)
    pad = lambda x: _pad_rows(x, anchor.shape[0], edge + 1, plan.width)  # noqa: E731
    flat = lambda x: pad(x).reshape(anchor.shape[0] * plan.width, *x.shape[1:])  # noqa: E731
    stacked = state.cache.k.ndim == 5 if not isinstance(state.cache.k, tuple) else False
    return Verified(pad(chosen), pad(features), pad(hidden), jax.tree.map(jax.vmap(flat) if stacked else flat, new_kv))


def _rows(draft: Draft | None, anchor, prefix, edge: int) -> tuple[Rows, Int[Array, "N"], Int[Array, "N"]]:
    if edge == 0 or draft is None:
        return uniform_rows(prefix, 1), anchor, prefix
    tokens = jnp.concatenate([anchor[:, None], draft.tokens[:, :edge]], axis=1)
    if draft.parents is None:
        rows = uniform_rows(prefix, edge + 1)
        depth = jnp.broadcast_to(jnp.arange(edge + 1, dtype=jnp.int32), tokens.shape)
    else:
        root = jnp.full_like(anchor[:, None], -1)
        ancestors = tree_ancestors(jnp.concatenate([root, draft.parents[:, :edge] + 1], axis=1))
        rows = dataclasses.replace(uniform_rows(prefix, edge + 1), ancestors=ancestors.reshape(-1, 2))
        depth = jnp.sum(jax.lax.population_count(ancestors), axis=-1).astype(jnp.int32) - 1
    return rows, tokens.reshape(-1), (prefix[:, None] + depth).reshape(-1)


def _emit(plan: Plan, state: DecodeState, accepted) -> tuple[Emitted, Bool[Array, "R"]]:
    """Cut what was accepted at the first stop token and at the request's limit."""
    index = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)[None]
    count = jnp.minimum(accepted.count + 1, state.limit - state.length)
    stops = jnp.isin(accepted.tokens, jnp.asarray(plan.stop_ids, jnp.int32)) & (index < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.finished, 0, count)
    finished = state.finished | stopped | (state.length + count >= state.limit)
    return Emitted(accepted.tokens, count), finished


def _commit(plan: Plan, weights: Weights, state: DecodeState, verified: Verified, path, emitted: Emitted, prefix) -> DecodeState:
    """Write the anchor and all emitted drafts but the last token, which becomes the next anchor."""
    requests, width = emitted.tokens.shape
    depth = jnp.arange(width, dtype=jnp.int32)[None]
    keep = (depth < emitted.count[:, None]).reshape(-1)
    request = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), width)
    positions = (prefix[:, None] + depth).reshape(-1)
    new_kv, features, hidden = verified.new_kv, verified.features, verified.hidden
    if path is not None:
        features = jnp.take_along_axis(features, path[:, :, None, None], axis=1)
        hidden = jnp.take_along_axis(hidden, path[:, :, None], axis=1)
        source = request * width + path.reshape(-1)
        axis = 0 if isinstance(state.cache.k, tuple) else 1
        new_kv = jax.tree.map(lambda x: jnp.take(x, source, axis=axis), new_kv)
    cache = kv_cache.commit(state.cache, new_kv, request, positions, keep)
    features, hidden = (x.reshape(requests * width, *x.shape[2:]) for x in (features, hidden))
    drafter = _extend(plan, weights, features, hidden, emitted.tokens.reshape(-1), request, positions, keep, state.drafter)
    columns = jnp.where(depth < emitted.count[:, None], state.length[:, None] + depth, state.tokens.shape[1])
    slots = jnp.arange(requests, dtype=jnp.int32)[:, None]
    tokens = state.tokens.at[slots, columns].set(emitted.tokens, mode="drop")
    return dataclasses.replace(state, tokens=tokens, length=state.length + emitted.count, cache=cache, drafter=drafter)


def _extend(plan: Plan, weights: Weights, features, hidden, next_tokens, request, positions, accepted, drafter):
    if plan.drafter is None:
        return drafter
    return registry.module(plan.drafter).extend(
        weights.drafter, plan.drafter, weights.shared, features, hidden, next_tokens, request, positions, accepted, drafter
    )


def _report(draft, checked, accepted, emitted: Emitted, finished, running, drafting, budget) -> Report:
    kept = jnp.zeros_like(emitted.count) if checked is None else jnp.sum(checked & running[:, None], axis=1, dtype=jnp.int32)
    survival = jnp.zeros((running.shape[0], 0), jnp.float32) if draft is None else draft.survival
    return Report(finished, jnp.asarray(drafting), budget, kept, jnp.minimum(accepted.count, emitted.count), survival)


def _count(statistics: Statistics, checked, accepted, running) -> Statistics:
    running = running.astype(jnp.int32)
    statistics = dataclasses.replace(statistics, rounds=statistics.rounds + running)
    if checked is None:
        return statistics
    index = jnp.arange(checked.shape[1], dtype=jnp.int32)[None]
    running = running[:, None]
    return dataclasses.replace(
        statistics,
        verified=statistics.verified + checked.astype(jnp.int32) * running,
        reached=statistics.reached + (checked & (index <= accepted[:, None])).astype(jnp.int32) * running,
        accepted=statistics.accepted + (index < accepted[:, None]).astype(jnp.int32) * running,
    )


def _pad_rows(x, requests: int, width: int, full: int):
    """[R * width, ...] -> [R, full, ...], zeros behind."""
    x = x.reshape(requests, width, *x.shape[1:])
    return jnp.pad(x, [(0, 0), (0, full - width)] + [(0, 0)] * (x.ndim - 2))
