"""A drafter measured on prompts of several domains: acceptance, speed against plain decoding, and whether the words are the same."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from angelspec_jax import text
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation import tau, throughput
from angelspec_jax.evaluation.tau import Acceptance, Agreement
from angelspec_jax.evaluation.throughput import Pair, Progress, Speed
from angelspec_jax.target.loading import Target

ALL = "all"  # the row that pools every domain


@dataclasses.dataclass(frozen=True)
class Options:
    """How prompts are decoded. `capacity` None takes what the longest prompt needs."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # prompt i draws with seed + i
    capacity: int | None = None
    repeats: int = 1  # timed runs of each prompt, of which the fastest counts
    adaptive: bool = False  # verify as many drafts as pay on this device, by costs measured first; else always all
    tree: int | None = None  # nodes of the draft trees; None drafts chains
    batch: int = 1  # prompts decoded together where nothing is timed

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was found; `speeds` and `agreement` only where plain decoding ran too."""

    acceptance: dict[str, Acceptance]
    speeds: dict[str, Speed] | None
    agreement: Agreement | None
    records: list[dict[str, Any]]  # one a prompt
    policy: dict[str, Any] | None  # seconds of a round by budget and of drafting, where drafting was adaptive
    left_out: int  # prompts that leave no room in the model's context
    texts: list[list[int]]  # what was said with the drafter, one a prompt

    def survival(self) -> dict[str, tuple[float, ...]]:
        return {domain: found.survival for domain, found in self.acceptance.items() if domain != ALL}

    def rates(self) -> dict[str, tuple[float, float]]:
        """Domain -> tokens per second (plain, speculative)."""
        return {domain: (speed.plain, speed.speculative) for domain, speed in (self.speeds or {}).items() if domain != ALL}

    def to_dict(self) -> dict[str, Any]:
        agreement = None if self.agreement is None else dataclasses.asdict(self.agreement) | {"holds": self.agreement.holds}
        return {
            "acceptance": {domain: found.to_dict() for domain, found in self.acceptance.items()},
            "speed": None if self.speeds is None else {domain: speed.to_dict() for domain, speed in self.speeds.items()},
            "agreement": agreement,
            "policy": self.policy,
            "left_out": self.left_out,
            "prompts": self.records,
        }


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[text.Prompt]],
    options: Options | None = None,
    *,
    timed: bool = True,
    policy: Policy | None = None,
    progress: Progress | None = None,
    **switches: Any,
) -> Measurement:
    """Decode every prompt with the drafter, and plainly as well when `timed`; `switches` go to the chat template.

    `policy` is what `options.adaptive` decides by where its costs were measured before.

    Raises ValueError when no prompt fits the model's context, or an option is out of range.
    """
    options = Options() if options is None else options
    kept, left_out = _encoded(target, prompts, options, switches)
    capacity = options.capacity
    if capacity is None:
        capacity = capacity_for(target, [ids for _, ids in kept], options.max_new_tokens, drafter.config.num_drafts)
    if timed:
        return _against_plain(target, drafter, kept, options, capacity, left_out, policy, progress)
    plan, weights = text.prepare(target, drafter, adaptive=options.adaptive, tree=options.tree)
    if options.adaptive and policy is None:
        policy = text.measure_policy(target, drafter, requests=options.batch, capacity=capacity, tree=options.tree)
    found, records, texts = [], [], []
    ids = [ids for _, ids in kept]
    for index, (counted, said) in enumerate(_decoded(plan, weights, ids, options, capacity, policy)):
        domain, prompt = kept[index]
        found.append((domain, counted))
        records.append({"domain": domain, "prompt_tokens": len(prompt), **_counts(counted)})
        texts.append(said)
        if progress is not None:
            progress(index + 1, len(kept))
    return Measurement(_pooled(found), None, None, records, _described(plan, policy), left_out, texts)


def plain_texts(
    target: Target, prompts: Sequence[text.Prompt], options: Options, progress: Progress | None = None, **switches: Any
) -> list[tuple[list[int], list[int]]]:
    """Every prompt's tokens and what the target alone says, drawing as `measure` does. `options.capacity` must be given."""
    assert options.capacity is not None, "texts that are compared are decoded at one capacity"
    kept, _ = _encoded(target, {"": prompts}, options, switches)
    ids, said = [ids for _, ids in kept], []
    for _, tokens in _decoded(*text.prepare(target), ids, options, options.capacity, None):
        said.append(tokens)
        if progress is not None:
            progress(len(said), len(ids))
    return list(zip(ids, said, strict=True))


