"""Several drafters over one target on the same prompts: tau, acceptance by position, what a draft costs, and speed.

The result is a list of cells: a drafter, a way of using it (all its drafts, D-cut, or trees of some size), a domain and a temperature.
Every timed prompt is decoded plainly too, in turns, so a speed-up is of one run. Where only some are timed, the others are decoded in
batches, which takes a fraction of the time and says as much about tau; plain decoding then writes their texts once for all drafters. A
finished cell is kept in the JSON file, so a comparison that was stopped goes on where it was, and drafters, ways, domains and temperatures
can be added to it.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from angelspec_jax import text
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.tree import growable
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation import measure, report, step_costs, tau
from angelspec_jax.evaluation.bootstrap import Interval, interval
from angelspec_jax.evaluation.tau import Acceptance, Agreement
from angelspec_jax.evaluation.throughput import Progress
from angelspec_jax.target.loading import Target

FIXED, DCUT = "all drafts", "D-cut"
CONTEXT = 256  # tokens in the cache while a draft is timed, at most
DRAFT_REPEATS = 9


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared, and how. At temperature 0 the seed decides nothing, so each prompt is decoded once."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    seeds: int = 3  # texts of each prompt at temperatures above 0
    seed: int = 0  # of the first text
    max_new_tokens: int = 256
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeats: int = 1  # timed runs of each text, of which the fastest counts
    adaptive: bool = False  # also with D-cut
    trees: tuple[int, ...] = ()  # also with trees of so many nodes, where the drafter grows trees
    capacity: int | None = None
    timed: int | None = None  # prompts a domain that are timed, one text each; None times every text of all, 0 none
    batch: int = 8  # prompts decoded together where that is not timed

    def __post_init__(self):
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be one or several numbers from 0 on, got {self.temperatures}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.timed is not None and self.timed < 0:
            raise ValueError(f"timed must be a number of prompts from 0 on, got {self.timed}")

    def texts(self, temperature: float) -> int:
        """Texts of each prompt."""
        return self.seeds if temperature > 0 else 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one drafter did, used one way, on one domain at one temperature; rates are pooled over prompts and seeds."""

    drafter: str
    way: str
    domain: str
    temperature: float
    acceptance: Acceptance
    tau_interval: Interval
    plain: float | None  # tokens per second of decoding, after the prompt was read; None where nothing was timed, as the next three
    speculative: float | None
    speedup: float | None
    speedup_interval: Interval | None
    draft_seconds: float | None  # of a draft to full depth with what it digests of the round before; None for trees and where untimed
    agreement: Agreement
    policy: dict[str, Any] | None  # D-cut's costs
    left_out: int
    records: list[dict[str, Any]]  # one a prompt and seed
    timings: list[dict[str, Any]]  # the timed ones, with their seconds

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.drafter, self.way, self.domain, self.temperature

    @property
    def label(self) -> str:
        return self.drafter if self.way == FIXED else f"{self.drafter}, {self.way}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"acceptance": self.acceptance.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Cell":
        counted: dict[str, Any] = {field.name: values["acceptance"][field.name] for field in dataclasses.fields(Acceptance)}
        counted = {name: tuple(value) if isinstance(value, list) else value for name, value in counted.items()}
        parts: dict[str, Any] = {"acceptance": Acceptance(**counted), "agreement": Agreement(**values["agreement"])}
        intervals = {name: values[name] for name in ("tau_interval", "speedup_interval")}
        parts |= {name: None if found is None else Interval(**found) for name, found in intervals.items()}
        return cls(**{**values, **parts})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Cells, and what they were measured with; cells of another setting must not be added."""

    facts: dict[str, Any]
    cells: list[Cell]

    def to_dict(self) -> dict[str, Any]:
        return {**self.facts, "cells": [cell.to_dict() for cell in self.cells]}

    @property
    def agreement(self) -> Agreement:
        """All cells together."""
        found = [cell.agreement for cell in self.cells]
        return Agreement(*(sum(getattr(a, field.name) for a in found) for field in dataclasses.fields(Agreement)))


def compare(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Mapping[str, Sequence[text.Prompt]],
    options: Options | None = None,
    *,
    file: Path | None = None,
    progress: Progress | None = None,
    **switches: Any,
) -> Comparison:
    """Measure every cell that `file` does not hold yet, writing the file after each; `switches` go to the chat template.

    Drafters take turns within each domain and temperature. Raises ValueError when no prompt of a domain fits the model's context, or when
    the file was made with something else.
    """
    options = Options() if options is None else options
    if not drafters:
        raise ValueError("there is no drafter to compare; name them with --drafter")
    kept = None if file is None or not file.exists() else read(file)
    found = _begin(target, drafters, prompts, options, kept, file, switches)
    done = {cell.key for cell in found.cells}
    ways = {name: _ways(drafter, options) for name, drafter in drafters.items()}
    pairs = itertools.product(prompts, options.temperatures, drafters)
    keys = [(name, way, domain, temperature) for domain, temperature, name in pairs for way in ways[name]]
    left = [key for key in keys if key not in done]
    capacity = found.facts["options"]["capacity"]
    bench = _Bench(target, drafters, prompts, dataclasses.replace(options, capacity=capacity), switches, progress)
    bench.total = sum(bench.work(domain, temperature) for *_, domain, temperature in left)
    bench.drafting = {cell.drafter: cell.draft_seconds for cell in found.cells if cell.draft_seconds is not None}
    cells = list(found.cells)
    for key in left:
        cells.append(bench.cell(key, ways[key[0]][key[1]]))
        found = dataclasses.replace(found, cells=cells)
        if file is not None:
            report.write_json(file, found.to_dict())
    return found


class _Bench:
    """What the cells of one run share: plain texts, costs measured at its start, and the progress bar."""

    def __init__(self, target: Target, drafters, prompts, options: Options, switches, progress: Progress | None):
        self.target, self.drafters, self.prompts, self.options, self.switches = target, drafters, prompts, options, switches
        self.drafting: dict[str, float] = {}
        self.total, self._passed, self._progress = 0, 0, progress
        self._policies: dict[tuple[str, int], Policy] = {}
        self._plain: dict[tuple[str, float, int], list[tuple[list[int], list[int]]]] = {}

    def work(self, domain: str, temperature: float) -> int:
        """Texts that a cell decodes, for the progress bar."""
        count = len(self.prompts[domain])
        timed = 0 if self.options.timed is None else min(self.options.timed, count)
        return count * self.options.texts(temperature) + timed

    def cell(self, key: tuple[str, str, str, float], nodes: int | None) -> Cell:
        name, *_, temperature = key
        drafter, options = self.drafters[name], self.options
        assert options.capacity is not None
        if name not in self.drafting and nodes is None and options.timed != 0:
            context = min(CONTEXT, options.capacity // 2)
            self.drafting[name] = step_costs.time_draft(drafter, self.target, 1, context, options.capacity, DRAFT_REPEATS)
        texts = range(options.texts(temperature))
        if options.timed is None:
            timed = runs = [self._timed(key, nodes, number, None) for number in texts]
            agreements = [run.agreement for run in runs if run.agreement is not None]
        else:
            timed = [self._timed(key, nodes, 0, options.timed)] if options.timed else []
            runs, agreements = zip(*(self._batched(key, nodes, number) for number in texts), strict=True)
        return _cell(key, runs, timed, agreements, self.drafting.get(name) if nodes is None else None)

    def _timed(self, key, nodes: int | None, number: int, limit: int | None) -> measure.Measurement:
        name, way, domain, temperature = key
        prompts = {domain: self.prompts[domain][:limit]}
        options = self._settings(domain, temperature, number, way, nodes, 1)
        report_on, policy = self._shifted(len(prompts[domain])), self._policy(name, way, 1)
        return measure.measure(self.target, self.drafters[name], prompts, options, policy=policy, progress=report_on, **self.switches)

    def _batched(self, key, nodes: int | None, number: int) -> tuple[measure.Measurement, Agreement]:
        name, way, domain, temperature = key
        group, options = self.prompts[domain], self._settings(domain, temperature, number, way, nodes, self.options.batch)
        place = domain, temperature, number
        if place not in self._plain:
            self._plain[place] = measure.plain_texts(self.target, group, options, **self.switches)
        report_on, policy = self._shifted(len(group)), self._policy(name, way, self.options.batch)
        found = measure.measure(
            self.target, self.drafters[name], {domain: group}, options, timed=False, policy=policy, progress=report_on, **self.switches
        )
        sampling = options.sampling()
        compared = [
            tau.compare(self.target, ids, plain, said, make_sampling(1, **sampling | {"seed": options.seed + index}))
            for index, ((ids, plain), said) in enumerate(zip(self._plain[place], found.texts, strict=True))
        ]
        return found, tau.agreement(compared)

    def _settings(self, domain: str, temperature: float, number: int, way: str, nodes: int | None, batch: int) -> measure.Options:
        options = self.options
        return measure.Options(
            options.max_new_tokens, temperature, options.top_k, options.top_p, options.min_p,
            seed=options.seed + number * len(self.prompts[domain]), capacity=options.capacity, repeats=options.repeats,
            adaptive=way == DCUT, tree=nodes, batch=batch,
        )  # fmt: skip

    def _policy(self, name: str, way: str, requests: int) -> Policy | None:
        if way != DCUT:
            return None
        if (name, requests) not in self._policies:
            drafter, capacity = self.drafters[name], self.options.capacity
            assert capacity is not None
            self._policies[name, requests] = text.measure_policy(self.target, drafter, requests=requests, capacity=capacity)
        return self._policies[name, requests]

    def _shifted(self, texts: int) -> Progress | None:
        progress, passed, total = self._progress, self._passed, self.total
        self._passed += texts
        return None if progress is None else lambda done, _: progress(passed + done, total)


def _ways(drafter: Drafter, options: Options) -> dict[str, int | None]:
    """Every way of using a drafter, with the nodes of its trees (None: chains)."""
    chains: dict[str, int | None] = dict.fromkeys((FIXED, DCUT) if options.adaptive else (FIXED,))
    return chains | ({f"trees of {nodes}": nodes for nodes in options.trees} if growable(drafter.config) else {})


def read(file: str | Path) -> Comparison:
    """What an earlier run found. Raises ValueError when the file holds no comparison."""
    try:
        values = json.loads(Path(file).read_text("utf-8"))
        cells = [Cell.from_dict(cell) for cell in values.pop("cells")]
        if not {"target", "machine", "options", "domains", "drafters"} <= set(values):
            raise ValueError("facts are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds no comparison of drafters ({error}); name another file with --output") from None
    return Comparison(values, cells)


def lead(best: Cell, other: Cell) -> tuple[float, Interval]:
    """By how much the tau of `best` is above the other's on the same prompts, with the interval of that difference."""
    columns = np.concatenate([_counts(best.records), _counts(other.records)])

    def difference(sums):
        return sums[0] / sums[1] - sums[2] / sums[3]

    return float(difference(columns.sum(axis=1))), interval(columns, difference)


