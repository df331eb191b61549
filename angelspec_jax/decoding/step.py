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

from angelspec_jax import noise
from angelspec_jax.decoding import dcut, deferral, margins, tree
from angelspec_jax.decoding.acceptance import RULES, Accepted, accept, accept_by_ratio, known_before
from angelspec_jax.decoding.dcut import Memory, Policy
from angelspec_jax.decoding.deferral import Pending
from angelspec_jax.decoding.margins import Margins
from angelspec_jax.decoding.packing import Packed, pack, unpack
from angelspec_jax.decoding.sampling import Sampling, Text, choose, log_probability, transform
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.registry import AnyConfig, AnyDrafter
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, Seen, Shared
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.transformer import TargetParams, forward, logits


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the step is compiled. `budgets` are the drafts that a round may verify, per request on average, ascending.

    `tree` is the number of nodes of the draft trees that are grown, best first; None drafts chains. `rule` is "coupled" (the text is a
    function of prompt and seed) or "rejection" (chains only; the text has the right distribution). `logprobs` records the log-probability
    of every emitted token.
    """

    target: TransformerConfig
    drafter: AnyConfig | None = None
    stop_ids: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    candidates: int = 64
    prefill_chunk: int = 128
    tree: int | None = None
    rule: str = "coupled"
    logprobs: bool = False
    bias_slots: int = 0  # biased tokens a request of an empty state can have; `generate` takes what its sampling options hold

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.tree is not None:
            tree.check(self.drafter, self.tree)
            if self.rule == "rejection":
                raise ValueError("the rejection rule verifies chains; with a tree take the coupled rule")
        if self.drafter is None:
            object.__setattr__(self, "budgets", (0,))
        elif not self.budgets:
            object.__setattr__(self, "budgets", (self.num_drafts,))
        if list(self.budgets) != sorted(set(self.budgets)) or self.budgets[0] < 0:
            raise ValueError(f"budgets must be ascending draft counts, got {self.budgets}")
        if self.drafter is not None and self.budgets[-1] > self.num_drafts:
            raise ValueError(f"this drafter makes {self.num_drafts} drafts a round, a budget asks for {self.budgets[-1]}")

    @property
    def num_drafts(self) -> int:
        """Drafts of a request and round: a chain's, or the nodes of a tree."""
        if self.drafter is None:
            return 0
        return self.drafter.num_drafts if self.tree is None else self.tree

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
    """Counters per request, from which tau and acceptance by position follow.

    Draft k of a tree is its k-th best node where verified drafts are counted, and the node at depth k on the path where accepted ones are.
    """

    rounds: Int[Array, "R"]
    verified: Int[Array, "R K"]  # rounds in which draft k was verified
    reached: Int[Array, "R K"]  # ... and the draft before it had been accepted
    accepted: Int[Array, "R K"]  # rounds in which draft k was accepted


@struct.dataclass
class DecodeState:
    tokens: Int[Array, "R S"]  # prompt, then what was emitted
    length: Int[Array, "R"]  # tokens known; the last is the anchor
    prompt_length: Int[Array, "R"]  # tokens that were not generated; penalties tell them apart
    limit: Int[Array, "R"]  # length at which a request ends
    finished: Bool[Array, "R"]
    sampling: Sampling
    cache: KVCache
    drafter: Any  # the drafter's own memory, None without one
    statistics: Statistics
    memory: Memory
    pending: Pending | None = None  # where rounds may go without a draft
    logprobs: Float[Array, "R S"] | None = None  # of the generated tokens, where they stand


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
    logprobs: Float[Array, "R W"] | None = None  # the model's own log-probabilities of the tokens, at temperature 1


@struct.dataclass
class Verified:
    accepted: Accepted
    logprobs: Float[Array, "R W"] | None  # of the tokens that were accepted
    features: Float[Array, "R W T D"]
    hidden: Float[Array, "R W D"]  # after the final norm
    new_kv: tuple


