"""AdamW or Muon on float32 master parameters: schedules, clipping by the global norm, decay on matrices only, freezing, averaging."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from angelspec_jax.config import OptimizationSection
from angelspec_jax.params import Param, is_param

# Scales and mixtures, not directions: shrinking them towards zero would change what the layer computes rather than regularise it.
UNDECAYED = ("norm", "bias", "fusion")


def make_schedule(train: OptimizationSection) -> optax.Schedule:
    """Learning rate of each step: linear warm-up from zero over a fraction of the run, then one of

    * "cosine": down to the minimum along half a cosine;
    * "wsd": warm-up, stable, decay: the full rate until the last `decay` fraction of the run, then linearly down to the minimum. A run may
      be continued from before its decay with more steps, which a cosine does not allow;
    * "constant": the full rate to the end.
    """
    warmup = round(train.warmup * train.steps)
    if train.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            train.learning_rate, max(train.steps - warmup, 1), train.min_learning_rate / train.learning_rate
        )
    elif train.schedule == "wsd":
        falling = max(round(train.decay * train.steps), 1)
        after = optax.linear_schedule(train.learning_rate, train.min_learning_rate, falling, max(train.steps - warmup - falling, 0))
    else:
        after = optax.constant_schedule(train.learning_rate)
    if warmup == 0:
        return after
    # The first step already moves: step 0 has rate lr / warmup.
    linear = optax.linear_schedule(train.learning_rate / warmup, train.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([linear, after], [warmup])


def make_optimizer(train: OptimizationSection, specs=None) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The gradient transformation of a run, and its schedule for the log.

    `specs` declares the drafter's parameters (`params.Param`); Muon reads from them which dimensions of a weight are inputs. Frozen
    parameters keep their value, take no optimizer state and do not count in the gradient's norm.
    """
    schedule = make_schedule(train)
    parts: list[Any] = [] if train.clip_norm is None else [optax.clip_by_global_norm(train.clip_norm)]
    parts.append(_muon(train, schedule, specs) if train.optimizer == "muon" else _adamw(train, schedule))
    if train.freeze:
        groups: dict[Hashable, Any] = {"moving": optax.chain(*parts), "frozen": optax.set_to_zero()}
        parts = [optax.partition(groups, lambda params: freeze_labels(params, train.freeze))]
    if train.ema is not None:
        parts.append(track_average(train.ema))
    return optax.chain(*parts), schedule


def freeze_labels(params, names: Sequence[str]):
    """ "frozen" for parameters that one of `names` covers, such as context or layers.0.down, else "moving".

    Raises ValueError for a name that covers nothing.
    """
    unused = set(names)

    def label(path, _) -> str:
        place = dotted(path)
        covering = [name for name in names if place == name or place.startswith(name + ".")]
        unused.difference_update(covering)
        return "frozen" if covering else "moving"

    labels = jax.tree_util.tree_map_with_path(label, params)
    if unused:
        tops = sorted({dotted(path).split(".")[0] for path, _ in jax.tree_util.tree_leaves_with_path(params)})
        raise ValueError(f"train.freeze names {sorted(unused)[0]!r}, which is no parameter of the drafter; it has {', '.join(tops)}")
    return labels


def _adamw(train: OptimizationSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    b1, b2 = train.betas
    return optax.adamw(schedule, b1=b1, b2=b2, weight_decay=train.weight_decay, mask=decay_mask)


def _muon(train: OptimizationSection, schedule: optax.Schedule, specs) -> optax.GradientTransformation:
    """Muon on matrices, AdamW on the rest (AngelSpec's choice, from Moonlight, arXiv 2502.16982).

    Momentum 0.95 (Nesterov) is orthogonalised by five Newton-Schulz steps and scaled by 0.2 sqrt(max(inputs, outputs)), so that one
    learning rate serves both. Vectors, norms, fusion logits and everything with a vocabulary axis stay with AdamW. Experts and the two
    halves of a gated feed-forward layer are matrices of their own; AngelSpec's code orthogonalises stacked experts as one matrix, which
    mixes them.
    """
    if specs is None:
        raise ValueError("Muon needs the declaration of the drafter's parameters: call make_optimizer(train, specs)")
    dimensions = jax.tree_util.tree_map_with_path(lambda p, spec: matrix_dimensions(p, spec) or optax.MaskedNode(), specs, is_leaf=is_param)
    flat, tree = jax.tree.flatten(dimensions, is_leaf=_is_leaf)

    def where_present(params, values):
        """`values`, or a MaskedNode wherever another transformation is at work on these parameters."""
        absent = [_is_masked(leaf) for leaf in jax.tree.leaves(params, is_leaf=_is_masked)]
        return tree.unflatten([optax.MaskedNode() if gone else value for gone, value in zip(absent, values, strict=True)])

    def fitting(params):
        return where_present(params, flat)

    def labels(params):
        return where_present(params, ["adamw" if _is_masked(leaf) else "muon" for leaf in flat])

    matrices = optax.chain(
        contrib.scale_by_muon(weight_dimension_numbers=fitting),
        optax.stateless(lambda updates, _: jax.tree.map(_to_adamw_size, updates, fitting(updates), is_leaf=_is_masked)),
        optax.add_decayed_weights(train.weight_decay, decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": matrices, "adamw": _adamw(train, schedule)}, labels)


def matrix_dimensions(path, spec: Param) -> contrib.MuonDimensionNumbers | None:
    """Which dimensions of a weight are a matrix's inputs and outputs; None for what is no matrix."""
    if len(spec.shape) < 2 or "vocab" in spec.axes or any(word in _name(path) for word in UNDECAYED):
        return None
    first = 1 if spec.axes[0] == "experts" else 0
    inputs = tuple(range(first, first + spec.inputs))
    outputs = list(range(first + spec.inputs, len(spec.shape)))
    if spec.axes[-1] == "mlp" and len(outputs) == 2:
        outputs = outputs[1:]  # gate and up, stacked
    return contrib.MuonDimensionNumbers(inputs, tuple(outputs)) if outputs else None


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


def _to_adamw_size(update, dimensions):
    """An orthogonal update with the root mean square of a typical one of AdamW: 0.2."""
    if _is_masked(update):
        return update
    sizes = [math.prod(update.shape[axis] for axis in axes) for axes in dimensions]
    return update * (0.2 * math.sqrt(max(sizes)))


def _is_masked(leaf) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _is_leaf(leaf) -> bool:
    return _is_masked(leaf) or isinstance(leaf, contrib.MuonDimensionNumbers)


def dotted(path) -> str:
    """A leaf's place as text: layers.0.down."""
    return ".".join(str(getattr(e, "name", getattr(e, "key", getattr(e, "idx", "")))) for e in path)


def _name(path) -> str:
    """Name of the field a leaf sits in."""
    names = [str(getattr(entry, "name", getattr(entry, "key", ""))) for entry in path]
    return next((name for name in reversed(names) if name), "")
