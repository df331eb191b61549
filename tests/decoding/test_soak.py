"""The engine over a long stretch of what clients do: nobody is lost or stuck, nothing piles up, and greedy text is plain decoding's."""

import gc
import threading
import time

import jax
import numpy as np
import pytest

from angelspec_jax.decoding.engine import Engine, QueueFull, Settings
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import load_drafter

pytest_plugins = ["toy_model"]

CAPACITY, KNOWN, WAIT = 64, 16, 1200  # prompts whose greedy text is known


@pytest.fixture(scope="module")
def texts(toy_target):
    """Prompts and the 40 tokens plain decoding says to each."""
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 250, random.integers(1, 24)).tolist() for _ in range(KNOWN)]
    plan = Plan(toy_target.config, stop_ids=tuple(toy_target.eos_ids))
    return list(zip(prompts, generate(plan, Weights(toy_target.params), prompts, 40, capacity=CAPACITY).texts(), strict=True))


@pytest.mark.parametrize("requests", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_soak(toy_target, texts, requests):
    settings = Settings(slots=4, capacity=CAPACITY, queue=12, prefill_chunk=16, prefixes=2, shortest_prefix=4)
    ended = {"stop": 0, "length": 0, "cancelled": 0, "deadline": 0, "refused": 0}
    wrong, live, lock = [], [], threading.Lock()
    with Engine(toy_target, load_drafter("lookup:3", toy_target), settings) as engine:

        def note(what: str) -> None:
            with lock:
                ended[what] += 1

        def client(number: int, count: int) -> None:
            random = np.random.default_rng(number)
            for turn in range(count):
                prompt, known = texts[random.integers(KNOWN)]
                new, what = int(random.integers(1, 40)), random.random()
                options = {"client": str(number), "priority": int(random.integers(2)), "max_new_tokens": new}
                try:
                    if what < 0.1:
                        bad = [{"temperature": -1.0}, {"max_new_tokens": 1000}, {"stop": ""}, {"top_p": 2.0}][int(random.integers(4))]
                        with pytest.raises(ValueError, match="must|over the"):
                            engine.submit(prompt, **options | bad)
                        note("refused")
                        continue
                    options |= {"deadline": 0.001} if what < 0.2 else {"temperature": 1.0, "seed": turn} if what < 0.4 else {}
                    stream = engine.submit(prompt, **options)
                    if 0.4 <= what < 0.5:
                        next(stream, None)
                        stream.cancel()
                    elif 0.5 <= what < 0.55:
                        stop = chr(97 + int(random.integers(26)))
                        stream = engine.submit(prompt, stop=stop, **options)
                    answer = stream.result(WAIT)
                except QueueFull:
                    note("refused")
                    time.sleep(0.01)
                    continue
                note(answer.finish_reason)
                greedy = "temperature" not in options
                said = list(answer.tokens)
                expected = known[: known.index(257)] if 257 in known else known
                if (greedy and said != expected[: len(said)]) or (answer.finish_reason == "length" and len(said) != new):
                    wrong.append((prompt, said, known))

        clients = 5
        for half in range(2):
            threads = [threading.Thread(target=client, args=(half * clients + n, requests // clients // 2)) for n in range(clients)]
            [thread.start() for thread in threads]
            [thread.join(WAIT) for thread in threads]
            assert not any(thread.is_alive() for thread in threads), "a client waits for ever"
            end = time.monotonic() + WAIT
            while any(engine.load[name] for name in ("waiting", "reading", "active")):
                assert time.monotonic() < end, engine.load
                time.sleep(0.01)
            gc.collect()
            live.append(sum(array.nbytes for array in jax.live_arrays()))
    assert wrong == []
    assert sum(ended.values()) == requests
    assert all(ended[name] for name in ("length", "cancelled", "refused")), ended
    assert live[1] <= 1.5 * live[0]
