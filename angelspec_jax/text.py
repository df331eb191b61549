"""Text in, text out: chat template, tokens, decoding and detokenization in one call."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from angelspec_jax.answers import Completion, Delta, Prompt, encode, require_tokenizer
from angelspec_jax.decoding import costs
from angelspec_jax.decoding import generate as decoding
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.sampling import Bias, check_bias, make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.target.loading import Target
from angelspec_jax.tokenizer import Detokenizer


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: Bias | None = None,
    capacity: int | None = None,
    policy: Policy | None = None,
    tree: int | None = None,
    rule: str = "coupled",
    logprobs: bool = False,
    **switches: Any,
) -> list[Completion]:
    """Answer one prompt or a batch; with a drafter the words are the same and come faster.

    A prompt is a text (the user's message) or a conversation, a list of {"role", "content"}. `switches` go to the model's chat template,
    such as `enable_thinking`; a model without a template continues the text. Temperature 0 is greedy; request r of a batch draws with
    seed + r. `bias` maps token ids to what is added to their logits; `repetition`, `frequency` and `presence` are penalties. `capacity`
    fixes the tokens a request can hold, so that calls of any length share one compiled program. With a `policy` from `measure_policy` each
    round verifies as many drafts as pay on this device, none included. `tree` drafts trees of so many nodes; `rule` "rejection" keeps the
    distribution but not the text of a seed; `logprobs` reports the log-probability of every token. Raises ValueError with one sentence for
    prompts that are empty or do not fit, and for options out of range.
    """
    ids = [encode(target, prompt, **switches) for prompt in batch_of(prompts)]
    shaping = {"repetition": repetition, "frequency": frequency, "presence": presence, "bias": _checked(bias, target)}
    sampling = make_sampling(len(ids), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, **shaping)
    plan, weights = prepare(target, drafter, adaptive=policy is not None, tree=tree, rule=rule, logprobs=logprobs)
    generation = decoding.generate(plan, weights, ids, max_new_tokens, sampling=sampling, policy=policy, capacity=capacity)
    rounds = np.asarray(generation.statistics.rounds)
    answers = [completion(target, said, int(count)) for said, count in zip(generation.texts(), rounds, strict=True)]
    if not logprobs:
        return answers
    found = generation.text_logprobs()
    return [dataclasses.replace(a, logprobs=tuple(p[: len(a.tokens)])) for a, p in zip(answers, found, strict=True)]


def stream(
    target: Target,
    prompt: Prompt,
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: Bias | None = None,
    capacity: int | None = None,
    policy: Policy | None = None,
    tree: int | None = None,
    rule: str = "coupled",
    **switches: Any,
) -> Iterator[Delta]:
    """The same answer as `generate` gives, round by round as it is decoded."""
    shaping = {"repetition": repetition, "frequency": frequency, "presence": presence, "bias": _checked(bias, target)}
    sampling = make_sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, **shaping)
    plan, weights = prepare(target, drafter, adaptive=policy is not None, tree=tree, rule=rule)
    detokenizer = Detokenizer(require_tokenizer(target))
    ids = encode(target, prompt, **switches)
    for (tokens,) in decoding.stream(plan, weights, [ids], max_new_tokens, sampling=sampling, policy=policy, capacity=capacity):
        shown = [token for token in tokens if token not in target.eos_ids]
        yield Delta(detokenizer.push(shown) if shown else "", tuple(tokens))
    rest = detokenizer.finish()
    if rest:
        yield Delta(rest, ())


def prepare(
    target: Target,
    drafter: Drafter | None = None,
    *,
    adaptive: bool = False,
    tree: int | None = None,
    rule: str = "coupled",
    logprobs: bool = False,
) -> tuple[Plan, Weights]:
    """What the decoding functions take for a target, alone or with a drafter; `adaptive` allows rounds with fewer drafts or none."""
    options = {"stop_ids": tuple(target.eos_ids), "rule": rule, "logprobs": logprobs}
    if drafter is None:
        return Plan(target.config, tree=tree, **options), Weights(target.params)
    budgets = costs.default_budgets(drafter.config.num_drafts if tree is None else tree) if adaptive else ()
    plan = Plan(target.config, drafter.config, budgets=budgets, tree=tree, **options)
    return plan, Weights(target.params, drafter.params, drafter.shared)


def measure_policy(
    target: Target, drafter: Drafter, *, requests: int = 1, capacity: int = 512, tree: int | None = None, rule: str = "coupled"
) -> Policy:
    """Costs of every budget on this device for batches of `requests`, measured in a few seconds beside compiling."""
    plan, weights = prepare(target, drafter, adaptive=True, tree=tree, rule=rule)
    return costs.measure(plan, weights, requests=requests, capacity=capacity)


def _checked(bias: Bias | None, target: Target) -> Bias | None:
    check_bias(bias, target.config.vocab_size)
    return bias


def completion(target: Target, tokens: Sequence[int], rounds: int) -> Completion:
    """The answer that generated token ids make, their stop token taken off."""
    stopped = bool(tokens) and tokens[-1] in target.eos_ids
    kept = tuple(tokens[:-1] if stopped else tokens)
    text = require_tokenizer(target).decode(kept)
    return Completion(text, kept, "stop" if stopped else "length", rounds, len(tokens) / max(rounds, 1))


def batch_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several; a list of messages is one conversation."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
