"""Drafters whose quality a test chooses: they know the answer and garble some of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import Bench, depths, last_siblings

from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import block
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.drafter.types import Draft, OneHot
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs


@pytest.fixture(scope="session")
def make_bench():
    """`make_bench(family="dfly")`: a random target of 6 layers and 96 tokens, and a random drafter of blocks of 4."""

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


@pytest.fixture
def knowing(monkeypatch):
    """`knowing(texts, wrong, parents=None)`: drafts come from `texts` [R, S] by position; positions in `wrong` are garbled.

    With `parents` [K] the drafts form that tree: among siblings the one that holds the true token is the last, the others are false.
    """

    def install(texts: np.ndarray, wrong=(), parents=None):
        table = np.array(texts, np.int32)
        for position in wrong:
            table[:, position] = (table[:, position] + 1) % 90
        truth = jnp.asarray(table)

        def draft(params, config, shared, seen, state, noise, policy):
            prefix_length = seen.prefix_length
            count = config.num_drafts
            tree = np.arange(-1, count - 1) if parents is None else np.asarray(parents)
            depth, last = depths(tree), last_siblings(tree)
            positions = jnp.minimum(prefix_length[:, None] + jnp.asarray(depth, jnp.int32)[None], truth.shape[1] - 1)
            tokens = jnp.take_along_axis(truth, positions, axis=1)
            tokens = jnp.where(jnp.asarray(last)[None], tokens, (tokens + 1 + jnp.arange(count, dtype=jnp.int32)[None]) % 90)
            structure = None if parents is None else jnp.broadcast_to(jnp.asarray(tree, jnp.int32), tokens.shape)
            return Draft(tokens, OneHot(), jnp.full(tokens.shape, 0.5, jnp.float32), structure)

        monkeypatch.setattr(block, "draft", draft)
        jax.clear_caches()  # programs traced with another drafter

    yield install
    jax.clear_caches()
