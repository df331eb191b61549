"""The highest scores as a TPU finds them. On CPU its search is a sort and misses nothing, so the parts must give what the whole gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import mesh as meshes
from angelspec_jax.highest import at_least_kth, by_parts, highest

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")


def scores_of(rows: int, size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).permutation(rows * 3 * size).reshape(rows, 3, size).astype(np.float32))


def test_without_a_mesh():
    scores = scores_of(2, 640)
    for theirs, ours in zip(jax.lax.top_k(scores, 16), highest(scores, 16), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@needs_devices
@pytest.mark.parametrize(("rows", "size"), [(4, 640), (3, 640), (4, 642), (2, 40)])
def test_a_vocabulary_over_devices(rows, size):
    """Spread over rows and vocabulary, over one of the two, and with fewer numbers a part than are asked for."""
    scores, mesh = scores_of(rows, size), meshes.make_mesh(2, 1, 4, jax.devices()[:8])
    with jax.set_mesh(mesh):
        found = jax.jit(by_parts, static_argnums=1)(scores, 16)
    for theirs, ours in zip(jax.lax.top_k(scores, 16), found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_not_below_the_kth_highest():
    """Against a sort, with a k for every row, numbers of both signs and infinities; what ties with the k-th stays."""
    scores = np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32)
    scores[0, :3], scores[1, 5], scores[2, ::7] = np.inf, -np.inf, -0.5
    k = np.array([2, 50, 20, 7], np.int32)
    kth = np.sort(scores, axis=1)[np.arange(4), 50 - k]
    np.testing.assert_array_equal(at_least_kth(jnp.asarray(scores), jnp.asarray(k)), scores >= kth[:, None])
    np.testing.assert_array_equal(at_least_kth(jnp.asarray(scores), 3), scores >= np.sort(scores, axis=1)[:, [47]])
