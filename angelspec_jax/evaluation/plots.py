"""Figures of an evaluation: tokens per second both ways, and how far drafts survive, per domain."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = ("#3566a8", "#d9822b", "#3d8f5f", "#a64d79", "#6b6b6b", "#b5a42e")
PLAIN = "#c3c7cc"


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