def speculative_step(plan: Plan, weights: Weights, policy: Policy, state: DecodeState) -> tuple[DecodeState, Emitted]:
    """Advance every unfinished request by one to `plan.width` tokens."""
    running = ~state.finished
    prefix = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, prefix[:, None], axis=1)[:, 0]
    drafting = dcut.worth_drafting(policy, plan.budgets, plan.drafter is not None, state.memory)
    state = _catch_up(plan, weights, state, drafting)
    draft, cut, kept = _draft(plan, weights, policy, state, anchor, prefix, drafting), None, jnp.zeros_like(anchor)
    if draft is not None and plan.rule == "rejection":  # what a draft turned out to be has no part in whether it is verified
        draft = dataclasses.replace(draft, survival=known_before(draft))
        policy = dataclasses.replace(policy, mode=dcut.unbiased(policy.mode))
    if draft is not None:
        cut = dcut.choose(policy, plan.budgets, draft, running, drafting, state.memory)
        draft, kept = dcut.compact(draft, cut.keep)
    budget = jnp.int32(0) if cut is None else cut.budget
    checked = None if draft is None else jnp.arange(plan.budgets[-1], dtype=jnp.int32)[None] < kept[:, None]

    with jax.named_scope("verify"):
        branches = [lambda room=room: _verify(plan, weights, state, draft, checked, anchor, prefix, kept, room) for room in plan.budgets]
        verified = jax.lax.switch(budget, branches) if len(branches) > 1 else branches[0]()

    accepted = verified.accepted
    emitted, finished = _emit(plan, state, accepted, verified.logprobs)

    with jax.named_scope("commit"):
        state = _commit(plan, weights, state, verified, accepted.path, emitted, prefix, drafting)
    statistics = _count(state.statistics, draft, checked, accepted, jnp.minimum(accepted.count, emitted.count), running)
    memory = dcut.remember(policy, state.memory, cut, drafting, emitted.count, running)
    if draft is not None and checked is not None and draft.margin is not None:
        memory = dataclasses.replace(memory, margins=_learn(memory.margins, draft, checked & running[:, None], accepted))
    report = Report(
        finished=finished,
        drafted=jnp.asarray(drafting),
        budget=budget,
        kept=kept,
        accepted=jnp.minimum(accepted.count, emitted.count),
        survival=jnp.zeros((running.shape[0], 0), jnp.float32) if cut is None else cut.survival,
    )
    state = dataclasses.replace(state, finished=finished, statistics=statistics, memory=memory)
    return state, dataclasses.replace(emitted, report=report)


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


def settle(plan: Plan, weights: Weights, state: DecodeState) -> DecodeState:
    """The same state with nothing left for the drafter to digest."""
    if state.pending is None:
        return state
    positions, waiting = deferral.positions(state.pending, state.length - 1)
    requests, rows = positions.shape
    next_tokens = jnp.take_along_axis(state.tokens, jnp.clip(positions + 1, 0, state.tokens.shape[1] - 1), axis=1)
    flat = lambda x: x.reshape(requests * rows, *x.shape[2:])  # noqa: E731
    request = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), rows)
    rest = (flat(next_tokens), request, flat(jnp.maximum(positions, 0)), flat(waiting), state.drafter)
    drafter = _extend(plan, weights, flat(state.pending.features), flat(state.pending.hidden), *rest)
    return dataclasses.replace(state, drafter=drafter, pending=deferral.emptied(state.pending))


def _catch_up(plan: Plan, weights: Weights, state: DecodeState, drafting) -> DecodeState:
    """Let the drafter digest what waits, if it drafts now or no more can wait."""
    pending = state.pending
    if pending is None:
        return state

    def digest(drafter, pending):
        settled = settle(plan, weights, dataclasses.replace(state, drafter=drafter, pending=pending))
        return settled.drafter, settled.pending

    due = (drafting & jnp.any(pending.count > 0)) | deferral.is_full(pending)
    drafter, pending = jax.lax.cond(due, digest, lambda drafter, pending: (drafter, pending), state.drafter, pending)
    return dataclasses.replace(state, drafter=drafter, pending=pending)


