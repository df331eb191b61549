"""The engine under load: closed loops of clients and Poisson arrivals, over mixed prompts, several ways of decoding in turns.

*Closed loop*: a fixed number of clients, each of which asks again as soon as it has its answer. Rates count what was emitted inside a
window that begins when every client is being answered, so neither the start nor the end of a run is part of them; the clients' first
answers are of different lengths, so that they do not all end, and their successors are not all read in, at once. *Poisson*: requests come
at a rate, whether or not the engine keeps up. Every way gets the same prompts in the same order, and the ways take turns within each load.
*Routed* is a way with one engine that holds all drafters and a router that picks one for each prompt; picking is part of what is timed.

Every window is kept in the run's file as it ends, so a run that was stopped goes on where it was, and loads, ways and repeats can be added.
"""

import dataclasses
import hashlib
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from angelspec_jax import text
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.decoding.engine import Engine, QueueFull, Round, Settings
from angelspec_jax.decoding.router import Router
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation import files
from angelspec_jax.target.loading import Target

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
WAIT = 600.0  # seconds after which a client gives an answer up for lost
PLAIN, FIXED = "plain", "fixed"
ROUTED = "routed"  # as a drafter: whichever the router picks


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of decoding: an engine's drafter, or `ROUTED`, and the policy it is used with."""

    name: str
    drafter: str | None = None
    budget: str | float = "off"
    confidence: str = "drafter"
    bonus: bool = True


@dataclasses.dataclass(frozen=True)
class Options:
    """How load is made. Each request draws with a seed of its own."""

    concurrency: tuple[int, ...] = CONCURRENCY
    rates: tuple[float, ...] = ()  # requests per second of Poisson arrivals
    seconds: float = 20.0  # of every window
    warm: float = 2.0  # seconds before a window; a closed loop's begin when every client is being answered
    repeats: int = 1  # windows of each way at each load
    max_new_tokens: int = 128
    temperature: float = 0.0
    capacity: int = 512
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """One window of one way at one load."""

    way: str
    load: str  # "closed" or "poisson"
    level: float  # clients, or requests per second
    seconds: float
    tokens: int
    rounds: int
    answered: int
    refused: int
    tau: float  # tokens per round and request
    request_rate: float | None  # median tokens per second that a request saw, waiting included
    first_token: float | None  # median seconds from submission to the first token
    first_token_95: float | None
    kept: float | None  # share of the drafts made that were verified
    accepted: float | None  # share of the verified drafts that were accepted
    drafted: float  # share of the rounds that made a draft
    budgets: list[tuple[float, float]]  # (seconds into the window, mean drafts verified per request), a point a tenth of the window
    steps: list[tuple[int, int, int, float]]  # (slots, budget or -1 without a draft, rounds, median seconds of these): costs under load

    @property
    def rate(self) -> float:
        """Tokens per second of all requests together."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rate": self.rate}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**own, **{name: [tuple(point) for point in own[name]] for name in ("budgets", "steps")}})


@dataclasses.dataclass(frozen=True)
class Trace:
    """What every round of every request offered when all drafts were verified: the material of `evaluation.simulation`."""

    survival: list[list[float]]  # per record: estimates of the drafts
    accepted: list[int]  # per record: drafts that were accepted
    prompt_tokens: float  # mean per request
    answer_tokens: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run has so far. Windows of other `facts` must not be added."""

    facts: dict[str, Any]
    results: list[Result]
    costs: dict[str, CostTable]  # by drafter, as the engines weighed with
    traces: dict[str, Trace]  # by drafter, from the windows in which all drafts were verified

    def to_dict(self) -> dict[str, Any]:
        parts = {"costs": self.costs, "traces": self.traces}
        written = {part: {name: value.to_dict() for name, value in found.items()} for part, found in parts.items()}
        return {**self.facts, "results": [result.to_dict() for result in self.results], **written}


class Watch:
    """Collects the rounds of an engine while it is open."""

    def __init__(self):
        self.rounds: list[tuple[float, Round]] = []
        self.open = False

    def __call__(self, round: Round) -> None:
        if self.open:
            self.rounds.append((time.monotonic(), round))


def ways_of(drafters: Sequence[str], *, confidences: Sequence[str] = ("drafter",), budgets: Sequence[str | float] = ("retrospective",)):
    """Plain, and each drafter with all its drafts and with every policy."""
    found = [Way(PLAIN)]
    for drafter in drafters:
        found.append(Way(f"{drafter} {FIXED}", drafter))
        for budget, confidence in itertools.product(budgets, confidences):
            label = f"{drafter} D-cut {budget}" + ("" if confidence == "drafter" else f" {confidence}")
            found.append(Way(label, drafter, budget, confidence))
    return tuple(found)


