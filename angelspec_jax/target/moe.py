"""Routed feed-forward layers: a router picks each row's experts, and rows go through them sorted by expert. No row is dropped.

`X` experts, `C` chosen a row. Routing is float32 throughout: a rounding there changes which experts answer.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from angelspec_jax import mesh as meshes
from angelspec_jax.params import Param
from angelspec_jax.target import int8
from angelspec_jax.target.config import MoEConfig


@struct.dataclass
class Stacked:
    """One layer's experts where they lie among those of all layers of a scan."""

    weights: jax.Array  # [L, X, in, out]
    index: jax.Array  # [] int32, the layer

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape[1:]


@struct.dataclass
class MoE:
    router: jax.Array  # [D, X] float32
    gate_up: int8.Weight | Stacked  # [X, D, 2F], the gates of all hidden numbers first: one product reads them as they lie
    down: int8.Weight | Stacked  # [X, F, D]
    selection_bias: jax.Array | None = None  # [X] float32, added to the scores that choose and not to those that weigh


def moe_specs(config: MoEConfig, width: int, quantize: str | None = None) -> MoE:
    """Declaration of the router and the experts of one layer of a model of this width."""
    x, f = config.num_experts, config.intermediate_size
    matrix = Param if quantize is None else lambda *args, **options: int8.specs(Param(*args, **options), lead=1)
    return MoE(
        router=Param((width, x), ("embed", None), dtype=jnp.float32),
        gate_up=matrix((x, width, 2 * f), ("experts", None, None), scale=1 / math.sqrt(width)),
        down=matrix((x, f, width), ("experts", None, None), scale=1 / math.sqrt(f)),
        selection_bias=Param((x,), (None,), "zeros", dtype=jnp.float32) if config.selection_bias else None,
    )


