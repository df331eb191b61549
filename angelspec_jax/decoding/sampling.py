"""From logits to the target's token: one transform and one choice, for plain and speculative decoding alike.

Coupled sampling (Daliri et al. 2024, drafter-invariant speculative decoding): the token at a position is the argmax of the transformed
log-probabilities plus Gumbel noise, which depends on the request's seed and the position alone. The text is then a function of prompt and
seed, whatever was drafted.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from angelspec_jax import noise


@struct.dataclass
class Sampling:
    """Per-request sampling options. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    seeds: UInt32[Array, "R"]
    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]

    def rows(self, request: Int[Array, "N"]) -> "Sampling":
        """The options of each packed row."""
        return jax.tree.map(lambda option: option[request], self)


def make_sampling(requests: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0) -> Sampling:
    """Sampling options for a batch from scalars or one value per request; request r of a scalar seed s uses seed s + r.

    Raises ValueError naming the option that is out of range.
    """

    def spread(name, value, dtype, low, high):
        array = np.broadcast_to(np.asarray(value, dtype), (requests,))
        if not (np.isfinite(array).all() and (array >= low).all() and (array <= high).all()):
            raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        return array

    seeds = np.asarray(seed, np.int64)
    seeds = seeds + np.arange(requests) if seeds.ndim == 0 else np.broadcast_to(seeds, (requests,))
    return Sampling(
        seeds=jnp.asarray(seeds.astype(np.uint32)),
        temperature=jnp.asarray(spread("temperature", temperature, np.float32, 0.0, 100.0)),
        top_k=jnp.asarray(spread("top_k", top_k, np.int32, 0, 2**31 - 1)),
        top_p=jnp.asarray(spread("top_p", top_p, np.float32, 0.0, 1.0)),
        min_p=jnp.asarray(spread("min_p", min_p, np.float32, 0.0, 1.0)),
    )


def choose(logits: Float[Array, "N V"], options: Sampling, positions: Int[Array, "N"]) -> Int[Array, "N"]:
    """The target's token for each row; `positions` are where the chosen tokens will stand, `options` one entry per row."""

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def coupled():
        perturbed = perturb(transform(logits, options), options, positions)
        return jnp.argmax(perturbed, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(options.temperature > 0), coupled, greedy)


def perturb(scores: Float[Array, "N V"], options: Sampling, positions: Int[Array, "N"]) -> Float[Array, "N V"]:
    """Transformed scores plus the shared noise; greedy rows stay as they are."""
    gumbel = noise.gumbel_all(options.seeds, positions, scores.shape[-1])
    return scores + jnp.where((options.temperature > 0)[:, None], gumbel, 0.0)


def transform(logits: Float[Array, "N V"], options: Sampling) -> Float[Array, "N V"]:
    """Temperature, then top-k, top-p and min-p; removed tokens become -inf. Greedy rows are returned unchanged.

    Nothing sorts the vocabulary: the thresholds are found bit by bit on the ordered integer image of float32. Ties at a threshold stay.
    """
    hot = (options.temperature > 0)[:, None]
    scores = logits.astype(jnp.float32) / jnp.where(hot, options.temperature[:, None], 1.0)

    def cut(keep):
        return lambda: jnp.where(keep() | ~hot, scores, -jnp.inf)

    limited = hot & (options.top_k > 0)[:, None]
    scores = jax.lax.cond(jnp.any(limited), cut(lambda: ~limited | _top_k(scores, options.top_k)), lambda: scores)
    nucleus = hot & (options.top_p < 1)[:, None]
    scores = jax.lax.cond(jnp.any(nucleus), cut(lambda: ~nucleus | _top_p(scores, options.top_p)), lambda: scores)
    floor = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(options.min_p)[:, None]
    return jnp.where(hot & (scores < floor), -jnp.inf, scores)


def _top_k(scores: Float[Array, "N V"], k: Int[Array, "N"]) -> Bool[Array, "N V"]:
    """Tokens at or above the k-th highest score."""
    ordered = _ordered(scores)
    wanted = jnp.minimum(jnp.maximum(k, 1), scores.shape[-1])
    return ordered >= _threshold(ordered, lambda above: jnp.sum(above, axis=-1, dtype=jnp.int32) >= wanted)[:, None]


def _top_p(scores: Float[Array, "N V"], p: Float[Array, "N"]) -> Bool[Array, "N V"]:
    """The smallest set of most likely tokens whose mass reaches p (always the most likely token)."""
    ordered = _ordered(scores)
    mass = jax.nn.softmax(scores, axis=-1)
    enough = _threshold(ordered, lambda above: jnp.sum(jnp.where(above, mass, 0.0), axis=-1) >= p)
    top = jnp.max(ordered, axis=-1)
    return ordered >= jnp.minimum(enough, top)[:, None]


def _threshold(ordered: UInt32[Array, "N V"], enough) -> UInt32[Array, "N"]:
    """Largest threshold t, per row, for which the tokens with `ordered >= t` are enough."""

    def bit(index, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(enough(ordered >= candidate[:, None]), candidate, threshold)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(ordered.shape[0], jnp.uint32))


def _ordered(scores: Float[Array, "N V"]) -> UInt32[Array, "N V"]:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    negative = (bits >> 31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))
