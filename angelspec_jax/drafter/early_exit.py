"""Early-exit self-speculation: the target's first layers, its final norm and its head say the next token (LayerSkip, arXiv 2404.16710).

No weights of its own and no memory: the first layers' keys and values of the committed text are in the target's cache already. The rows of
a draft stay in flight; the target verifies them from its first layer on.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from angelspec_jax.drafter.drawing import draw, shortlist, top_margin
from angelspec_jax.drafter.lanes import extend_paths
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen, Shared, Sparse
from angelspec_jax.drafter.untrained import EarlyExitConfig
from angelspec_jax.target.attention import MAX_TREE_ROWS, attend, chain_ancestors, uniform_rows
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.layers import decoder_layer, rms_norm, rotation
from angelspec_jax.target.transformer import TargetParams, layer_at


@struct.dataclass
class Flight:
    """Rows the cache does not hold, F a request: each layer's keys and values, where they stand and whom they see."""

    k: tuple[Float[Array, "R F G E"], ...]
    v: tuple[Float[Array, "R F G E"], ...]
    positions: Int[Array, "R F"]
    ancestors: UInt32[Array, "R F 2"]


def drafter_specs(config: EarlyExitConfig) -> None:
    """There are no parameters beside the target's."""


def create_state(config: EarlyExitConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> None:
    """There is no memory beside the target's cache."""


def extend(params, config, shared, features, hidden, next_tokens, request, positions, accepted, state) -> None:
    """Nothing is digested."""


def draft(params, config: EarlyExitConfig, shared: Shared, seen: Seen, state, noise: Noise | None, policy: DraftPolicy) -> Draft:
    """Draw a chain after each request's anchor, until no chain survives with `policy.min_survival`."""
    target, cache = _borrowed(seen)
    requests, depth = seen.anchor.shape[0], config.num_drafts
    positions = seen.prefix_length[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]
    ancestors = jnp.broadcast_to(chain_ancestors(depth)[None], (requests, depth, 2))
    flight = _empty(config, target, positions, ancestors)
    size = min(policy.candidates, shared.head.shape[0]) or shared.head.shape[0]

    def step(carry):
        k, previous, survival, flight, tokens, ids, probabilities, survivals, margins = carry
        logits, flight = _advance(target, config, shared, cache, seen.prefix_length, flight, k, previous[:, None])
        scores, candidates = shortlist(logits[:, 0], policy.candidates)
        choice, p, confidence = draw(scores, candidates, seen.prefix_length + k + 1, noise)
        token = jnp.take_along_axis(candidates, choice[:, None], axis=1)[:, 0]
        survival = survival * confidence
        said = (
            _put(tokens, token, k), _put(ids, candidates, k), _put(probabilities, p, k), _put(survivals, survival, k),
            _put(margins, top_margin(scores), k),
        )  # fmt: skip
        return k + 1, token, survival, flight, *said

    def worthwhile(carry):
        k, _, survival, *_ = carry
        return (k < depth) & (jnp.max(survival) >= policy.min_survival)

    start = (
        jnp.int32(0),
        seen.anchor,
        jnp.ones(requests, jnp.float32),
        flight,
        jnp.zeros((requests, depth), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
    )
    with jax.named_scope("draft_early_exit"):
        *_, tokens, ids, probabilities, survivals, margins = jax.lax.while_loop(worthwhile, step, start)
    return Draft(tokens, OneHot() if noise is None else Sparse(ids, probabilities), survivals, margin=margins)


def tree_lanes(config: EarlyExitConfig) -> int:
    """Lanes of every level are in flight together."""
    return max(MAX_TREE_ROWS // config.num_drafts, 1)


def start_tree(params, config: EarlyExitConfig, shared: Shared, seen: Seen, state, policy: DraftPolicy, lanes: int) -> tuple[None, Flight]:
    """A flight with a column for every lane of every level."""
    target, _ = _borrowed(seen)
    columns = jnp.arange(config.num_drafts * lanes, dtype=jnp.int32)[None]
    positions = seen.prefix_length[:, None] + columns // lanes
    return None, _empty(config, target, positions, jnp.zeros((*positions.shape, 2), jnp.uint32))


def expand(
    params, config: EarlyExitConfig, shared: Shared, seen: Seen, state, fixed: None, memory: Flight, depth, tokens, origin, policy
) -> tuple[Int[Array, "R W M"], Float[Array, "R W M"], Flight]:
    """One pass over the lanes, each seeing its own path."""
    target, cache = _borrowed(seen)
    column = depth * tokens.shape[1]
    flight = dataclasses.replace(memory, ancestors=extend_paths(memory.ancestors, depth, origin))
    logits, flight = _advance(target, config, shared, cache, seen.prefix_length, flight, column, tokens)
    scores, ids = shortlist(logits, policy.candidates)
    return ids, scores, flight


def _advance(
    target: TargetParams,
    config: EarlyExitConfig,
    shared: Shared,
    cache: KVCache,
    prefix_length: Int[Array, "R"],
    flight: Flight,
    column: Int[Array, ""],
    tokens: Int[Array, "R W"],
) -> tuple[Float[Array, "R W V"], Flight]:
    """Logits after the W rows from `column` on, and the flight with them; rows behind them are seen by nobody yet."""
    requests, width = tokens.shape
    full = flight.positions.shape[1]
    model = config.transformer
    rows = dataclasses.replace(uniform_rows(prefix_length, full), ancestors=_packed(flight.ancestors))
    positions = jax.lax.dynamic_slice_in_dim(flight.positions, column, width, axis=1).reshape(-1)
    turned = rotation(model, positions)
    x = target.embed[tokens.reshape(-1)]
    keys, values = [], []

    def whole(new, old):  # the rows of this pass in the place they have among all rows in flight
        return jax.lax.dynamic_update_slice_in_dim(old, new.reshape(requests, width, *new.shape[1:]), column, axis=1)

    for index in range(config.layers):

        k_cache, v_cache = cache.layer(index)

        def see(q, k, v, index=index, k_cache=k_cache, v_cache=v_cache):
            keys.append(whole(k, flight.k[index]))
            values.append(whole(v, flight.v[index]))
            # A kernel reads the cache once for all rows of a request, so rows that are not of this pass cost little.
            queries = whole(q, jnp.zeros((requests, full, *q.shape[1:]), q.dtype))
            out = attend(
                _packed(queries), _packed(keys[-1]), _packed(values[-1]), k_cache, v_cache, cache.table,
                rows, _packed(flight.positions), scale=model.attention_scale, window=model.sliding_window,
            )  # fmt: skip
            out = jax.lax.dynamic_slice_in_dim(out.reshape(queries.shape), column, width, axis=1)
            return out.reshape(q.shape)

        x, _ = decoder_layer(layer_at(target.layers, index), model, x, turned, see)
    hidden = rms_norm(x, target.final_norm, model.rms_norm_eps).reshape(requests, width, -1)
    logits = jnp.einsum("rwd,vd->rwv", hidden, shared.head, preferred_element_type=jnp.float32)
    return logits, dataclasses.replace(flight, k=tuple(keys), v=tuple(values))


def _empty(config: EarlyExitConfig, target: TargetParams, positions, ancestors) -> Flight:
    model = config.transformer
    blank = jnp.zeros((*positions.shape, model.num_kv_heads, model.head_dim), target.embed.dtype)
    return Flight((blank,) * config.layers, (blank,) * config.layers, positions, ancestors)


def _borrowed(seen: Seen) -> tuple[TargetParams, KVCache]:
    if seen.target is None or seen.cache is None:
        raise ValueError("early exit drafts with the target itself; Seen must hold its parameters and its cache")
    return seen.target, seen.cache


def _packed(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _put(x, value, k):
    return jax.lax.dynamic_update_index_in_dim(x, value, k, axis=1)
