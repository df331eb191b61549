"""Several drafters over one target as one: every request is drafted for by the one it chose, and may choose another at any time.

All of them digest what the target commits, each the features it taps, so whichever is chosen next knows the whole text. A drafter that no
request wants is not run. Which drafter proposes never changes what coupled acceptance emits, so switching inside a request is exact.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.drafter import registry
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Seen, Shared, Sparse

NOBODY = -1  # the choice of a request that wants no drafts


@dataclasses.dataclass(frozen=True)
class SeveralConfig:
    """The drafters in the order that choices count them."""

    members: tuple[registry.AnyConfig, ...]

    def __post_init__(self):
        if not self.members:
            raise ValueError("there must be at least one drafter")

    @property
    def family(self) -> str:
        return "+".join(member.family for member in self.members)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for member in self.members for tap in member.taps}))

    @property
    def num_drafts(self) -> int:
        return max(member.num_drafts for member in self.members)

    @property
    def target_num_layers(self) -> int:
        return self.members[0].target_num_layers


@struct.dataclass
class SeveralState:
    members: tuple[Any, ...]
    choice: Int[Array, "R"]  # index of the drafter of each request, or NOBODY


def drafter_specs(config: SeveralConfig) -> tuple[Any, ...]:
    return tuple(registry.module(member).drafter_specs(member) for member in config.members)


def create_state(config: SeveralConfig, requests: int, capacity: int, dtype=jnp.float32, page: int | None = None) -> SeveralState:
    """Every request begins with the first drafter."""
    states = (registry.module(member).create_state(member, requests, capacity, dtype, page) for member in config.members)
    return SeveralState(tuple(states), jnp.zeros((requests,), jnp.int32))


def extend(
    params: tuple[Any, ...],
    config: SeveralConfig,
    shared: tuple[Shared, ...],
    features: Float[Array, "N T D"],
    hidden: Float[Array, "N D"],
    next_tokens: Int[Array, "N"],
    request: Int[Array, "N"],
    positions: Int[Array, "N"],
    accepted: Bool[Array, "N"],
    state: SeveralState,
) -> SeveralState:
    """Let every drafter digest what the target committed."""
    after = []
    for member, own, borrowed, memory in zip(config.members, params, shared, state.members, strict=True):
        columns = np.asarray([config.taps.index(tap) for tap in member.taps], np.int32)
        rest = (hidden, next_tokens, request, positions, accepted, memory)
        after.append(registry.module(member).extend(own, member, borrowed, features[:, columns], *rest))
    return SeveralState(tuple(after), state.choice)


def draft(
    params: tuple[Any, ...],
    config: SeveralConfig,
    shared: tuple[Shared, ...],
    seen: Seen,
    state: SeveralState,
    noise: Noise | None,
    policy: DraftPolicy,
) -> Draft:
    """Each request's draft by the drafter it chose, in one shape: shorter ones end with drafts of survival 0."""
    proposals = []
    for member, own, borrowed, memory in zip(config.members, params, shared, state.members, strict=True):

        def propose(member=member, own=own, borrowed=borrowed, memory=memory):
            return registry.module(member).draft(own, member, borrowed, seen, memory, noise, policy)

        proposals.append(propose)
    shapes = [jax.eval_shape(propose) for propose in proposals]
    candidates = max((shape.q.p.shape[2] for shape in shapes if isinstance(shape.q, Sparse)), default=0)
    trees = any(shape.parents is not None for shape in shapes)
    margins = all(shape.margin is not None for shape in shapes)

    def alike(propose):
        return _alike(propose(), config.num_drafts, candidates, trees, margins)

    requests = seen.anchor.shape[0]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: alike(proposals[0])))
    found = nothing
    for index, propose in enumerate(proposals):
        mine = state.choice == index
        one = jax.lax.cond(jnp.any(mine), lambda propose=propose: alike(propose), lambda: nothing)
        found = jax.tree.map(lambda new, old, mine=mine: jnp.where(mine.reshape((requests,) + (1,) * (new.ndim - 1)), new, old), one, found)
    if found.parents is None:
        return found
    # Drafts of nobody still need parents that come before them.
    chain = jnp.broadcast_to(jnp.arange(-1, config.num_drafts - 1, dtype=jnp.int32), found.parents.shape)
    return dataclasses.replace(found, parents=jnp.where((state.choice < 0)[:, None], chain, found.parents))


def _alike(draft: Draft, drafts: int, candidates: int, trees: bool, margins: bool) -> Draft:
    """The same draft with `drafts` places, as a tree if any drafter makes one, and with as many candidates as the one with the most."""
    short = drafts - draft.tokens.shape[1]

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))

    tokens, parents = pad(draft.tokens), None
    if trees:
        requests, made = draft.tokens.shape
        chain = jnp.broadcast_to(jnp.arange(-1, drafts - 1, dtype=jnp.int32), (requests, drafts))
        parents = chain if draft.parents is None else chain.at[:, :made].set(draft.parents)
    if candidates == 0:
        q = OneHot()
    elif isinstance(draft.q, Sparse):
        more = [(0, 0), (0, 0), (0, candidates - draft.q.p.shape[2])]
        q = Sparse(jnp.pad(pad(draft.q.ids), more), jnp.pad(pad(draft.q.p), more))
    else:
        sure = jnp.zeros((candidates,), jnp.float32).at[0].set(1.0)
        ids = jnp.broadcast_to(tokens[..., None], (*tokens.shape, candidates))
        q = Sparse(ids, jnp.broadcast_to(sure[None, None], ids.shape))
    margin = pad(draft.margin) if margins and draft.margin is not None else None
    return Draft(tokens, q, pad(draft.survival), parents, margin)


registry.MODULES[SeveralConfig] = sys.modules[__name__]