def run(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Mapping[str, Sequence[text.Prompt]],
    ways: Sequence[Way],
    options: Options | None = None,
    *,
    router: Router | None = None,
    costs: Mapping[str, CostTable] | None = None,
    file: Path | None = None,
    note: Callable[[Measured, int, int], None] | None = None,
    **switches: Any,
) -> Measured:
    """Measure every way at every load, but for the windows that `file` already holds, and write it after each.

    `note` is called after every window with what there is, the windows done and those in all. Raises ValueError when no prompt leaves room
    for its answer, a way names a drafter that is not there, or the file was made with something else.
    """
    options = Options() if options is None else options
    if ROUTED in drafters:
        raise ValueError(f"a drafter must not be named {ROUTED}, the name of the way in which a router picks one; give it another name")
    for way in ways:
        if way.drafter == ROUTED and router is None:
            raise ValueError(f"{way.name} needs a router that picks drafters")
        if way.drafter not in (None, ROUTED, *drafters):
            raise ValueError(f"{way.name} needs a drafter named {way.drafter}; there are {', '.join(drafters) or 'none'}")
    mixed = _mixed(target, prompts, options, **switches)
    found = _begin(target, drafters, mixed, options, router, file)
    windows = _windows(ways, options)
    done: dict[tuple[str, str, float], int] = {}
    for result in found.results:
        done[result.way, result.load, result.level] = done.get((result.way, result.load, result.level), 0) + 1
    left = [(way, kind, level) for way, kind, level, repeat in windows if repeat >= done.get((way.name, kind, level), 0)]
    slots = max(options.concurrency, default=8)
    length = statistics.fmean(len(ids) for ids, _ in mixed)
    engines: dict[str | None, Engine] = {}
    try:
        for name in dict.fromkeys(way.drafter for way, _, _ in left):
            own = {**found.costs, **(costs or {})}.get(name or "")
            if own is not None and own.sizes[-1] < slots:
                own = None  # a larger load was added
            engines[name] = _engine(target, drafters, name, Settings(slots=slots, capacity=options.capacity, prefixes=0), router, own)
        for engine in engines.values():
            engine.warm_up()  # nothing is compiled while a clock runs
        found.costs.update({name: engine.costs for name, engine in engines.items() if name is not None and engine.costs is not None})
        for place, (way, kind, level) in enumerate(left, len(windows) - len(left) + 1):
            engine = engines[way.drafter]
            if way.drafter is not None:
                engine.choose_policy(way.budget, way.confidence, way.bonus)
            result, rounds, said = _window(engine, way, kind, level, mixed, options)
            found.results.append(result)
            if way.drafter is not None and way.budget == "off":
                found.traces[way.drafter] = _joined(found.traces.get(way.drafter), trace(rounds, length, said))
            if file is not None:
                files.write_json(file, found.to_dict())
            if note is not None:
                note(found, place, len(windows))
        return found
    finally:
        for engine in engines.values():
            engine.close()


def read(file: str | Path) -> Measured:
    """What an earlier run measured. Raises ValueError when the file holds no windows."""
    file = Path(file)
    try:
        values = json.loads(file.read_text("utf-8"))
        results = [Result.from_dict(result) for result in values.pop("results")]
        costs = {name: CostTable.from_dict(table) for name, table in values.pop("costs").items()}
        traces = {name: Trace(**own) for name, own in values.pop("traces").items()}
        if missing := {"target", "drafters", "machine", "options", "prompts"} - set(values):
            raise ValueError(f"{', '.join(sorted(missing))} missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds no windows under load ({error!r}); name another file with --output") from None
    return Measured(values, results, costs, traces)


def _windows(ways: Sequence[Way], options: Options) -> list[tuple[Way, str, float, int]]:
    """Every way, load, level and repeat, in the order they are measured: ways take turns, every other time from the back."""
    loads = [("closed", float(n)) for n in options.concurrency] + [("poisson", rate) for rate in options.rates]
    return [
        (way, kind, level, repeat)
        for kind, level in loads
        for repeat in range(options.repeats)
        for way in (ways if repeat % 2 == 0 else reversed(ways))
    ]


def _engine(target: Target, drafters, name: str | None, settings: Settings, router: Router | None, costs: CostTable | None) -> Engine:
    if name is None:
        return Engine(target, None, settings)
    helpers, picks = (drafters, router) if name == ROUTED else (drafters[name], None)
    budgets = () if costs is None else costs.budgets
    return Engine(target, helpers, settings, router=picks, costs="measure" if costs is None else costs, budgets=budgets)


