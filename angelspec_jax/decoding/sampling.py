"""From logits to the target's token: one transform and one choice, for plain and speculative decoding alike.

Coupled sampling (Daliri et al. 2024, drafter-invariant speculative decoding): the token at a position is the argmax of the transformed
log-probabilities plus Gumbel noise, which depends on the request's seed and the position alone. The text is then a function of prompt and
seed, whatever was drafted.

The transform is, in this order: bias, penalties, temperature, top-k, top-p, min-p. Penalties depend on the text before a token, so a row
that stands behind drafts counts the drafts on its path as text.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from angelspec_jax import noise
from angelspec_jax.highest import at_least_kth, ordered, threshold

NOWHERE = np.iinfo(np.int32).max  # the id of a bias that is not there
MOST_BIASES = 4096


@struct.dataclass
class Sampling:
    """Per-request sampling options. Temperature 0 is greedy; off are top_k 0, top_p 1, min_p 0, repetition 1, frequency and presence 0."""

    seeds: UInt32[Array, "R"]
    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    repetition: Float[Array, "R"]  # divides positive logits of tokens in prompt and text, multiplies negative ones
    frequency: Float[Array, "R"]  # subtracted from a token's logit for each time it was generated
    presence: Float[Array, "R"]  # subtracted once when it was generated
    bias_ids: Int[Array, "R biases"]  # tokens whose logits get something added; NOWHERE fills up
    bias: Float[Array, "R biases"]

    def rows(self, request: Int[Array, "N"]) -> "Sampling":
        """The options of each packed row."""
        return jax.tree.map(lambda option: option[request], self)


@struct.dataclass
class Text:
    """What penalties count before each of N rows: the text of its request, and the drafts of its path."""

    tokens: Int[Array, "R S"]
    length: Int[Array, "R"]  # tokens known, the anchor included
    prompt_length: Int[Array, "R"]
    drafts: Int[Array, "R K"]
    request: Int[Array, "N"]
    ancestors: UInt32[Array, "N 2"]  # bit 1 + k: the row stands behind draft k, or is it (`target.attention.Rows`)


Bias = Mapping[int, float]  # token id -> what is added to its logit


def make_sampling(
    requests: int,
    *,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    repetition=1.0,
    frequency=0.0,
    presence=0.0,
    bias=None,
    bias_slots=None,
) -> Sampling:
    """Sampling options for a batch from scalars or one value per request; request r of a scalar seed s uses seed s + r.

    `bias` maps token ids to what is added to their logits, -inf forbids a token; one mapping for all or one per request. `bias_slots` fixes
    how many ids a request can have, a static shape; by default the power of two that fits. Raises ValueError naming the option that is out
    of range.
    """

    def spread(name, value, dtype, low, high):
        array = np.broadcast_to(np.asarray(value, dtype), (requests,))
        if not (np.isfinite(array).all() and (array >= low).all() and (array <= high).all()):
            raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        return array

    seeds = np.asarray(seed, np.int64)
    seeds = seeds + np.arange(requests) if seeds.ndim == 0 else np.broadcast_to(seeds, (requests,))
    bias_ids, biases = _biases(requests, bias, bias_slots)
    return Sampling(
        seeds=jnp.asarray(seeds.astype(np.uint32)),
        temperature=jnp.asarray(spread("temperature", temperature, np.float32, 0.0, 100.0)),
        top_k=jnp.asarray(spread("top_k", top_k, np.int32, 0, 2**31 - 1)),
        top_p=jnp.asarray(spread("top_p", top_p, np.float32, 0.0, 1.0)),
        min_p=jnp.asarray(spread("min_p", min_p, np.float32, 0.0, 1.0)),
        repetition=jnp.asarray(spread("repetition", repetition, np.float32, 0.01, 100.0)),
        frequency=jnp.asarray(spread("frequency", frequency, np.float32, -100.0, 100.0)),
        presence=jnp.asarray(spread("presence", presence, np.float32, -100.0, 100.0)),
        bias_ids=jnp.asarray(bias_ids),
        bias=jnp.asarray(biases),
    )


def check_bias(bias: Bias | Sequence[Bias | None] | None, vocabulary: int) -> None:
    """Raise ValueError for a biased token id outside the vocabulary."""
    for entry in [bias] if isinstance(bias, Mapping) else bias or []:
        for token in entry or {}:
            if not 0 <= token < vocabulary:
                raise ValueError(f"bias names token id {token}, outside the vocabulary of {vocabulary} tokens")


def _biases(requests: int, bias, slots: int | None) -> tuple[np.ndarray, np.ndarray]:
    entries = [bias or {}] * requests if bias is None or isinstance(bias, Mapping) else [entry or {} for entry in bias]
    if len(entries) != requests:
        raise ValueError(f"bias must be one mapping or one for each of the {requests} requests, got {len(entries)}")
    most = max((len(entry) for entry in entries), default=0)
    if slots is None:
        slots = 1 << (most - 1).bit_length() if most else 0
    if most > min(slots, MOST_BIASES):
        raise ValueError(f"bias names {most} tokens; at most {min(slots, MOST_BIASES)} are possible here")
    ids, values = np.full((requests, slots), NOWHERE, np.int32), np.zeros((requests, slots), np.float32)
    for row, entry in enumerate(entries):
        for column, (token, value) in enumerate(entry.items()):
            if not (np.isfinite(value) or value == -np.inf):
                raise ValueError(f"bias of token {token} must be a number or -inf, got {value}")
            ids[row, column], values[row, column] = token, value
    return ids, values


def choose(
    logits: Float[Array, "N V"], options: Sampling, positions: Int[Array, "N"], text: Text | None = None
) -> Int[Array, "N"]:
    """The target's token for each row; `positions` are where the chosen tokens will stand, `options` one entry per row.

    Without a `text` nothing is penalized.
    """
    logits = adjust(logits, options, text)

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def coupled():
        perturbed = perturb(cut(logits, options), options, positions)
        return jnp.argmax(perturbed, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(options.temperature > 0), coupled, greedy)


def perturb(scores: Float[Array, "N V"], options: Sampling, positions: Int[Array, "N"], role: int = noise.SHARED) -> Float[Array, "N V"]:
    """Transformed scores plus the noise of a role; greedy rows stay as they are."""
    gumbel = noise.gumbel_all(options.seeds, positions, scores.shape[-1], role)
    return scores + jnp.where((options.temperature > 0)[:, None], gumbel, 0.0)


def transform(logits: Float[Array, "N V"], options: Sampling, text: Text | None = None) -> Float[Array, "N V"]:
    """The whole transform; removed tokens become -inf. Without a `text` nothing is penalized."""
    return cut(adjust(logits, options, text), options)


def adjust(logits: Float[Array, "N V"], options: Sampling, text: Text | None = None) -> Float[Array, "N V"]:
    """Bias, then penalties: repetition, frequency, presence. They hold for greedy rows too."""
    logits = logits.astype(jnp.float32)
    if options.bias.shape[1]:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        biased = lambda: logits.at[rows, options.bias_ids].add(options.bias, mode="drop")  # noqa: E731
        logits = jax.lax.cond(jnp.any(options.bias != 0), biased, lambda: logits)
    if text is None:
        return logits
    penalized = (options.repetition != 1) | (options.frequency != 0) | (options.presence != 0)
    return jax.lax.cond(jnp.any(penalized), lambda: _penalize(logits, options, text), lambda: logits)


def _penalize(logits: Float[Array, "N V"], options: Sampling, text: Text) -> Float[Array, "N V"]:
    prompt, said = _counts(text, logits.shape[-1])
    seen = (prompt + said) > 0
    said = said.astype(jnp.float32)
    factor = options.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - options.frequency[:, None] * said - options.presence[:, None] * jnp.minimum(said, 1.0)


def _counts(text: Text, vocabulary: int) -> tuple[Int[Array, "N V"], Int[Array, "N V"]]:
    """How often each token stands in the prompt of a row, and in what was said after it, drafts on the row's path included."""
    requests, drafts = text.drafts.shape
    columns = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    slots = jnp.arange(requests, dtype=jnp.int32)[:, None]

    def count(which):
        zeros = jnp.zeros((requests, vocabulary), jnp.int32)
        return zeros.at[slots, text.tokens].add(which.astype(jnp.int32), mode="drop")[text.request]

    prompt = count(columns < text.prompt_length[:, None])
    said = count((columns >= text.prompt_length[:, None]) & (columns < text.length[:, None]))
    if drafts:
        bit = jnp.arange(1, drafts + 1, dtype=jnp.int32)
        behind = (text.ancestors[:, bit // 32] >> (bit % 32).astype(jnp.uint32)[None]) & jnp.uint32(1)
        rows = jnp.arange(text.request.shape[0], dtype=jnp.int32)[:, None]
        said = said.at[rows, text.drafts[text.request]].add(behind.astype(jnp.int32), mode="drop")
    return prompt, said


def cut(logits: Float[Array, "N V"], options: Sampling) -> Float[Array, "N V"]:
    """Temperature, then top-k, top-p and min-p; removed tokens become -inf. Greedy rows are returned unchanged.

    Nothing sorts the vocabulary: the thresholds are found bit by bit on the ordered integer image of float32. Ties at a threshold stay.
    """
    hot = (options.temperature > 0)[:, None]
    scores = logits.astype(jnp.float32) / jnp.where(hot, options.temperature[:, None], 1.0)

    def drop(keep):
        return lambda: jnp.where(keep() | ~hot, scores, -jnp.inf)

    limited = hot & (options.top_k > 0)[:, None]
    scores = jax.lax.cond(jnp.any(limited), drop(lambda: ~limited | at_least_kth(scores, options.top_k)), lambda: scores)
    nucleus = hot & (options.top_p < 1)[:, None]
    scores = jax.lax.cond(jnp.any(nucleus), drop(lambda: ~nucleus | _top_p(scores, options.top_p)), lambda: scores)
    floor = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(options.min_p)[:, None]
    return jnp.where(hot & (scores < floor), -jnp.inf, scores)


def log_probability(logits: Float[Array, "*N V"], tokens: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """The model's own log-probability of a token after each row: at temperature 1, before the transform."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _top_p(scores: Float[Array, "N V"], p: Float[Array, "N"]) -> Bool[Array, "N V"]:
    """The smallest set of most likely tokens whose mass reaches p (always the most likely token)."""
    images = ordered(scores)
    mass = jax.nn.softmax(scores, axis=-1)
    enough = threshold(images, lambda above: jnp.sum(jnp.where(above, mass, 0.0), axis=-1) >= p)
    top = jnp.max(images, axis=-1)
    return images >= jnp.minimum(enough, top)[:, None]
