"""Which drafts survive. Two rules, both exact.

*Coupled* (the default), for chains and any tree: the target's token after every row is known (`sampling.choose`), and a draft is accepted
iff it is that token and its parent was accepted. Siblings are distinct, so what is accepted is one path, and the row at its end gives the
bonus token. The text is a function of prompt and seed alone.

*Rejection* (Leviathan et al. 2023; Chen et al. 2023), for chains: a draft x drawn from q is accepted with probability min(1, p(x)/q(x)),
the first rejected one is replaced by a token drawn from max(p - q, 0), normalized. The text has the target's distribution, but depends on
what was drafted. Exact only if every choice of what is verified was made before it was drawn: `known_before`.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax import noise
from angelspec_jax.decoding.sampling import Sampling
from angelspec_jax.drafter.types import Draft, OneHot, Sparse

RULES = ("coupled", "rejection")
NO_RESIDUAL = 1e-8  # mass of max(p - q, 0) below which p and q are the same but for rounding


@struct.dataclass
class Accepted:
    """The accepted path of every request: `path[r, :count[r] + 1]` are its rows (row 0, the anchor, first); None says row = depth."""

    count: Int[Array, "R"]  # accepted drafts
    tokens: Int[Array, "R W"]  # what each path row emits: the accepted drafts, then the bonus token
    path: Int[Array, "R W"] | None = None  # row at each depth; rows past `count` mean nothing


def accept(draft: Draft | None, chosen: Int[Array, "R W"], verified: Bool[Array, "R K"] | None = None) -> Accepted:
    """Walk the draft with the target's choices. `chosen[r, 1 + k]` is the target's token after draft k, `chosen[r, 0]` after the anchor.

    Drafts that are not `verified` are never accepted.
    """
    requests, width = chosen.shape
    if draft is None or width == 1:
        return Accepted(jnp.zeros((requests,), jnp.int32), chosen[:, :1])
    tokens = draft.tokens[:, : width - 1]
    if verified is None:
        verified = jnp.ones(tokens.shape, bool)
    if draft.parents is None:
        alive = jnp.cumprod(((tokens == chosen[:, :-1]) & verified).astype(jnp.int32), axis=1)
        return Accepted(jnp.sum(alive, axis=1), chosen)
    parents = draft.parents[:, : width - 1]
    wanted = jnp.take_along_axis(chosen, parents + 1, axis=1)
    return _walk((tokens == wanted) & verified, parents, chosen)


def _walk(matches: Bool[Array, "R K"], parents: Int[Array, "R K"], chosen: Int[Array, "R W"]) -> Accepted:
    """Follow, from the anchor, the one child that matches."""
    requests, width = chosen.shape
    row = jnp.zeros((requests,), jnp.int32)
    going = jnp.ones((requests,), bool)
    path, count = [row], jnp.zeros((requests,), jnp.int32)
    for _ in range(width - 1):
        child = matches & (parents == (row - 1)[:, None])
        going = going & jnp.any(child, axis=1)
        row = jnp.where(going, jnp.argmax(child, axis=1).astype(jnp.int32) + 1, row)
        count = count + going.astype(jnp.int32)
        path.append(row)
    path = jnp.stack(path, axis=1)
    return Accepted(count, jnp.take_along_axis(chosen, path, axis=1), path)


def accept_by_ratio(
    draft: Draft | None,
    scores: Float[Array, "R W V"],
    options: Sampling,
    prefix_length: Int[Array, "R"],
    verified: Bool[Array, "R K"] | None = None,
) -> Accepted:
    """The rejection rule for a chain, from the target's transformed scores after every row; `prefix_length` is where the anchor stands.

    The drafts must have been drawn from `draft.q` with noise that is used for nothing else (`noise.reseed`). Greedy requests have all of p
    on the best token.
    """
    width, vocabulary = scores.shape[1:]
    offsets = jnp.arange(1, width + 1, dtype=jnp.int32)[None]
    if draft is None or width == 1:
        none = jnp.zeros_like(prefix_length)
        return Accepted(none, _sample(scores[:, 0], options, prefix_length + 1, none == 1)[:, None])
    if draft.parents is not None:
        raise ValueError("the rejection rule verifies chains; trees take the coupled rule")
    tokens = draft.tokens[:, : width - 1]
    verified = jnp.ones(tokens.shape, bool) if verified is None else verified[:, : width - 1]
    p = _probability(scores[:, :-1], tokens, options)
    q = _drawn_with(draft.q, tokens)
    positions = prefix_length[:, None] + offsets[:, :-1]
    seeds = jnp.broadcast_to(options.seeds[:, None], positions.shape)
    judge = noise.uniform(seeds, positions, jnp.zeros((*positions.shape, 1), jnp.int32), noise.ACCEPT)[..., 0]
    count = count_accepted(p, q, judge, verified)

    row = jnp.take_along_axis(scores, count[:, None, None], axis=1)[:, 0]
    rejected = jnp.any((offsets[:, :-1] == count[:, None] + 1) & verified, axis=1)
    target = _point_or_softmax(row, options)
    left = residual(target, _dense(draft, count, vocabulary), rejected)
    last = _sample(jnp.log(left), options, prefix_length + 1 + count, rejected)
    said = jnp.concatenate([tokens, last[:, None]], axis=1)
    return Accepted(count, jnp.where(offsets == count[:, None] + 1, last[:, None], said))


def count_accepted(
    p: Float[Array, "R K"], q: Float[Array, "R K"], judge: Float[Array, "R K"], verified: Bool[Array, "R K"]
) -> Int[Array, "R"]:
    """How many drafts of a chain are accepted: while u q < p. Strict, so that a token of zero probability never is, whatever u."""
    return jnp.sum(jnp.cumprod(((judge * q < p) & verified).astype(jnp.int32), axis=1), axis=1)


def residual(p: Float[Array, "R V"], q: Float[Array, "R V"], rejected: Bool[Array, "R"]) -> Float[Array, "R V"]:
    """What the token after the accepted drafts is drawn from, not normalized: p, less q where a draft of q was rejected."""
    left = jnp.maximum(p - q, 0.0)
    usable = rejected & (jnp.sum(left, axis=-1) > NO_RESIDUAL)
    return jnp.where(usable[:, None], left, p)


def known_before(draft: Draft) -> Float[Array, "R K"]:
    """Survival of a chain's drafts as known before each is drawn: the likeliest token's probability takes the place of the drawn one's.

    Draft k may be verified or not by entries up to k, and by nothing later (DSpark, arXiv 2607.05147, appendix A). Drafts that were not
    made keep 0.
    """
    if isinstance(draft.q, OneHot):
        return draft.survival  # nothing was drawn
    return jnp.where(draft.survival > 0, jnp.cumprod(jnp.max(draft.q.p, axis=-1), axis=1), 0.0)


def _probability(scores: Float[Array, "R K V"], tokens: Int[Array, "R K"], options: Sampling) -> Float[Array, "R K"]:
    found = jnp.take_along_axis(scores, tokens[..., None], axis=2)[..., 0]
    soft = jnp.exp(found - jax.nn.logsumexp(scores, axis=-1))
    best = (tokens == jnp.argmax(scores, axis=-1)).astype(jnp.float32)
    return jnp.where((options.temperature > 0)[:, None], soft, best)


def _point_or_softmax(scores: Float[Array, "R V"], options: Sampling) -> Float[Array, "R V"]:
    best = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=jnp.float32)
    return jnp.where((options.temperature > 0)[:, None], jax.nn.softmax(scores, axis=-1), best)


def _drawn_with(q: OneHot | Sparse, tokens: Int[Array, "R K"]) -> Float[Array, "R K"]:
    if isinstance(q, OneHot):
        return jnp.ones(tokens.shape, jnp.float32)
    depth = tokens.shape[1]
    return jnp.sum(jnp.where(q.ids[:, :depth] == tokens[..., None], q.p[:, :depth], 0.0), axis=-1)


def _dense(draft: Draft, index: Int[Array, "R"], vocabulary: int) -> Float[Array, "R V"]:
    """Distribution over the vocabulary that the draft with this index was drawn from; zeros past the last draft."""
    pick = lambda x: jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1, mode="clip")[:, 0]  # noqa: E731
    if isinstance(draft.q, OneHot):
        return jax.nn.one_hot(pick(draft.tokens), vocabulary, dtype=jnp.float32)
    slots = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((index.shape[0], vocabulary), jnp.float32).at[slots, pick(draft.q.ids)].add(pick(draft.q.p), mode="drop")


def _sample(scores: Float[Array, "R V"], options: Sampling, positions: Int[Array, "R"], rejected: Bool[Array, "R"]) -> Int[Array, "R"]:
    """Draw from scores with the noise of a residual or of a bonus token; greedy requests take the best."""
    draws = [noise.gumbel_all(options.seeds, positions, scores.shape[-1], role) for role in (noise.RESIDUAL, noise.BONUS)]
    drawn = jnp.where((options.temperature > 0)[:, None], jnp.where(rejected[:, None], *draws), 0.0)
    return jnp.argmax(scores + drawn, axis=-1).astype(jnp.int32)