def routed(moe: MoE, config: MoEConfig, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Weighted sum of the chosen experts' SwiGLU, in float32.

    On a mesh, that of `jax.set_mesh` or else `config.mesh`, every device runs the experts it holds on the rows of its data shard, and the
    sums are added up. Left to itself the partitioner would gather all experts' weights on every device.
    """
    rows = x.reshape(-1, x.shape[-1])
    chosen, weights = route(moe, config, rows)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = config.mesh if mesh.empty and config.mesh is not None else mesh
    spread = expert_axes(mesh, config.num_experts)
    if not spread:
        return experts(moe, rows, chosen, weights).reshape(x.shape)

    def local(moe, *inputs):
        return jax.lax.psum(experts(moe, *inputs, first=jax.lax.axis_index(spread) * moe.gate_up.shape[0]), spread)

    parts = mesh.shape["data"] * meshes.sequence_parts(mesh)
    here = PartitionSpec(tuple(axis for axis in ("data", meshes.SEQUENCE) if axis in mesh.shape))
    here = here if rows.shape[0] % parts == 0 else PartitionSpec()
    own: Any = PartitionSpec(spread)
    if isinstance(moe.gate_up, Stacked):
        own = Stacked(PartitionSpec(None, spread), PartitionSpec())  # pyright: ignore[reportArgumentType]
    held = MoE(PartitionSpec(), own, own, PartitionSpec())  # pyright: ignore[reportArgumentType]
    # Gradients do not pass here (a target is frozen), so nothing needs the proof that outputs agree across devices.
    run = jax.shard_map(local, mesh=mesh, in_specs=(held, here, here, here), out_specs=here, check_vma=False)
    return run(moe, rows, chosen, weights).reshape(x.shape)


def expert_axes(mesh, count: int) -> tuple[str, ...]:
    """Mesh axes over which this many experts are spread; none outside a mesh of this package."""
    if not meshes.is_ours(mesh):
        return ()
    axes = meshes.partition(mesh, ("experts",), (count,))[0]
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def route(moe: MoE, config: MoEConfig, x: Float[Array, "N D"]) -> tuple[Int[Array, "N C"], Float[Array, "N C"]]:
    """Ids and weights of each row's experts, best first; the lower id wins a tie."""
    scores = jnp.einsum("nd,dx->nx", x.astype(jnp.float32), moe.router, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(scores) if config.scores == "sigmoid" else jax.nn.softmax(scores, axis=-1)
    ranked = scores if moe.selection_bias is None else scores + moe.selection_bias[None]
    _, chosen = jax.lax.top_k(ranked, config.experts_per_token)
    # Picked by comparing: a TPU fetches single numbers one after the other.
    own = chosen[..., None] == jnp.arange(scores.shape[-1], dtype=chosen.dtype)[None, None]
    weights = jnp.sum(jnp.where(own, scores[:, None], 0.0), axis=-1)
    if config.normalize:
        # Sigmoid scores may all underflow.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * config.scale


def experts(
    moe: MoE, x: Float[Array, "N D"], chosen: Int[Array, "N C"], weights: Float[Array, "N C"], first: int | Int[Array, ""] = 0
) -> Float[Array, "N D"]:
    """The chosen experts' weighted sum: each expert reads its rows as one consecutive group of a grouped product.

    `moe` may hold only a part of the experts, from id `first` on; the others then add nothing.
    """
    count, width, hidden = moe.gate_up.shape[0], moe.gate_up.shape[1], moe.gate_up.shape[2] // 2
    own = chosen.reshape(-1) - first
    held = (own >= 0) & (own < count)
    own = jnp.where(held, own, count)  # sorted behind every group
    order = jnp.argsort(own, stable=True)
    sizes = jnp.sum(own[:, None] == jnp.arange(count, dtype=own.dtype)[None], axis=0, dtype=jnp.int32)
    rows, expert = x[order // chosen.shape[1]], own[order]
    fused = _grouped(rows, moe.gate_up, sizes, expert)
    active = jax.nn.silu(fused[:, :hidden]) * fused[:, hidden:]
    out = _grouped(active, moe.down, sizes, expert, preferred_element_type=jnp.float32)
    # Back in the rows' order by a gather, whose sum over a row's experts has one order (a scatter's has not). What no group covered
    # is whatever the product left there.
    out = jnp.where(held[:, None], out[jnp.argsort(order)], 0.0)
    return jnp.sum(out.reshape(*chosen.shape, width) * weights[..., None], axis=1)


def aside(layers: Any) -> tuple[Any, Callable[[Any, Int[Array, ""]], Any]]:
    """A stack of layers without its experts, for a scan to slice, and what gives layer `index` of it its experts back.

    A scan hands its body a slice of each array. A kernel cannot read that where it is, so every layer's experts, most of the model, would
    be copied once a pass. 8-bit experts are widened before their product anyway and stay in the stack.
    """
    moe = layers.moe
    if moe is None or int8.is_int8(moe.gate_up):
        return layers, lambda layer, index: layer

    def complete(layer, index):
        return layer.replace(moe=layer.moe.replace(gate_up=Stacked(moe.gate_up, index), down=Stacked(moe.down, index)))

    return layers.replace(moe=moe.replace(gate_up=None, down=None)), complete


def _grouped(rows, weight: int8.Weight | Stacked, sizes, expert, preferred_element_type=None) -> jax.Array:
    """`int8.grouped`, also of experts in a stack."""
    if not isinstance(weight, Stacked):
        return int8.grouped(rows, weight, sizes, expert, preferred_element_type)

    options = {"preferred_element_type": preferred_element_type}
    inputs = (rows, weight.weights, sizes, weight.index)
    return jax.lax.platform_dependent(*inputs, tpu=functools.partial(_among_all, **options), default=functools.partial(_alone, **options))


def _among_all(rows, weights, sizes, index, **options) -> jax.Array:
    """A TPU's grouped product reads the experts that have rows: those of the other layers are groups without any."""
    layers, count = weights.shape[:2]
    groups = jax.lax.dynamic_update_slice(jnp.zeros((layers * count,), sizes.dtype), sizes, (index * count,))
    return jax.lax.ragged_dot(rows, weights.reshape(layers * count, *weights.shape[2:]), groups, **options)


def _alone(rows, weights, sizes, index, **options) -> jax.Array:
    """Other devices work through every group, so they get no more than one layer's."""
    one = jax.lax.dynamic_index_in_dim(weights, index, keepdims=False, allow_negative_indices=False)
    return jax.lax.ragged_dot(rows, one, sizes, **options)
