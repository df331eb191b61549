"""The one place that knows how checkpoint tensors relate to parameters.

Checkpoints follow Hugging Face: one `[out, in]` matrix per projection. In memory the projections that read the same input are fused and
stored `[in..., out...]` (layers.py). A `Leaf` assembles any window of one parameter from the tensors it comes from, so a device's shard is
read straight from the file; `layer_tensors` and `target_tensors` are the way back.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from angelspec_jax.target.config import MoEConfig, TransformerConfig
from angelspec_jax.target.layers import Layer
from angelspec_jax.target.moe import MoE
from angelspec_jax.target.transformer import TargetParams, arrange, layer_at

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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where one parameter comes from: the checkpoint tensors with their expected shapes, and how a window is assembled from them."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    read: Callable[[TensorSource, Window], np.ndarray]


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
    moe = config.moe if sparse else None
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    dense, f = (mlp, config.intermediate_size) if moe is None else (f"{mlp}{SHARED}", moe.shared_size)
    norms = [_plain(f"{attention}{name}.weight", (e,)) for name in HEAD_NORMS[config.qk_norm]] if config.qk_norm else [None, None]
    heads = ((f"{attention}q_proj", h * e), (f"{attention}k_proj", g * e), (f"{attention}v_proj", g * e))
    return Layer(
        input_norm=_plain(f"{prefix}input_layernorm.weight", (d,)),
        qkv=_leaf(
            tuple((f"{name}.weight", (rows, inputs or d)) for name, rows in heads),
            functools.partial(_read_qkv, [f"{name}.weight" for name, _ in heads], config),
        ),
        o=_leaf(((f"{attention}o_proj.weight", (d, h * e)),), functools.partial(_read_o, f"{attention}o_proj.weight", e)),
        post_attention_norm=_plain(f"{prefix}post_attention_layernorm.weight", (d,)),
        gate_up=_gate_up(dense, f, d) if f else None,
        down=_transposed(f"{dense}down_proj.weight", (d, f)) if f else None,
        q_norm=norms[0],
        k_norm=norms[1],
        qkv_bias=_leaf(
            tuple((f"{name}.bias", (rows,)) for name, rows in heads),
            functools.partial(_read_qkv_bias, [f"{name}.bias" for name, _ in heads], config),
        )
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
        gate_up=_stack_leaves(*(_gate_up(name, f, width) for name in names)),
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


def check_depth(layers: int, tensors: int, path: Path) -> None:
    """Refuse a number of layers that the checkpoint cannot hold, before anything is built layer by layer."""
    if layers > tensors:
        raise ValueError(f"{path} claims {layers} layers but holds only {tensors} tensors; its configuration is wrong or it is incomplete")


def target_tensors(params: TargetParams, config: TransformerConfig, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The checkpoint tensors of a target: the inverse of `target_leaves`."""
    tensors = {f"{prefix}embed_tokens.weight": np.asarray(params.embed), f"{prefix}norm.weight": np.asarray(params.final_norm)}
    if params.lm_head is not None:
        tensors["lm_head.weight"] = np.asarray(params.lm_head)
    for index in range(config.num_layers):
        tensors |= layer_tensors(layer_at(params.layers, index), config, f"{prefix}layers.{index}.")
    return tensors


def layer_tensors(layer: Layer, config: TransformerConfig, prefix: str) -> dict[str, np.ndarray]:
    """The checkpoint tensors of one decoder layer: the inverse of `layer_leaves`."""
    d, e, queries = config.hidden_size, config.head_dim, config.queries_per_kv
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = np.moveaxis(np.asarray(layer.qkv), 0, -1)  # [G, H/G + 2, E, inputs]
    parts = {"q_proj": slice(0, queries), "k_proj": slice(queries, queries + 1), "v_proj": slice(queries + 1, queries + 2)}
    tensors = {f"{attention}{name}.weight": np.ascontiguousarray(qkv[:, part].reshape(-1, qkv.shape[-1])) for name, part in parts.items()}
    if layer.qkv_bias is not None:
        bias = np.asarray(layer.qkv_bias)
        tensors |= {f"{attention}{name}.bias": np.ascontiguousarray(bias[:, part].reshape(-1)) for name, part in parts.items()}
    tensors |= {
        f"{prefix}input_layernorm.weight": np.asarray(layer.input_norm),
        f"{prefix}post_attention_layernorm.weight": np.asarray(layer.post_attention_norm),
        f"{attention}o_proj.weight": np.ascontiguousarray(np.asarray(layer.o).reshape(config.num_heads * e, d).T),
    }
    if layer.gate_up is not None:
        tensors |= _swiglu_tensors(mlp if layer.moe is None else f"{mlp}{SHARED}", np.asarray(layer.gate_up), np.asarray(layer.down))
    if config.qk_norm:
        norms = (layer.q_norm, layer.k_norm)
        tensors |= {f"{attention}{name}.weight": np.asarray(norm) for name, norm in zip(HEAD_NORMS[config.qk_norm], norms, strict=True)}
    if layer.moe is not None and config.moe is not None:
        tensors |= moe_tensors(layer.moe, config.moe, mlp)
    return tensors


