"""Checkpoints: bit-exact round trips, shardings, what is kept, and a disk that fills up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct

from angelspec_jax.training.checkpoint import Checkpoints


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(seed=0):
    params = {
        "w": jax.random.normal(jax.random.key(seed), (4, 6)),
        "layers": ({"b": jnp.arange(3.0)}, {"b": jnp.arange(3.0, dtype=jnp.bfloat16)}),
        "absent": None,
    }
    return State(jnp.int32(seed), params, optax.adam(1e-3).init(params), jax.random.key(seed + 5))


def bits(tree):
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_round_trip_is_bit_exact_and_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step() is None
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {"config": {"lr": 0.1, "taps": [1, 2]}, "seconds": 2.5})
    checkpoints.wait()
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest_step() == 3
    assert again.read_record(3) == {"config": {"lr": 0.1, "taps": [1, 2]}, "seconds": 2.5}
    restored = again.restore(3, make_state())
    assert jax.tree.structure(restored) == jax.tree.structure(make_state())
    assert bits(restored) == bits(make_state(3))
    assert sorted(p.name for p in again.folder.iterdir()) == ["2", "3"]
    again.close()


def test_restores_onto_the_shardings_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[: 2 if len(jax.devices()) > 1 else 1]), ("data",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = make_state()
    like = jax.eval_shape(lambda: state)
    like = like.replace(params=like.params | {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=placed)})
    restored = checkpoints.restore(1, like)
    assert restored.params["w"].sharding == placed
    assert bits(restored) == bits(make_state(1))
    checkpoints.close()


def test_another_shape_is_one_sentence(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    other = make_state()
    other = other.replace(params=other.params | {"w": jnp.ones((5, 6))})
    with pytest.raises(ValueError, match="does not fit this run's drafter or optimizer"):
        checkpoints.restore(1, other)
    checkpoints.close()


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()

    async def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    handler = ocp.type_handlers.ArrayHandler if hasattr(ocp.type_handlers, "ArrayHandler") else None
    with monkeypatch.context() as patch:
        patch.setattr(handler, "serialize", full)
        with pytest.raises(OSError, match="No space left on device.*step 1, is kept") as caught:
            checkpoints.save(2, make_state(2), {})
            checkpoints.wait()
        assert "\n" not in str(caught.value)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=1)
    assert again.latest_step() == 1
    assert bits(again.restore(1, make_state())) == bits(make_state(1))
    again.save(2, make_state(2), {})
    again.wait()
    assert again.latest_step() == 2
    again.close()