def offers_margins(plan: Plan, weights: Weights, policy: Policy, state: DecodeState) -> bool:
    """Whether drafts come with the margins that `Policy.margin` reads; nothing is run."""
    if plan.drafter is None:
        return False
    made = jax.eval_shape(lambda weights, state: _draft(plan, weights, policy, state, state.length, state.length, True), weights, state)
    return made is not None and made.margin is not None


def _draft(plan, weights, policy, state, anchor, prefix, drafting) -> Draft | None:
    """A draft of at most as many tokens as the largest budget verifies."""
    if drafting is False:
        return None

    def propose():
        # Drafts use the target's own noise, which raises the coupled rule's hit rate; at temperature 0 they are greedy. The rejection rule
        # asks for noise of their own, and of the round alone: drafts behind a rejected one are forgotten, but the estimates that choose
        # the next budget have seen them, so what is drawn next at their places must not depend on them.
        seeds = state.sampling.seeds if plan.rule == "coupled" else noise.reseed(state.sampling.seeds, noise.DRAFT, prefix)
        drawing = Noise(seeds, state.sampling.temperature)
        least = dcut.min_survival(policy, plan.budgets, anchor.shape[0], jnp.sum(~state.finished))
        options = DraftPolicy(least, plan.candidates)
        seen = Seen(anchor, prefix, state.tokens, weights.target, state.cache)
        arguments = (weights.drafter, plan.drafter, weights.shared, seen, state.drafter, drawing, options)
        draft = registry.module(plan.drafter).draft(*arguments) if plan.tree is None else tree.grow(*arguments, plan.tree)
        return jax.tree.map(lambda x: x[:, : plan.budgets[-1]], draft)

    if drafting is True:
        return propose()
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(propose))
    return jax.lax.cond(drafting, propose, lambda: nothing)


def _verify(plan: Plan, weights: Weights, state: DecodeState, draft: Draft | None, checked, anchor, prefix, kept, room: int) -> Verified:
    """One target pass over the anchors and what was kept of the drafts, laid out by request."""
    packed = pack(draft, anchor, prefix, kept, ~state.finished, room, plan.budgets[-1])
    rows = packed.rows
    features, hidden, new_kv = forward(weights.target, plan.target, packed.tokens, packed.positions, rows, state.cache, plan.taps)
    spread = lambda x: unpack(x, rows, plan.width)  # noqa: E731
    with jax.named_scope("head"):
        found, text = logits(weights.target, hidden), _text(state, draft, packed)
        options, positions = state.sampling.rows(rows.request), packed.positions + 1
        if plan.rule == "coupled":
            chosen = choose(found, options, positions, text)
            accepted = accept(draft, spread(chosen), checked)
            logprobs = spread(log_probability(found, chosen)) if plan.logprobs else None
            if logprobs is not None and accepted.path is not None:
                logprobs = jnp.take_along_axis(logprobs, accepted.path, axis=1)
        else:
            accepted = accept_by_ratio(draft, spread(transform(found, options, text)), state.sampling, prefix, checked)
            logprobs = log_probability(spread(found), accepted.tokens) if plan.logprobs else None
    flat = lambda x: spread(x).reshape(anchor.shape[0] * plan.width, *x.shape[1:])  # noqa: E731
    stacked = state.cache.k.ndim == 5 if not isinstance(state.cache.k, tuple) else False
    return Verified(accepted, logprobs, spread(features), spread(hidden), jax.tree.map(jax.vmap(flat) if stacked else flat, new_kv))


def _text(state: DecodeState, draft: Draft | None, packed: Packed) -> Text:
    """What stands before every row: its request's text, and the drafts it sees."""
    rows = packed.rows
    drafts = jnp.zeros((state.length.shape[0], 0), jnp.int32) if draft is None else draft.tokens[:, : rows.max_rows - 1]
    return Text(state.tokens, state.length, state.prompt_length, drafts, rows.request, rows.ancestors)


