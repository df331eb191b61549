"""Throughput against concurrency from recorded rounds and a table of costs, without running a model.

Requests of a closed loop replay records of what the drafter offered and what of it was accepted (`load.Trace`); D-cut's own functions
decide about them, and the cost table says what each round takes. With the table of another device, measured there or computed by a compiler
for a chip that is not here, it predicts what that device would do with these drafts.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from angelspec_jax.decoding import dcut
from angelspec_jax.decoding.costs import COMPUTED, CostTable
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.drafter.types import Draft, OneHot
from angelspec_jax.evaluation.load import Trace

ROUNDS = 400  # simulated per setting
DECODE_STEP = "decode step"  # among the programs that `angelspec compile` reports


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a setting is predicted to give."""

    concurrency: int
    budget: str | float
    rate: float  # tokens per second of all requests together
    tau: float
    kept: float  # drafts verified per request and round
    drafted: float  # share of the rounds that made a draft
    source: str  # where the costs come from

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def simulate(
    trace: Trace, table: CostTable, concurrency: int, budget: str | float = "retrospective", *, rounds: int = ROUNDS, bonus: bool = True
) -> Prediction:
    """Replay a trace with `concurrency` requests at a time.

    A request goes through the records one by one from a place of its own. A round without a draft moves it one token on, through a record
    of a accepted drafts in a + 1 such rounds. Reading in the prompts of those that follow costs chunks between rounds, as in the engine.
    Raises ValueError for a trace without records, with another number of drafts than the table's budgets, or a concurrency past the table.
    """
    if not trace.accepted:
        raise ValueError("the trace holds no record; `angelspec bench load` writes them for drafters that also run with all their drafts")
    depth = table.budgets[-1]
    survival, accepted = np.asarray(trace.survival, np.float32)[:, :depth], np.minimum(np.asarray(trace.accepted, np.int32), depth)
    if survival.shape[1] != depth:
        have = survival.shape[1]
        raise ValueError(f"the trace has {have} drafts a round, the cost table budgets up to {depth}; they belong to two drafters")
    if not 1 <= concurrency <= table.sizes[-1]:
        raise ValueError(f"concurrency must lie between 1 and the table's {table.sizes[-1]} slots, got {concurrency}")
    size = next(size for size in table.sizes if size >= concurrency)
    policy = table.policy(size, budget=budget, bonus=bonus)
    found = _replay(
        table.budgets, rounds, policy, jnp.asarray(survival), jnp.asarray(accepted), jnp.arange(size, dtype=jnp.int32) < concurrency
    )
    tokens, seconds, kept, drafted = (float(x) for x in found)
    chunks = -(-trace.prompt_tokens // table.facts.get("prefill_chunk", 128))  # of every request that follows
    seconds += tokens / max(trace.answer_tokens, 1.0) * chunks * table.chunk
    shares = rounds * concurrency
    return Prediction(concurrency, budget, tokens / seconds, tokens / shares, kept / shares, drafted / rounds, table.source)


def read_traces(file: str | Path) -> dict[str, tuple[Trace, CostTable]]:
    """Traces and cost tables by drafter from what `angelspec bench load` wrote. Raises ValueError when the file holds none."""
    file = Path(file)
    try:
        values = json.loads(file.read_text("utf-8"))
        found = {
            name: (Trace(**values["traces"][name]), CostTable.from_dict(values["costs"][name])) for name in values["traces"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no traces ({error}); `angelspec bench load --output FILE` writes them") from None
    if not found:
        raise ValueError(f"{file} holds no traces; run `angelspec bench load` with a drafter")
    return found


def compiled_costs(files: Sequence[str | Path]) -> CostTable:
    """The cost table of a chip that is not here, from what `angelspec compile` wrote about decode steps.

    Each file is about one number of slots and one budget: compile with `decode.requests=R decode.budgets=[B]`, for every R with B = 0 (a
    plain step) and the same one or several B above. The drafter runs in full whatever the budget, so the cost of a draft that verifies
    nothing is where the line through the two smallest budgets meets 0; with one budget it is that budget's. Powers of two between two
    compiled numbers of slots are filled in on the line between them (a little too dear: costs bend upwards, from reading weights to
    computing) and named in the table's `estimated`. Collectives, the rounds of loops inside a draft, and reading in prompts are not in
    these estimates. Raises ValueError for files that are something else or do not belong together.
    """
    found: dict[int, dict[int, float]] = {}
    facts: dict[str, Any] = {}
    for file in files:
        slots, budget, seconds, own = _compiled_step(Path(file))
        for name, here in own.items():
            if facts.setdefault(name, here) != here:
                raise ValueError(f"{file} was compiled with {name} {here}, the files before it with {facts[name]}; keep to one")
        if budget in found.setdefault(slots, {}):
            raise ValueError(f"{file} is about {slots} slots and a budget of {budget}, as a file before it is")
        found[slots][budget] = seconds
    if not found:
        raise ValueError("there is no compiled decode step to take costs from")
    budgets = sorted(set().union(*found.values()) | {0})
    if len(budgets) < 2:
        raise ValueError("the files hold plain steps only; also compile decode.budgets=[B] with some B above 0")
    for slots, own in found.items():
        for budget in budgets:
            if budget not in own:
                missing = f"decode.requests={slots} decode.budgets=[{budget}]"
                raise ValueError(f"no file is about {slots} slots and a budget of {budget}; compile one with {missing}")
    plain = {slots: own[0] for slots, own in found.items()}
    drafted = {slots: _with_draft(own, budgets) for slots, own in found.items()}
    between = _between(sorted(found))
    for slots, (lower, upper) in between.items():
        share = (slots - lower) / (upper - lower)
        line = lambda low, high, share=share: low + share * (high - low)  # noqa: E731
        plain[slots] = line(plain[lower], plain[upper])
        drafted[slots] = tuple(map(line, drafted[lower], drafted[upper]))
    source = COMPUTED if not between else f"{COMPUTED} for {', '.join(map(str, sorted(found)))} slots"
    return CostTable(tuple(budgets), plain, drafted, facts, source=source, estimated=tuple(between))


def _between(sizes: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Powers of two that lie between neighbouring sizes, with these."""
    pairs = list(itertools.pairwise(sizes))
    powers = [1 << bit for bit in range(sizes[-1].bit_length())]
    return {power: pair for pair in pairs for power in powers if pair[0] < power < pair[1]}


def _compiled_step(file: Path) -> tuple[int, int, float, dict[str, Any]]:
    """Slots, budget, estimated seconds and what must be the same everywhere."""
    try:
        values = json.loads(file.read_text("utf-8"))
        step = next(program for program in values["programs"] if program["program"] == DECODE_STEP)
        shape, seconds = values["decode"], float(step["estimated_seconds"])
        facts = {name: step[name] for name in ("topology", "mesh", "layers")} | {"config": values["config"], "capacity": shape["capacity"]}
        slots, budgets = int(shape["requests"]), list(shape["budgets"])
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        remedy = "`angelspec compile --only decode --output FILE` writes one"
        raise ValueError(f"{file} holds no compiled decode step ({error!r}); {remedy}") from None
    if len(budgets) != 1:
        raise ValueError(f"{file} was compiled with budgets {budgets}; costs need one at a time: decode.budgets=[B]")
    if seconds <= 0:
        raise ValueError(f"{file} holds an estimate of {seconds} seconds, which is none")
    return slots, int(budgets[0]), seconds, facts


def _with_draft(seconds: Mapping[int, float], budgets: Sequence[int]) -> tuple[float, ...]:
    """Seconds of rounds with a draft, by budget; 0 is extrapolated. More rows never cost less."""
    first = budgets[1]
    slope = (seconds[budgets[2]] - seconds[first]) / (budgets[2] - first) if len(budgets) > 2 else 0.0
    nothing = min(max(seconds[first] - slope * first, seconds[0]), max(seconds[first], seconds[0]))
    return tuple(float(cost) for cost in np.maximum.accumulate([nothing, *(seconds[budget] for budget in budgets[1:])]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _replay(
    budgets: tuple[int, ...], rounds: int, policy: Policy, survival: Float[Array, "T K"], accepted: Int[Array, "T"], running
) -> tuple[Float[Array, ""], ...]:
    """Tokens, seconds, drafts verified and rounds with a draft."""
    slots, records = running.shape[0], accepted.shape[0]
    start = jnp.arange(slots, dtype=jnp.int32) * (records // slots) if records >= slots else jnp.arange(slots, dtype=jnp.int32) % records

    def round(carry, _):
        memory, place, inside = carry
        drafting = jnp.asarray(dcut.worth_drafting(policy, budgets, True, memory))
        draft = Draft(jnp.zeros((slots, survival.shape[1]), jnp.int32), OneHot(), survival[place])
        cut = dcut.choose(policy, budgets, draft, running, drafting, memory)
        kept = jnp.sum(cut.keep, axis=1, dtype=jnp.int32)
        emitted = jnp.where(running, 1 + jnp.minimum(accepted[place], kept), 0)
        memory = dcut.remember(policy, memory, cut, drafting, emitted, running)
        seconds = policy.costs[cut.budget] + jnp.where(drafting, policy.draft_cost, 0.0)
        inside = inside + 1
        moves = drafting | (inside > accepted[place])
        place, inside = jnp.where(moves, (place + 1) % records, place), jnp.where(moves, 0, inside)
        facts = (jnp.sum(emitted).astype(jnp.float32), seconds, jnp.sum(kept).astype(jnp.float32), drafting.astype(jnp.float32))
        return (memory, place, inside), facts

    carry = (dcut.create_memory(budgets), start, jnp.zeros((slots,), jnp.int32))
    _, facts = jax.lax.scan(round, carry, length=rounds)
    return tuple(jnp.sum(fact) for fact in facts)
