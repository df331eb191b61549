"""Chains of one long text dealt over the devices that hold its tokens.

The tokens of a sequence lie over the mesh's sequence axis (n devices), and with them everything of their length that has a width: features,
hidden states, keys and values. Anchors are dealt round, one to each device in turn, so that every device has as many early ones (which see
little) as late ones. Dealt arrays lead with the n parts: [B, A, ...] becomes [n B, A / n, ...], each part a batch of its own, and lie where
`mesh.dealt_axes` says. Losses are sums over rows and do not care. Tokens, masks and positions are whole on every device; beside a
hidden state of thousands of numbers they weigh nothing. Without a sequence axis n is 1 and nothing changes.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from angelspec_jax import mesh as meshes
from angelspec_jax.training import anchors


def deal(x: Array) -> Array:
    """[B, A, ...] -> [n B, A / n, ...]: anchor j goes to part j mod n."""
    parts = meshes.sequence_parts()
    if parts == 1:
        return x
    split = jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // parts, parts, *x.shape[2:]), 2, 0)
    return _placed(split.reshape(parts * x.shape[0], x.shape[1] // parts, *x.shape[2:]), x.shape[0])


def everywhere(x: Array, like: Array) -> Array:
    """[B, S], once for every part of the dealt array `like`, so that its rows can look things up."""
    parts = like.shape[0] // x.shape[0]
    return x if parts == 1 else _placed(jnp.tile(x, (parts, *[1] * (x.ndim - 1))), x.shape[0])


def gather_rows(values: Float[Array, "B S D"], index: Int[Array, "dealt *index"]) -> Float[Array, "dealt *index D"]:
    """`values[b, index[part b, ...]]`, where a row is fetched from the device that holds its token.

    Every device answers for its own tokens what all ask, zeros elsewhere, and the answers are added up where they were asked for.
    """
    parts = index.shape[0] // values.shape[0]
    if parts == 1:
        return anchors.gather_rows(values, index)
    mesh = jax.sharding.get_abstract_mesh()
    batch = meshes.partition(mesh, ("batch",), values.shape[:1])[0]  # pyright: ignore[reportArgumentType]
    rows = PartitionSpec(meshes.dealt_axes(batch))

    def run(values, index):
        length = values.shape[1]
        asked = jax.lax.all_gather(index, meshes.SEQUENCE)  # [n, B, ...]
        local = asked - jax.lax.axis_index(meshes.SEQUENCE).astype(asked.dtype) * length
        mine = (local >= 0) & (local < length)
        found = jax.vmap(anchors.gather_rows, in_axes=(None, 0))(values, jnp.clip(local, 0, length - 1))
        found = jnp.where(mine[..., None], found, jnp.zeros((), found.dtype))
        return jax.lax.psum_scatter(found, meshes.SEQUENCE)

    # The sum of one answer and zeros: exact in any type.
    specs = (PartitionSpec(batch, meshes.SEQUENCE), rows)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(values, index)


def _placed(x: Array, sequences: int) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    batch = meshes.partition(mesh, ("batch",), (sequences,))[0]  # pyright: ignore[reportArgumentType]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(meshes.dealt_axes(batch)))
