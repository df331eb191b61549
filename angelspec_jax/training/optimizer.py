"""AdamW on float32 master parameters: warm-up and cosine, clipping by the global norm, decay on matrices only, optional averaging."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from angelspec_jax.config import OptimizationSection

# Scales and mixtures, not directions: shrinking them towards zero would change what the layer computes rather than regularise it.
UNDECAYED = ("norm", "bias", "fusion")


def make_schedule(train: OptimizationSection) -> optax.Schedule:
    """Learning rate of each step: linear warm-up from zero over a fraction of the run, then cosine down to the minimum."""
    warmup = round(train.warmup * train.steps)
    cosine = optax.cosine_decay_schedule(train.learning_rate, max(train.steps - warmup, 1), train.min_learning_rate / train.learning_rate)
    if warmup == 0:
        return cosine
    # The first step already moves: step 0 has rate lr / warmup.
    linear = optax.linear_schedule(train.learning_rate / warmup, train.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([linear, cosine], [warmup])


def make_optimizer(train: OptimizationSection) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The gradient transformation of a run, and its schedule for the log."""
    schedule = make_schedule(train)
    parts = [] if train.clip_norm is None else [optax.clip_by_global_norm(train.clip_norm)]
    b1, b2 = train.betas
    parts.append(optax.adamw(schedule, b1=b1, b2=b2, weight_decay=train.weight_decay, mask=decay_mask))
    if train.ema is not None:
        parts.append(track_average(train.ema))
    return optax.chain(*parts), schedule


def decay_mask(params):
    """True for parameters that weight decay shrinks: all but norms, biases and fusion logits."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not any(word in _name(path) for word in UNDECAYED), params)


class AverageState(NamedTuple):
    """Exponential moving average of the parameters, same tree."""

    average: optax.Params


def track_average(decay: float) -> optax.GradientTransformation:
    """Leaves updates alone and keeps average <- decay average + (1 - decay) (params + update) in the optimizer state."""

    def init(params):
        return AverageState(jax.tree.map(jnp.array, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("averaging needs the parameters: call update(updates, state, params)")
        average = jax.tree.map(lambda a, p, u: a * decay + (p + u) * (1 - decay), state.average, params, updates)
        return updates, AverageState(average)

    return optax.GradientTransformation(init, update)


def averaged(opt_state, params):
    """The averaged parameters when the optimizer tracks them, else `params`."""
    found = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=_is_average) if _is_average(leaf)]
    return found[0].average if found else params


def _is_average(leaf) -> bool:
    return isinstance(leaf, AverageState)


def _name(path) -> str:
    """Name of the field a leaf sits in."""
    names = [str(getattr(entry, "name", getattr(entry, "key", ""))) for entry in path]
    return next((name for name in reversed(names) if name), "")
