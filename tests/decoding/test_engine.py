"""The engine: the same text alone, in a crowd and after an interruption; endings, refusals, failures and absent clients."""

import dataclasses
import gc
import threading
import time

import jax
import numpy as np
import pytest

from angelspec_jax.decoding import slots
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.decoding.engine import Engine, QueueFull, Settings
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import load_drafter

pytest_plugins = ["toy_model"]

SETTINGS = Settings(slots=4, capacity=96, queue=8, prefill_chunk=8, shortest_prefix=4)
TABLE = CostTable((0, 3), {1: 1.0}, {1: (1.1, 1.3)}, {})
WAIT = 120  # seconds that nothing takes


@pytest.fixture(scope="module")
def engine(toy_target, toy_drafter):
    with Engine(toy_target, toy_drafter, SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(toy_target):
    """`plain(prompt, new, **sampling)`: the token ids plain decoding says, stop token included."""

    def say(prompt, new=12, **sampling):
        plan = Plan(toy_target.config, stop_ids=tuple(toy_target.eos_ids))
        options = make_sampling(1, **sampling)
        return generate(plan, Weights(toy_target.params), [prompt], new, sampling=options, capacity=96).texts()[0]

    return say


def heard(stream) -> list[int]:
    return [token for delta in stream for token in delta.tokens]


def idle(engine) -> None:
    """Wait until every slot is free."""
    end = time.monotonic() + WAIT
    while any(engine.load[name] for name in ("waiting", "reading", "active")):
        assert time.monotonic() < end
        time.sleep(0.01)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 250, random.integers(1, longest)).tolist() for _ in range(count)]


def test_a_crowd_hears_what_each_would_hear_alone(engine, plain):
    asked = prompts(7)
    options = [{"seed": i, "temperature": 0.9 * (i % 3), "top_k": 20 * (i % 2)} for i in range(7)]
    streams = [engine.submit(ids, max_new_tokens=5 + i, **given) for i, (ids, given) in enumerate(zip(asked, options, strict=True))]
    for i, (ids, given, stream) in enumerate(zip(asked, options, streams, strict=True)):
        assert heard(stream) == plain(ids, 5 + i, **given)
        assert stream.done
    idle(engine)


def test_text_prompts_stream_text(engine, toy_target):
    stream = engine.submit("Hello", max_new_tokens=9, seed=4, temperature=0.7)
    shown = "".join(delta.text for delta in stream)
    found = stream.result(WAIT)
    assert found.text == shown
    assert found.finish_reason == "length"
    assert len(found.tokens) == 9
    assert 1.0 <= found.tau <= 4.0
    times = stream.times
    assert times.submitted <= times.first <= times.ended


def test_an_interrupted_request_goes_on_where_it_was(toy_target, toy_drafter, plain):
    asked = prompts(3, seed=1)
    with Engine(toy_target, toy_drafter, dataclasses.replace(SETTINGS, slots=1)) as engine:
        low = engine.submit(asked[0], max_new_tokens=40, temperature=1.0, seed=3)
        assert next(low).tokens
        high = engine.submit(asked[1], max_new_tokens=6, priority=1)
        said = heard(high)
        assert not low.done  # it gave up its slot
        assert said == plain(asked[1], 6)
        assert list(low.result(WAIT).tokens) == plain(asked[0], 40, temperature=1.0, seed=3)


def test_a_step_that_fails_once_costs_nobody_their_answer(toy_target, toy_drafter, plain, monkeypatch):
    asked = prompts(2, seed=2)
    step, calls = slots.step, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return step(*arguments)

    monkeypatch.setattr(slots, "step", failing)
    with Engine(toy_target, toy_drafter, SETTINGS) as engine:
        streams = [engine.submit(ids, max_new_tokens=20, seed=1, temperature=1.0) for ids in asked]
        assert [heard(stream) for stream in streams] == [plain(ids, 20, seed=1, temperature=1.0) for ids in asked]
    assert len(calls) > 5


def test_steps_that_always_fail_end_requests_with_the_error(toy_target, toy_drafter, monkeypatch):
    def failing(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(slots, "step", failing)
    with Engine(toy_target, toy_drafter, SETTINGS) as engine:
        stream = engine.submit([1, 2, 3])
        with pytest.raises(RuntimeError, match="out of memory"):
            stream.result(WAIT)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)


