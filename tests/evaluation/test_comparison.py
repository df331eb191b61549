"""Drafters compared on a toy: cells, their intervals, a comparison that goes on where it stopped, and what does not belong together."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.evaluation import bootstrap, comparison, comparison_views, measure

pytest_plugins = ["toy_model"]

OPTIONS = comparison.Options(seeds=2, max_new_tokens=6, capacity=128)
PROMPTS = {"a": ["one", "two", "three three three"], "b": ["four"]}


@pytest.fixture(scope="module")
def helpers(toy_target, toy_drafter):
    return {"toy": toy_drafter, "lookup": load_drafter("lookup:2", toy_target)}


@pytest.fixture(scope="module")
def found(toy_target, helpers, tmp_path_factory):
    """The comparison, and the file it was written to."""
    file = tmp_path_factory.mktemp("comparison") / "found.json"
    return comparison.compare(toy_target, helpers, PROMPTS, OPTIONS, file=file), file


def test_a_cell_says_what_a_measurement_says(toy_target, helpers, found):
    cells = {cell.key: cell for cell in found[0].cells}
    assert len(cells) == 2 * 2 * 2
    greedy, sampled = (cells["toy", comparison.FIXED, "a", t] for t in (0.0, 1.0))
    assert len(greedy.records) == 3  # the seed decides nothing
    assert len(sampled.records) == 6
    options = [measure.Options(max_new_tokens=6, temperature=1.0, seed=seed, capacity=128) for seed in (0, 3)]
    runs = [measure.measure(toy_target, helpers["toy"], {"a": PROMPTS["a"]}, own, timed=False) for own in options]
    assert sampled.acceptance.emitted == sum(run.acceptance["a"].emitted for run in runs)
    assert sampled.acceptance.rounds == sum(run.acceptance["a"].rounds for run in runs)
    assert sampled.acceptance.tau == pytest.approx(sampled.acceptance.emitted / sampled.acceptance.rounds)
    assert all(cell.tau_interval.low <= cell.acceptance.tau <= cell.tau_interval.high for cell in cells.values())
    assert all(cell.speedup_interval.low <= cell.speedup <= cell.speedup_interval.high for cell in cells.values())
    assert all(cell.speedup == pytest.approx(cell.speculative / cell.plain) for cell in cells.values())
    assert all(cell.draft_seconds > 0 for cell in cells.values())
    assert found[0].agreement.holds
    assert found[0].agreement.prompts == 2 * (4 + 2 * 4)


def test_a_comparison_goes_on_where_it_stopped(toy_target, helpers, found, monkeypatch):
    first, file = found
    values = json.loads(file.read_text())
    stopped = file.with_name("stopped.json")
    stopped.write_text(json.dumps(values | {"cells": values["cells"][:-1]}))
    calls = []
    own = measure.measure
    monkeypatch.setattr(measure, "measure", lambda *given, **options: calls.append(given) or own(*given, **options))
    seen = []
    again = comparison.compare(toy_target, helpers, PROMPTS, OPTIONS, file=stopped, progress=lambda done, total: seen.append((done, total)))
    assert len(calls) == 2  # the last cell has two texts of one prompt
    assert seen == [(1, 2), (2, 2)]
    assert [cell.key for cell in again.cells] == [cell.key for cell in first.cells]
    assert again.cells[-1].acceptance == first.cells[-1].acceptance
    assert comparison.read(stopped).cells[:-1] == comparison.read(file).cells[:-1]
    only = comparison.compare(toy_target, {"toy": helpers["toy"]}, {"a": PROMPTS["a"]}, OPTIONS, file=stopped)
    assert len(calls) == 2
    assert len(only.cells) == len(first.cells)  # what was found before stays


def test_what_does_not_belong_together_is_refused(toy_target, helpers, found, tmp_path):
    _, file = found
    with pytest.raises(ValueError, match="was measured with options max new tokens 6, now it is 7; name another file"):
        comparison.compare(toy_target, helpers, PROMPTS, dataclasses.replace(OPTIONS, max_new_tokens=7), file=file)
    with pytest.raises(ValueError, match="was measured with domain a"):
        comparison.compare(toy_target, helpers, {"a": ["other"]}, OPTIONS, file=file)
    with pytest.raises(ValueError, match="was measured with drafter toy"):
        comparison.compare(toy_target, {"toy": helpers["lookup"]}, PROMPTS, OPTIONS, file=file)
    other = tmp_path / "other.json"
    other.write_text('{"cells": [{}]}')
    with pytest.raises(ValueError, match="holds no comparison of drafters"):
        comparison.compare(toy_target, helpers, PROMPTS, OPTIONS, file=other)
    with pytest.raises(ValueError, match="no drafter to compare"):
        comparison.compare(toy_target, {}, PROMPTS)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        comparison.Options(seeds=0)


def test_some_prompts_are_timed_and_all_counted_in_batches(toy_target, helpers, found, tmp_path):
    """The same tau as one at a time, with a batch that the prompts do not fill; a wrong text is found; what is not timed has no speed."""
    alone = {cell.key: cell for cell in found[0].cells}
    options = dataclasses.replace(OPTIONS, timed=1, batch=2)
    file = tmp_path / "found.json"
    partly = comparison.compare(toy_target, helpers, PROMPTS, options, file=file)
    for cell in partly.cells:
        assert cell.acceptance == alone[cell.key].acceptance
        assert cell.agreement == alone[cell.key].agreement
        assert len(cell.timings) == 1
        assert cell.speedup == pytest.approx(cell.speculative / cell.plain)
    assert comparison.compare(toy_target, helpers, PROMPTS, options, file=file).cells == comparison.read(file).cells
    untimed = comparison.compare(toy_target, {"toy": helpers["toy"]}, {"b": PROMPTS["b"]}, dataclasses.replace(options, timed=0))
    assert all(cell.speedup is None and cell.speedup_interval is None and cell.draft_seconds is None for cell in untimed.cells)
    assert [file.name for file in comparison_views.figures("t", untimed.cells, tmp_path)] == list(comparison_views.FILES[:2])
    with pytest.raises(ValueError, match="timed must be a number"):
        dataclasses.replace(OPTIONS, timed=-1)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        measure.Options(batch=0)


def test_a_text_of_a_batch_that_differs_is_found(toy_target, helpers, monkeypatch):
    own = measure.plain_texts
    monkeypatch.setattr(
        measure, "plain_texts", lambda *given, **more: [(ids, [*said[:-1], said[-1] ^ 1]) for ids, said in own(*given, **more)]
    )
    options = dataclasses.replace(OPTIONS, temperatures=(0.0,), timed=0)
    assert not comparison.compare(toy_target, {"toy": helpers["toy"]}, {"b": PROMPTS["b"]}, options).agreement.holds


def test_trees_stand_beside_chains_where_a_drafter_grows_them(toy_target, helpers, found, tmp_path):
    options = dataclasses.replace(OPTIONS, temperatures=(0.0,), trees=(3,))
    both = comparison.compare(toy_target, helpers, {"b": PROMPTS["b"]}, options)
    assert [cell.label for cell in both.cells] == ["toy", "toy, trees of 3", "lookup"]
    tree = both.cells[1]
    alone = measure.Options(max_new_tokens=6, capacity=128, tree=3)
    assert tree.acceptance == measure.measure(toy_target, helpers["toy"], {"b": PROMPTS["b"]}, alone, timed=False).acceptance["b"]
    assert tree.draft_seconds is None
    assert both.agreement.holds


def test_it_is_shown(found, tmp_path):
    cells = found[0].cells
    with (tmp_path / "screen").open("w+") as screen:
        Console(file=screen, width=200).print(comparison_views.table("t", cells))
        screen.seek(0)
        shown = screen.read()
    assert shown.count("lookup") == 4
    assert all(f"{domain}, T = {temperature}" in shown for domain in "ab" for temperature in (0, 1))
    assert f"{cells[0].acceptance.tau:.2f} [" in shown
    files = comparison_views.figures("t", cells, tmp_path / "deep")
    assert [file.name for file in files] == list(comparison_views.FILES)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_intervals_narrow_with_prompts_and_hold_the_truth():
    random = np.random.default_rng(1)
    held, widths = 0, {10: [], 160: []}
    for prompts, collected in widths.items():
        for _ in range(60):
            rounds = random.integers(20, 60, prompts).astype(float)
            tokens = random.binomial(rounds.astype(int), 0.5) + rounds  # 1.5 tokens a round
            found = bootstrap.interval(np.stack([tokens, rounds]), lambda sums: sums[0] / sums[1], samples=400)
            collected.append(found.high - found.low)
            held += found.low <= 1.5 <= found.high
    assert held >= 0.85 * 120
    assert np.mean(widths[160]) == pytest.approx(np.mean(widths[10]) / 4, rel=0.3)


def test_a_difference_on_the_same_prompts_is_sharper_than_two_intervals(found):
    one = next(cell for cell in found[0].cells if cell.domain == "a")
    difference, known = comparison.lead(one, one)
    assert (difference, known.low, known.high) == (0.0, 0.0, 0.0)
