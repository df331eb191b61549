"""Slots of a decode state: one request put in, one taken out, all moved to a state of another size.

Which axis of a leaf counts the slots follows from the shapes of states of one and of two slots, so any drafter's memory can be moved. A
leaf whose shape does not depend on the number of slots (round counters, fitted confidences) belongs to the whole state.

Under `jax.set_mesh` every state is spread over the mesh: slots over the batch axes and kv heads over the tensor axis, as the kernels map
them; a count that does not divide stays whole.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from angelspec_jax import mesh as meshes
from angelspec_jax.decoding.dcut import Policy
from angelspec_jax.decoding.generate import create_state
from angelspec_jax.decoding.step import DecodeState, Emitted, Plan, Weights, prefill_chunk, settle, speculative_step
from angelspec_jax.target.kv_cache import KVCache

WHOLE = -1


def with_axes(put: Callable[[Any, tuple[str | None, ...]], Any], state: DecodeState) -> DecodeState:
    """`put(leaf, logical axes)` for every leaf of a state: slots over the batch axes, kv heads over the tensor axis."""
    requests = state.length.shape[0]

    def place(part):
        if isinstance(part, KVCache):
            stacked = () if isinstance(part.k, tuple) else (None,)
            return jax.tree.map(lambda pages: put(pages, (*stacked, "batch", "kv_heads", None, None)), part)
        per_slot = part.ndim > 0 and part.shape[0] == requests
        return put(part, ("batch" if per_slot else None,) * min(part.ndim, 1) + (None,) * (part.ndim - 1))

    return jax.tree.map(place, state, is_leaf=lambda part: isinstance(part, KVCache))


def spread(state: DecodeState) -> DecodeState:
    """The state where the mesh that the program is traced for wants it; as it is without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not meshes.is_ours(mesh) or mesh.size == 1:
        return state

    def put(leaf, axes):
        return jax.lax.with_sharding_constraint(leaf, meshes.partition(mesh, axes, leaf.shape))  # pyright: ignore[reportArgumentType]

    return with_axes(put, state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def create(plan: Plan, dtype, requests: int, capacity: int) -> DecodeState:
    """Empty slots."""
    return spread(create_state(plan, dtype, requests, capacity))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(plan: Plan, state: DecodeState, single: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Put the request of a state of one slot into a slot."""

    def put(axis, old, new):
        return old if axis == WHOLE else jax.lax.dynamic_update_slice_in_dim(old, new, slot * new.shape[axis], axis)

    return spread(jax.tree.map(put, _axes(plan, state), state, single))


@functools.partial(jax.jit, static_argnums=0)
def take(plan: Plan, state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """A copy of one slot, as a state of one slot."""
    requests = state.length.shape[0]

    def cut(axis, leaf):
        if axis == WHOLE:
            return leaf
        return jax.lax.dynamic_slice_in_dim(leaf, slot * (leaf.shape[axis] // requests), leaf.shape[axis] // requests, axis)

    return spread(jax.tree.map(cut, _axes(plan, state), state))


@functools.partial(jax.jit, static_argnums=0)
def rearrange(plan: Plan, state: DecodeState, order: Int[Array, "new"]) -> DecodeState:
    """A state whose slot i holds what slot `order[i]` held."""
    requests = state.length.shape[0]

    def pick(axis, leaf):
        if axis == WHOLE:
            return leaf
        size = leaf.shape[axis] // requests
        apart = leaf.reshape(*leaf.shape[:axis], requests, size, *leaf.shape[axis + 1 :])
        picked = jnp.take(apart, order, axis=axis)
        return picked.reshape(*leaf.shape[:axis], order.shape[0] * size, *leaf.shape[axis + 1 :])

    return spread(jax.tree.map(pick, _axes(plan, state), state))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step(
    plan: Plan, weights: Weights, policy: Policy, state: DecodeState, active: Bool[Array, "R"], choice: Int[Array, "R"] | None = None
) -> tuple[DecodeState, Emitted]:
    """One round of the slots that are active; the others are finished for good. `choice`: each slot's drafter, where there are several."""
    state = dataclasses.replace(state, finished=state.finished | ~active)
    if choice is not None:
        state = dataclasses.replace(state, drafter=dataclasses.replace(state.drafter, choice=choice))
    state, emitted = speculative_step(plan, weights, policy, state)
    return spread(state), emitted


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def prefill(plan: Plan, weights: Weights, state: DecodeState, start: Int[Array, ""], chunk: int) -> DecodeState:
    """One chunk of the prompt of a state of one slot."""
    return spread(prefill_chunk(plan, weights, state, start, chunk))


@functools.partial(jax.jit, static_argnums=0)
def settled(plan: Plan, weights: Weights, state: DecodeState) -> DecodeState:
    """The state with nothing left for the drafter to digest."""
    return spread(settle(plan, weights, state))


copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))


def _axes(plan: Plan, state: DecodeState):
    """The axis of every leaf that counts slots, or WHOLE."""
    dtype = (state.cache.k[0] if isinstance(state.cache.k, tuple) else state.cache.k).dtype
    one, two = (
        jax.eval_shape(functools.partial(create_state, plan, dtype, requests, state.tokens.shape[1])) for requests in (1, 2)
    )

    def axis(a, b) -> int:
        return next((i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y), WHOLE)

    return jax.tree.map(axis, one, two)