def test_one_request_that_cannot_be_read_in_fails_alone(engine, plain, monkeypatch):
    begin = engine._begin

    def picky(request):
        if request.prompt[0] == 13:
            raise ValueError("no 13")
        return begin(request)

    monkeypatch.setattr(engine, "_begin", picky)
    bad, good = engine.submit([13, 1]), engine.submit([12, 1], max_new_tokens=5)
    with pytest.raises(ValueError, match="no 13"):
        bad.result(WAIT)
    assert heard(good) == plain([12, 1], 5)


def test_stop_strings_cut_the_text_before_them(engine):
    whole = engine.submit("Hello", max_new_tokens=24, temperature=1.2, seed=5).result(WAIT)
    stop = next(letter for letter in whole.text[3:] if letter != "\ufffd")
    cut = engine.submit("Hello", max_new_tokens=24, temperature=1.2, seed=5, stop=["never said", stop])
    shown = "".join(delta.text for delta in cut)
    assert shown == cut.result(WAIT).text == whole.text[: whole.text.index(stop)]
    assert cut.result().finish_reason == "stop"
    assert cut.result().tokens == whole.tokens[: len(cut.result().tokens)]


def test_cancelled_late_and_abandoned_requests_free_their_slots(toy_target, toy_drafter):
    with Engine(toy_target, toy_drafter, SETTINGS) as engine:
        cancelled = engine.submit([1, 2], max_new_tokens=90)
        next(cancelled)
        cancelled.cancel()
        assert cancelled.result(WAIT).finish_reason == "cancelled"
        assert cancelled.result().tokens
        assert engine.submit([1, 2], max_new_tokens=90, deadline=1e-6).result(WAIT).finish_reason == "deadline"
        with engine.submit([3], max_new_tokens=90) as left:
            next(left)
        assert left.result(WAIT).finish_reason == "cancelled"
        dropped = engine.submit([4], max_new_tokens=90)
        next(dropped)
        del dropped
        gc.collect()
        idle(engine)
        waiting = engine.submit([5], max_new_tokens=90)
    assert waiting.result(0).finish_reason == "cancelled"  # closing leaves nobody waiting
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1])


def test_a_full_queue_refuses_and_recovers(toy_target, toy_drafter, plain, monkeypatch):
    hold = threading.Event()
    step = slots.step
    monkeypatch.setattr(slots, "step", lambda *arguments: (hold.wait(WAIT), step(*arguments))[1])
    with Engine(toy_target, toy_drafter, dataclasses.replace(SETTINGS, slots=1, queue=2)) as engine:
        first = engine.submit([1], max_new_tokens=3)
        while engine.load["waiting"]:
            time.sleep(0.01)
        queued = [engine.submit([2 + i], max_new_tokens=3) for i in range(2)]
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            engine.submit([9], max_new_tokens=3)
        hold.set()
        assert [heard(stream) for stream in (first, *queued)] == [plain([1 + i], 3) for i in range(3)]
        assert heard(engine.submit([9], max_new_tokens=3)) == plain([9], 3)


def test_clients_share_the_slots(toy_target, toy_drafter):
    order = []
    with Engine(toy_target, toy_drafter, dataclasses.replace(SETTINGS, slots=1, queue=16)) as engine:
        begin = engine._begin
        engine._begin = lambda request: (order.append(request.client), begin(request))[1]
        with engine._lock:  # all are there before any is served
            streams = [engine.submit([1], max_new_tokens=2, client="many") for _ in range(4)]
            streams += [engine.submit([1], max_new_tokens=2, client="one")]
        [stream.result(WAIT) for stream in streams]
    assert order.index("one") <= 1


