"""What MTP and EAGLE-3 share: one decoder layer that reads a token and a hidden state, and says one token at a time.

Row j pairs what the target left at position j with the token at j + 1, has rotary position j and predicts the token at j + 2. The first
draft of a round therefore comes from the last committed row, paired with the anchor; every further row pairs the token just drafted with
the drafter's own output. A layer's keys and values depend on its inputs alone, so committed rows are digested without attention, and the
rows of a draft stay in flight: the next round's keys come from the target's features again, never from a self-fed state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from angelspec_jax.drafter import lanes as lane_rows
from angelspec_jax.drafter.drawing import draw, shortlist, top_margin
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen, Shared, Sparse
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import MAX_TREE_ROWS, attend, uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.layers import decoder_layer, project_kv, rotation


@struct.dataclass
class ChainState:
    """An autoregressive drafter's memory of what the target committed."""

    cache: KVCache  # keys and values of its layer
    condition: Float[Array, "R D"]  # what the target left at each request's last committed position


@struct.dataclass
class Branches:
    """A tree's rows in flight, F = W * num_drafts a request, and what the W lanes of the last level left for the next."""

    k: Float[Array, "R F G E"]
    v: Float[Array, "R F G E"]
    ancestors: UInt32[Array, "R F 2"]
    hidden: Float[Array, "R W D"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a family adds to the common loop; every function takes (params, config) first. The layer itself is `params.layer`."""

    # (features [*N, T, D], hidden [*N, D]) -> [*N, D]: what the target leaves for the drafter at a position
    condition: Callable[..., jax.Array]
    # (embedded [*N, D], hidden [*N, D], positions [*N]) -> the layer's residual stream [*N, D] and what its attention reads
    read: Callable[..., tuple[jax.Array, jax.Array]]
    # (layer output [*N, D]) -> the hidden state of the next step and what the head scores, both [*N, D]
    write: Callable[..., tuple[jax.Array, jax.Array]]
    # (the target's head rows [V', D]) -> the rows that score the draft vocabulary
    head: Callable[..., jax.Array]


def check(transformer: TransformerConfig, taps: tuple[int, ...], target_num_layers: int, num_drafts: int, draft_vocab: int | None) -> None:
    """Raise ValueError for a value that no autoregressive drafter can have."""
    if transformer.num_layers != 1:
        raise ValueError(f"an autoregressive drafter has one layer, got {transformer.num_layers}")
    if not 1 <= num_drafts < MAX_TREE_ROWS:
        raise ValueError(f"num_drafts must be between 1 and {MAX_TREE_ROWS - 1}, got {num_drafts}")
    for tap in taps:
        if not -1 <= tap < target_num_layers:
            raise ValueError(f"tapped layer {tap} does not exist in a target of {target_num_layers} layers")
    if draft_vocab is not None and not 1 <= draft_vocab <= transformer.vocab_size:
        raise ValueError(f"draft_vocab must be between 1 and {transformer.vocab_size}, got {draft_vocab}")


def create_state(config, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> ChainState:
    model = config.transformer
    return ChainState(kv_cache.create(model, requests, capacity, dtype, page), jnp.zeros((requests, model.hidden_size), dtype))


def extend(
    cell: Cell,
    params: Any,
    config: Any,
    shared: Shared,
    features: Float[Array, "N T D"],
    hidden: Float[Array, "N D"],
    next_tokens: Int[Array, "N"],
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
    state: ChainState,
) -> ChainState:
    """Digest rows the target has committed, each with the token that follows it; rows not `accepted` leave no trace."""
    model, dtype = config.transformer, params.layer.o.dtype
    with jax.named_scope("draft_extend"):
        condition = cell.condition(params, config, features.astype(dtype), hidden.astype(dtype))
        _, normed = cell.read(params, config, shared.embed[next_tokens].astype(dtype), condition, positions)
        k, v = project_kv(params.layer, model, normed, rotation(model, positions))
        cache = kv_cache.commit(state.cache, ((k,), (v,)), request, positions, accepted)
        requests = state.condition.shape[0]
        last = jax.ops.segment_max(jnp.where(accepted, positions, -1), request, requests)
        slot = jnp.where(accepted & (positions == last[request]), request, requests)  # out of bounds: dropped
        return ChainState(cache, state.condition.at[slot].set(condition.astype(state.condition.dtype), mode="drop"))


def draft(
    cell: Cell, params: Any, config: Any, shared: Shared, seen: Seen, state: ChainState, noise: Noise | None, policy: DraftPolicy
) -> Draft:
    """Draw a chain of at most `config.num_drafts` tokens after each request's anchor.

    The loop ends when no request's chain survives with `policy.min_survival`; the remaining drafts have survival 0.
    """
    model, depth, requests = config.transformer, config.num_drafts, seen.anchor.shape[0]
    dtype = params.layer.o.dtype
    # The first row repeats the last committed one, for its output: it stands in flight, and the cache is read up to the row before it.
    # A request of one token has no committed row; its drafts mean nothing, and are verified like all others.
    base = jnp.maximum(seen.prefix_length - 1, 0)
    rows, (k_cache, v_cache) = uniform_rows(base, depth), state.cache.layer(0)
    all_positions = (base[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]).reshape(-1)
    head = cell.head(params, config, shared.head)
    size = min(policy.candidates, head.shape[0]) or head.shape[0]
    flat = lambda x: x.reshape(requests * depth, *x.shape[2:])  # noqa: E731

    def step(carry):
        k, previous, hidden, kv, survival, tokens, ids, probabilities, survivals, margins = carry
        positions = base + k

        def see(q, *new):
            # A kernel reads the cache once for all rows of a request, so rows that are not this step's cost little.
            queries = jnp.broadcast_to(q[:, None], (requests, depth, *q.shape[1:]))
            keys, values = (flat(_put(old, k, x)) for old, x in zip(kv, new, strict=True))
            out = attend(
                flat(queries), keys, values, k_cache, v_cache, state.cache.table, rows, all_positions,
                scale=model.attention_scale, window=model.sliding_window,
            )  # fmt: skip
            return _slot(out.reshape(queries.shape), k)

        hidden, new_kv, scores, target_ids = _say(cell, params, config, shared, head, previous, hidden, positions, see, policy.candidates)
        # Row k stands at `positions`, reads the token after it and says the one after that.
        choice, p, confidence = draw(scores, target_ids, seen.prefix_length + 1 + k, noise)
        token = jnp.take_along_axis(target_ids, choice[:, None], axis=1)[:, 0]
        survival = survival * confidence
        kv = tuple(_put(old, k, new) for old, new in zip(kv, new_kv, strict=True))
        said = (
            _put(tokens, k, token), _put(ids, k, target_ids), _put(probabilities, k, p), _put(survivals, k, survival),
            _put(margins, k, top_margin(scores)),
        )  # fmt: skip
        return k + 1, token, hidden, kv, survival, *said

    def worthwhile(carry):
        k, survival = carry[0], carry[4]
        return (k < depth) & (jnp.max(survival) >= policy.min_survival)

    start = (
        jnp.int32(0),
        seen.anchor,
        state.condition.astype(dtype),
        (jnp.zeros((requests, depth, model.num_kv_heads, model.head_dim), dtype),) * 2,
        jnp.ones(requests, jnp.float32),
        jnp.zeros((requests, depth), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
    )
    with jax.named_scope("draft_chain"):
        *_, tokens, ids, probabilities, survivals, margins = jax.lax.while_loop(worthwhile, step, start)
    return Draft(tokens=tokens, q=OneHot() if noise is None else Sparse(ids, probabilities), survival=survivals, margin=margins)


def tree_lanes(config: Any) -> int:
    """Lanes of every level are in flight together."""
    return max(MAX_TREE_ROWS // config.num_drafts, 1)


def start_tree(
    params: Any, config: Any, shared: Shared, seen: Seen, state: ChainState, policy: DraftPolicy, lanes: int
) -> tuple[None, Branches]:
    """A place in flight for every lane of every level; all lanes begin with the last committed row, as a chain does."""
    model, dtype = config.transformer, params.layer.o.dtype
    requests, full = seen.anchor.shape[0], config.num_drafts * lanes
    blank = jnp.zeros((requests, full, model.num_kv_heads, model.head_dim), dtype)
    hidden = jnp.broadcast_to(state.condition.astype(dtype)[:, None], (requests, lanes, model.hidden_size))
    return None, Branches(blank, blank, jnp.zeros((requests, full, 2), jnp.uint32), hidden)


def expand(
    cell: Cell,
    params: Any,
    config: Any,
    shared: Shared,
    seen: Seen,
    state: ChainState,
    fixed: None,
    memory: Branches,
    depth: Int[Array, ""],
    tokens: Int[Array, "R W"],
    origin: Int[Array, "R W"],
    policy: DraftPolicy,
) -> tuple[Int[Array, "R W M"], Float[Array, "R W M"], Branches]:
    """One pass over the lanes, each seeing its own path and reading what the row before it on that path left."""
    model, (requests, width) = config.transformer, tokens.shape
    full, column = memory.k.shape[1], depth * width
    base = jnp.maximum(seen.prefix_length - 1, 0)
    ancestors = lane_rows.extend_paths(memory.ancestors, depth, origin)
    rows = dataclasses.replace(uniform_rows(base, full), ancestors=lane_rows.packed(ancestors))
    k_cache, v_cache = state.cache.layer(0)
    everywhere = base[:, None] + jnp.arange(full, dtype=jnp.int32)[None] // width
    positions = jnp.broadcast_to((base + depth)[:, None], (requests, width)).reshape(-1)
    kv = [memory.k, memory.v]

    def see(q, *new):
        kv[:] = [lane_rows.put(old, x, column, width) for old, x in zip(kv, new, strict=True)]
        # A kernel reads the cache once for all rows of a request, so rows that are not of this level cost little.
        queries = lane_rows.put(jnp.zeros((requests, full, *q.shape[1:]), q.dtype), q, column, width)
        out = attend(
            lane_rows.packed(queries), lane_rows.packed(kv[0]), lane_rows.packed(kv[1]), k_cache, v_cache, state.cache.table,
            rows, everywhere.reshape(-1), scale=model.attention_scale, window=model.sliding_window,
        )  # fmt: skip
        return lane_rows.take(out.reshape(queries.shape), column, width)

    left = jnp.take_along_axis(memory.hidden, origin[..., None], axis=1)
    arguments = (tokens.reshape(-1), lane_rows.packed(left), positions, see, policy.candidates)
    hidden, _, scores, ids = _say(cell, params, config, shared, cell.head(params, config, shared.head), *arguments)
    spread = lambda x: x.reshape(requests, width, -1)  # noqa: E731
    return spread(ids), spread(scores), Branches(kv[0], kv[1], ancestors, spread(hidden))


def _say(
    cell: Cell,
    params: Any,
    config: Any,
    shared: Shared,
    head: Float[Array, "V D"],
    tokens: Int[Array, "N"],
    hidden: Float[Array, "N D"],
    positions: Int[Array, "N"],
    see: Callable[..., jax.Array],
    candidates: int,
) -> tuple[Float[Array, "N D"], tuple[jax.Array, jax.Array], Float[Array, "N M"], Int[Array, "N M"]]:
    """What rows leave for the next ones, their keys and values, and the scores and ids of their candidates in the target's vocabulary."""
    x, normed = cell.read(params, config, shared.embed[tokens].astype(hidden.dtype), hidden, positions)
    y, new_kv = decoder_layer(params.layer, config.transformer, x, rotation(config.transformer, positions), see, normed)
    hidden, scored = cell.write(params, config, y)
    logits = jnp.einsum("nd,vd->nv", scored, head, preferred_element_type=jnp.float32)
    scores, columns = shortlist(logits, candidates)
    return hidden, new_kv, scores, columns if shared.draft_ids is None else shared.draft_ids[columns]


def _slot(x, k):
    return jax.lax.dynamic_index_in_dim(x, k, axis=1, keepdims=False)


def _put(x, k, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, k, axis=1)


def layer_config(target: TransformerConfig, own: dict[str, Any], options: dict[str, Any]) -> TransformerConfig:
    """The one layer of a new drafter: the target's shape, changed by `own` and by the caller's `options`, fields of TransformerConfig."""
    changeable = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope", "rms_norm_eps", "qk_norm", "max_positions")
    for option in options:
        if option not in changeable:
            raise ValueError(f"an autoregressive drafter has no option {option!r}; the options of its layer are {', '.join(changeable)}")
    common = {"num_layers": 1, "attention_bias": False, "tie_embeddings": False, "sliding_window": None, "scan_layers": False, "moe": None}
    return dataclasses.replace(target, **(common | own | options))
