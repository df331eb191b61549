"""Gradient accumulation: the mean over the parts of a batch, with the memory of one part."""

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax.training.step import accumulated

BATCH = {"x": jnp.arange(12.0).reshape(6, 2), "w": jnp.array([1.0, 2.0, 0.0, 1.0, 3.0, 1.0])}
PARAMS = {"a": jnp.array([0.5, -1.0])}


def loss(params, batch, key, objective):
    values = jnp.square(batch["x"] @ params["a"])
    count = jnp.stack([jnp.sum(batch["w"]), jnp.sum((batch["w"] > 1).astype(jnp.float32))])
    mean = jnp.sum(values * batch["w"]) / count[0]
    return mean, {"loss": mean, "count": count, "accuracy": jnp.stack([mean, jnp.sum(batch["w"])])}


def gradient(batch, key, objective):
    return jax.grad(loss, has_aux=True)(PARAMS, batch, key, objective)


def test_parts_average_their_gradients_and_pool_their_metrics():
    found, metrics = jax.jit(lambda batch: accumulated(gradient, batch, jax.random.key(0), None, 3))(BATCH)
    parts = [gradient({name: x[i::3] for name, x in BATCH.items()}, jax.random.key(0), None) for i in range(3)]
    np.testing.assert_allclose(found["a"], np.mean([g["a"] for g, _ in parts], axis=0), rtol=1e-6)
    np.testing.assert_array_equal(metrics["count"], [8.0, 2.0])
    np.testing.assert_allclose(metrics["loss"], np.mean([m["loss"] for _, m in parts]), rtol=1e-6)
    weighed = sum(np.asarray(m["accuracy"] * m["count"]) for _, m in parts) / np.array([8.0, 2.0])
    np.testing.assert_allclose(metrics["accuracy"], weighed, rtol=1e-6)


def test_one_part_is_the_batch_itself():
    found, metrics = accumulated(gradient, BATCH, jax.random.key(0), None, 1)
    whole, expected = gradient(BATCH, jax.random.key(0), None)
    np.testing.assert_array_equal(found["a"], whole["a"])
    np.testing.assert_array_equal(metrics["loss"], expected["loss"])


def test_memory_is_that_of_one_part():
    def peak(parts: int) -> int:
        def whole(batch):
            def own(batch, key, objective):
                hidden = jnp.tanh(batch["x"][:, :, None] * jnp.ones((1, 2, 4096)))
                return {"a": jnp.mean(jnp.sin(hidden) @ jnp.ones(4096), axis=0)}, {"count": jnp.ones(1), "loss": jnp.sum(hidden)}

            return accumulated(own, batch, jax.random.key(0), None, parts)

        batch = {"x": jax.ShapeDtypeStruct((64, 2), jnp.float32)}
        return jax.jit(whole).lower(batch).compile().memory_analysis().temp_size_in_bytes

    assert peak(8) < 0.5 * peak(1)
