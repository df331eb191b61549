"""Figures of an evaluation: tokens per second both ways, and how far drafts survive, per domain."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = ("#3566a8", "#d9822b", "#3d8f5f", "#a64d79", "#6b6b6b", "#b5a42e", "#4fb0c6", "#8c564b", "#9467bd", "#1b3a4b")
PLAIN = "#c3c7cc"
Bar = tuple[float, float, float]  # value, low and high end of its interval


def overview(title: str, survival: Mapping[str, Sequence[float]], speeds: Mapping[str, tuple[float, float]]) -> Figure:
    """`survival`: domain -> [K] share of rounds in which the drafts up to k were accepted; `speeds`: domain -> tokens per second, plain and
    speculative. Either may be empty, then its panel is left out.
    """
    panels = [panel for panel, values in (("speeds", speeds), ("survival", survival)) if values]
    figure = Figure(figsize=(5.2 * max(len(panels), 1), 3.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    colours = {domain: COLOURS[i % len(COLOURS)] for i, domain in enumerate(dict.fromkeys([*survival, *speeds]))}
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.spines[["top", "right"]].set_visible(False)
        if panel == "speeds":
            _speeds(axes, speeds, colours)
        else:
            _survival(axes, survival, colours)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure, in the format its name ends with."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path


def under_load(title: str, curves: Mapping[str, Sequence[tuple[float, float, float | None]]], level: str = "concurrent requests") -> Figure:
    """`curves`: way -> (level, tokens per second of all, tokens per second of one request or None). Left: all against the level; right:
    all against one request's, the trade between throughput and speed."""
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    whole, trade = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for place, (name, points) in enumerate(curves.items()):
        colour = PLAIN if name == "plain" else COLOURS[place % len(COLOURS)]
        whole.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", markersize=4, color=colour, label=name)
        known = [(one, every) for _, every, one in points if one is not None]
        trade.plot([one for one, _ in known], [every for _, every in known], marker="o", markersize=4, color=colour)
    whole.set_xscale("log", base=2)
    ticks = sorted({x for points in curves.values() for x, _, _ in points})
    whole.set_xticks(ticks, [f"{x:g}" for x in ticks])
    whole.set_xlabel(level)
    trade.set_xlabel("tokens per second of one request")
    for axes in (whole, trade):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("tokens per second, all requests")
        axes.set_ylim(bottom=0)
    whole.legend(frameon=False, fontsize=8)
    return figure


def grouped(title: str, panels: Mapping[str, Mapping[str, Mapping[str, Bar]]], axis: str, reference: float = 1.0) -> Figure:
    """`panels`: panel -> series -> group -> bar. One panel under the other; `reference` is drawn as a line (plain decoding)."""
    series = list(dict.fromkeys(name for bars in panels.values() for name in bars))
    groups = list(dict.fromkeys(group for bars in panels.values() for own in bars.values() for group in own))
    width = 0.84 / max(len(series), 1)
    figure = Figure(figsize=(max(6.4, 2.0 + 0.5 * len(groups) * (len(series) + 1)), 0.8 + 2.9 * max(len(panels), 1)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    lines = {}
    for place, (panel, bars) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, place)
        axes.spines[["top", "right"]].set_visible(False)
        for number, name in enumerate(series):
            for group, (value, low, high) in bars.get(name, {}).items():
                x = groups.index(group) + (number - (len(series) - 1) / 2) * width
                error = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
                drawn = axes.bar(x, value, 0.92 * width, color=COLOURS[number % len(COLOURS)], yerr=error, error_kw=_ERRORS)
                lines.setdefault(name, drawn)
                axes.annotate(f"{value:.2f}", (x, high), ha="center", va="bottom", fontsize=7, xytext=(0, 1), textcoords="offset points")
        axes.axhline(reference, color="#555555", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(groups)), groups)
        axes.set_title(panel, fontsize=10, loc="left")
        axes.set_ylabel(axis, fontsize=9)
        axes.set_ylim(bottom=0)
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize=8, ncols=min(len(lines), 5) or 1, loc="outside lower center")
    return figure


_ERRORS = {"elinewidth": 0.9, "ecolor": "#222222", "capsize": 2}


def by_position(title: str, panels: Mapping[str, Mapping[str, Sequence[float | None]]], columns: int = 3) -> Figure:
    """`panels`: panel -> drafter -> [K] conditional acceptance, None where draft k was never verified; `columns` panels side by side."""
    series = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.4, 3.6 * columns), 0.8 + 2.9 * max(rows, 1)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    lines = {}
    for place, (panel, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.spines[["top", "right"]].set_visible(False)
        for name, shares in curves.items():
            points = [(k, share) for k, share in enumerate(shares, 1) if share is not None]
            colour = COLOURS[series.index(name) % len(COLOURS)]
            (drawn,) = axes.plot([k for k, _ in points], [s for _, s in points], marker="o", markersize=3.5, color=colour)
            lines.setdefault(name, drawn)
        axes.set_xticks(range(1, max((len(shares) for shares in curves.values()), default=1) + 1))
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft position", fontsize=9)
        if place % columns == 1 or columns == 1:
            axes.set_ylabel("accepted, of those reached", fontsize=9)
        axes.set_title(panel, fontsize=10, loc="left")
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize=8, ncols=min(len(lines), 5) or 1, loc="outside lower center")
    return figure


def _speeds(axes, speeds: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    for place, (domain, (plain, speculative)) in enumerate(speeds.items()):
        axes.bar(place - 0.2, plain, 0.38, color=PLAIN, label="plain" if place == 0 else None)
        axes.bar(place + 0.2, speculative, 0.38, color=colours[domain], label="with drafter" if place == 0 else None)
        axes.annotate(f"{speculative / plain:.2f}x", (place + 0.2, speculative), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(speeds)), list(speeds))
    axes.set_ylabel("tokens per second, one request")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _survival(axes, survival: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    for domain, shares in survival.items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=colours[domain], label=domain)
    axes.set_xticks(range(1, max(len(shares) for shares in survival.values()) + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of rounds accepted up to here")
    axes.legend(frameon=False, fontsize=8)