def moe_tensors(moe: MoE, config: MoEConfig, prefix: str) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a router and its experts: the inverse of `moe_leaves`."""
    tensors = {f"{prefix}{ROUTERS[config.names]}": np.ascontiguousarray(np.asarray(moe.router).T)}
    if moe.selection_bias is not None:
        tensors[f"{prefix}{SELECTION_BIAS}"] = np.asarray(moe.selection_bias)
    for index, parts in enumerate(zip(np.asarray(moe.gate_up), np.asarray(moe.down), strict=True)):
        tensors |= _swiglu_tensors(f"{prefix}{EXPERTS}{index}.", *parts)
    return tensors


def _swiglu_tensors(prefix: str, gate_up: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    parts = {"gate_proj": gate_up[:, 0], "up_proj": gate_up[:, 1], "down_proj": down}
    return {f"{prefix}{name}.weight": np.ascontiguousarray(part.T) for name, part in parts.items()}


def _leaf(tensors: tuple, read: Callable[[TensorSource, Window], np.ndarray]) -> Any:
    """A `Leaf`, typed as anything: it stands where the tree of parameters will hold an array."""
    return Leaf(tensors, read)


def _plain(name: str, shape: tuple[int, ...]) -> Any:
    return Leaf(((name, shape),), lambda source, window: source.read(name, window))


def _transposed(name: str, shape: tuple[int, int]) -> Any:
    return Leaf(((name, shape),), lambda source, window: source.read(name, (window[1], window[0])).T)


def _gate_up(prefix: str, width: int, inputs: int) -> Any:
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return Leaf(tuple((name, (width, inputs)) for name in names), functools.partial(_read_gate_up, names))


def _stack(layers: tuple[Layer, ...]) -> Layer:
    return jax.tree.map(_stack_leaves, *layers, is_leaf=is_leaf)


def _stack_leaves(*leaves: Leaf) -> Any:
    return Leaf(tuple(tensor for leaf in leaves for tensor in leaf.tensors), _reader_of_stack(leaves))


def _reader_of_stack(leaves: tuple[Leaf, ...]) -> Callable[[TensorSource, Window], np.ndarray]:
    return lambda source, window: np.stack([leaf.read(source, window[1:]) for leaf in leaves[window[0]]])


def _head_rows(window: slice, size: int) -> slice:
    return slice(window.start * size, window.stop * size)


def _head_parts(config: TransformerConfig, groups: slice, parts: slice):
    """(projection, first head, last head) runs that make up a window of [G, H/G + 2], group by group."""
    queries = config.queries_per_kv
    for group in range(groups.start, groups.stop):
        if parts.start < queries:
            yield 0, slice(group * queries + parts.start, group * queries + min(parts.stop, queries))
        for projection in (1, 2):
            if parts.start <= queries + projection - 1 < parts.stop:
                yield projection, slice(group, group + 1)


def _read_qkv(names: list[str], config: TransformerConfig, source: TensorSource, window: Window) -> np.ndarray:
    d, groups, parts, within = window
    e = config.head_dim
    rows = [source.read(names[which], (_head_rows(heads, e), d)) for which, heads in _head_parts(config, groups, parts)]
    fused = np.concatenate(rows).reshape(groups.stop - groups.start, parts.stop - parts.start, e, -1)[:, :, within]
    return np.moveaxis(fused, -1, 0)


def _read_qkv_bias(names: list[str], config: TransformerConfig, source: TensorSource, window: Window) -> np.ndarray:
    groups, parts, within = window
    e = config.head_dim
    rows = [source.read(names[which], (_head_rows(heads, e),)) for which, heads in _head_parts(config, groups, parts)]
    return np.concatenate(rows).reshape(groups.stop - groups.start, parts.stop - parts.start, e)[:, :, within]


def _read_o(name: str, e: int, source: TensorSource, window: Window) -> np.ndarray:
    heads, within, d = window
    return source.read(name, (d, _head_rows(heads, e))).T.reshape(heads.stop - heads.start, e, -1)[:, within]


def _read_gate_up(names: tuple[str, str], source: TensorSource, window: Window) -> np.ndarray:
    d, which, f = window
    return np.stack([source.read(name, (f, d)).T for name in names[which]], axis=1)
