"""A comparison of drafters as a table and as figures."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from angelspec_jax.evaluation import plots
from angelspec_jax.evaluation.bootstrap import LEVEL
from angelspec_jax.evaluation.comparison import FIXED, Cell, groups, lead

FILES = ("tau.png", "acceptance.png", "speed.png")


def table(title: str, cells: Sequence[Cell]) -> Table:
    """One row a drafter and way, grouped by domain and temperature, the highest tau first."""
    found = Table(title=title, title_justify="left", caption=_caption(), caption_justify="left")
    found.add_column("domain")
    found.add_column("drafter")
    for name in ("tau", "below the first", "accepted at 1, 2, ... (%)", "draft\nms", "plain\ntok/s", "drafted\ntok/s", "speed-up", "texts"):
        found.add_column(name, justify="right")
    for (domain, temperature), own in groups(cells).items():
        ranked = sorted(own, key=lambda cell: -cell.acceptance.tau)
        for place, cell in enumerate(ranked):
            shares = " ".join(" -" if share is None else f"{100 * share:2.0f}" for share in _offered(cell.acceptance.conditional))
            found.add_row(
                f"{escape(domain)}, T = {temperature:g}" if place == 0 else "",
                escape(cell.label),
                f"{cell.acceptance.tau:.2f} [{cell.tau_interval}]".replace("[", r"\["),
                "" if place == 0 else _behind(ranked[0], cell),
                shares,
                "-" if cell.draft_seconds is None else f"{1e3 * cell.draft_seconds:.2f}",
                *_speed(cell),
                _agreement(cell),
                end_section=place == len(ranked) - 1,
            )
    return found


def figures(title: str, cells: Sequence[Cell], folder: str | Path) -> list[Path]:
    """Tau and speed-up by drafter and domain with intervals, and acceptance by position, each with a panel a temperature."""
    taus: dict[str, dict[str, dict[str, plots.Bar]]] = {}
    speeds: dict[str, dict[str, dict[str, plots.Bar]]] = {}
    shares: dict[str, dict[str, Sequence[float | None]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.temperature):
        panel = f"T = {cell.temperature:g}"
        tau, speed = cell.tau_interval, cell.speedup_interval
        _inside(taus, panel, cell.label)[cell.domain] = (cell.acceptance.tau, tau.low, tau.high)
        if cell.speedup is not None and speed is not None:
            _inside(speeds, panel, cell.label)[cell.domain] = (cell.speedup, speed.low, speed.high)
        if cell.way == FIXED:  # what D-cut leaves out was not offered
            shares.setdefault(f"{cell.domain}, {panel}", {})[cell.label] = cell.acceptance.conditional
    interval = f"{LEVEL:.0%} intervals over prompts"
    made = [
        plots.grouped(f"{title}: tau, {interval}", taus, "tokens per round"),
        plots.by_position(f"{title}: acceptance by position", shares, len({cell.domain for cell in cells})),
    ]
    if speeds:
        made.append(plots.grouped(f"{title}: speed-up, {interval}", speeds, "times plain decoding"))
    return [plots.save(figure, Path(folder) / name) for figure, name in zip(made, FILES, strict=False)]


def _inside(panels: dict[str, dict[str, dict[str, plots.Bar]]], panel: str, label: str) -> dict[str, plots.Bar]:
    return panels.setdefault(panel, {}).setdefault(label, {})


def _offered(shares: Sequence[float | None]) -> Sequence[float | None]:
    """Without the positions at the end that no draft reached; a tree has far fewer levels than nodes."""
    return shares[: max((place for place, share in enumerate(shares, 1) if share is not None), default=0)]


def _behind(best: Cell, cell: Cell) -> str:
    if len(best.records) != len(cell.records):
        return "-"  # not of the same prompts
    difference, known = lead(best, cell)
    return f"{difference:.2f} [{known}]".replace("[", r"\[")


def _speed(cell: Cell) -> tuple[str, str, str]:
    if cell.plain is None or cell.speculative is None:
        return "-", "-", "-"
    return f"{cell.plain:.1f}", f"{cell.speculative:.1f}", f"{cell.speedup:.2f} x [{cell.speedup_interval}]".replace("[", r"\[")


def _agreement(cell: Cell) -> str:
    found = cell.agreement
    if found.different:
        return f"{found.different} of {found.prompts} differ"
    return "same" if not found.near_ties else f"same, {found.near_ties} near tie{'s' if found.near_ties > 1 else ''}"


def _caption() -> str:
    return (
        f"In brackets: {LEVEL:.0%} bootstrap intervals over prompts; 'below the first' is the difference of tau on the same prompts. "
        "Accepted at k: of the rounds in which draft k was verified and all before it accepted. Draft: one at full depth, greedy."
    )
