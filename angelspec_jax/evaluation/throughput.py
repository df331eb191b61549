"""Plain against speculative decoding on the clock: prompt by prompt, in alternating order, in one process, with the same weights."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.generate import Generation, generate
from angelspec_jax.decoding.sampling import Sampling, make_sampling
from angelspec_jax.decoding.step import Plan, Weights

Progress = Callable[[int, int], None]  # (prompts done, prompts in all)


@dataclasses.dataclass(frozen=True)
class Run:
    """One decoding of one prompt. `seconds` is the whole request; `prefill_seconds` what of it came before the first round."""

    tokens: tuple[int, ...]
    seconds: float
    prefill_seconds: float
    generation: Generation

    @property
    def decode_seconds(self) -> float:
        return max(self.seconds - self.prefill_seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways."""

    prompt: tuple[int, ...]
    sampling: Sampling
    plain: Run
    speculative: Run


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second over a set of prompts: all their tokens by all their time."""

    prompts: int
    plain: float  # tokens per second of decoding, after the prompt was read
    speculative: float
    plain_request: float  # tokens per second of the whole request, reading the prompt included
    speculative_request: float
    prefill_seconds: float  # per prompt, both ways together averaged

    @property
    def speedup(self) -> float:
        return self.speculative / self.plain

    @property
    def request_speedup(self) -> float:
        return self.speculative_request / self.plain_request

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"speedup": self.speedup, "request_speedup": self.request_speedup}


def warm_up(plan: Plan, weights: Weights, capacity: int, sampling: Sampling | None = None) -> None:
    """Compile (or load from the compilation cache) and run once; two rounds, so that nothing of a first run is left in the timings."""
    generation = generate(plan, weights, [[0]], 2 * plan.width, sampling=sampling, capacity=capacity)
    jax.block_until_ready(generation.length)


def interleaved(
    plain: tuple[Plan, Weights],
    speculative: tuple[Plan, Weights],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    capacity: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    policy: Policy | None = None,
    repeats: int = 1,
    progress: Progress | None = None,
) -> list[Pair]:
    """Decode every prompt both ways, one at a time, the other way first at every second prompt; of `repeats` runs the fastest counts.

    Both run `decoding.generate` at one capacity, so each way is one compiled program; both are compiled and run before the clock starts.
    Prompt i draws with seed + i.
    """
    options = [make_sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + i) for i in range(len(prompts))]
    if options:
        for plan, weights in (plain, speculative):
            warm_up(plan, weights, capacity, options[0])
    pairs = []
    for index, prompt in enumerate(prompts):
        best: dict[str, Run] = {}
        for repeat in range(repeats):
            ways = [("plain", *plain, None), ("speculative", *speculative, policy)]
            for name, plan, weights, own_policy in ways if (index + repeat) % 2 == 0 else reversed(ways):
                run = timed(plan, weights, own_policy, prompt, max_new_tokens, capacity, options[index])
                if name not in best or run.seconds < best[name].seconds:
                    best[name] = run
        pairs.append(Pair(tuple(prompt), options[index], best["plain"], best["speculative"]))
        if progress is not None:
            progress(index + 1, len(prompts))
    return pairs


def timed(plan: Plan, weights: Weights, policy: Policy | None, prompt, max_new_tokens: int, capacity: int, sampling: Sampling) -> Run:
    """One request on the clock; the same program with no token to generate gives the time of its prefill."""

    def run(new_tokens: int) -> tuple[Generation, float]:
        begin = time.perf_counter()
        generation = generate(plan, weights, [prompt], new_tokens, sampling=sampling, policy=policy, capacity=capacity)
        jax.block_until_ready(generation.length)
        return generation, time.perf_counter() - begin

    _, prefill_seconds = run(0)
    generation, seconds = run(max_new_tokens)
    return Run(tuple(generation.texts()[0]), seconds, prefill_seconds, generation)


def speed(pairs: Sequence[Pair]) -> Speed:
    """Pooled rates. Raises ValueError without pairs."""
    if not pairs:
        raise ValueError("there is no timed prompt to take a speed of")

    def rate(name: str, clock: str) -> float:
        runs = [getattr(pair, name) for pair in pairs]
        return sum(len(run.tokens) for run in runs) / sum(getattr(run, clock) for run in runs)

    prefill = sum(pair.plain.prefill_seconds + pair.speculative.prefill_seconds for pair in pairs) / (2 * len(pairs))
    return Speed(
        prompts=len(pairs),
        plain=rate("plain", "decode_seconds"),
        speculative=rate("speculative", "decode_seconds"),
        plain_request=rate("plain", "seconds"),
        speculative_request=rate("speculative", "seconds"),
        prefill_seconds=prefill,
    )
