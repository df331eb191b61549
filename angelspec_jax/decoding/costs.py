"""What a round costs on this device, by number of slots and budget: measured with the very program that will run, and kept on disk."""

import dataclasses
import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax import models
from angelspec_jax.decoding import dcut, deferral, slots
from angelspec_jax.decoding.dcut import PLAIN, Policy
from angelspec_jax.decoding.generate import check_prompt, even_policy, generate
from angelspec_jax.decoding.step import DecodeState, Plan, Weights
from angelspec_jax.drafter.several import SeveralConfig

CONTEXT = 64  # tokens before the rounds that `measure` times
LONGEST_CONTEXT = 1024  # tokens before the rounds of a table
FORMAT = 2  # of the files
SECONDS = 25.0  # that a whole table may take to measure, compiling aside
GAP = 8  # times between two numbers of slots that are measured, at most
PRECISION = 0.01  # relative standard error at which measuring ends
LEAST_TURNS, MOST_TURNS = 4, 16  # of every kind of round
MEASURED, COMPUTED = "measured", "computed from the compiler's estimates"


def default_budgets(num_drafts: int) -> tuple[int, ...]:
    """No draft, all of them, and half where that is many: each budget is a program of its own inside the step, so they are few."""
    return tuple(sorted({0, num_drafts} | ({num_drafts // 2} if num_drafts > 5 else set())))


def crowd_budgets(num_drafts: int) -> tuple[int, ...]:
    """Budgets for many requests at once: room for none, a quarter, a half and all of the drafts."""
    return tuple(sorted({0, max(num_drafts // 4, 1), max(num_drafts // 2, 1), num_drafts}))


def measure(plan: Plan, weights: Weights, *, requests: int = 1, capacity: int = 512, repeats: int = 3) -> Policy:
    """A policy with the measured costs, in seconds, of every budget of `plan` and of drafting, for a batch of this size.

    The policy is traced, so each budget is forced in turn and nothing but `generate` itself is compiled, whose loop leaves the host no
    part in a round. Call it when the device is idle.
    """
    drafted = [_seconds(plan, weights, _forced(plan, index), requests, capacity, repeats) for index in range(len(plan.budgets))]
    if plan.budgets[0] > 0:
        return Policy(jnp.asarray(drafted, jnp.float32), jnp.float32(0.0), jnp.float32(0.0))
    plain = min(max(_seconds(plan, weights, _forced(plan, PLAIN), requests, capacity, repeats), 1e-9), drafted[0])
    return _policy(plain, drafted)


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of a round: without a draft by number of slots, and with one by slots and budget. `facts` say where they hold."""

    budgets: tuple[int, ...]
    plain: dict[int, float]
    drafted: dict[int, tuple[float, ...]]  # the draft included
    facts: dict[str, Any]
    source: str = MEASURED
    chunk: float = 0.0  # seconds of reading in `plan.prefill_chunk` prompt tokens
    estimated: tuple[int, ...] = ()  # numbers of slots that lie on a line between measured ones, or for which there was no time
    error: float = 0.0  # relative standard error of the least certain of the measured costs

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.plain))

    def policy(self, size: int, **names: Any) -> Policy:
        """What the step weighs drafts with when it has `size` slots; `names` as in `dcut_policy`."""
        known = next((known for known in self.sizes if known >= size), self.sizes[-1])
        return dcut_policy(_policy(self.plain[known], self.drafted[known]), self.budgets, **names)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "jax": jax.__version__, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CostTable":
        return cls(
            budgets=tuple(values["budgets"]),
            plain={int(size): float(seconds) for size, seconds in values["plain"].items()},
            drafted={int(size): tuple(map(float, row)) for size, row in values["drafted"].items()},
            facts=dict(values["facts"]),
            source=str(values["source"]),
            chunk=float(values["chunk"]),
            estimated=tuple(values["estimated"]),
            error=float(values.get("error", 0.0)),
        )


def dcut_policy(
    costs: Policy,
    budgets: tuple[int, ...],
    budget: str | float = "retrospective",
    confidence: str = "drafter",
    bonus: bool = True,
    rule: str = "coupled",
) -> Policy:
    """A policy by name: `budget` is one of `dcut.MODES`, "off" (every draft is verified), "plain" (none is made), or the share of the
    drafts that is always verified; `confidence` is "drafter" (its own word, or its trained head's) or "margin"; `bonus` counts the token
    that comes anyway as yield; `rule` is the acceptance rule it is for. Raises ValueError for other names, and for a budget that the rule
    does not allow."""
    if rule == "rejection" and budget == "retrospective":
        raise ValueError(
            "the retrospective budget looks at drafts to decide about them, which is exact with coupled acceptance only; with rejection "
            "choose lagged, causal, a share of the drafts, or off"
        )
    forced = dcut.FREE
    if budget == "off":
        forced = len(budgets) - 1
    elif budget == "plain":
        forced = PLAIN
    elif isinstance(budget, int | float):
        if not 0 < budget <= 1:
            raise ValueError(f"a fixed budget is a share of the drafts above 0 and at most 1, got {budget}")
        forced = min(range(len(budgets)), key=lambda index: abs(budgets[index] - budget * budgets[-1]))
    elif budget not in dcut.MODES:
        raise ValueError(f"the budget must be one of {', '.join(dcut.MODES)}, off, plain, or a share such as 0.5, got {budget!r}")
    if confidence not in ("drafter", "margin"):
        raise ValueError(f"confidence must be drafter or margin, got {confidence!r}")
    return dataclasses.replace(
        costs,
        mode=jnp.int32(dcut.MODES.index(budget) if budget in dcut.MODES else 0),
        forced=jnp.int32(forced),
        bonus=jnp.float32(1.0 if bonus else 0.0),
        margin=jnp.asarray(confidence == "margin"),
    )


def table(
    plan: Plan,
    weights: Weights,
    sizes: Sequence[int],
    capacity: int,
    prompts: Sequence[Sequence[int]] = (),
    *,
    folder: Path | None = None,
    seconds: float = SECONDS,
) -> CostTable:
    """The table of this device, model and mesh: from the cache folder, or measured now and kept there. Call it when the device is idle."""
    facts = find_facts(plan, weights, sizes, capacity)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    file = (models.cache_folder() / "costs" if folder is None else Path(folder)) / f"{name}.json"
    try:
        return load(file, facts)
    except (FileNotFoundError, ValueError):
        found = measure_table(plan, weights, sizes, capacity, prompts, seconds=seconds)
    save(file, found)
    return found


def find_facts(plan: Plan, weights: Weights, sizes: Sequence[int], capacity: int) -> dict[str, Any]:
    """What decides costs: the device, the mesh, and everything that is fixed when the step is compiled."""
    device = jax.devices()[0]
    embed = weights.target.embed
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "mesh": str(getattr(embed.sharding, "mesh", "one device")),
        "dtype": str(embed.dtype),
        "plan": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],
        "sizes": sorted(sizes),
        "capacity": capacity,
        "prefill_chunk": plan.prefill_chunk,
    }


def save(file: str | Path, found: CostTable) -> Path:
    """Write a table; a reader sees the old file or the new one, never half of it."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump(found.to_dict(), part, indent=1)
    os.replace(part.name, file)
    return file


def load(file: str | Path, facts: dict[str, Any] | None = None) -> CostTable:
    """Read a table. Raises ValueError when it is not one, was made by another version, or, given `facts`, belongs elsewhere."""
    file = Path(file)
    try:
        values = json.loads(file.read_text("utf-8"))
        found = CostTable.from_dict(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a cost table ({error}); delete it and let it be measured again") from None
    for name, now in (("format", FORMAT), ("jax", jax.__version__)):
        if values.get(name) != now:
            raise ValueError(f"{file} is stale: it was made with {name} {values.get(name)}, this is {now}; measure it again")
    for name, here in (facts or {}).items():
        if found.facts.get(name) != here:
            raise ValueError(f"{file} belongs elsewhere: its {name} is {found.facts.get(name)}, here it is {here}; measure one here")
    return found


def measure_table(
    plan: Plan,
    weights: Weights,
    sizes: Sequence[int],
    capacity: int,
    prompts: Sequence[Sequence[int]] = (),
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure every budget for some of the numbers of slots (`measured_sizes`), smallest first, within about `seconds` beside compiling.

    What is measured is the engine's own program, so nothing is compiled for the table alone; but a step takes longer to compile than to
    measure, hence only some sizes: the others lie on the line between their neighbours. Kinds of rounds take turns, until the medians are
    known within `PRECISION` or their share of the time is over. `prompts` fill the slots; without them random tokens do, which says little
    about a model with experts. More rows and more slots never cost less: what noise turned round is levelled.
    """
    filled = _filled(plan, weights, prompts, capacity)
    chosen = measured_sizes(sizes)
    plain, drafted, estimated, errors = {}, {}, [], [0.0]
    left, before = seconds, None
    for position, size in enumerate(chosen):
        if before is not None and left <= 0:
            scale = size / before
            plain[size], drafted[size] = plain[before] * scale, tuple(cost * scale for cost in drafted[before])
            estimated.append(size)
        else:
            plain[size], drafted[size], error, spent = _measure_size(plan, weights, filled, size, left / (len(chosen) - position), clock)
            errors.append(error)
            left -= spent
        if before is not None:
            plain[size] = max(plain[size], plain[before])
            drafted[size] = tuple(map(max, drafted[size], drafted[before]))
        before = size
    for size in sorted(set(sizes) - set(chosen)):
        plain[size] = float(np.interp(size, chosen, [plain[known] for known in chosen]))
        columns = zip(*(drafted[known] for known in chosen), strict=True)
        drafted[size] = tuple(float(np.interp(size, chosen, column)) for column in columns)
        estimated.append(size)
    facts, chunk = find_facts(plan, weights, sizes, capacity), _chunk_seconds(plan, weights, capacity, clock)
    return CostTable(plan.budgets, plain, drafted, facts, MEASURED, chunk, tuple(sorted(estimated)), max(errors))


def measured_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The smallest and the largest, and of those between as few as leave no gap of more than `GAP` times."""
    ordered = sorted(set(sizes))
    found = [ordered[-1]]
    while found[-1] > ordered[0]:
        smaller = [size for size in ordered if size < found[-1]]
        found.append(next((size for size in smaller if size * GAP >= found[-1]), smaller[-1]))
    return tuple(reversed(found))


def _measure_size(plan: Plan, weights: Weights, filled: DecodeState, size: int, seconds: float, clock):
    """Seconds of a plain round and of every budget's, the relative standard error of the worst of them, and the seconds it all took."""
    order = jnp.arange(size, dtype=jnp.int32) % filled.length.shape[0]
    active = jnp.ones((size,), bool)
    space = int(filled.tokens.shape[1] - np.max(np.asarray(filled.length)))
    kinds = [PLAIN, *range(len(plan.budgets))] if plan.drafter is not None and plan.budgets[0] == 0 else [*range(len(plan.budgets))]

    def timed(kind: int) -> float:
        # Plain rounds cost what they leave the drafter to digest, too, which is due once in so many rounds.
        rounds = max(1, min(deferral.ROWS if kind == PLAIN else 2, space // plan.width - 1))
        state, _ = _timed(plan, weights, _forced(plan, kind), slots.rearrange(plan, filled, order), active, 1, clock)
        return _timed(plan, weights, _forced(plan, kind), state, active, rounds, clock)[1]

    _timed(plan, weights, even_policy(plan), slots.rearrange(plan, filled, order), active, 1, clock)  # compiles
    begin = clock()
    found: dict[int, list[float]] = {kind: [] for kind in kinds}
    error = math.inf
    for turn in range(1, MOST_TURNS + 1):
        for kind in kinds:
            found[kind].append(timed(kind))
        spent = clock() - begin
        if turn >= LEAST_TURNS:
            error = max(_error(own) for own in found.values())
        if (error <= PRECISION) or (turn >= 2 and spent * (turn + 1) / turn > seconds):
            break
    medians = {kind: statistics.median(own) for kind, own in found.items()}
    drafted = np.maximum.accumulate([medians[index] for index in range(len(plan.budgets))])
    error = max(_error(own) for own in found.values())
    return min(medians[kinds[0]], float(drafted[0])), tuple(float(cost) for cost in drafted), error, clock() - begin


def _error(values: Sequence[float]) -> float:
    """Standard error of a median, relative to it, with the spread taken from the median absolute deviation."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values)) / max(middle, 1e-9)


def _chunk_seconds(plan: Plan, weights: Weights, capacity: int, clock) -> float:
    state = slots.create(plan, weights.target.embed.dtype, 1, capacity)
    state = dataclasses.replace(state, length=jnp.full((1,), capacity, jnp.int32))
    found = []
    for _ in range(3):  # the first one may compile
        begin = clock()
        state = slots.prefill(plan, weights, state, jnp.int32(0), plan.prefill_chunk)
        jax.block_until_ready(state.length)
        found.append(clock() - begin)
    return min(found)


def _timed(plan, weights, policy, state, active, rounds: int, clock):
    """Run rounds as the engine does, and the seconds each took; several drafters are dealt out to the slots in turn."""
    choice = None
    if isinstance(plan.drafter, SeveralConfig):
        choice = jnp.arange(active.shape[0], dtype=jnp.int32) % len(plan.drafter.members)
    jax.block_until_ready(state.tokens)
    begin = clock()
    for _ in range(rounds):
        state, _ = slots.step(plan, weights, policy, state, active, choice)
    jax.block_until_ready(state.tokens)
    return state, (clock() - begin) / rounds


def _filled(plan: Plan, weights: Weights, prompts: Sequence[Sequence[int]], capacity: int) -> DecodeState:
    """A few slots with prompts read in, again and again until there is as much text as slots of this capacity see in use: attention to a
    longer prefix costs more, most of all for the many rows of drafts."""
    room = max(capacity - 8 * plan.width, 2)
    context = min(max(3 * capacity // 8, 2), LONGEST_CONTEXT, room)
    if not prompts:
        random = np.random.default_rng(0)
        prompts = random.integers(0, plan.target.vocab_size, (2, context)).tolist()
    prompts = [(list(prompt) * (1 + context // max(len(prompt), 1)))[:context] for prompt in prompts[:4]]
    dtype = weights.target.embed.dtype
    state = slots.create(plan, dtype, len(prompts), capacity)
    for slot, prompt in enumerate(prompts):
        check_prompt(plan, prompt, 1, capacity=capacity)
        tokens = np.zeros((1, capacity), np.int32)
        tokens[0, : len(prompt)] = prompt
        single = dataclasses.replace(
            slots.create(plan, dtype, 1, capacity),
            tokens=jnp.asarray(tokens),
            length=jnp.full((1,), len(prompt), jnp.int32),
            limit=jnp.full((1,), capacity, jnp.int32),
            finished=jnp.zeros((1,), bool),
        )
        for start in range(0, len(prompt) - 1, plan.prefill_chunk):
            single = slots.prefill(plan, weights, single, jnp.int32(start), plan.prefill_chunk)
        state = slots.insert(plan, state, single, jnp.int32(slot))
    return state


def _forced(plan: Plan, index: int) -> Policy:
    return dataclasses.replace(even_policy(plan), forced=jnp.int32(index))


def _policy(plain: float, drafted: Sequence[float]) -> Policy:
    """Costs of rounds, drafts apart: a draft costs what a round with one that verifies nothing takes beyond a plain round."""
    draft = max(drafted[0] - plain, 0.0)
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
        for new_tokens in (0, min(capacity - context, 24)):
            begin = time.perf_counter()
            generation = generate(plan, weights, prompts, new_tokens, policy=policy, capacity=capacity)
            jax.block_until_ready(generation.length)
            seconds.append(time.perf_counter() - begin)
            rounds = int(np.max(np.asarray(generation.statistics.rounds)))
        if repeat > 0:  # the first one may compile
            found.append((seconds[1] - seconds[0]) / max(rounds, 1))
    return max(statistics.median(found), 1e-9)
