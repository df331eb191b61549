"""The one place that knows how checkpoint tensors relate to parameters.

Checkpoints follow Hugging Face: one `[out, in]` matrix per projection. In memory the projections that read the same input are fused and
stored `[in..., out...]` (layers.py). A `Leaf` says which tensors make up one parameter: each, reshaped and transposed, is a box of it. From
that any window of a parameter is read, straight from the bytes that hold it, and the tensors are made again from a parameter.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from angelspec_jax.target.config import MoEConfig, TransformerConfig
from angelspec_jax.target.layers import Layer
from angelspec_jax.target.moe import MoE
from angelspec_jax.target.transformer import TargetParams, arrange

Window = tuple[slice, ...]  # start and stop given, step 1

HEAD_NORMS = {"before_rope": ("q_norm", "k_norm"), "after_rope": ("query_layernorm", "key_layernorm")}
ROUTERS = {"qwen3": "gate.weight", "hunyuan": "gate.wg.weight", "hy3": "router.gate.weight"}
SELECTION_BIAS, SHARED, EXPERTS = "expert_bias", "shared_mlp.", "experts."


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of a checkpoint, read a window at a time."""

    @property
    def path(self) -> Path: ...

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def read(self, name: str, window: Window) -> np.ndarray: ...

    def sample(self, name: str, size: int) -> bytes: ...


class Meter:
    """Bytes read from storage so far, by any number of threads."""

    def __init__(self):
        self.bytes, self._lock = 0, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count


@dataclasses.dataclass(frozen=True)
class Box:
    """One tensor as a part of a parameter.

    Every axis of the tensor is split into `parts`; the axes of all parts, in `order`, are those of the box, which begins at `start`.
    """

    name: str
    parts: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """In the checkpoint."""
        return tuple(math.prod(sizes) for sizes in self.parts)

    @property
    def split(self) -> tuple[int, ...]:
        return tuple(itertools.chain(*self.parts))

    @property
    def place(self) -> tuple[slice, ...]:
        """Where the box lies in the parameter."""
        return tuple(slice(start, start + self.split[axis]) for start, axis in zip(self.start, self.order, strict=True))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where one parameter comes from: the checkpoint tensors with their expected shapes, and how a window is assembled from them."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    read: Callable[[TensorSource, Window], np.ndarray]
    boxes: tuple[Box, ...] = ()  # which tile the parameter; none where only `read` knows


@dataclasses.dataclass(frozen=True)
class Piece:
    """A window of one tensor and the part of an array that it fills."""

    name: str
    window: Window
    target: np.ndarray  # a view, with the axes of the tensor's parts

    def read(self, source: TensorSource) -> None:
        self.target[...] = source.read(self.name, self.window).reshape(self.target.shape)


def pieces(leaf: Leaf, window: Window, out: np.ndarray, largest: int) -> Iterator[Piece]:
    """What fills `out`, a window of a parameter, from its tensors, in pieces of at most `largest` elements (or one row)."""
    for box in leaf.boxes:
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(window, box.place, strict=True)]
        if any(part.start >= part.stop for part in common):
            continue
        view = out[tuple(slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(common, window, strict=True))]
        inverse = np.argsort(box.order)
        view = view.transpose(inverse)
        wanted = [slice(common[i].start - box.start[i], common[i].stop - box.start[i]) for i in inverse]
        yield from _stretches(box, wanted, view, largest)