def _begin(target: Target, drafters: Mapping[str, Drafter], mixed, options: Options, router: Router | None, file: Path | None) -> Measured:
    """An empty run, or that of the file, which must be of the same target, machine, prompts and options."""
    fixed = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("concurrency", "rates", "repeats")}
    facts: dict[str, Any] = {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": str(target.params.embed.dtype)},
        "machine": files.machine(),
        "options": fixed,
        "prompts": {"count": len(mixed), "sha256": hashlib.sha256(repr(mixed).encode()).hexdigest()[:16]},
        "drafters": {name: _described(drafter) for name, drafter in drafters.items()},
        "routes": {} if router is None else {**router.routes, "otherwise": router.default},
    }
    if file is None or not file.exists():
        return Measured(facts, [], {}, {})
    kept = read(file)
    for section in ("target", "machine", "options", "prompts", "drafters"):
        for name, here in facts[section].items():
            there = kept.facts[section].get(name, here if section == "drafters" else None)
            _same(file, f"{section} {name.replace('_', ' ')}", there, here)
    if kept.facts.get("routes") and facts["routes"]:
        _same(file, "routes", kept.facts["routes"], facts["routes"])
    facts["drafters"] = {**kept.facts["drafters"], **facts["drafters"]}
    facts["routes"] = facts["routes"] or kept.facts.get("routes", {})
    return dataclasses.replace(kept, facts={**kept.facts, **facts})


def _same(file: Path, what: str, there: Any, here: Any) -> None:
    if there != here:
        raise ValueError(f"{file} was measured with {what} {there}, now it is {here}; name another file with --output")


def _described(drafter: Drafter) -> str:
    """The drafter's family and a digest of all that it is."""
    digest = hashlib.sha256(repr(drafter.config).encode())
    for leaf in jax.tree.leaves(drafter.params):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return f"{drafter.config.family} {digest.hexdigest()[:16]}"


def _joined(before: Trace | None, new: Trace) -> Trace:
    if before is None:
        return new
    old, more = len(before.accepted), len(new.accepted)
    said = (old * before.answer_tokens + more * new.answer_tokens) / max(old + more, 1)
    return Trace(before.survival + new.survival, before.accepted + new.accepted, new.prompt_tokens, said)


def trace(rounds: Sequence[Round], prompt_tokens: float, answer_tokens: float) -> Trace:
    """The records of rounds in which every draft was verified, request by request."""
    records: dict[int, list[tuple[list[float], int]]] = {}
    for round in rounds:
        if round.drafted:
            for number, survival, accepted in zip(round.requests, round.survival, round.accepted, strict=True):
                records.setdefault(number, []).append((list(survival), accepted))
    flat = [record for own in records.values() for record in own]
    return Trace([survival for survival, _ in flat], [accepted for _, accepted in flat], prompt_tokens, answer_tokens)


def picked(prompts: Mapping[str, Sequence[text.Prompt]], router: Router) -> dict[str, dict[str, int]]:
    """Domain -> how many of its prompts a router gives to each drafter ("none" for no drafter)."""
    found: dict[str, dict[str, int]] = {}
    for domain, group in prompts.items():
        counts = found.setdefault(domain, {})
        for prompt in group:
            name = router.choose(_words(prompt)) or "none"
            counts[name] = counts.get(name, 0) + 1
    return found


