"""Routed feed-forward layers: a router picks each row's experts, and rows go through them sorted by expert. No row is dropped.

`X` experts, `C` chosen a row. Routing is float32 throughout: a rounding there changes which experts answer.
"""

import math

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
class MoE:
    router: jax.Array  # [D, X] float32
    gate_up: int8.Weight  # [X, D, 2, F]
    down: int8.Weight  # [X, F, D]
    selection_bias: jax.Array | None = None  # [X] float32, added to the scores that choose and not to those that weigh


def moe_specs(config: MoEConfig, width: int, quantize: str | None = None) -> MoE:
    """Declaration of the router and the experts of one layer of a model of this width."""
    x, f = config.num_experts, config.intermediate_size
    matrix = Param if quantize is None else lambda *args, **options: int8.specs(Param(*args, **options), lead=1)
    return MoE(
        router=Param((width, x), ("embed", None), dtype=jnp.float32),
        gate_up=matrix((x, width, 2, f), ("experts", None, None, None), scale=1 / math.sqrt(width)),
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
    held = MoE(PartitionSpec(), PartitionSpec(spread), PartitionSpec(spread), PartitionSpec())  # pyright: ignore[reportArgumentType]
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
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
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
    count, width, _, hidden = moe.gate_up.shape
    own = chosen.reshape(-1) - first
    held = (own >= 0) & (own < count)
    own = jnp.where(held, own, count)  # sorted behind every group
    order = jnp.argsort(own, stable=True)
    sizes = jnp.bincount(own, length=count).astype(jnp.int32)
    rows, expert = x[order // chosen.shape[1]], own[order]
    fused = int8.grouped(rows, moe.gate_up.reshape(count, width, 2 * hidden), sizes, expert)
    active = jax.nn.silu(fused[:, :hidden]) * fused[:, hidden:]
    out = int8.grouped(active, moe.down, sizes, expert, preferred_element_type=jnp.float32)
    # Back in the rows' order by a gather, whose sum over a row's experts has one order (a scatter's has not). What no group covered
    # is whatever the product left there.
    out = jnp.where(held[:, None], out[jnp.argsort(order)], 0.0)
    return jnp.sum(out.reshape(*chosen.shape, width) * weights[..., None], axis=1)