def _stretches(box: Box, wanted: list[slice], view: np.ndarray, largest: int) -> Iterator[Piece]:
    """The wanted window of a box's parts as windows of its tensor: one where the parts are consecutive, several where they are not."""
    axes, first = [], 0
    for index, sizes in enumerate(box.parts):
        own = wanted[first : first + len(sizes)]
        rest = math.prod(part.stop - part.start for part in wanted[first + len(sizes) :])
        axes.append(list(_runs(sizes, own, largest // max(rest, 1) if index == 0 else None)))
        first += len(sizes)
    for chosen in itertools.product(*axes):
        parts = tuple(itertools.chain(*(run for _, run in chosen)))
        inner = tuple(slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(parts, wanted, strict=True))
        yield Piece(box.name, tuple(span for span, _ in chosen), view[inner])


def _runs(sizes: tuple[int, ...], wanted: list[slice], longest: int | None) -> Iterator[tuple[slice, list[slice]]]:
    """Consecutive stretches of a split axis that a window of its parts covers, each at most `longest` entries where that is given."""
    partial = [i for i, (size, part) in enumerate(zip(sizes, wanted, strict=True)) if (part.start, part.stop) != (0, size)]
    last = max(partial, default=0)  # the parts after it are whole
    inner = math.prod(sizes[last + 1 :])
    step = sizes[last] if longest is None else max(longest // inner, 1)
    for outer in itertools.product(*(range(part.start, part.stop) for part in wanted[:last])):
        base = 0
        for index, size in zip(outer, sizes, strict=False):
            base = base * size + index
        base *= sizes[last]
        for start in range(wanted[last].start, wanted[last].stop, step):
            stop = min(start + step, wanted[last].stop)
            run = [*(slice(index, index + 1) for index in outer), slice(start, stop), *wanted[last + 1 :]]
            yield slice((base + start) * inner, (base + stop) * inner), run


def boxed(*boxes: Box) -> Any:
    """The leaf of a parameter that these boxes tile, typed as anything: it stands where the tree of parameters will hold an array."""
    return Leaf(tuple((box.name, box.shape) for box in boxes), functools.partial(_read_boxes, boxes), boxes)


def _read_boxes(boxes: tuple[Box, ...], source: TensorSource, window: Window) -> np.ndarray:
    out = np.empty([part.stop - part.start for part in window], np.result_type(*{source.dtype(box.name) for box in boxes}))
    for piece in pieces(boxed(*boxes), window, out, out.size):
        piece.read(source)
    return out


def tensors_of(leaf: Leaf, value: np.ndarray) -> dict[str, np.ndarray]:
    """The checkpoint tensors that a parameter is made of."""
    return {box.name: np.ascontiguousarray(value[box.place].transpose(np.argsort(box.order))).reshape(box.shape) for box in leaf.boxes}


def target_leaves(config: TransformerConfig, prefix: str = "model.") -> TargetParams:
    """A `Leaf` for every parameter of the target, in the tree of `target_specs(config)`."""
    layers = tuple(layer_leaves(config, f"{prefix}layers.{index}.", config.is_sparse(index)) for index in range(config.num_layers))
    vocab = (config.vocab_size, config.hidden_size)
    return TargetParams(
        embed=_plain(f"{prefix}embed_tokens.weight", vocab),
        layers=arrange(config, layers, _stack),
        final_norm=_plain(f"{prefix}norm.weight", vocab[1:]),
        lm_head=None if config.tie_embeddings else _plain("lm_head.weight", vocab),
    )


def layer_leaves(config: TransformerConfig, prefix: str, sparse: bool = False, inputs: int | None = None) -> Layer:
    """A `Leaf` for every parameter of one decoder layer, routed to experts or not, whose checkpoint names start with `prefix`.

    `inputs` is the width of what attention reads, by default the model's.
    """
    d, h, g, e = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    q = config.queries_per_kv
    moe = config.moe if sparse else None
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    dense, f = (mlp, config.intermediate_size) if moe is None else (f"{mlp}{SHARED}", moe.shared_size)
    norms = [_plain(f"{attention}{name}.weight", (e,)) for name in HEAD_NORMS[config.qk_norm]] if config.qk_norm else [None, None]
    # Every group's queries, then its key, then its value.
    fused = ((f"{attention}q_proj", q, 0), (f"{attention}k_proj", 1, q), (f"{attention}v_proj", 1, q + 1))
    return Layer(
        input_norm=_plain(f"{prefix}input_layernorm.weight", (d,)),
        qkv=boxed(*(Box(f"{name}.weight", ((g, n, e), (inputs or d,)), (3, 0, 1, 2), (0, 0, at, 0)) for name, n, at in fused)),
        o=boxed(Box(f"{attention}o_proj.weight", ((d,), (h, e)), (1, 2, 0), (0, 0, 0))),
        post_attention_norm=_plain(f"{prefix}post_attention_layernorm.weight", (d,)),
        gate_up=_gate_up(dense, f, d) if f else None,
        down=_transposed(f"{dense}down_proj.weight", (d, f)) if f else None,
        q_norm=norms[0],
        k_norm=norms[1],
        qkv_bias=boxed(*(Box(f"{name}.bias", ((g, n, e),), (0, 1, 2), (0, at, 0)) for name, n, at in fused))
        if config.attention_bias
        else None,
        moe=None if moe is None else moe_leaves(moe, d, mlp),
    )


def moe_leaves(config: MoEConfig, width: int, prefix: str) -> MoE:
    """A `Leaf` for the router and for the experts together, which checkpoints hold one by one."""
    x, f = config.num_experts, config.intermediate_size
    names = [f"{prefix}{EXPERTS}{index}." for index in range(x)]
    return MoE(
        router=_transposed(f"{prefix}{ROUTERS[config.names]}", (x, width)),
        gate_up=_stack_leaves(*(_side_by_side(name, f, width) for name in names)),
        down=_stack_leaves(*(_transposed(f"{name}down_proj.weight", (width, f)) for name in names)),
        selection_bias=_plain(f"{prefix}{SELECTION_BIAS}", (x,)) if config.selection_bias else None,
    )


def is_leaf(node) -> bool:
    return isinstance(node, Leaf)


def check(source: TensorSource, leaves) -> None:
    """Raise ValueError naming the first tensor that is missing or has another shape than the configuration implies."""
    present = set(source.names())
    for leaf in jax.tree.leaves(leaves, is_leaf=is_leaf):
        for name, shape in leaf.tensors:
            if name not in present:
                raise ValueError(f"{source.path} has no tensor {name}, which its configuration asks for; the checkpoint is incomplete")
            if source.shape(name) != shape:
                raise ValueError(
                    f"{source.path}: tensor {name} has shape {list(source.shape(name))} but the configuration implies {list(shape)}; "
                    "the weights and the configuration do not belong together"
                )


def check_counts(config: TransformerConfig, tensors: int, path: Path) -> None:
    """Refuse numbers of layers and experts that the checkpoint cannot hold, before anything is built one by one."""
    check_depth(config.num_layers, tensors, path)
    experts = 0 if config.moe is None else config.moe.num_experts * sum(map(config.is_sparse, range(config.num_layers)))
    if experts > tensors:
        raise ValueError(f"{path} claims {experts} experts but holds only {tensors} tensors; the configuration is wrong")


def check_depth(layers: int, tensors: int, path: Path) -> None:
    if layers > tensors:
        raise ValueError(f"{path} claims {layers} layers but holds only {tensors} tensors; its configuration is wrong or it is incomplete")


def target_tensors(params: TargetParams, config: TransformerConfig, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The checkpoint tensors of a target: the inverse of `target_leaves`."""
    return _tensors(target_leaves(config, prefix), params)


def layer_tensors(layer: Layer, config: TransformerConfig, prefix: str) -> dict[str, np.ndarray]:
    """The checkpoint tensors of one decoder layer: the inverse of `layer_leaves`."""
    return _tensors(layer_leaves(config, prefix, layer.moe is not None, inputs=layer.qkv.shape[0]), layer)


def _tensors(leaves, params) -> dict[str, np.ndarray]:
    made = jax.tree.map(lambda leaf, value: tensors_of(leaf, np.asarray(value)), leaves, params, is_leaf=is_leaf)
    return {name: value for part in jax.tree.leaves(made, is_leaf=lambda node: isinstance(node, dict)) for name, value in part.items()}


def _plain(name: str, shape: tuple[int, ...]) -> Any:
    axes = tuple(range(len(shape)))
    return boxed(Box(name, tuple((size,) for size in shape), axes, (0,) * len(shape)))


def _transposed(name: str, shape: tuple[int, int]) -> Any:
    return boxed(Box(name, ((shape[0],), (shape[1],)), (1, 0), (0, 0)))


def _gate_up(prefix: str, width: int, inputs: int) -> Any:
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return boxed(*(Box(name, ((width, 1), (inputs,)), (2, 1, 0), (0, which, 0)) for which, name in enumerate(names)))


def _side_by_side(prefix: str, width: int, inputs: int) -> Any:
    """As `_gate_up`, but the two together are one matrix [inputs, 2 width]."""
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return boxed(*(Box(name, ((width,), (inputs,)), (1, 0), (0, which * width)) for which, name in enumerate(names)))


def _stack(layers: tuple[Layer, ...]) -> Layer:
    return jax.tree.map(_stack_leaves, *layers, is_leaf=is_leaf)


def _stack_leaves(*leaves: Leaf) -> Any:
    """One parameter with a new leading axis: entry i comes from leaf i."""
    return boxed(*(_behind(box, index) for index, leaf in enumerate(leaves) for box in leaf.boxes))


def _behind(box: Box, index: int) -> Box:
    parts = ((1, *box.parts[0]), *box.parts[1:])
    return Box(box.name, parts, (0, *(axis + 1 for axis in box.order)), (index, *box.start))
