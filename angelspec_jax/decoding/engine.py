"""Continuous batching: many requests share the rounds of one decode state, each with its own sampling, limits and stream.

The thread of the engine runs one step ahead of the device: while a round is computed, what the round before it said is delivered, new
requests are read in, chunk by chunk, and slots are filled. The number of slots follows the load in a few sizes, each a compiled program, so
one request does not pay for a crowd. A request's text depends on its prompt and seed alone (`decoding.sampling`), so it is the same in any
company, and after an interruption, which throws the slot away and reads in again what had been said.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.answers import Prompt, encode
from angelspec_jax.decoding import costs as cost_tables
from angelspec_jax.decoding import dcut, slots
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.generate import check_prompt, even_policy
from angelspec_jax.decoding.prefixes import Prefixes
from angelspec_jax.decoding.requests import Feed, Request, Stream
from angelspec_jax.decoding.router import Router
from angelspec_jax.decoding.sampling import check_bias, make_sampling
from angelspec_jax.decoding.step import DecodeState, Emitted, Plan, Weights, offers_margins
from angelspec_jax.decoding.waiting import FairQueue, QueueFull
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.drafter.several import NOBODY, SeveralConfig
from angelspec_jax.target.loading import Target

__all__ = ["Engine", "QueueFull", "Round", "Settings"]

DEFAULT_NEW_TOKENS = 256
ROUTED = "by the router"  # the value of `drafter` that leaves the choice open
SHORT_CHUNK = 32  # prompt tokens read in at once where few are left
IDLE = 2.0  # seconds without a request after which the slots are given back
PATIENCE = 8  # rounds that fewer slots would have done, before there are fewer
SAMPLES = (  # what slots are filled with while costs are measured
    "A train leaves at nine and travels 180 km at 60 km/h. When does it arrive?",
    "Write a Python function that returns the longest word of a sentence.",
    "What should I see in Rome on a rainy weekend?",
)
ATTEMPTS = 2  # times a request may be begun when a step fails


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of an engine, and what its programs are compiled for."""

    slots: int = 8  # requests decoded at once
    capacity: int = 1024  # tokens a request can hold, prompt included
    queue: int = 256  # requests that may wait
    prefixes: int = 4  # finished prompts whose caches are kept for prompts that begin alike; 0 keeps none
    shortest_prefix: int = 16  # tokens in common that are worth a copy
    prefill_chunk: int = 128
    rule: str = "coupled"  # or "rejection"; see `decoding.acceptance`
    tree: int | None = None  # nodes of the draft trees; None drafts chains
    bias_slots: int = 0  # biased tokens a request can have

    def __post_init__(self):
        lowest = {"slots": 1, "capacity": 2, "queue": 1, "prefixes": 0, "shortest_prefix": 1, "prefill_chunk": 1, "bias_slots": 0}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of slots a state may have."""
        return (*(size for size in (1 << n for n in range(12)) if size < self.slots), self.slots)


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did, for `Engine.watch`."""

    seconds: float  # since the round before it was delivered
    slots: int
    active: int
    drafted: bool
    budget: int  # drafts per slot the round had room for
    kept: tuple[int, ...]  # per active request: drafts verified
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    survival: tuple[tuple[float, ...], ...]  # nothing in a round without a draft
    requests: tuple[int, ...]  # their numbers, in the order of submission


@dataclasses.dataclass
class _Reading:
    """A prompt that is being read in."""

    request: Request
    state: DecodeState
    start: int  # tokens that are in the caches

    @property
    def rest(self) -> int:
        return len(self.request.known) - 1 - self.start


@dataclasses.dataclass
class _Flight:
    """A round on the device, and who was in which slot."""

    emitted: Emitted
    owners: list[Request | None]


