"""Golden cases and a tiny target for the drafter tests."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax.params import map_params
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs

GOLDENS = Path(__file__).parents[1] / "goldens"


def random_params(specs, seed=0):
    """Random parameters made by NumPy: nothing to compile."""
    rng = np.random.default_rng(seed)
    return map_params(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.2, jnp.float32), specs)


@pytest.fixture(scope="session")
def randomize():
    return random_params


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def golden():
    """`golden("drafters/zlab_dflash")` -> folder, `in.*` and `out.*` arrays, scalar settings."""

    def load(case: str) -> tuple[Path, dict[str, np.ndarray], dict]:
        folder = GOLDENS / case
        return folder, load_file(folder / "io.safetensors"), json.loads((folder / "case.json").read_text())["params"]

    return load


@pytest.fixture(scope="session")
def tiny_target():
    """A random target of 6 layers that a drafter can be made for."""
    config = TransformerConfig(97, 32, 48, 6, 4, 2, 8)
    params = random_params(target_specs(config))
    return types.SimpleNamespace(params=params, config=config, chat_template="{{ messages }}", name="tiny", fingerprint="0123")
