"""The choice of a token from logits that are sharded over the vocabulary gathers none of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angelspec_jax.decoding.sampling import Text, choose, log_probability, make_sampling

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
ROWS, VOCABULARY = 6, 4096


def largest_gather(compiled) -> int:
    """Elements of the largest array that devices send each other whole."""
    found = re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
    shapes = [shape for result in found for shape in re.findall(r"\[([\d,]*)\]", result)]
    return max((int(np.prod([int(n) for n in shape.split(",") if n] or [1])) for shape in shapes), default=0)


def test_logits_stay_where_they_are():
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("tensor",))
    whole = NamedSharding(mesh, PartitionSpec())
    logits = jax.random.normal(jax.random.key(0), (ROWS, VOCABULARY)) * 3
    options = make_sampling(
        ROWS, temperature=[0, 1, 1, 0.7, 2, 1], top_k=[0, 50, 0, 9, 0, 0], top_p=[1, 1, 0.8, 0.9, 1, 1], min_p=[0, 0, 0, 0, 0.1, 0], seed=3,
        repetition=1.3, frequency=0.2, presence=0.1, bias={17: 2.0, 4000: -float("inf")},
    )  # fmt: skip
    text = Text(
        tokens=jax.random.randint(jax.random.key(1), (2, 20), 0, VOCABULARY, jnp.int32),
        length=jnp.asarray([15, 18], jnp.int32),
        prompt_length=jnp.asarray([4, 9], jnp.int32),
        drafts=jnp.asarray([[5, 6], [7, 4095]], jnp.int32),
        request=jnp.asarray([0, 0, 0, 1, 1, 1], jnp.int32),
        ancestors=jnp.asarray([[1, 0], [3, 0], [7, 0]] * 2, jnp.uint32),
    )
    positions = jnp.arange(ROWS, dtype=jnp.int32)

    def run(logits, options, positions, text):
        chosen = choose(logits, options, positions, text)
        return chosen, log_probability(logits, chosen)

    alone = jax.jit(run)(logits, options, positions, text)
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    rest = jax.device_put((options, positions, text), whole)
    compiled = jax.jit(run, out_shardings=whole).lower(sharded, *rest).compile()
    assert largest_gather(compiled) <= 64 * ROWS  # per-device winners at most, never [N, V]
    copied = jax.jit(lambda x: x, out_shardings=whole).lower(sharded).compile()
    assert largest_gather(copied) >= ROWS * VOCABULARY  # as it would be seen
    for one, several in zip(alone, compiled(sharded, *rest), strict=True):
        np.testing.assert_allclose(np.asarray(several), np.asarray(one), rtol=1e-5)
