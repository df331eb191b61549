"""N-gram lookup: copy what followed when the text last stood at the same words (prompt lookup decoding; no weights, no training).

The longest suffix of a request's text that occurs earlier in it is found on the device, the latest occurrence among equals. Where the copy
would run past the end of the text it goes round: text that repeats itself is continued with its own period.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen
from angelspec_jax.drafter.untrained import LookupConfig


def drafter_specs(config: LookupConfig) -> None:
    """There are no parameters."""


def create_state(config: LookupConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> None:
    """There is no memory: the text is in `Seen`."""


def extend(params, config, shared, features, hidden, next_tokens, request, positions, accepted, state) -> None:
    """Nothing is digested."""


def draft(params, config: LookupConfig, shared, seen: Seen, state, noise: Noise | None, policy: DraftPolicy) -> Draft:
    """Propose the continuation of the longest match; a request without one gets drafts of survival 0."""
    with jax.named_scope("draft_lookup"):
        matched = match_lengths(seen.tokens, seen.prefix_length, config.longest_match)
        columns = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)
        place = _longest(matched, columns)
        length = jnp.take_along_axis(matched, place[:, None], axis=1)[:, 0]
        period = jnp.maximum(seen.prefix_length - place, 1)
        steps = jnp.arange(config.num_drafts, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(seen.tokens, place[:, None] + 1 + steps % period[:, None], axis=1, mode="clip")
        # An accepted draft makes the match one token longer.
        reached = jnp.minimum(length[:, None] + steps, config.longest_match)
        survival = jnp.cumprod(jnp.asarray(config.acceptance, jnp.float32)[reached], axis=1)
        survival = jnp.where((length > 0)[:, None], survival, 0.0)
        return Draft(tokens, OneHot(), jnp.where(survival >= policy.min_survival, survival, 0.0))


def match_lengths(tokens: Int[Array, "R S"], last: Int[Array, "R"], longest: int) -> Int[Array, "R S"]:
    """How many tokens up to column s equal those up to column `last`, at most `longest`; 0 from `last` on."""
    width = tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    count = jnp.zeros(tokens.shape, jnp.int32)
    alive = columns < last[:, None]
    for back in range(longest):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)
        # Columns before `back` would compare with what stands before the text.
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :width]
        alive = alive & (earlier == suffix) & (columns >= back)
        count = count + alive.astype(jnp.int32)
    return count


def _longest(matched: Int[Array, "R S"], columns: Int[Array, "S"]) -> Int[Array, "R"]:
    """Column of the longest match, the latest among equals."""
    best = jnp.max(matched, axis=1, keepdims=True)
    return jnp.max(jnp.where(matched == best, columns[None], -1), axis=1)
