"""The highest scores of a row and where they stand, or the score that the k-th highest has, without sorting a vocabulary.

XLA:TPU answers a `top_k` over a vocabulary by sorting it, and takes half a minute to compile each. Its `approx_max_k` keeps the best of
each of many bins in one reading (TPU-KNN, arXiv 2206.14286) and sorts those: the best score is always found, of the others each with a
chance of `RECALL` or more. A vocabulary that is spread over devices is searched where it lies, and the parts' best are compared.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from angelspec_jax import mesh as meshes

RECALL = 0.95


def highest(scores: Float[Array, "*N V"], count: int) -> tuple[Float[Array, "*N M"], Int[Array, "*N M"]]:
    """The `count` highest scores of each row, best first, and their places; on a TPU a few behind the first may be missing."""
    tpu = functools.partial(by_parts, count=count)
    best, places = jax.lax.platform_dependent(scores, tpu=tpu, default=lambda scores: tuple(jax.lax.top_k(scores, count)))
    return best, places


def by_parts(scores: Float[Array, "*N V"], count: int) -> tuple[Float[Array, "*N M"], Int[Array, "*N M"]]:
    """As `highest` on a TPU: every device of the mesh that the program is traced for searches its own part of rows and vocabulary."""
    mesh = jax.sharding.get_abstract_mesh()
    rows = len(scores.shape) - 1
    if not meshes.is_ours(mesh) or mesh.size == 1 or mesh.manual_axes:
        return _search(scores, count)
    spec = meshes.partition(mesh, ("batch", *[None] * (rows - 1), "vocab"), scores.shape)  # pyright: ignore[reportArgumentType]
    if spec[-1] is None or scores.shape[-1] // mesh.shape[spec[-1]] < count:
        return _search(scores, count)
    return _mapped(mesh, spec, scores, count)


def _mapped(mesh: AbstractMesh, spec: PartitionSpec, scores, count: int):
    axis = spec[-1]

    def local(part):
        best, places = _search(part, count)
        places = places + jax.lax.axis_index(axis).astype(jnp.int32) * part.shape[-1]
        best, places = (jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True) for x in (best, places))
        best, index = _one_by_one(best, count)
        return best, jnp.take_along_axis(places, index, axis=-1)

    out = PartitionSpec(*spec[:-1], None)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(out, out), check_vma=False)(scores)


def _search(scores, count: int):
    best, places = jax.lax.approx_max_k(scores, count, recall_target=RECALL)
    return best, places


def _one_by_one(scores: Float[Array, "*N V"], count: int) -> tuple[Float[Array, "*N M"], Int[Array, "*N M"]]:
    """The highest of a few hundred scores, one after the other: compiled in a tenth of the time of another sort."""
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)

    def take(rest, _):
        index = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        return jnp.where(place == index[..., None], -jnp.inf, rest), (jnp.max(rest, axis=-1), index)

    _, (best, index) = jax.lax.scan(take, scores, length=count)
    return jnp.moveaxis(best, 0, -1), jnp.moveaxis(index, 0, -1)


def at_least_kth(scores: Float[Array, "*N V"], k: int | Int[Array, "*N"]) -> Bool[Array, "*N V"]:
    """Which scores are not below the k-th highest of their row, exactly; all that tie with it are among them."""
    images = ordered(scores)
    wanted = jnp.minimum(jnp.maximum(k, 1), scores.shape[-1])
    return images >= threshold(images, lambda above: jnp.sum(above, axis=-1, dtype=jnp.int32) >= wanted)[..., None]


def threshold(images: UInt32[Array, "*N V"], enough: Callable[[Bool[Array, "*N V"]], Bool[Array, "*N"]]) -> UInt32[Array, "*N"]:
    """Largest threshold t, per row, for which the entries with `images >= t` are enough; found bit by bit in 32 readings."""

    def bit(index, found):
        candidate = found | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(enough(images >= candidate[..., None]), candidate, found)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(images.shape[:-1], jnp.uint32))


def ordered(scores: Float[Array, "*N V"]) -> UInt32[Array, "*N V"]:
    """Whole numbers in the order of the float32 scores."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    negative = (bits >> 31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))