def groups(cells: Sequence[Cell]) -> dict[tuple[str, float], list[Cell]]:
    """Cells by domain and temperature, in the order they were asked for."""
    found: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.domain, cell.temperature), []).append(cell)
    return found


def _begin(target: Target, drafters, prompts, options: Options, kept: Comparison | None, file, switches) -> Comparison:
    """The facts of this run joined with those of the file, which must not contradict them."""
    encoded = {domain: [text.encode(target, prompt, **switches) for prompt in group] for domain, group in prompts.items()}
    fixed = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("temperatures", "adaptive", "trees")}
    facts = {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": str(target.params.embed.dtype)},
        "machine": report.machine(),
        "options": fixed,
        "domains": {domain: {"prompts": len(ids), "sha256": _digest(repr(ids).encode())} for domain, ids in encoded.items()},
        "drafters": {name: _described(drafter) for name, drafter in drafters.items()},
    }
    drafts = max(drafter.config.num_drafts for drafter in drafters.values())
    needed = max(measure.capacity_for(target, ids, options.max_new_tokens, drafts) for ids in encoded.values())
    held = None if kept is None else kept.facts["options"]["capacity"]
    fixed["capacity"] = options.capacity or (held if held is not None and held >= needed else needed)
    if kept is None:
        return Comparison(facts, [])
    for section in ("target", "machine", "options"):
        for name, here in facts[section].items():
            _same(file, f"{section} {name.replace('_', ' ')}", kept.facts[section].get(name), here)
    for section in ("domains", "drafters"):
        for name, here in facts[section].items():
            if name in kept.facts[section]:
                _same(file, f"{section[:-1]} {name}", kept.facts[section][name], here)
        facts[section] = kept.facts[section] | facts[section]
    return Comparison(facts, kept.cells)


