"""Throughput against concurrency from recorded rounds and a table of costs, without running a model.

Requests of a closed loop replay records of what the drafter offered and what of it was accepted (`load.Trace`); D-cut's own functions
decide about them, and the cost table says what each round takes. With the table of another device, measured there or computed by a compiler
for a chip that is not here, it predicts what that device would do with these drafts.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from angelspec_jax.decoding import dcut
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.drafter.types import Draft, OneHot
from angelspec_jax.evaluation.load import Trace

ROUNDS = 400  # simulated per setting


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