def _words(prompt: text.Prompt) -> str:
    """What a router judges a prompt by: the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _mixed(target: Target, prompts: Mapping[str, Sequence[text.Prompt]], options: Options, **switches: Any) -> list[tuple[list[int], str]]:
    """Token ids and last words of prompts of all domains in a random order that the seed decides; those without room are left out."""
    encoded = [(text.encode(target, prompt, **switches), _words(prompt)) for group in prompts.values() for prompt in group]
    kept = [(ids, words) for ids, words in encoded if len(ids) + options.max_new_tokens <= options.capacity]
    if not kept:
        raise ValueError(
            f"no prompt leaves room for {options.max_new_tokens} new tokens in a slot of {options.capacity}; raise --capacity or lower them"
        )
    order = np.random.default_rng(options.seed).permutation(len(kept))
    return [kept[i] for i in order]


def _window(engine: Engine, way: Way, kind: str, level: float, mixed, options: Options) -> tuple[Result, list[Round], float]:
    """One window: what it gave, its rounds, and the mean tokens of an answer."""
    watch, stop = Watch(), threading.Event()
    answers: list[tuple[float, float, int]] = []  # (rate, seconds to the first token, tokens) of answers that came in the window
    refused, begun = [0], [False] * int(level)  # begun: clients whose first answer has begun
    engine.watch = watch
    numbers = itertools.count()

    def ask(index: int, share: float = 1.0):
        ids, words = mixed[index % len(mixed)]
        own: dict[str, Any] = {} if engine.router is None else {"drafter": engine.router.choose(words)}
        seed = options.seed + index
        length = max(round(share * options.max_new_tokens), 1)
        return engine.submit(ids, max_new_tokens=length, temperature=options.temperature, seed=seed, **own)

    def note(stream) -> None:
        times = stream.times
        if watch.open and times is not None and times.first is not None:
            said = len(stream.result(0).tokens)
            answers.append((said / (times.ended - times.submitted), times.first - times.submitted, said))

    def client(mine: int) -> None:
        share = (mine + 1) / level
        while not stop.is_set():
            whole, stream = share == 1.0, ask(next(numbers), share)
            if not begun[mine]:
                next(stream, None)
                begun[mine] = True
            share = 1.0
            while not stop.is_set():
                try:
                    stream.result(0.2)
                    break
                except TimeoutError:
                    continue
            if stop.is_set():
                stream.cancel()
            elif whole:
                note(stream)

    def arrivals() -> None:
        random, waiting = np.random.default_rng(options.seed + 1), []
        while not stop.is_set():
            stop.wait(float(random.exponential(1.0 / level)))
            try:
                waiting.append(ask(next(numbers)))
            except QueueFull:
                refused[0] += 1
            done = [stream for stream in waiting if stream.done]
            for stream in done:
                note(stream)
            waiting = [stream for stream in waiting if not stream.done]
        for stream in waiting:
            stream.cancel()

    if kind == "closed":
        makers = [threading.Thread(target=client, args=(mine,)) for mine in range(int(level))]
    else:
        makers = [threading.Thread(target=arrivals)]
    for maker in makers:
        maker.start()
    try:
        begin = time.monotonic()
        while kind == "closed" and not all(begun) and time.monotonic() - begin < WAIT:
            time.sleep(0.01)
        time.sleep(options.warm)
        watch.open, begin = True, time.monotonic()
        time.sleep(options.seconds)
        while not any(round.active for _, round in watch.rounds) and time.monotonic() - begin < WAIT:
            time.sleep(0.05)  # a round took longer than the window
        watch.open, seconds = False, time.monotonic() - begin
    finally:  # also when someone interrupts the run
        watch.open = False
        stop.set()
        for maker in makers:
            maker.join()
    while any(engine.load[name] for name in ("waiting", "reading", "active")):
        time.sleep(0.02)
    engine.watch = None
    rounds = [round for _, round in watch.rounds]
    said = statistics.fmean(tokens for _, _, tokens in answers) if answers else float(options.max_new_tokens)
    return _summary(way, kind, level, seconds, begin, watch.rounds, answers, refused[0]), rounds, said


def _summary(way: Way, kind: str, level: float, seconds: float, begin: float, timed, answers, refused: int) -> Result:
    rounds: list[Round] = [round for _, round in timed]
    tokens, shares = sum(sum(r.emitted) for r in rounds), sum(r.active for r in rounds)
    made = sum(value > 0 for r in rounds for survival in r.survival for value in survival)
    kept, accepted = sum(sum(r.kept) for r in rounds), sum(sum(r.accepted) for r in rounds)
    first = sorted(seconds for _, seconds, _ in answers)
    points = []
    for part in range(10):
        low, high = begin + part * seconds / 10, begin + (part + 1) * seconds / 10
        inside = [r for at, r in timed if low <= at < high and r.active]
        if inside:
            points.append(((part + 0.5) * seconds / 10, sum(sum(r.kept) for r in inside) / sum(r.active for r in inside)))
    steps: dict[tuple[int, int], list[float]] = {}
    for r in rounds:
        steps.setdefault((r.slots, r.budget if r.drafted else -1), []).append(r.seconds)
    return Result(
        way=way.name,
        load=kind,
        level=level,
        seconds=seconds,
        tokens=tokens,
        rounds=len(rounds),
        answered=len(answers),
        refused=refused,
        tau=tokens / max(shares, 1),
        request_rate=statistics.median(rate for rate, _, _ in answers) if answers else None,
        first_token=statistics.median(first) if first else None,
        first_token_95=first[min(int(0.95 * len(first)), len(first) - 1)] if first else None,
        kept=kept / made if made else None,
        accepted=accepted / kept if kept else None,
        drafted=sum(r.drafted for r in rounds) / max(len(rounds), 1),
        budgets=points,
        steps=[(*key, len(own), statistics.median(own)) for key, own in sorted(steps.items())],
    )
