"""The one door from training to decoding: how many tokens a round the drafter serves on held-out prompts, decoded for real."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from angelspec_jax import text
from angelspec_jax.data import chat
from angelspec_jax.decoding.generate import generate
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation.tau import Acceptance, acceptance, pool
from angelspec_jax.target.loading import Target

Tokens = Sequence[int]


def served_tau(target: Target, drafter: Drafter, prompts: Mapping[str, Sequence[Tokens]], max_new_tokens: int) -> dict[str, Acceptance]:
    """Acceptance per domain of greedy speculative decoding, one batch a domain; `prompts` are token ids."""
    if not any(prompts.values()):
        return {}
    drafter = dataclasses.replace(drafter, params=served_dtype(drafter, target.params.embed.dtype))
    plan, weights = text.prepare(target, drafter)
    longest = max(len(prompt) for domain in prompts.values() for prompt in domain) + max_new_tokens
    capacity = -(-longest // 64) * 64
    return {
        domain: acceptance(generate(plan, weights, batch, max_new_tokens, capacity=capacity)) for domain, batch in prompts.items() if batch
    }


def served_dtype(drafter: Drafter, dtype):
    """The drafter's parameters as it is served: matrices in the target's dtype, norms and fusion weights as declared."""
    specs = registry.module(drafter.config).drafter_specs(drafter.config)
    return jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype or dtype), drafter.params, specs)


def evaluator(job) -> Callable[[Drafter, int], dict[str, Any]]:
    """The `evaluate` hook of `trainer.train` for a `trainer.Job`.

    It decodes the first `evaluation.prompts` held-out conversations of every domain, up to their first answer, for
    `evaluation.max_new_tokens` tokens. Conversations that leave no room in the model's context are passed over. The result is
    {"tau": {domain: tau}, "survival": {domain: [K]}}.
    """
    options, target = job.config.evaluation, job.target
    prompts = held_out_prompts(
        target, job.data.validation_conversations, options.prompts, options.max_new_tokens, dict(job.config.data.template)
    )

    def evaluate(drafter: Drafter, step: int) -> dict[str, Any]:
        served = served_tau(target, drafter, prompts, options.max_new_tokens)
        if len(served) > 1:
            served["all"] = pool(served.values())
        return {"tau": {name: found.tau for name, found in served.items()}, "survival": {n: list(f.survival) for n, f in served.items()}}

    return evaluate


def held_out_prompts(
    target: Target, conversations, count: int, max_new_tokens: int, switches: Mapping[str, Any]
) -> dict[str, list[list[int]]]:
    """Token ids of the first `count` conversations of every domain, up to their first answer."""
    found: dict[str, list[list[int]]] = {}
    for conversation in conversations:
        chosen = found.setdefault(conversation.domain or "all", [])
        roles = [message["role"] for message in conversation.messages]
        if len(chosen) >= count or "assistant" not in roles:
            continue
        opening = conversation.messages[: roles.index("assistant")]
        ids = chat.encode_prompt(text.require_tokenizer(target), target.chat_template or "", opening, **switches)
        if 0 < len(ids) <= target.config.max_positions - max_new_tokens:
            chosen.append(ids)
    return {domain: chosen for domain, chosen in found.items() if chosen}
