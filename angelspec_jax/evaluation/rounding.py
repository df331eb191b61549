"""What rounding a target's weights changes of its text, against the same model as it is stored."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from angelspec_jax import text
from angelspec_jax.data.features import target_features
from angelspec_jax.decoding.generate import generate
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import Target
from angelspec_jax.target.transformer import TargetParams, logits

ROWS = 64  # positions that have logits at one time
TOGETHER = 8  # prompts that are answered at one time: the weights are read once for all


@dataclasses.dataclass(frozen=True)
class Answers:
    """Greedy answers of the stored model, by token ids."""

    prompts: list[list[int]]
    answers: list[list[int]]
    max_new_tokens: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a rounded model's greedy text differs."""

    prompts: int
    same: int  # prompts whose whole answer is the same
    tokens: int  # of the stored model's answers
    common: int  # of them, before the first that differs in the rounded model's own answer
    agreed: int  # of them, the rounded model's choice after the same text

    def __str__(self) -> str:
        return (
            f"against the weights as stored: {self.same} of {self.prompts} answers are the same, {self.common / self.tokens:.1%} of their "
            f"tokens come before the first difference; after the same text {self.agreed / self.tokens:.2%} of the choices are the same"
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def answer(target: Target, prompts: Mapping[str, Sequence[text.Prompt]], max_new_tokens: int, **switches) -> Answers:
    """What the stored model says. Prompts without room for an answer in the model's context are left out."""
    encoded = [text.encode(target, prompt, **switches) for group in prompts.values() for prompt in group]
    kept = [ids for ids in encoded if len(ids) + max_new_tokens <= target.config.max_positions]
    if not kept:
        raise ValueError(f"no prompt leaves room for {max_new_tokens} new tokens in the context of {target.config.max_positions} tokens")
    capacity = -(-(max(map(len, kept)) + max_new_tokens) // 128) * 128
    return Answers(kept, _say(target, kept, max_new_tokens, capacity), max_new_tokens, capacity)


def compare(stored: Answers, rounded: Target, answers: Sequence[list[int]] | None = None) -> Difference:
    """The rounded model's own answers, and its choices along the stored model's.

    `answers` are its greedy answers where they are known; speculative ones are the same.
    """
    if answers is None:
        answers = _say(rounded, stored.prompts, stored.max_new_tokens, stored.capacity)
    same = common = agreed = 0
    for prompt, said, own in zip(stored.prompts, stored.answers, answers, strict=True):
        same += own == said
        common += next((at for at, (a, b) in enumerate(zip(own, said, strict=False)) if a != b), min(len(own), len(said)))
        whole = np.zeros(stored.capacity, np.int32)
        whole[: len(prompt) + len(said)] = [*prompt, *said]
        choices = np.asarray(_choices(rounded.params, rounded.config, jnp.asarray(whole)))
        agreed += int(np.sum(choices[len(prompt) - 1 : len(prompt) + len(said) - 1] == said))
    return Difference(len(stored.prompts), same, sum(map(len, stored.answers)), common, agreed)


def _say(target: Target, prompts: list[list[int]], new: int, capacity: int) -> list[list[int]]:
    """Greedy answers by one compiled program: the last batch is filled up with requests that say nothing."""
    plan, weights = text.prepare(target)
    together, said = min(TOGETHER, len(prompts)), []
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        idle = together - len(batch)
        limits = [new] * len(batch) + [0] * idle
        said += generate(plan, weights, batch + [[0]] * idle, limits, capacity=capacity).texts()[: len(batch)]
    return said


@functools.partial(jax.jit, static_argnums=1)
def _choices(params: TargetParams, config: TransformerConfig, tokens: Int[Array, "S"]) -> Int[Array, "S"]:
    """The most likely token after every position."""
    hidden = target_features(params, config, tokens[None], (), params.embed.dtype)[0, :, 0]
    chunks = hidden.reshape(-1, ROWS, hidden.shape[-1])  # capacities are multiples of 128
    return jax.lax.map(lambda rows: jnp.argmax(logits(params, rows), axis=-1).astype(jnp.int32), chunks).reshape(-1)
