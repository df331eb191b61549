"""What was measured under load for people: a line a window, one table, and the two curves of throughput."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from angelspec_jax.evaluation import plots
from angelspec_jax.evaluation.load import Result

COLUMNS = (
    ("all\ntok/s", "rate", "{:.1f}"),
    ("one\ntok/s", "request_rate", "{:.1f}"),
    ("first token\nms", "first_token", "{:.0f} ms"),
    ("p95\nms", "first_token_95", "{:.0f} ms"),
    ("tau", "tau", "{:.2f}"),
    ("rounds\ndrafted", "drafted", "{:.0%}"),
    ("kept", "kept", "{:.0%}"),
    ("of kept\naccepted", "accepted", "{:.0%}"),
)


def pooled(results: Sequence[Result]) -> dict[tuple[str, float], dict[str, dict[str, float | None]]]:
    """Load -> way -> rates over all its windows: aggregate by all tokens and all seconds, the rest as medians of the windows."""
    found: dict[tuple[str, float], dict[str, dict[str, float | None]]] = {}
    results = sorted(results, key=lambda r: (r.load, r.level))
    keys = dict.fromkeys(((r.load, r.level), r.way) for r in results)
    for load, way in keys:
        own = [r for r in results if (r.load, r.level) == load and r.way == way]
        values: dict[str, float | None] = {"rate": sum(r.tokens for r in own) / sum(r.seconds for r in own)}
        for name in ("request_rate", "first_token", "first_token_95", "tau", "drafted", "kept", "accepted"):
            known = [value for r in own if (value := getattr(r, name)) is not None]
            values[name] = statistics.median(known) if known else None
        found.setdefault(load, {})[way] = values
    return found


def line(result: Result, done: int, total: int) -> str:
    """One window in a few words."""
    return f"{done}/{total} {_load(result.load, result.level)}, {result.way}: {result.rate:.1f} tokens a second, tau {result.tau:.2f}"


def table(title: str, results: Sequence[Result]) -> Table:
    """One row a way and load: rates, first token, tau, and what became of the drafts."""
    shown = Table(title=title, title_justify="left")
    for name in ("load", "way"):
        shown.add_column(name)
    for name, _, _ in COLUMNS:
        shown.add_column(name, justify="right")
    for (kind, level), ways in pooled(results).items():
        for place, (way, values) in enumerate(ways.items()):
            row = [_cell(values[name], form) for _, name, form in COLUMNS]
            shown.add_row(_load(kind, level) if place == 0 else "", way, *row, end_section=place == len(ways) - 1)
    return shown


def figure(title: str, results: Sequence[Result], path: str | Path) -> Path:
    """Throughput against concurrency, and against the speed of one request, of the closed loops there are."""
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    for (kind, level), ways in sorted(pooled(results).items()):
        for way, values in ways.items() if kind == "closed" else ():
            rate = values["rate"]
            assert rate is not None
            curves.setdefault(way, []).append((level, rate, values["request_rate"]))
    return plots.save(plots.under_load(title, curves), path)


def _load(kind: str, level: float) -> str:
    if kind == "closed":
        return f"{level:g} client{'s' if level != 1 else ''}"
    return f"{level:g} a second"


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(1e3 * value).removesuffix(" ms") if form.endswith("ms") else form.format(value)
