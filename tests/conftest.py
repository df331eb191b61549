"""One environment for every test: CPU with eight virtual devices, strict array semantics, compiled programs kept between runs."""

import dataclasses
import os
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import annotation_checks

annotation_checks.install(("angelspec_jax", "pallas_kernels"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402

from angelspec_jax.mesh import enable_compilation_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
enable_compilation_cache(os.path.expanduser("~/.cache/angelspec-jax/compiled-tests"))


@dataclasses.dataclass(frozen=True)
class Toy:
    """A random target with a random drafter for it."""

    target: types.SimpleNamespace  # params, config, and what drafter.loading asks of a target
    drafter: types.SimpleNamespace  # params, config, shared


@pytest.fixture(scope="session")
def toy():
    """`toy(family="dfly", seed=0)` -> Toy: 6 layers of width 32, 97 tokens, blocks of 4. Sizes divide by meshes of two devices an axis."""
    from angelspec_jax.drafter.loading import create_drafter
    from angelspec_jax.params import initialize
    from angelspec_jax.target.config import TransformerConfig
    from angelspec_jax.target.transformer import target_specs

    def make(family: str = "dfly", seed: int = 0) -> Toy:
        config = TransformerConfig(96, 32, 48, 6, 4, 2, 8)
        params = initialize(target_specs(config), jax.random.key(seed), jnp.float32)
        target = types.SimpleNamespace(params=params, config=config, chat_template="{{ messages }}", name="toy", fingerprint="0123")
        drafter = create_drafter(
            target, jax.random.key(seed + 1), family=family, num_layers=2, block_size=4, taps=2, mask_token=95, correction_size=16
        )
        return Toy(target, types.SimpleNamespace(params=drafter.params, config=drafter.config, shared=drafter.shared))

    return make