def _encoded(target: Target, prompts: Mapping[str, Sequence[text.Prompt]], options: Options, switches) -> tuple[list, int]:
    """(domain, tokens) of the prompts that fit, and how many do not."""
    encoded = [(domain, text.encode(target, prompt, **switches)) for domain, group in prompts.items() for prompt in group]
    room = target.config.max_positions - options.max_new_tokens
    kept = [(domain, ids) for domain, ids in encoded if len(ids) <= room]
    if not kept:
        raise ValueError(
            f"no prompt leaves room for {options.max_new_tokens} new tokens in the model's context of {target.config.max_positions}; "
            "lower max_new_tokens or shorten the prompts"
        )
    return kept, len(encoded) - len(kept)


def _decoded(
    plan: Plan, weights: Weights, prompts: Sequence[Sequence[int]], options: Options, capacity: int, policy: Policy | None
) -> Iterator[tuple[Acceptance, list[int]]]:
    """Counters and text of every prompt, a batch at a time; a last batch that is not full repeats prompts, for it is the same program."""
    for first in range(0, len(prompts), options.batch):
        own = prompts[first : first + options.batch]
        group = list(itertools.islice(itertools.cycle(own), options.batch))
        sampling = make_sampling(options.batch, **options.sampling() | {"seed": options.seed + first})
        generation = generate(plan, weights, group, options.max_new_tokens, sampling=sampling, policy=policy, capacity=capacity)
        yield from itertools.islice(zip(tau.each_acceptance(generation), generation.texts(), strict=True), len(own))


def capacity_for(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_drafts: int) -> int:
    """Tokens a request must be able to hold for the longest of the prompts that fit the model's context, in steps of 128."""
    longest = max((len(ids) for ids in prompts if len(ids) + max_new_tokens <= target.config.max_positions), default=0)
    return -(-(longest + max(max_new_tokens, 2 * (num_drafts + 1))) // 128) * 128


def _against_plain(
    target, drafter, kept, options: Options, capacity: int, left_out: int, policy: Policy | None, progress
) -> Measurement:
    plan, weights = text.prepare(target, drafter, adaptive=options.adaptive, tree=options.tree)
    if options.adaptive and policy is None:
        policy = text.measure_policy(target, drafter, capacity=capacity, tree=options.tree)
    pairs = throughput.interleaved(
        text.prepare(target),
        (plan, weights),
        [ids for _, ids in kept],
        options.max_new_tokens,
        capacity,
        policy=policy,
        repeats=options.repeats,
        progress=progress,
        **options.sampling(),
    )
    found, records, comparisons = [], [], []
    for (domain, ids), pair in zip(kept, pairs, strict=True):
        counted = tau.acceptance(pair.speculative.generation)
        compared = tau.compare(target, ids, pair.plain.tokens, pair.speculative.tokens, pair.sampling)
        found.append((domain, counted))
        comparisons.append(compared)
        records.append({"domain": domain, "prompt_tokens": len(ids), **_counts(counted), **_times(pair), **dataclasses.asdict(compared)})
    speeds = {domain: throughput.speed(group) for domain, group in _groups([(d, p) for (d, _), p in zip(kept, pairs, strict=True)]).items()}
    texts = [list(pair.speculative.tokens) for pair in pairs]
    return Measurement(_pooled(found), speeds, tau.agreement(comparisons), records, _described(plan, policy), left_out, texts)


def _described(plan: Plan, policy: Policy | None) -> dict[str, Any] | None:
    if policy is None:
        return None
    costs = [float(cost) for cost in policy.costs]
    return {"budgets": list(plan.budgets), "round_seconds": costs, "draft_seconds": float(policy.draft_cost)}


def _groups(items: Sequence[tuple[str, Any]]) -> dict[str, list]:
    """By domain, and all together where there are several."""
    groups: dict[str, list] = {}
    for domain, item in items:
        groups.setdefault(domain, []).append(item)
    return groups | ({ALL: [item for _, item in items]} if len(groups) > 1 else {})


def _pooled(found: Sequence[tuple[str, Acceptance]]) -> dict[str, Acceptance]:
    return {domain: tau.pool(parts) for domain, parts in _groups(found).items()}


def _counts(found: Acceptance) -> dict[str, Any]:
    return {"tokens": found.emitted, "rounds": found.rounds, "tau": found.tau}


def _times(pair: Pair) -> dict[str, float]:
    return {
        "plain_tokens": len(pair.plain.tokens),
        "plain_seconds": pair.plain.seconds,
        "speculative_seconds": pair.speculative.seconds,
        "plain_prefill_seconds": pair.plain.prefill_seconds,
        "speculative_prefill_seconds": pair.speculative.prefill_seconds,
    }