def _emit(plan: Plan, state: DecodeState, accepted: Accepted, logprobs) -> tuple[Emitted, Bool[Array, "R"]]:
    """Cut what was accepted at the first stop token and at the request's limit."""
    index = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)[None]
    count = jnp.minimum(accepted.count + 1, state.limit - state.length)
    stops = jnp.isin(accepted.tokens, jnp.asarray(plan.stop_ids, jnp.int32)) & (index < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.finished, 0, count)
    finished = state.finished | stopped | (state.length + count >= state.limit)
    return Emitted(accepted.tokens, count, logprobs=logprobs), finished


def _commit(
    plan: Plan, weights: Weights, state: DecodeState, verified: Verified, path, emitted: Emitted, prefix, drafting
) -> DecodeState:
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

    def digest(drafter):
        flat = lambda x: x.reshape(requests * width, *x.shape[2:])  # noqa: E731
        return _extend(plan, weights, flat(features), flat(hidden), flat(emitted.tokens), request, positions, keep, drafter)

    if state.pending is None:
        drafter, pending = digest(state.drafter), None
    else:  # a round without a draft commits the anchor alone
        drafter, pending = jax.lax.cond(
            drafting,
            lambda drafter, pending: (digest(drafter), pending),
            lambda drafter, pending: (drafter, deferral.append(pending, features[:, 0], hidden[:, 0], emitted.count > 0)),
            state.drafter,
            state.pending,
        )
    columns = jnp.where(depth < emitted.count[:, None], state.length[:, None] + depth, state.tokens.shape[1])
    slots = jnp.arange(requests, dtype=jnp.int32)[:, None]
    tokens, logprobs = state.tokens.at[slots, columns].set(emitted.tokens, mode="drop"), state.logprobs
    if logprobs is not None and emitted.logprobs is not None:
        logprobs = logprobs.at[slots, columns].set(emitted.logprobs, mode="drop")
    length = state.length + emitted.count
    return dataclasses.replace(state, tokens=tokens, length=length, cache=cache, drafter=drafter, pending=pending, logprobs=logprobs)


def _extend(plan: Plan, weights: Weights, features, hidden, next_tokens, request, positions, accepted, drafter):
    if plan.drafter is None:
        return drafter
    return registry.module(plan.drafter).extend(
        weights.drafter, plan.drafter, weights.shared, features, hidden, next_tokens, request, positions, accepted, drafter
    )


def _learn(fitted: Margins, draft: Draft, checked, accepted: Accepted) -> Margins:
    """Show the estimator which of the verified drafts, their parents accepted, were accepted."""
    node = jnp.arange(checked.shape[1], dtype=jnp.int32)
    if accepted.path is None or draft.parents is None:
        taken = node[None] < accepted.count[:, None]
        parent_taken = node[None] <= accepted.count[:, None]
    else:
        on_path = accepted.path[:, 1:, None] - 1 == node[None, None]
        taken = jnp.any(on_path & (node[None, :, None] < accepted.count[:, None, None]), axis=1)
        parent_taken = (draft.parents < 0) | jnp.take_along_axis(taken, jnp.maximum(draft.parents, 0), axis=1)
    assert draft.margin is not None
    return margins.observe(fitted, draft.margin, dcut.depths(draft), checked & parent_taken, taken)


def _count(statistics: Statistics, draft: Draft | None, checked, accepted: Accepted, became, running) -> Statistics:
    """Counters after a round in which `became` drafts of each request became text."""
    running = running.astype(jnp.int32)
    statistics = dataclasses.replace(statistics, rounds=statistics.rounds + running)
    if draft is None or checked is None:
        return statistics
    index = jnp.arange(checked.shape[1], dtype=jnp.int32)[None]
    tried = checked
    if draft.parents is not None and accepted.path is not None:  # depth k was tried if the node before it has a verified child
        parents = draft.parents[:, : checked.shape[1]] + 1
        tried = jnp.any((parents[:, None, :] == accepted.path[:, :-1, None]) & checked[:, None, :], axis=-1)
    running = running[:, None]
    return dataclasses.replace(
        statistics,
        verified=statistics.verified + checked.astype(jnp.int32) * running,
        reached=statistics.reached + (tried & (index <= became[:, None])).astype(jnp.int32) * running,
        accepted=statistics.accepted + (index < became[:, None]).astype(jnp.int32) * running,
    )