class Engine:
    """Serves one target, alone or with a drafter, from a thread of its own. Thread-safe; close it, or use it in a `with` block."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        settings: Settings | None = None,
        *,
        router: Router | None = None,
        costs: CostTable | str | None = None,
        budgets: tuple[int, ...] = (),
        budget: str | float | None = None,
        confidence: str = "drafter",
        bonus: bool = True,
    ):
        """Give several drafters as a mapping of names, and perhaps a `router` that picks one for each prompt (else the first).

        With `costs`, a table or "measure", D-cut verifies as many drafts as pay, none included; without, all of them.

        `budgets` are the drafts per slot that a round may have room for (with costs: none, a quarter, a half and all, where not given).
        `budget`, `confidence` and `bonus` name the policy (`costs.dcut_policy`). Measuring takes half a minute the first time, compiling
        aside, and is kept on disk for this device, model and mesh. Several drafters have one table, measured with the slots dealt out to
        them in turn. Raises ValueError for a table of other budgets, and for a rule, a tree or a policy that does not fit the drafter.
        """
        self.settings = Settings() if settings is None else settings
        if self.settings.capacity > target.config.max_positions:
            most = target.config.max_positions
            raise ValueError(f"capacity {self.settings.capacity} is over the model's context of {most}; lower capacity")
        self.target = target
        self.drafters: tuple[str, ...] = ()
        config: Any = None
        own = shared = None
        if isinstance(drafter, Mapping):
            self.drafters, helpers = tuple(drafter), tuple(drafter.values())
            config = SeveralConfig(tuple(helper.config for helper in helpers))
            own, shared = tuple(helper.params for helper in helpers), tuple(helper.shared for helper in helpers)
        elif drafter is not None:
            config, own, shared = drafter.config, drafter.params, drafter.shared
        self.router = router
        for name in () if router is None else (*router.routes.values(), router.default):
            self._index(name)
        chunk = min(self.settings.prefill_chunk, self.settings.capacity)
        if config is not None and costs is not None and not budgets:
            budgets = cost_tables.crowd_budgets(self.settings.tree or config.num_drafts)
        sizes = {name: getattr(self.settings, name) for name in ("rule", "tree", "bias_slots")}
        self.plan = Plan(target.config, config, stop_ids=tuple(target.eos_ids), budgets=budgets, prefill_chunk=chunk, **sizes)
        self.weights = Weights(target.params, own, shared)  # type: ignore[arg-type]
        mesh = getattr(target.params.embed.sharding, "mesh", None)
        self._mesh = mesh if mesh is not None and mesh.size > 1 else None
        with self._on_mesh():
            self._table = self._find_costs(costs)
        self._policies: dict[int, Policy] = {}
        self.choose_policy(budget, confidence, bonus)
        self.watch: Callable[[Round], None] | None = None  # called with every round, from the engine's thread
        self._queue: FairQueue[Request] = FairQueue(self.settings.queue)
        self._prefixes = Prefixes(self.settings.prefixes, self.settings.shortest_prefix)
        self._lock = threading.Condition()
        self._closing = self._aborting = False
        self._submitted = 0
        with self._on_mesh():
            self._forget()
        self._thread = threading.Thread(target=self._run, name="angelspec-engine", daemon=True)
        self._thread.start()

    # What clients call

    def submit(
        self,
        prompt: Prompt | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        drafter: str | None = ROUTED,
        deadline: float | None = None,
        client: str = "",
        priority: int = 0,
        switches: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Ask for an answer; it streams from the returned object.

        `prompt` is a text, a conversation, or token ids; `max_new_tokens` None is 256, or what the slot has room for. `sampling` are the
        options of `make_sampling` (temperature, top_k, top_p, min_p, seed, penalties, and bias where the Settings have `bias_slots`). The
        text ends before the first of the `stop` strings.
        `drafter` names one of several drafters, or None for none; left out, the router decides. `deadline`: seconds from now, waiting
        included, after which what was said so far is the answer. Clients (any name) share the slots fairly; a higher `priority` goes first,
        and takes the slot of a lower one, which goes on later. Raises ValueError for a prompt that does not fit or an option out of range,
        QueueFull when too many wait, RuntimeError when the engine is closed.
        """
        tokens = self._tokens(prompt, switches or {})
        if max_new_tokens is None:
            max_new_tokens = max(min(DEFAULT_NEW_TOKENS, self.settings.capacity - len(tokens)), 1)
        check_prompt(self.plan, tokens, max_new_tokens, capacity=self.settings.capacity)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(text, str) or not text for text in stops):
            raise ValueError(f"stop must be non-empty texts, got {stop!r}")
        if stops and self.target.tokenizer is None:
            raise ValueError(f"{self.target.name} was loaded without a tokenizer, so it knows no stop strings; add its tokenizer.json")
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be a positive number of seconds from now, got {deadline}")
        if bias := sampling.get("bias"):
            check_bias(bias, self.target.config.vocab_size)
            if len(bias) > self.plan.bias_slots:
                most = self.plan.bias_slots
                raise ValueError(f"bias names {len(bias)} tokens, this engine has room for {most}; give its Settings more bias_slots")
        cancelled = threading.Event()
        choice = [self._route(prompt, tokens) if drafter == ROUTED else self._index(drafter)]
        feed = Feed(cancelled.set, lambda name: choice.__setitem__(0, self._index(name)))
        request = Request(
            prompt=tuple(tokens),
            max_new_tokens=max_new_tokens,
            sampling=make_sampling(1, bias_slots=self.plan.bias_slots, **sampling),
            stop_ids=frozenset(self.target.eos_ids),
            tokenizer=self.target.tokenizer,
            stops=stops,
            client=client,
            priority=priority,
            deadline=None if deadline is None else time.monotonic() + deadline,
            choice=choice,
            feed=feed,
            cancelled=cancelled,
        )
        with self._lock:
            if self._closing:
                raise RuntimeError("this engine is closed; make a new one")
            if max_new_tokens == 0:
                request.end("length")
            else:
                self._queue.push(request, client, priority, len(tokens) + max_new_tokens)
                self._submitted += 1
                request.number = self._submitted
                self._lock.notify()
        return feed.hand_over()

    def warm_up(self) -> None:
        """Compile every program now, so that no request waits for it; call it before the first one."""
        with self._on_mesh():
            self._compile()

    def _compile(self) -> None:
        plan, sizes, capacity = self.plan, self.settings.sizes, self.settings.capacity
        single = slots.create(plan, self._dtype, 1, capacity)
        for width in {plan.prefill_chunk, min(SHORT_CHUNK, plan.prefill_chunk)}:
            single = slots.prefill(plan, self.weights, single, jnp.int32(0), width)
        for place, size in enumerate(sizes):
            state = slots.insert(plan, slots.create(plan, self._dtype, size, capacity), single, jnp.int32(0))
            for other in sizes[max(place - 1, 0) : place + 2]:
                slots.rearrange(plan, state, jnp.zeros((other,), jnp.int32))
            slots.settled(plan, self.weights, slots.take(plan, state, jnp.int32(0)))
            choice = jnp.zeros((size,), jnp.int32) if self.drafters else None
            state, _ = slots.step(plan, self.weights, self._policies[size], state, jnp.zeros((size,), bool), choice)
            jax.block_until_ready(state.length)

    @property
    def costs(self) -> CostTable | None:
        """The table that D-cut weighs drafts with."""
        return self._table

    def choose_policy(self, budget: str | float | None = None, confidence: str = "drafter", bonus: bool = True) -> None:
        """Change how drafts are cut, from the next round on; nothing is compiled.

        Without a `budget`, drafts are weighed where there are costs (retrospective with the coupled rule, lagged with rejection), and all
        verified where there are none. Raises ValueError as `costs.dcut_policy` does, for a policy that needs costs where there are none,
        and for confidence by margins where a drafter has none."""
        if self.plan.drafter is None:
            self._policies = {size: even_policy(self.plan) for size in self.settings.sizes}
            return
        if budget is None and self._table is not None:
            budget = "retrospective" if self.plan.rule == "coupled" else "lagged"
        elif budget is None or (budget == "retrospective" and self._table is None):
            budget = "off"
        if self._table is None and budget in dcut.MODES:
            raise ValueError(f"the budget {budget!r} weighs drafts by their costs, and this engine has none; pass costs='measure'")
        even, dtype = even_policy(self.plan), self.weights.target.embed.dtype
        if confidence == "margin":
            state = jax.eval_shape(lambda: slots.create(self.plan, dtype, 1, self.settings.capacity))
            if not offers_margins(self.plan, self.weights, even, state):
                drafts = "trees have" if self.plan.tree is not None else f"drafts of {self.plan.drafter.family} have"
                raise ValueError(f"confidence by margins needs the logits of every draft, and {drafts} none; take confidence='drafter'")
        names: dict[str, Any] = {"budget": budget, "confidence": confidence, "bonus": bonus, "rule": self.plan.rule}
        if self._table is None:
            policies = dict.fromkeys(self.settings.sizes, cost_tables.dcut_policy(even, self.plan.budgets, **names))
        else:
            policies = {size: self._table.policy(size, **names) for size in self.settings.sizes}
        self._policies = policies

    @property
    def load(self) -> dict[str, int]:
        """Requests that wait, are read in and are decoded, and the present number of slots."""
        with self._lock:
            active = sum(owner is not None for owner in self._owners)
            return {"waiting": len(self._queue), "reading": len(self._reading), "active": active, "slots": len(self._owners)}

    def close(self, *, finish: bool = False) -> None:
        """Stop: cancel what is under way, or let it finish. Returns when the thread has ended."""
        with self._lock:
            self._closing = True
            self._aborting = self._aborting or not finish
            self._lock.notify()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _on_mesh(self):
        """The mesh of the target's parameters as that of programs traced inside: states follow it, and kernels are mapped over it."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _find_costs(self, costs: CostTable | str | None) -> CostTable | None:
        if costs is None or self.plan.drafter is None:
            return None
        if isinstance(costs, str):
            if costs != "measure":
                raise ValueError(f"costs must be a table or 'measure', got {costs!r}; costs.load reads one from a file")
            texts = SAMPLES if self.target.tokenizer is not None else ()
            prompts = [encode(self.target, text) for text in texts]
            return cost_tables.table(self.plan, self.weights, self.settings.sizes, self.settings.capacity, prompts)
        if costs.budgets != self.plan.budgets:
            raise ValueError(f"the cost table is for budgets {costs.budgets}, this engine has {self.plan.budgets}; measure one for them")
        return costs

    def _tokens(self, prompt: Prompt | Sequence[int], switches: dict[str, Any]) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(token, int | np.integer) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return encode(self.target, prompt, **switches)  # type: ignore[arg-type]

    def _index(self, name: str | None) -> int:
        if name is None:
            return NOBODY
        if name not in self.drafters:
            raise ValueError(f"this engine has no drafter named {name!r}; there are {', '.join(self.drafters) or 'none with a name'}")
        return self.drafters.index(name)

    def _route(self, prompt: Prompt | Sequence[int], tokens: Sequence[int]) -> int:
        if self.router is None:
            return 0
        if isinstance(prompt, str):
            words = prompt
        elif prompt and isinstance(prompt[-1], Mapping):
            words = str(prompt[-1].get("content", ""))
        else:
            words = "" if self.target.tokenizer is None else self.target.tokenizer.decode(tokens)
        return self._index(self.router.choose(words))

    # The engine's thread

    def _run(self) -> None:
        with self._on_mesh():
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._queue or self._reading or self._flight or any(self._owners)):
                    if self._closing:
                        return
                    if not self._lock.wait(IDLE) and len(self._owners) > self.settings.sizes[0]:
                        self._resize(self.settings.sizes[0])  # gives the memory back
            try:
                self._turn()
            except Exception as error:  # whatever fails, those who wait must hear of it
                self._recover(error)

    def _turn(self) -> None:
        with self._lock:
            self._sweep()
            self._admit()
        self._read_in()
        flight = self._launch()
        if self._flight is not None:
            self._deliver(self._flight)
        self._flight = flight
        self._shrink()

    def _sweep(self) -> None:
        """End what was cancelled or is late; their slots are free at once."""
        now = time.monotonic()

        def gone(request: Request) -> bool:
            if self._aborting:
                request.cancelled.set()
            return request.over or request.cancelled.is_set() or (request.deadline is not None and now > request.deadline)

        leaving = [*self._queue.remove(gone), *(request for request in self._under_way() if gone(request))]
        for request in leaving:
            request.end("cancelled" if request.cancelled.is_set() else "deadline")
        self._reading = collections.deque(reading for reading in self._reading if not reading.request.over)
        self._owners = [None if owner is None or owner.over else owner for owner in self._owners]

    def _admit(self) -> None:
        """Begin to read in what waits, as far as there are slots; the highest priority may take the slot of a lower one."""
        while self._queue:
            if sum(owner is not None for owner in self._owners) + len(self._reading) >= self.settings.slots:
                running = [owner for owner in self._owners if owner is not None]
                lowest = min(running, key=lambda owner: (owner.priority, len(owner.known)), default=None)
                wanted = self._queue.priority()
                if lowest is None or wanted is None or lowest.priority >= wanted:
                    return
                self._put_back(lowest)
            request = self._queue.pop()
            try:
                self._reading.append(self._begin(request))
            except Exception as error:
                request.fail(error)

    def _begin(self, request: Request) -> _Reading:
        known = request.known
        tokens = np.zeros((1, self.settings.capacity), np.int32)
        tokens[0, : len(known)] = known
        found = self._prefixes.find(known[:-1])
        if found is None:
            start, state = 0, slots.create(self.plan, self._dtype, 1, self.settings.capacity)
        else:
            start, state = found[0], slots.copy(found[1])
        state = dataclasses.replace(
            state,
            tokens=jnp.asarray(tokens),
            length=jnp.full((1,), len(known), jnp.int32),
            prompt_length=jnp.full((1,), len(request.prompt), jnp.int32),
            limit=jnp.full((1,), request.limit, jnp.int32),
            finished=jnp.zeros((1,), bool),
            sampling=jax.tree.map(jnp.copy, request.sampling),
            statistics=jax.tree.map(jnp.zeros_like, state.statistics),
        )
        return _Reading(request, state, start)

    def _read_in(self) -> None:
        """A few chunks of the prompts, more while most slots are idle; prompts that are complete get a slot."""
        active = sum(owner is not None for owner in self._owners)
        chunks = 1 if 2 * active >= self.settings.slots else 4
        while self._reading:
            reading = self._reading[0]
            if reading.rest > 0:
                if chunks == 0:
                    return
                chunks -= 1
                width = self.plan.prefill_chunk if reading.rest > SHORT_CHUNK else min(SHORT_CHUNK, self.plan.prefill_chunk)
                try:
                    reading.state = slots.prefill(self.plan, self.weights, reading.state, jnp.int32(reading.start), width)
                except Exception as error:  # this request alone is to blame
                    self._reading.popleft()
                    reading.request.fail(error)
                    continue
                reading.start += min(width, reading.rest)
            if reading.rest <= 0:
                self._reading.popleft()
                self._seat(reading)

    def _seat(self, reading: _Reading) -> None:
        """Put a prompt that was read into a slot, of a larger state if all are taken."""
        if not reading.request.said:
            self._prefixes.keep(reading.request.known[:-1], reading.state)
        if None not in self._owners:
            self._resize(next(size for size in self.settings.sizes if size > len(self._owners)))
        slot = self._owners.index(None)
        self._state = slots.insert(self.plan, self._state, reading.state, jnp.int32(slot))
        self._owners[slot] = reading.request

    def _resize(self, size: int) -> None:
        """Move the requests under way to a state of another size."""
        taken = [slot for slot, owner in enumerate(self._owners) if owner is not None]
        order = (taken + [0] * size)[:size]
        self._state = slots.rearrange(self.plan, self._state, jnp.asarray(order, jnp.int32))
        self._owners = [self._owners[slot] for slot in taken] + [None] * (size - len(taken))
        self._idle_rounds = 0

    def _shrink(self) -> None:
        active = sum(owner is not None for owner in self._owners)
        size = next(size for size in self.settings.sizes if size >= active)
        if size == len(self._owners) or self._reading:
            self._idle_rounds = 0
            return
        self._idle_rounds += 1
        if self._idle_rounds > PATIENCE:
            self._resize(size)

    def _launch(self) -> _Flight | None:
        """Start a round on the device and return without waiting for it."""
        if not any(self._owners):
            return None
        active = jnp.asarray([owner is not None for owner in self._owners])
        policy = self._policies[len(self._owners)]
        choice = None
        if self.drafters:
            choice = jnp.asarray([NOBODY if owner is None else owner.choice[0] for owner in self._owners], jnp.int32)
        self._state, emitted = slots.step(self.plan, self.weights, policy, self._state, active, choice)
        return _Flight(emitted, list(self._owners))

    def _deliver(self, flight: _Flight) -> None:
        """Hand what a round said to its clients, and free the slots of those that ended."""
        emitted = jax.device_get(flight.emitted)
        for slot, request in enumerate(flight.owners):
            if request is None or request.over:
                continue
            request.rounds += 1
            try:
                request.say(emitted.tokens[slot, : emitted.count[slot]].tolist())
            except Exception as error:  # such as a tokenizer that cannot decode; the others go on
                request.fail(error)
            if request.over and slot < len(self._owners) and self._owners[slot] is request:
                if self.settings.prefixes:
                    left = slots.take(self.plan, self._state, jnp.int32(slot))
                    self._prefixes.keep(request.known[:-1], slots.settled(self.plan, self.weights, left))
                self._owners[slot] = None
        self._tell(flight, emitted)

    def _tell(self, flight: _Flight, emitted: Emitted) -> None:
        now = time.monotonic()
        seconds, self._delivered = now - self._delivered, now
        if self.watch is None:
            return
        report = emitted.report
        assert report is not None
        live = [slot for slot, owner in enumerate(flight.owners) if owner is not None and emitted.count[slot] > 0]

        def each(values) -> tuple[int, ...]:
            return tuple(int(values[slot]) for slot in live)

        drafts = report.survival[:, : self.plan.budgets[-1]].tolist()
        survival = tuple(tuple(drafts[slot]) for slot in live)
        numbers = tuple(owner.number for slot, owner in enumerate(flight.owners) if owner is not None and slot in live)
        budget = self.plan.budgets[int(report.budget)]
        drafted = bool(report.drafted)
        counts = each(report.kept), each(report.accepted), each(emitted.count)
        self.watch(Round(seconds, len(flight.owners), len(live), drafted, budget, *counts, survival if drafted else (), numbers))

    def _under_way(self) -> list[Request]:
        return [reading.request for reading in self._reading] + [owner for owner in self._owners if owner is not None]

    def _put_back(self, request: Request) -> None:
        """Take a request out of its slot; it goes on from what it has said when a slot is free again."""
        self._owners[self._owners.index(request)] = None
        if self._flight is not None:  # what the round in flight says is part of what has been said
            flight, self._flight = self._flight, None
            self._deliver(flight)
        if not request.over:
            self._queue.push(request, request.client, request.priority, again=True)

    def _recover(self, error: Exception) -> None:
        """A step failed and took the state with it: those under way begin again, unless they have been part of failures before."""
        with self._lock:
            requests = self._under_way()
            self._forget()
            for request in requests:
                request.attempts += 1
                if request.over:
                    continue
                if request.attempts >= ATTEMPTS:
                    request.fail(error)
                else:
                    self._queue.push(request, request.client, request.priority, again=True)

    def _forget(self) -> None:
        """An empty state of the smallest size."""
        self._dtype = self.weights.target.embed.dtype
        self._state = slots.create(self.plan, self._dtype, self.settings.sizes[0], self.settings.capacity)
        self._owners: list[Request | None] = [None] * self.settings.sizes[0]
        self._reading: collections.deque[_Reading] = collections.deque()
        self._flight: _Flight | None = None
        self._idle_rounds = 0
        self._delivered = time.monotonic()
        self._prefixes.clear()
