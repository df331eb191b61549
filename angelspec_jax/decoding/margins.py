"""Survival estimated while serving: a logistic regression, per depth, on the margin between a draft's two best logits.

The margin is known before the draft is drawn, and whether drafts of that margin were accepted is seen in every round. Gradient and Fisher
information are collected over `EVERY` rounds with the estimates in force; then each depth takes one Newton step, if it saw enough (the
estimator of vLLM's adaptive verification).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

LARGEST = 40.0  # margins are cut off here
EVERY = 100  # rounds between two fits
LEARNING = 3  # fits before the estimates are used
ENOUGH = 50  # trials of a depth
RIDGE = 1e-3
FURTHEST = 6.0  # offsets stay within plus and minus this, so that an estimate of almost 0 or 1 can be unlearned


@struct.dataclass
class Margins:
    slope: Float[Array, "K"]
    offset: Float[Array, "K"]
    gradient: Float[Array, "K 2"]
    information: Float[Array, "K 3"]  # of (slope, slope), (slope, offset), (offset, offset)
    trials: Int[Array, "K"]
    rounds: Int[Array, ""]  # since the last fit
    refits: Int[Array, ""]


def create(depth: int) -> Margins:
    return Margins(
        slope=jnp.zeros((depth,), jnp.float32),
        offset=jnp.full((depth,), 1.5, jnp.float32),
        gradient=jnp.zeros((depth, 2), jnp.float32),
        information=jnp.zeros((depth, 3), jnp.float32),
        trials=jnp.zeros((depth,), jnp.int32),
        rounds=jnp.int32(0),
        refits=jnp.int32(0),
    )


def survival(
    fitted: Margins, margin: Float[Array, "R K"], parents: Int[Array, "R K"] | None, depth: Int[Array, "R K"]
) -> Float[Array, "R K"]:
    """Probability that a draft and all its ancestors are accepted."""
    chance = _chance(fitted, margin, depth)
    if parents is None:
        return jnp.cumprod(chance, axis=1)
    whole = chance
    for node in range(chance.shape[1]):  # parents come first
        parent = parents[:, node]
        above = jnp.take_along_axis(whole, jnp.maximum(parent, 0)[:, None], axis=1)[:, 0]
        whole = whole.at[:, node].set(chance[:, node] * jnp.where(parent < 0, 1.0, above))
    return whole


def observe(
    fitted: Margins,
    margin: Float[Array, "R K"],
    depth: Int[Array, "R K"],
    tried: Bool[Array, "R K"],
    accepted: Bool[Array, "R K"],
) -> Margins:
    """Take in a round: `tried` drafts were verified after an accepted parent. Fits when it is time."""
    chance = _chance(fitted, margin, depth)
    clipped = jnp.minimum(margin, LARGEST)
    inputs = jnp.stack([clipped, jnp.ones_like(clipped)], axis=-1)
    weight = tried.astype(jnp.float32)
    error = weight * (accepted.astype(jnp.float32) - chance)
    spread = weight * chance * (1.0 - chance)
    products = jnp.stack([clipped * clipped, clipped, jnp.ones_like(clipped)], axis=-1)
    levels = jnp.where(tried, depth, fitted.trials.shape[0])  # out of bounds: dropped
    fitted = Margins(
        slope=fitted.slope,
        offset=fitted.offset,
        gradient=fitted.gradient.at[levels].add(error[..., None] * inputs, mode="drop"),
        information=fitted.information.at[levels].add(spread[..., None] * products, mode="drop"),
        trials=fitted.trials.at[levels].add(1, mode="drop"),
        rounds=fitted.rounds + jnp.any(tried).astype(jnp.int32),
        refits=fitted.refits,
    )
    return jax.lax.cond(fitted.rounds >= EVERY, _fit, lambda same: same, fitted)


def _chance(fitted: Margins, margin, depth):
    return jax.nn.sigmoid(fitted.slope[depth] * jnp.minimum(margin, LARGEST) + fitted.offset[depth])


def _fit(fitted: Margins) -> Margins:
    """One Newton step of every depth that saw enough; a step that makes no sense is not taken.

    A larger margin never counts against a draft: where the step would make the slope negative, as it does when nothing was accepted, the
    slope becomes 0 and the offset alone is fitted.
    """
    a, b, c = (fitted.information[:, i] + (RIDGE if i != 1 else 0.0) for i in range(3))
    determinant = a * c - b * b
    safe = jnp.where(jnp.abs(determinant) > 1e-12, determinant, 1.0)
    up, down = fitted.gradient[:, 0], fitted.gradient[:, 1]
    slope = fitted.slope + (c * up - b * down) / safe
    flat = slope < 0
    offset = jnp.where(flat, fitted.offset + (down + b * fitted.slope) / c, fitted.offset + (a * down - b * up) / safe)
    slope, offset = jnp.where(flat, 0.0, slope), jnp.clip(offset, -FURTHEST, FURTHEST)
    good = (fitted.trials >= ENOUGH) & (jnp.abs(determinant) > 1e-12) & jnp.isfinite(slope) & jnp.isfinite(offset)
    fresh = create(fitted.trials.shape[0])
    return Margins(
        slope=jnp.where(good, slope, fitted.slope),
        offset=jnp.where(good, offset, fitted.offset),
        gradient=fresh.gradient,
        information=fresh.information,
        trials=fresh.trials,
        rounds=fresh.rounds,
        refits=fitted.refits + 1,
    )
