"""A toy target, a drafter for it, what a caller of `generate` asks for, and drafters whose quality a test chooses.

What such a drafter knows is among its parameters, so tests of all qualities share one compiled program.
"""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import block, registry
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.types import Draft, OneHot

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]
NEW = 24
OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "all": {"temperature": [0.0, 0.7, 1.0, 1.4], "top_k": [0, 8, 0, 20], "top_p": [1.0, 0.9, 0.5, 1.0], "min_p": [0.0, 0.01, 0.0, 0.05]},
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """A toy target, what it says alone, and the same with drafts."""

    plain: Plan
    speculative: Plan
    weights: Weights

    def alone(self, prompts=PROMPTS, new=NEW, options=None, seed=7, **plan) -> list[list[int]]:
        plan = dataclasses.replace(self.plain, **plan)
        sampling = make_sampling(len(prompts), seed=seed, **(options or {}))
        return generate(plan, Weights(self.weights.target), prompts, new, sampling=sampling, capacity=64).texts()

    def drafted(self, prompts=PROMPTS, new=NEW, options=None, seed=7, policy=None, **plan):
        plan = dataclasses.replace(self.speculative, **plan)
        sampling = make_sampling(len(prompts), seed=seed, **(options or {}))
        return generate(plan, self.weights, prompts, new, sampling=sampling, policy=policy, capacity=64)


@dataclasses.dataclass(frozen=True)
class KnowingConfig(DrafterConfig):
    """A block drafter that digests as it would, and drafts what it was told."""

    parents: tuple[int, ...] | None = None  # the tree its drafts form; None: a chain
    lengths: tuple[int, ...] | None = None  # drafts of each request that survive; None: all


@struct.dataclass
class Knowledge:
    block: block.BlockDrafter
    texts: jnp.ndarray  # int32[R, S]: drafts by position


def knowing(bench: Bench, prompts, texts, wrong=(), parents=None, lengths=None) -> Bench:
    """The bench with a drafter that knows `texts` after `prompts`, but for the positions `wrong`.

    With `parents` [K] the drafts form that tree: among siblings the one that holds the true token is the last, the others are false. With
    `lengths` request r has `lengths[r]` drafts worth verifying.
    """
    table = np.zeros((len(prompts), 64), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        table[row, : len(prompt) + len(text)] = [*prompt, *text]
    for position in wrong:
        table[:, position] = (table[:, position] + 1) % 90
    real, params = bench.speculative.drafter, bench.weights.drafter
    assert isinstance(real, DrafterConfig) and isinstance(params, block.BlockDrafter)
    values = {field.name: getattr(real, field.name) for field in dataclasses.fields(DrafterConfig)}
    config = KnowingConfig(**values, parents=None if parents is None else tuple(parents), lengths=lengths)
    plan = dataclasses.replace(bench.speculative, drafter=config, budgets=())
    weights = dataclasses.replace(bench.weights, drafter=Knowledge(params, jnp.asarray(table)))
    return dataclasses.replace(bench, speculative=plan, weights=weights)


def _extend(params, config, *rest):
    return block.extend(params.block, config, *rest)


def _draft(params, config, shared, seen, state, noise, policy):
    count, texts = config.num_drafts, params.texts
    tree = np.arange(-1, count - 1) if config.parents is None else np.asarray(config.parents)
    positions = jnp.minimum(seen.prefix_length[:, None] + jnp.asarray(_depths(tree), jnp.int32)[None], texts.shape[1] - 1)
    tokens, index = jnp.take_along_axis(texts, positions, axis=1), jnp.arange(count, dtype=jnp.int32)[None]
    tokens = jnp.where(jnp.asarray(_last_siblings(tree))[None], tokens, (tokens + 1 + index) % 90)
    survival = jnp.full(tokens.shape, 0.5, jnp.float32)
    if config.lengths is not None:
        survival = jnp.where(index < jnp.asarray(config.lengths, jnp.int32)[:, None], survival, 0.0)
    structure = None if config.parents is None else jnp.broadcast_to(jnp.asarray(tree, jnp.int32), tokens.shape)
    return Draft(tokens, OneHot(), survival, structure)


MODULE: Any = types.SimpleNamespace(create_state=block.create_state, extend=_extend, draft=_draft)
registry.MODULES[KnowingConfig] = MODULE


def _depths(parents: np.ndarray) -> np.ndarray:
    depth = np.zeros(len(parents), int)
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
    return depth


def _last_siblings(parents: np.ndarray) -> np.ndarray:
    return np.array([parent not in parents[node + 1 :] for node, parent in enumerate(parents)])
