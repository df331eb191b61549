"""What speculative decoding achieved, from its counters; and whether it said what plain decoding says.

tau is emitted tokens per round, the bonus token included, pooled over rounds (never a mean of means). Position k is the k-th draft.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from angelspec_jax.decoding.generate import Generation
from angelspec_jax.decoding.sampling import Sampling, Text, make_sampling, perturb, transform
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import Target
from angelspec_jax.target.transformer import TargetParams, forward, logits

NEAR_TIE = 1e-4  # of float32 scores after the noise: two correct programs may choose differently below it
POSITIONAL = ("verified", "reached", "accepted")  # counters by draft position
TOKENS_PER_TIE = 20_000  # one near tie in so many tokens is tolerated


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counters of one or many generations."""

    rounds: int = 0
    emitted: int = 0  # tokens, bonus and stop tokens included
    verified: tuple[int, ...] = ()  # [K] rounds in which draft k was verified
    reached: tuple[int, ...] = ()  # [K] rounds in which draft k was verified and the draft before it accepted
    accepted: tuple[int, ...] = ()  # [K] rounds in which draft k, and so every draft before it, was accepted

    @property
    def tau(self) -> float:
        """Emitted tokens per round."""
        return self.emitted / max(self.rounds, 1)

    @property
    def drafted(self) -> int:
        """Rounds in which anything was drafted and verified."""
        return self.verified[0] if self.verified else 0

    @property
    def survival(self) -> tuple[float, ...]:
        """[K] share of the rounds with drafts in which those up to k were all accepted; a draft that was cut was not."""
        return tuple(count / max(self.drafted, 1) for count in self.accepted)

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """[K] share of the rounds that verified draft k and accepted all before it that accepted it too; None without such rounds."""
        return tuple(got / before if before else None for before, got in zip(self.reached, self.accepted, strict=True))

    @property
    def verified_accepted(self) -> float | None:
        """Share of the verified drafts that were accepted; None when nothing was drafted."""
        return sum(self.accepted) / sum(self.verified) if sum(self.verified) else None

    def to_dict(self) -> dict[str, Any]:
        """Counters and rates, as JSON takes them."""
        rates = {name: getattr(self, name) for name in ("tau", "drafted", "survival", "conditional", "verified_accepted")}
        return dataclasses.asdict(self) | rates


def acceptance(generation: Generation) -> Acceptance:
    """Counters of a generation, pooled over its requests."""
    return pool(each_acceptance(generation))


def each_acceptance(generation: Generation) -> list[Acceptance]:
    """Counters of every request."""
    statistics = jax.tree.map(np.asarray, generation.statistics)
    emitted = np.asarray(generation.length) - np.asarray(generation.prompt_length)
    return [
        Acceptance(
            rounds=int(statistics.rounds[request]),
            emitted=int(emitted[request]),
            **{name: tuple(int(count) for count in getattr(statistics, name)[request]) for name in POSITIONAL},
        )
        for request in range(len(emitted))
    ]


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """The counters of all parts together; parts with fewer positions had no drafts at the others."""
    parts = list(parts)
    positions = max((len(part.verified) for part in parts), default=0)

    def add(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(row[k] for row in rows if k < len(row)) for k in range(positions))

    return Acceptance(
        rounds=sum(part.rounds for part in parts),
        emitted=sum(part.emitted for part in parts),
        **{name: add([getattr(part, name) for part in parts]) for name in POSITIONAL},
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two decodings of one prompt. `position` counts generated tokens; `margin` is what the worse of the two choices falls short by."""

    verdict: Literal["equal", "near_tie", "different"]
    compared: int  # tokens that were compared, up to the first difference
    position: int | None = None
    margin: float | None = None


def compare(
    target: Target, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int], sampling: Sampling | None = None
) -> Comparison:
    """Whether two decodings of a prompt agree, up to a near tie.

    At the first difference the target's scores after the common prefix are computed again in float32, transformed and perturbed as
    `sampling` (one request) says. It is a near tie when both tokens lie within `NEAR_TIE` of the best; whatever follows a near tie is not
    compared. A text that ends where the other goes on is different: both have the same limit and the same stop tokens.
    """
    shorter = min(len(plain), len(speculative))
    position = next((i for i in range(shorter) if plain[i] != speculative[i]), None)
    if position is None:
        if len(plain) == len(speculative):
            return Comparison("equal", shorter)
        return Comparison("different", shorter, shorter)
    sampling = make_sampling(1) if sampling is None else sampling
    scores = next_scores(target, [*prompt, *plain[:position]], sampling, len(prompt))
    margin = float(scores.max() - min(scores[plain[position]], scores[speculative[position]]))
    return Comparison("near_tie" if margin < NEAR_TIE else "different", position + 1, position, margin)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Comparisons of many prompts, pooled."""

    prompts: int
    tokens: int
    near_ties: int
    different: int

    @property
    def holds(self) -> bool:
        """No difference but near ties, and those within one in `TOKENS_PER_TIE` tokens (one is always tolerated)."""
        return self.different == 0 and self.near_ties <= max(1, self.tokens // TOKENS_PER_TIE)

    def __str__(self) -> str:
        if self.different:
            return f"{self.different} of {self.prompts} texts differ from plain decoding"
        ties = f", {self.near_ties} of them up to a near tie" if self.near_ties else ""
        return f"all {self.prompts} texts ({self.tokens} tokens compared) are those of plain decoding{ties}"


def agreement(comparisons: Iterable[Comparison]) -> Agreement:
    comparisons = list(comparisons)
    verdicts = [comparison.verdict for comparison in comparisons]
    tokens = sum(comparison.compared for comparison in comparisons)
    return Agreement(len(comparisons), tokens, verdicts.count("near_tie"), verdicts.count("different"))


def next_scores(target: Target, tokens: Sequence[int], sampling: Sampling, prompt_length: int = 0) -> Float[np.ndarray, "V"]:
    """Float32 scores of the token after `tokens`: transformed logits plus the request's noise, whose argmax decoding emits.

    Penalties take the first `prompt_length` tokens for the prompt.
    """
    length = len(tokens)
    padded = np.zeros(-(-length // 128) * 128, np.int32)
    padded[:length] = tokens
    with jax.default_matmul_precision("highest"):
        row = _last_logits(target.params, target.config, jnp.asarray(padded), jnp.int32(length))
        one = lambda number: jnp.full((1,), number, jnp.int32)  # noqa: E731
        nothing = jnp.zeros((1, 0), jnp.int32), one(0), jnp.zeros((1, 2), jnp.uint32)
        text = Text(jnp.asarray(padded)[None], one(length), one(prompt_length), *nothing)
        scores = perturb(transform(row, sampling, text), sampling, one(length))
    return np.asarray(scores[0])


@functools.partial(jax.jit, static_argnums=1)
def _last_logits(params: TargetParams, config: TransformerConfig, tokens: Int[Array, "S"], length: Int[Array, ""]) -> Float[Array, "1 V"]:
    """Logits after the last of `length` tokens, in one float32 pass without a cache."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = uniform_rows(jnp.zeros((1,), jnp.int32), tokens.shape[0], causal=True)
    _, hidden, _ = forward(params, config, tokens, positions, rows, kv_cache.create(config, 1, 1))
    return logits(params, jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1))
