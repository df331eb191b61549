"""Load and its simulation on a toy: every way is run and counted, and a replay of what was recorded predicts what the engine does."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.decoding.costs import CostTable, load, measure_table, measured_sizes, save, table
from angelspec_jax.decoding.engine import Engine, Settings
from angelspec_jax.decoding.router import Router
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.evaluation import load as loading
from angelspec_jax.evaluation import load_views, report, simulation

pytest_plugins = ["toy_model"]

BUDGETS = (0, 1, 3)
TABLE = CostTable(
    BUDGETS,
    plain={1: 1.0, 2: 1.1, 4: 1.3},
    drafted={1: (1.2, 1.25, 1.3), 2: (1.4, 1.6, 1.9), 4: (1.6, 2.2, 3.4)},
    facts={},
)
SETTINGS = Settings(slots=4, capacity=96, prefill_chunk=16, prefixes=0)
WAIT = 300


@pytest.fixture(scope="module")
def helper(toy_target):
    """Copies what the text said before, which a random model repeats soon."""
    return load_drafter("lookup:3", toy_target)


def recorded(engine, budget, concurrency, seed=0):
    """Rounds of a closed loop."""
    watch = loading.Watch()
    watch.open, engine.watch = True, watch
    engine.choose_policy(budget)
    random = np.random.default_rng(seed)
    streams = [engine.submit(random.integers(0, 250, 6).tolist(), max_new_tokens=80) for _ in range(concurrency)]
    [stream.result(WAIT) for stream in streams]
    engine.watch = None
    return [round for _, round in watch.rounds if round.active == concurrency]


def rate(rounds):
    """Tokens per second if every round took what the table says."""
    seconds = sum(
        TABLE.drafted[r.slots][BUDGETS.index(r.budget)] if r.drafted else TABLE.plain[r.slots] for r in rounds
    )
    return sum(sum(r.emitted) for r in rounds) / seconds


def test_a_replay_predicts_the_engine(toy_target, helper):
    with Engine(toy_target, helper, SETTINGS, costs=TABLE, budgets=BUDGETS) as engine:
        for concurrency in (1, 4):
            trace = loading.trace(recorded(engine, "off", concurrency), 6.0, 80.0)
            assert len(trace.survival[0]) == 3
            for budget in ("off", "retrospective", "plain"):
                done = recorded(engine, budget, concurrency)
                predicted = simulation.simulate(trace, TABLE, concurrency, budget, rounds=max(len(done), 20))
                assert predicted.rate == pytest.approx(rate(done), rel=0.1), (concurrency, budget)


def test_compiled_costs_are_filled_in_between(tmp_path):
    step = {"program": "decode step", "topology": "v6e:2x4", "mesh": "1x1x8", "layers": 2}
    for slots, budget, seconds in ((4, 0, 1.0), (4, 2, 2.0), (24, 0, 3.0), (24, 2, 7.0)):
        found = {"config": "c", "decode": {"requests": slots, "capacity": 64, "budgets": [budget]}}
        found["programs"] = [step | {"estimated_seconds": seconds}]
        (tmp_path / f"{slots}-{budget}.json").write_text(json.dumps(found))
    table = simulation.compiled_costs(sorted(tmp_path.glob("*.json")))
    assert table.sizes == (4, 8, 16, 24) and table.estimated == (8, 16)
    assert table.plain[8] == pytest.approx(1.4) and table.drafted[16] == pytest.approx((5.0, 5.0))
    assert table.source == "computed from the compiler's estimates for 4, 24 slots"


def test_a_simulation_knows_what_does_not_fit():
    trace = loading.Trace([[0.5, 0.4, 0.2]], [2], 5.0, 10.0)
    found = simulation.simulate(trace, TABLE, 1, "off", rounds=10)
    assert found.tau == 3.0
    assert found.rate == pytest.approx(3 / 1.3)
    assert simulation.simulate(trace, TABLE, 1, "plain", rounds=10).rate == pytest.approx(1.0)
    computed = dataclasses.replace(TABLE, source="computed from the compiler's estimates")
    assert "computed" in simulation.simulate(trace, computed, 2).source
    with pytest.raises(ValueError, match="no record"):
        simulation.simulate(loading.Trace([], [], 1.0, 1.0), TABLE, 1)
    with pytest.raises(ValueError, match="two drafters"):
        simulation.simulate(loading.Trace([[0.5]], [1], 1.0, 1.0), TABLE, 1)
    with pytest.raises(ValueError, match="between 1 and the table's 4 slots"):
        simulation.simulate(trace, TABLE, 5)


def compiled(folder, slots, budget, seconds, **changes):
    """A file as `angelspec compile` writes it."""
    step = {"program": "decode step", "topology": "v6e:2x4", "mesh": "1x1x8", "layers": 36, "estimated_seconds": seconds} | changes
    shape = {"requests": slots, "capacity": 4096, "budgets": [] if budget is None else [budget]}
    kernel = {"program": "tree attention", "estimated_seconds": 9.0}
    return report.write_json(folder / f"{slots}-{budget}.json", {"config": "c", "decode": shape, "programs": [kernel, step]})


def test_costs_of_a_chip_that_is_not_here(tmp_path):
    steps = {1: {0: 1.0, 1: 1.5, 3: 1.7}, 1024: {0: 2.0, 1: 3.0, 3: 9.0}}
    files = [compiled(tmp_path, slots, budget, seconds) for slots, own in steps.items() for budget, seconds in own.items()]
    table = simulation.compiled_costs(files)
    assert table.budgets == (0, 1, 3)
    assert table.source == "computed from the compiler's estimates for 1, 1024 slots"
    assert table.estimated == tuple(2**n for n in range(1, 10))  # powers of two between what was compiled
    assert (table.plain[1], table.plain[1024]) == (1.0, 2.0)
    assert table.drafted[1] == pytest.approx((1.4, 1.5, 1.7))
    assert table.drafted[1024] == pytest.approx((2.0, 3.0, 9.0))  # a line that meets 0 below a plain step
    assert table.facts["topology"] == "v6e:2x4"
    random = np.random.default_rng(0)
    survival = -np.sort(-random.random((400, 3)), axis=1)
    accepted = np.sum(random.random((400, 1)) < survival, axis=1)  # as often as estimated
    trace = loading.Trace(survival.tolist(), accepted.tolist(), 5.0, 10.0)
    for level in (1, 600, 1024):
        rates = {budget: simulation.simulate(trace, table, level, budget, rounds=400).rate for budget in ("plain", "off", "retrospective")}
        assert rates["plain"] == pytest.approx(level / table.plain[1 if level == 1 else 1024])
        assert rates["retrospective"] >= 0.98 * max(rates["plain"], rates["off"])
    short = simulation.compiled_costs([file for file in files if not file.stem.endswith("-3")])
    assert short.drafted[1] == pytest.approx((1.5, 1.5))
    for wrong, sentence in (
        ([files[0], files[0]], "1-0.json is about 1 slots and a budget of 0, as a file before it is"),
        ([files[0]], "plain steps only"),
        (files[:-1], "no file is about 1024 slots and a budget of 3"),
        ([files[0], compiled(tmp_path, 2, 0, 1.0, topology="v5e:2x4")], "was compiled with topology v5e:2x4, the files before it with v6e"),
        ([compiled(tmp_path, 2, None, 1.0)], "costs need one at a time"),
        ([compiled(tmp_path, 2, 1, 0.0)], "an estimate of 0.0 seconds, which is none"),
        ([report.write_json(tmp_path / "other.json", {})], "holds no compiled decode step"),
        ([], "there is no compiled decode step"),
    ):
        with pytest.raises(ValueError, match=sentence):
            simulation.compiled_costs(wrong)


def test_every_way_is_run_at_every_load_and_a_stopped_run_goes_on(toy_target, helper, tmp_path, monkeypatch):
    ways = loading.ways_of(["lookup"], budgets=("retrospective", 0.5))
    options = loading.Options(concurrency=(1, 2), seconds=0.4, warm=0.05, max_new_tokens=6, capacity=96)
    questions = {"a": ["one", "two"], "b": ["three"]}
    file, lines = tmp_path / "load.json", []

    def note(found, done, total):
        lines.append(load_views.line(found.results[-1], done, total))
        if len(lines) == 3:
            raise KeyboardInterrupt

    def measure(options, drafters=None, **names):
        return loading.run(toy_target, drafters or {"lookup": helper}, questions, ways, options, file=file, note=note, **names)

    with pytest.raises(KeyboardInterrupt):
        measure(options, costs={"lookup": TABLE})
    stopped = loading.read(file)
    assert [r.way for r in stopped.results] == [way.name for way in ways[:3]]
    assert stopped.costs["lookup"].plain == TABLE.plain
    more = dataclasses.replace(options, rates=(20.0,))
    found = measure(more)  # weighs with the table of the file
    assert found.results[:3] == stopped.results
    assert {(r.load, r.level) for r in found.results} == {("closed", 1.0), ("closed", 2.0), ("poisson", 20.0)}
    assert len(found.results) == len(ways) * 3
    assert lines[0].startswith("1/8 1 client, plain: ") and lines[-1].startswith("12/12 20 a second, lookup D-cut 0.5: ")
    assert all(r.rate > 0 and r.tau >= 1.0 for r in found.results)
    assert all(r.kept is None for r in found.results if r.way == "plain")
    assert all(r.kept == 1.0 for r in found.results if r.way == "lookup fixed" and r.kept is not None)
    fixed = next(r for r in found.results if r.way == "lookup fixed" and r.level == 2.0)
    assert sum(rounds for _, _, rounds, _ in fixed.steps) == fixed.rounds and {budget for _, budget, _, _ in fixed.steps} == {3}
    trace, own = simulation.read_traces(file)["lookup"]
    assert own.plain == TABLE.plain
    assert len(trace.accepted) > len(stopped.traces["lookup"].accepted) > 0

    with monkeypatch.context() as patched:
        patched.setattr(loading, "Engine", None)
        again = measure(more)  # nothing is left, so no engine is made
    assert len(again.results) == len(found.results)
    assert load_views.table("t", again.results).row_count == len(found.results)
    assert load_views.figure("t", again.results, tmp_path / "p.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="was measured with options seconds 0.4, now it is 0.5; name another file"):
        measure(dataclasses.replace(options, seconds=0.5))
    with pytest.raises(ValueError, match="was measured with drafters lookup lookup"):
        measure(options, {"lookup": load_drafter("lookup:1", toy_target)})
    with pytest.raises(ValueError, match="needs a drafter named other"):
        loading.run(toy_target, {}, {"a": ["x"]}, [loading.Way("w", "other")], options)
    none = report.write_json(tmp_path / "none.json", {})
    with pytest.raises(ValueError, match="holds no traces"):
        simulation.read_traces(none)
    with pytest.raises(ValueError, match="holds no windows under load"):
        loading.run(toy_target, {"lookup": helper}, questions, ways, options, file=none)


def test_mixed_traffic_is_routed(toy_target, helper):
    helpers = {"long": helper, "short": load_drafter("lookup:1", toy_target)}
    questions = {"code": ["write a python function"], "maths": ["what is 3 + 4, and 5 + 6"], "chat": ["hello", "good day"]}
    router = Router({"code": "long", "maths": None}, default="short")
    assert loading.picked(questions, router) == {"code": {"long": 1}, "maths": {"none": 1}, "chat": {"short": 2}}
    ways = loading.ways_of(["long", loading.ROUTED])
    options = loading.Options(concurrency=(2,), seconds=0.5, warm=0.05, max_new_tokens=6, capacity=96)
    costs = {"long": TABLE, loading.ROUTED: TABLE}
    costs = {name: dataclasses.replace(table, plain={1: 1.0, 2: 1.1}) for name, table in costs.items()}
    found = loading.run(toy_target, helpers, questions, ways, options, router=router, costs=costs)
    assert [r.way for r in found.results] == [way.name for way in ways]
    assert all(r.rate > 0 for r in found.results)
    assert {sum(value > 0 for value in survival) for survival in found.traces["routed"].survival} >= {0, 1}  # nobody's, and short ones
    with pytest.raises(ValueError, match="routed fixed needs a router"):
        loading.run(toy_target, helpers, questions, ways, options)
    with pytest.raises(ValueError, match="a drafter must not be named routed"):
        loading.run(toy_target, {"routed": helper}, questions, ways, options, router=router)


def test_tables_are_measured_once_and_refused_elsewhere(toy_target, toy_drafter, tmp_path):
    with Engine(toy_target, toy_drafter, SETTINGS, budgets=(0, 3)) as engine:
        plan, weights = engine.plan, engine.weights
    found = table(plan, weights, (1, 2), 96, folder=tmp_path, seconds=0.2)
    assert found.sizes == (1, 2)
    assert all(found.plain[size] <= found.drafted[size][0] <= found.drafted[size][1] for size in found.sizes)
    assert found.plain[1] <= found.plain[2]
    assert found.chunk > 0
    again = table(plan, weights, (1, 2), 96, folder=tmp_path, seconds=0.2)
    assert again == found
    (file,) = tmp_path.glob("*.json")
    policy = found.policy(2)
    assert float(policy.costs[0]) == pytest.approx(found.plain[2], rel=1e-5)
    with pytest.raises(ValueError, match="belongs elsewhere: its capacity is 96, here it is 128"):
        load(file, found.facts | {"capacity": 128})
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"jax": "0.1"}))
    with pytest.raises(ValueError, match="stale: it was made with jax 0.1"):
        load(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not a cost table"):
        load(file)
    assert load(save(tmp_path / "deep" / "t.json", found)) == found
    assert 0 <= found.error < 1 and found.estimated == ()
    with pytest.raises(ValueError, match="the cost table is for budgets"):
        Engine(toy_target, toy_drafter, SETTINGS, costs=found)
    assert jnp.all(policy.costs > 0)


def test_few_numbers_of_slots_are_measured_and_the_rest_lie_between(toy_target, toy_drafter):
    every = (1, 2, 4, 8, 16, 32, 64)
    for sizes, chosen in ((every, (1, 8, 64)), (every[:4], (1, 8)), ((1, 2, 4, 8, 12), (1, 2, 12)), ((4, 100), (4, 100))):
        assert measured_sizes(sizes) == chosen
    with Engine(toy_target, toy_drafter, SETTINGS, budgets=(0, 3)) as engine:
        plan, weights = engine.plan, engine.weights
    ticks = itertools.count()
    found = measure_table(plan, weights, (1, 2, 4), 96, seconds=1e9, clock=lambda: float(next(ticks)))  # every measurement takes a tick
    assert found.estimated == (2,) and found.error == 0.0
    for before, after in itertools.pairwise(found.sizes):
        assert found.plain[before] <= found.plain[after]
    assert found.plain[2] == pytest.approx(found.plain[1] + (found.plain[4] - found.plain[1]) / 3)
    assert found.drafted[2] == pytest.approx(tuple(a + (b - a) / 3 for a, b in zip(found.drafted[1], found.drafted[4], strict=True)))
    assert list(found.drafted[4]) == sorted(found.drafted[4])
