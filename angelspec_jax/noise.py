"""Counter-based noise: a pure function of (seed, position, token id), the same wherever and in whatever shape it is asked for.

Coupled sampling rests on it: plain decoding, verification and drafters all see the same number for the same token at the same place.
"""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

# Independent uses of one place. The coupled rule needs one; the rejection rule draws, judges and corrects with numbers that share nothing.
SHARED, DRAFT, ACCEPT, RESIDUAL, BONUS = range(5)


def gumbel(
    seeds: UInt32[Array, "*N"], positions: Int[Array, "*N"], ids: Int[Array, "*N M"], role: int = 0
) -> Float[Array, "*N M"]:
    """Standard Gumbel noise for the tokens `ids` at a position of a request; `role` separates independent uses of one place."""
    return -jnp.log(-jnp.log(uniform(seeds, positions, ids, role)))


def gumbel_all(seeds: UInt32[Array, "*N"], positions: Int[Array, "*N"], vocabulary: int, role: int = 0) -> Float[Array, "*N V"]:
    """`gumbel` for every token id below `vocabulary`, at half the hashing."""
    pairs = (vocabulary + 1) // 2
    counter = jnp.broadcast_to(jnp.arange(pairs, dtype=jnp.uint32), (*seeds.shape, pairs))
    words = jnp.stack(_hash(seeds, positions, counter, role), axis=-1)
    bits = words.reshape(*seeds.shape, 2 * pairs)[..., :vocabulary]
    return -jnp.log(-jnp.log(_unit(bits)))


def uniform(seeds: UInt32[Array, "*N"], positions: Int[Array, "*N"], ids: Int[Array, "*N M"], role: int = 0) -> Float[Array, "*N M"]:
    """Uniform noise strictly inside (0, 1), one number per token id."""
    even, odd = _hash(seeds, positions, (ids // 2).astype(jnp.uint32), role)
    return _unit(jnp.where(ids % 2 == 0, even, odd))


def reseed(seeds: UInt32[Array, "*N"], role: int, positions: Int[Array, "*N"] | None = None) -> UInt32[Array, "*N"]:
    """Seeds of another stream, or of one for each position: what is drawn with them is independent of what `seeds` draw in any role."""
    zeros = jnp.zeros((*seeds.shape, 1), jnp.uint32)
    positions = jnp.zeros(seeds.shape, jnp.int32) if positions is None else positions
    word, _ = _hash(seeds, positions, zeros, 2**31 + role)
    return word[..., 0]


def _hash(seeds, positions, counter, role):
    """Threefry-2x32 keyed by (seed, position): two words per counter."""
    shape = counter.shape
    key = [jnp.broadcast_to(word.astype(jnp.uint32)[..., None], shape) for word in (seeds, positions)]
    return threefry2x32_p.bind(*key, counter, jnp.full(shape, role, jnp.uint32))


def _unit(bits: jax.Array) -> jax.Array:
    return ((bits >> 9).astype(jnp.float32) + 0.5) * (2.0**-23)
