"""Measurements as tables for people (and, in `files`, as JSON for machines)."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from angelspec_jax.drafter.layouts import Report
from angelspec_jax.evaluation.calibration import Quality
from angelspec_jax.evaluation.files import machine, write_json
from angelspec_jax.evaluation.simulation import Prediction
from angelspec_jax.evaluation.step_costs import StepCosts
from angelspec_jax.evaluation.tau import Acceptance
from angelspec_jax.evaluation.throughput import Speed

__all__ = [
    "calibration_table",
    "checkpoint_table",
    "domain_table",
    "machine",
    "prediction_table",
    "step_table",
    "write_json",
]


def domain_table(title: str, found: Mapping[str, Acceptance], speeds: Mapping[str, Speed] | None = None) -> Table:
    """One row a domain: tau, conditional acceptance by position, share of verified drafts accepted, and speeds where they were timed."""
    table = Table(title=title, title_justify="left")
    table.add_column("domain")
    table.add_column("tau", justify="right")
    table.add_column("accepted at\n1, 2, ... (%)", no_wrap=True)
    table.add_column("of\nverified", justify="right")
    if speeds:
        for name in ("plain\ntok/s", "drafted\ntok/s", "speed-up"):
            table.add_column(name, justify="right")
    for domain, acceptance in found.items():
        shares = " ".join("  -" if share is None else f"{100 * share:3.0f}" for share in acceptance.conditional)
        overall = acceptance.verified_accepted
        row = [domain, f"{acceptance.tau:.2f}", shares, "-" if overall is None else f"{100 * overall:.0f} %"]
        if speeds:
            speed = speeds[domain]
            row += [f"{speed.plain:.1f}", f"{speed.speculative:.1f}", f"{speed.speedup:.2f} x"]
        table.add_row(*row)
    return table


def step_table(costs: StepCosts) -> Table:
    """Verification by width, drafting and the plain step, against the memory floor."""
    each = f"{costs.requests} request{'s' if costs.requests > 1 else ''}, {costs.context} of {costs.capacity} tokens in the cache"
    table = Table(title=f"cost of a round: {each}", title_justify="left")
    table.add_column("part")
    for name in ("milliseconds", "of a plain step", "tokens a round to break even"):
        table.add_column(name, justify="right")

    def row(name: str, seconds: float, break_even: str = "") -> None:
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / costs.plain:.2f} x", break_even)

    row("memory floor", costs.floor)
    row("plain step", costs.plain)
    if costs.draft is not None:
        row("draft", costs.draft)
    if costs.round is not None and costs.overhead is not None:
        row("whole round", costs.round)
        row(f"beyond draft and verification ({100 * costs.overhead / costs.round:.1f} %)", costs.overhead)
    for width, seconds in costs.verify.items():
        row(f"verify {width} row{'s' if width > 1 else ''}", seconds, f"{costs.break_even(width):.2f}" if width > 1 else "")
    table.caption = f"floor: {costs.weight_bytes / 1e6:.0f} MB of weights at {costs.bandwidth / 1e9:.1f} GB/s"
    return table


def calibration_table(title: str, found: Mapping[str, tuple[Quality, Quality]], temperatures: Sequence[float]) -> Table:
    """One row a domain: how far estimated and observed survival lie apart before and after scaling, mean over the draft positions."""
    table = Table(title=title, title_justify="left", caption="temperatures: " + " ".join(f"{t:.2f}" for t in temperatures))
    table.add_column("domain")
    for name in ("rounds", "ECE (%)\nbefore", "\nafter", "Brier\nbefore", "\nafter", "AUROC\nbefore", "\nafter"):
        table.add_column(name, justify="right")

    def mean(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{sum(known) / len(known):.3f}" if known else "-"

    for domain, pair in found.items():
        errors = [f"{100 * sum(quality.ece) / len(quality.ece):.1f}" for quality in pair]
        table.add_row(domain, str(pair[0].rounds), *errors, *(mean(q.brier) for q in pair), *(mean(q.auroc) for q in pair))
    return table


def checkpoint_table(title: str, report: Report) -> Table:
    """What a reader decided about a drafter checkpoint, and what says so."""
    table = Table(title=title, title_justify="left")
    for name in ("what", "value", "from"):
        table.add_column(name, overflow="fold")
    for row in report.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def prediction_table(title: str, found: Sequence[Prediction]) -> Table:
    """One row a concurrency, one column a policy: predicted tokens per second of all requests, with tau."""
    policies = list(dict.fromkeys(str(prediction.budget) for prediction in found))
    table = Table(title=title, title_justify="left", caption=f"costs: {', '.join(sorted({p.source for p in found}))}")
    table.add_column("concurrency", justify="right")
    for policy in policies:
        table.add_column(f"{policy}\ntok/s (tau)", justify="right")
    for level in dict.fromkeys(prediction.concurrency for prediction in found):
        own = {str(prediction.budget): prediction for prediction in found if prediction.concurrency == level}
        table.add_row(str(level), *(f"{own[policy].rate:.1f} ({own[policy].tau:.2f})" for policy in policies))
    return table
