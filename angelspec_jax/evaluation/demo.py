"""`angelspec demo`: a real model answers with its shipped drafter, then both ways of decoding are timed and their words compared."""

import dataclasses
import time
import unicodedata
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from angelspec_jax import text
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation import plots, prompts, report
from angelspec_jax.evaluation.measure import Measurement, Options, measure
from angelspec_jax.target.loading import Target

PLOT, JSON = "demo.png", "demo.json"
SETTINGS = Options(max_new_tokens=160, capacity=512, adaptive=True)


def run(
    target: Target,
    drafter: Drafter,
    console: Console,
    output: str | Path = "demo-output",
    *,
    per_domain: int = 3,
    options: Options = SETTINGS,
) -> Measurement:
    """Stream an answer per domain, measure `per_domain` prompts of each both ways, print the table, write `PLOT` and `JSON` into `output`.

    Raises RuntimeError when the texts differ beyond a near tie; the files are written before that.
    """
    begin = time.perf_counter()
    questions = {domain: prompts.builtin(domain, per_domain) for domain in prompts.DOMAINS}
    for domain, group in questions.items():
        answer(target, drafter, domain, group[0], console, options)
    with progress_bar(console, "each prompt plainly and with the drafter, in turns") as progress:
        found = measure(target, drafter, questions, options, progress=progress)
    console.print()
    console.print(report.domain_table(f"{target.name} with {drafter.name}", found.acceptance, found.speeds))
    whole = found.speeds["all"] if found.speeds else None
    if whole is not None:
        console.print(f"reading the prompts included: {whole.request_speedup:.2f} x", highlight=False)
    console.print(f"{found.agreement}", highlight=False)
    files = write(target, drafter, found, options, Path(output))
    console.print(f"written to {files[0]} and {files[1]} after {time.perf_counter() - begin:.0f} s", highlight=False, soft_wrap=True)
    if found.agreement is not None and not found.agreement.holds:
        raise RuntimeError(f"speculative decoding is not exact here: {found.agreement}; {files[1]} names the prompts; please report it")
    return found


def answer(target: Target, drafter: Drafter | None, domain: str, question: str, console: Console, options: Options) -> None:
    """Stream one answer, its question above it and its tau below."""
    console.print()
    console.print(f"{domain}: {question}", style="bold", markup=False, highlight=False, soft_wrap=True)
    rounds = tokens = 0
    for delta in text.stream(
        target, question, drafter, max_new_tokens=options.max_new_tokens, capacity=options.capacity, tree=options.tree, **options.sampling()
    ):
        write_raw(console, delta.text)
        rounds, tokens = rounds + bool(delta.tokens), tokens + len(delta.tokens)
    console.print(f"\n{tokens} tokens in {rounds} rounds, {tokens / max(rounds, 1):.2f} tokens a round", style="dim", highlight=False)


def write(target: Target, drafter: Drafter, found: Measurement, options: Options, folder: Path) -> tuple[Path, Path]:
    """The plot and the JSON of a measurement."""
    figure = plots.overview(f"{target.name} with {drafter.name}", found.survival(), found.rates())
    values = {**facts(target, drafter, options), **found.to_dict()}
    return plots.save(figure, folder / PLOT), report.write_json(folder / JSON, values)


def facts(target: Target, drafter: Drafter, options: Options) -> dict[str, Any]:
    """What a measurement was made with."""
    return {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": str(target.params.embed.dtype)},
        "drafter": {"name": drafter.name, "family": drafter.config.family, "card": drafter.card.to_dict()},
        "machine": report.machine(),
        "options": dataclasses.asdict(options),
    }


def write_raw(console: Console, words: str) -> None:
    """Model output as it comes, without control characters that a terminal would obey."""
    console.file.write("".join(c for c in words if c in "\n\t" or unicodedata.category(c) != "Cc"))
    console.file.flush()


@contextmanager
def progress_bar(console: Console, title: str):
    """A `progress(done, total)` callback, drawn on a terminal only."""
    if not console.is_terminal:
        console.print(title, highlight=False)
        yield None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        update: Callable[[int, int], None] = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        yield update
