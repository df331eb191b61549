"""How a drafter draws a token from its scores: greedily, or with the noise that decoding hands it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from angelspec_jax import noise as noise_lib
from angelspec_jax.drafter.types import Noise
from angelspec_jax.highest import highest


def shortlist(scores: Float[Array, "*N V"], size: int) -> tuple[Float[Array, "*N M"], Int[Array, "*N M"]]:
    """The `size` highest scores of each row and where they stand, best first; all of them, in place, for size 0 or a small vocabulary."""
    if size == 0 or size >= scores.shape[-1]:
        return scores, jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
    return highest(scores, size)


def top_margin(scores: Float[Array, "R M"]) -> Float[Array, "R"]:
    """How far the best score lies above the second; infinite with one candidate."""
    best = jnp.argmax(scores, axis=-1)
    rest = jnp.where(jnp.arange(scores.shape[-1])[None] == best[:, None], -jnp.inf, scores)
    return jnp.max(scores, axis=-1) - jnp.max(rest, axis=-1)


def draw(
    scores: Float[Array, "R M"], ids: Int[Array, "R M"], positions: Int[Array, "R"], noise: Noise | None
) -> tuple[Int[Array, "R"], Float[Array, "R M"], Float[Array, "R"]]:
    """Index of the drawn candidate, the distribution it was drawn from, and the drafter's own probability of it at temperature 1.

    `ids` are the candidates' token ids in the target's vocabulary, `positions` where the token will stand; `noise=None` is greedy.
    """
    plain = jax.nn.softmax(scores, axis=-1)
    if noise is None:
        choice, p = jnp.argmax(scores, axis=-1), plain
    else:
        hot = (noise.temperature > 0)[:, None]
        scaled = scores / jnp.where(hot, noise.temperature[:, None], 1.0)
        perturbed = scaled + jnp.where(hot, noise_lib.gumbel(noise.seeds, positions, ids), 0.0)
        choice = jnp.argmax(perturbed, axis=-1)
        greedy = jax.nn.one_hot(choice, scores.shape[-1], dtype=jnp.float32)
        p = jnp.where(hot, jax.nn.softmax(scaled, axis=-1), greedy)
    confidence = jnp.take_along_axis(plain, choice[:, None], axis=1)[:, 0]
    return choice.astype(jnp.int32), p, confidence