def _same(file, what: str, there: Any, here: Any) -> None:
    if there != here:
        raise ValueError(f"{file} was measured with {what} {there}, now it is {here}; name another file with --output")


def _described(drafter: Drafter) -> dict[str, Any]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(drafter.params)]
    digest = hashlib.sha256(repr(drafter.config).encode())
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    sizes = {"drafts": drafter.config.num_drafts, "parameters": sum(leaf.size for leaf in leaves)}
    return {"family": drafter.config.family, **sizes, "sha256": digest.hexdigest()[:16]}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _cell(
    key: tuple[str, str, str, float],
    runs: Sequence[measure.Measurement],
    timed: Sequence[measure.Measurement],
    agreements: Sequence[Agreement],
    draft_seconds: float | None,
) -> Cell:
    drafter, way, domain, temperature = key
    records, timings = ([record | {"text": n} for n, run in enumerate(own) for record in run.records] for own in (runs, timed))
    counts = _counts(records)
    speeds: dict[str, Any] = dict.fromkeys(("plain", "speculative", "speedup", "speedup_interval"))
    if timings:
        columns = _clocked(timings)
        tokens, plain_tokens, seconds, plain_seconds = columns.sum(axis=1)
        speeds = {
            "plain": float(plain_tokens / plain_seconds),
            "speculative": float(tokens / seconds),
            "speedup": float(tokens / seconds / (plain_tokens / plain_seconds)),
            "speedup_interval": interval(columns, lambda sums: sums[0] / sums[2] / (sums[1] / sums[3])),
        }
    return Cell(
        drafter=drafter,
        way=way,
        domain=domain,
        temperature=temperature,
        acceptance=tau.pool(run.acceptance[domain] for run in runs),
        tau_interval=interval(counts, lambda sums: sums[0] / sums[1]),
        **speeds,
        draft_seconds=draft_seconds,
        agreement=Agreement(*(sum(getattr(a, field.name) for a in agreements) for field in dataclasses.fields(Agreement))),
        policy=(timed or runs)[0].policy,
        left_out=runs[0].left_out,
        records=records,
        timings=timings,
    )


def _counts(records: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, "2 P"]:
    """By prompt, its texts summed: tokens and rounds."""
    return np.stack([_column(records, "tokens"), np.maximum(_column(records, "rounds"), 1)])


def _clocked(records: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, "4 P"]:
    """By prompt, its texts summed: tokens, tokens of plain decoding, seconds of decoding, and of plain decoding."""
    seconds = [_column(records, f"{kind}_seconds") - _column(records, f"{kind}_prefill_seconds") for kind in ("speculative", "plain")]
    return np.stack([_column(records, "tokens"), _column(records, "plain_tokens"), *(np.maximum(clock, 1e-9) for clock in seconds)])


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Float[np.ndarray, "P"]:
    texts = 1 + max(record["text"] for record in records)
    return np.asarray([record[name] for record in records], float).reshape(texts, -1).sum(axis=0)
