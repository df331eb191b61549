"""Draft trees from any drafter: best first by joint draft probability, under a budget of nodes, in static shapes and on the device.

Level by level, the best W paths of the level before (*lanes*) are extended by all their candidates at once; the best of the level go into a
*ledger*, and the best of the ledger are the tree (the frontier of DominoTree, arXiv 2607.08642, which needs no heap). A child is never
likelier than its parent, so the tree is closed under ancestors, and with as many lanes as nodes it is the tree that expanding node by node
would give. Drafters offer `start_tree` and `expand` for it (see `drafter.registry`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from angelspec_jax import noise as noise_lib
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen, Shared
from angelspec_jax.target.attention import MAX_TREE_ROWS


def check(config: registry.AnyConfig | None, nodes: int) -> None:
    """Raise ValueError where no tree of so many nodes can be grown."""
    if config is None:
        raise ValueError(f"a tree of {nodes} nodes needs a drafter")
    if not 1 <= nodes < MAX_TREE_ROWS:
        raise ValueError(f"a draft tree has between 1 and {MAX_TREE_ROWS - 1} nodes, got {nodes}")
    if not growable(config):
        raise ValueError(f"a drafter of family {config.family} drafts chains only; leave out the tree")


def growable(config: registry.AnyConfig) -> bool:
    """Whether drafters of this family draft trees."""
    return hasattr(registry.module(config), "expand")


def grow(
    params,
    config: registry.AnyConfig,
    shared: Shared | None,
    seen: Seen,
    state,
    noise: Noise | None,
    policy: DraftPolicy,
    nodes: int,
) -> Draft:
    """The `nodes` likeliest drafts of every request, likeliest first and parents before children; drafts that were not made survive with 0.

    Where a request samples, the noise of each position is known, and a child's probability is that of being the choice: the softmax of the
    perturbed scores. `policy.min_survival` ends the growth when no lane is as likely; so does a tree that nothing can enter any more.
    """
    module = registry.module(config)
    requests, depth = seen.anchor.shape[0], config.num_drafts
    lanes = min(nodes, module.tree_lanes(config)) if hasattr(module, "tree_lanes") else nodes
    fixed, memory = module.start_tree(params, config, shared, seen, state, policy, lanes)

    def level(carry):
        d, tokens, scores, origin, memory, worst, ledger = carry
        ids, raw, memory = module.expand(params, config, shared, seen, state, fixed, memory, d, tokens, origin, policy)
        joint = scores[..., None] + _log_probability(raw, ids, seen.prefix_length + 1 + d, noise)
        best, pick = _best(joint.reshape(requests, -1), nodes)
        lane = pick // ids.shape[-1]
        token = jnp.take_along_axis(ids.reshape(requests, -1), pick, axis=1)
        parent = jnp.where(d == 0, -1, (d - 1) * nodes + lane)
        ledger = tuple(jax.lax.dynamic_update_index_in_dim(old, new, d, 1) for old, new in zip(ledger, (best, token, parent), strict=True))
        worst = _best(ledger[0].reshape(requests, -1), nodes)[0][:, -1]
        return d + 1, token[:, :lanes], best[:, :lanes], lane[:, :lanes], memory, worst, ledger

    def worthwhile(carry):
        d, _, scores, _, _, worst, _ = carry
        lead = scores[:, 0]
        return (d < depth) & (jnp.max(lead) >= jnp.log(policy.min_survival)) & jnp.any(lead > worst)

    start = (
        jnp.int32(0),
        jnp.broadcast_to(seen.anchor[:, None], (requests, lanes)),
        jnp.full((requests, lanes), -jnp.inf, jnp.float32).at[:, 0].set(0.0),  # one path so far
        jnp.zeros((requests, lanes), jnp.int32),
        memory,
        jnp.full((requests,), -jnp.inf, jnp.float32),
        (
            jnp.full((requests, depth, nodes), -jnp.inf, jnp.float32),
            jnp.zeros((requests, depth, nodes), jnp.int32),
            jnp.full((requests, depth, nodes), -1, jnp.int32),
        ),
    )
    with jax.named_scope("draft_tree"):
        scores, tokens, parents = jax.lax.while_loop(worthwhile, level, start)[-1]
        flat = lambda x: x.reshape(requests, depth * nodes)  # noqa: E731
        return _select(flat(scores), flat(tokens), flat(parents), nodes)


def _select(scores: Float[Array, "R D*B"], tokens: Int[Array, "R D*B"], parents: Int[Array, "R D*B"], nodes: int) -> Draft:
    """The best entries of the ledger as a draft. Among equals the shallower comes first, so no child precedes its parent."""
    best, pick = _best(scores, nodes)
    made = best > -jnp.inf
    tokens, parents = (jnp.take_along_axis(x, pick, axis=1) for x in (tokens, parents))
    own = pick[:, None, :] == parents[:, :, None]  # [R, node, candidate parent]
    rank = jnp.where(jnp.any(own, axis=2), jnp.argmax(own, axis=2).astype(jnp.int32), -1)
    return Draft(jnp.where(made, tokens, 0), OneHot(), jnp.where(made, jnp.exp(best), 0.0), jnp.where(made, rank, -1))


def _best(scores: Float[Array, "R P"], nodes: int) -> tuple[Float[Array, "R B"], Int[Array, "R B"]]:
    """The highest scores and where they stand; among equals the first. Filled up with -inf."""
    if scores.shape[1] < nodes:
        scores = jnp.pad(scores, ((0, 0), (0, nodes - scores.shape[1])), constant_values=-jnp.inf)
    best, pick = jax.lax.top_k(scores, nodes)
    return best, pick


def _log_probability(
    scores: Float[Array, "R W M"], ids: Int[Array, "R W M"], positions: Int[Array, "R"], noise: Noise | None
) -> Float[Array, "R W M"]:
    if noise is not None:
        hot = (noise.temperature > 0)[:, None, None]
        spread = lambda x: jnp.broadcast_to(x[:, None], ids.shape[:2])  # noqa: E731
        drawn = noise_lib.gumbel(spread(noise.seeds), spread(positions), ids)
        scores = jnp.where(hot, scores / jnp.where(hot, noise.temperature[:, None, None], 1.0) + drawn, scores)
    return jnp.minimum(jax.nn.log_softmax(scores, axis=-1), 0.0)
