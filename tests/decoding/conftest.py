"""A toy target with a random drafter."""

import functools
import types

import jax
import pytest
from decoding_bench import Bench

from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs


@pytest.fixture(scope="session")
def make_bench():
    """`make_bench(family="dfly")`: a random target of 6 layers and 96 tokens, and a random drafter of blocks of 4."""

    @functools.cache
    def make(family: str = "dfly") -> Bench:
        config = TransformerConfig(96, 32, 48, 6, 4, 2, 8)
        target = types.SimpleNamespace(
            params=initialize(target_specs(config), jax.random.key(0)), config=config, chat_template=None, name="toy", fingerprint="0123"
        )
        drafter = create_drafter(
            target, jax.random.key(1), family=family, num_layers=2, block_size=4, taps=2, mask_token=95, correction_size=16
        )
        return Bench(
            Plan(config, prefill_chunk=4),
            Plan(config, drafter.config, prefill_chunk=4),
            Weights(target.params, drafter.params, drafter.shared),
        )

    return make