def test_prompts_that_begin_alike_are_read_in_once(toy_target, toy_drafter, plain, monkeypatch):
    chunks = []
    prefill = slots.prefill
    monkeypatch.setattr(slots, "prefill", lambda *arguments: (chunks.append(1), prefill(*arguments))[1])
    common = list(range(40))
    with Engine(toy_target, toy_drafter, SETTINGS) as engine:
        first = heard(engine.submit([*common, 7], max_new_tokens=10))
        read = len(chunks)
        assert heard(engine.submit([*common, 8, 9], max_new_tokens=10)) == plain([*common, 8, 9], 10)
        assert len(chunks) - read < read
        longer = [*common, 7, *first, 3]  # the next turn of the first conversation
        read = len(chunks)
        assert heard(engine.submit(longer, max_new_tokens=10, temperature=1.0, seed=2)) == plain(longer, 10, temperature=1.0, seed=2)
        assert len(chunks) - read <= 1


@pytest.mark.parametrize(
    ("asked", "options", "sentence"),
    [
        ([], {}, "the prompt is empty"),
        ([999], {}, "token id 999, outside the vocabulary of 260"),
        ([1] * 90, {"max_new_tokens": 7}, "over the capacity of 96"),
        ([1], {"max_new_tokens": -1}, "must not be negative"),
        ([1], {"temperature": -1.0}, "temperature must be between"),
        ([1], {"stop": [""]}, "stop must be non-empty texts"),
        ([1], {"deadline": 0.0}, "deadline must be a positive number"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(engine, asked, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.submit(asked, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    ("kind", "settings", "options", "sentence"),
    [
        ("dfly", {"rule": "sampled"}, {}, "rule must be one of coupled, rejection"),
        ("dfly", {"rule": "rejection", "tree": 5}, {}, "rejection rule verifies chains"),
        ("lookup:2", {"tree": 5}, {}, "family lookup drafts chains only"),
        ("dfly", {"tree": 5}, {"budgets": (0, 6)}, "makes 5 drafts a round, a budget asks for 6"),
        ("dfly", {"tree": 5}, {"confidence": "margin"}, "trees have none; take confidence='drafter'"),
        ("lookup:2", {}, {"confidence": "margin"}, "drafts of lookup have none"),
        ("dfly", {}, {"budget": "lagged"}, "this engine has none; pass costs='measure'"),
        ("dfly", {"rule": "rejection"}, {"costs": TABLE, "budgets": (0, 3), "budget": "retrospective"}, "with rejection choose lagged"),
        ("dfly", {"bias_slots": -1}, {}, "bias_slots must be at least 0"),
    ],
)
def test_engines_that_cannot_be_are_refused_with_a_sentence(toy_target, toy_drafter, kind, settings, options, sentence):
    drafter = toy_drafter if kind == "dfly" else load_drafter(kind, toy_target)
    with pytest.raises(ValueError, match=sentence):
        Engine(toy_target, drafter, dataclasses.replace(SETTINGS, **settings), **options)


def test_nothing_to_say_needs_no_round(engine):
    assert engine.submit([1], max_new_tokens=0).result(WAIT).tokens == ()


def test_the_number_of_slots_follows_the_load(engine):
    sizes = set()
    engine.watch = lambda round: sizes.add(round.slots)
    [stream.result(WAIT) for stream in [engine.submit(ids, max_new_tokens=8) for ids in prompts(6, seed=5)]]
    engine.submit([1], max_new_tokens=60).result(WAIT)
    engine.watch = None
    assert sizes >= {1, 4}
    assert sizes <= {1, 2, 4}


def test_slots_can_be_moved(toy_target, toy_drafter):
    plan = Plan(toy_target.config, toy_drafter.config)
    random = np.random.default_rng(0)
    full = jax.tree.map(lambda x: jax.numpy.asarray(random.integers(0, 2, x.shape).astype(x.dtype)), slots.create(plan, np.float32, 3, 16))
    moved = slots.rearrange(plan, full, jax.numpy.asarray([2, 0], jax.numpy.int32))
    for new, old in ((0, 2), (1, 0)):
        one, other = slots.take(plan, moved, jax.numpy.int32(new)), slots.take(plan, full, jax.numpy.int32(old))
        jax.tree.map(np.testing.assert_array_equal, one, other)
    back = slots.insert(plan, moved, slots.take(plan, full, jax.numpy.int32(1)), jax.numpy.int32(0))
    jax.tree.map(np.testing.assert_array_equal, slots.take(plan, back, jax.numpy.int32(0)), slots.take(plan, full, jax.numpy.int32(1)))
