"""Chains unrolled from sampled anchors: the sample's share of all chains, what they may see, what decoding drafts, and whole runs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from angelspec_jax.data import features
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import create_drafter, load_drafter, save_drafter
from angelspec_jax.drafter.types import DraftPolicy, Seen
from angelspec_jax.training import prepare, ttt, warm
from angelspec_jax.training.trainer import train

STEPS, LENGTH = 3, 14
FAMILIES = {
    "mtp": ["drafter.init=target", "train.ttt.on_policy=true"],
    "eagle3": ["drafter.taps=[0,1]", "drafter.init=target", "train.stages=[{kl_weight: 1.0, position_weighting: steps}]"],
}


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.fixture(scope="module")
def unrolled(target):
    """`unrolled(family)(anchors, **changes)`: the scored states of chains over a random text, with the drafter and its inputs."""

    def of(family: str):
        options = {"eagle3": {"taps": (0, 1)}}.get(family, {})
        drafter = create_drafter(target, jax.random.key(1), family=family, num_drafts=STEPS, **options)
        draw = np.random.default_rng(2)
        tokens = jnp.asarray(draw.integers(0, 72, (1, LENGTH)), jnp.int32)
        states, hidden = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((1, LENGTH, 2, 16), (1, LENGTH, 16)))
        cell = registry.module(drafter.config).CELL
        head = cell.head(drafter.params, drafter.config, drafter.shared.head)
        positions, one = jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.zeros_like(tokens)

        @functools.partial(jax.jit, static_argnums=6)
        def unroll(tokens, hidden, states, positions, documents, anchors, on_policy):
            say = (lambda scored: ttt.greedy_tokens(scored, head, None, 5)) if on_policy else None
            condition = cell.condition(drafter.params, drafter.config, states[:, :, : len(drafter.config.taps)], hidden)
            return ttt.unroll(
                cell, drafter.params, drafter.config, drafter.shared.embed, condition, tokens, positions, anchors, anchors > 0, STEPS,
                documents, say,
            )  # fmt: skip

        def run(anchors, tokens=tokens, hidden=hidden, states=states, positions=positions, documents=one, rollout=False):
            padded = jnp.asarray([[*anchors, *[0] * (LENGTH - len(anchors))]], jnp.int32)  # one shape, one program
            return unroll(tokens, hidden, states, positions, documents, padded, rollout)[:, : len(anchors)]

        return run, drafter, (tokens, states, hidden, head)

    return of


@pytest.mark.parametrize("family", ["mtp", "eagle3"])
def test_chains_do_not_see_each_other_nor_what_comes_later(unrolled, family):
    run, _, (tokens, states, hidden, _) = unrolled(family)
    every = run(range(1, LENGTH - STEPS))
    np.testing.assert_allclose(run([3, 7])[0], every[0, [2, 6]], atol=1e-5)
    later = jnp.arange(LENGTH) >= 7  # the target's states at the anchor and behind it, and tokens the chain does not read
    changed = run(
        [3, 7],
        tokens=jnp.where((jnp.arange(LENGTH) > 7 + STEPS)[None], 0, tokens),
        hidden=jnp.where(later[None, :, None], 9.0, hidden),
        states=jnp.where(later[None, :, None, None], 9.0, states),
    )
    np.testing.assert_allclose(changed[0, 1], every[0, 6], atol=1e-5)
    before = run([7], hidden=hidden.at[0, 2].add(1.0), states=states.at[0, 2].add(1.0))
    assert np.abs(np.asarray(before[0, 0] - every[0, 6])).max() > 1e-3


@pytest.mark.parametrize("family", ["mtp", "eagle3"])
def test_packed_documents_are_as_alone(unrolled, family):
    run, _, (tokens, states, hidden, _) = unrolled(family)
    documents = jnp.asarray([[0] * 5 + [1] * (LENGTH - 5)], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(LENGTH - 5)]], jnp.int32)
    packed = run([2, 8], documents=documents, positions=positions)
    pad = lambda x: jnp.pad(x[:, 5:], [(0, 0), (0, 5)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    alone = run([3], tokens=pad(tokens), hidden=pad(hidden), states=pad(states))
    np.testing.assert_allclose(packed[0, 1], alone[0, 0], atol=1e-5)


@pytest.mark.parametrize("family", ["mtp", "eagle3"])
def test_a_rollout_says_what_decoding_drafts(unrolled, family):
    run, drafter, (tokens, states, hidden, head) = unrolled(family)
    anchor, module = 9, registry.module(drafter.config)
    scored = run([anchor], rollout=True)
    said = jnp.argmax(jnp.einsum("kd,vd->kv", scored[0, 0], head), axis=-1)
    at = jnp.arange(anchor, dtype=jnp.int32)
    state = module.create_state(drafter.config, 1, 16)
    rows = tokens[0, 1 : anchor + 1], jnp.zeros(anchor, jnp.int32), at, jnp.ones(anchor, bool)
    taps = states[0, :anchor, : len(drafter.config.taps)]
    extend = jax.jit(module.extend, static_argnums=1)
    state = extend(drafter.params, drafter.config, drafter.shared, taps, hidden[0, :anchor], *rows, state)
    seen = Seen(tokens[0, anchor][None], jnp.asarray([anchor], jnp.int32), tokens)
    policy = DraftPolicy(jnp.float32(0.0), candidates=0)
    drafted = jax.jit(module.draft, static_argnums=1)(drafter.params, drafter.config, drafter.shared, seen, state, None, policy)
    np.testing.assert_array_equal(drafted.tokens[0], said)


def test_the_mask_stands_at_the_label_or_two_before():
    mask = jnp.asarray([[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(ttt.gate(mask, "label"), mask)
    np.testing.assert_array_equal(ttt.gate(mask, "input"), [[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_trains_evaluates_and_exports(family, target, tmp_path):
    """The loss falls, held-out chains are measured at every depth, and the export is what was asked for."""
    common = [f"drafter.family={family}", "drafter.drafts=3", "drafter.taps=null", "train.save_every=4", *FAMILIES[family]]
    config = tiny_run.make_config(tmp_path, [*common, "train.steps=8"])
    folder = train(config, target=target)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train" and record["stage"] == 0]
    assert losses[-1] < losses[0]
    assert any(record["kind"] == "validation" and len(record["accuracy"]) == 3 for record in records)
    drafter = load_drafter(folder, target)
    assert drafter.config.family == family and drafter.config.num_drafts == 3
    assert drafter.card.mask_token is None and drafter.card.steps == 8
    assert drafter.shared.draft_ids is not None and len(drafter.shared.draft_ids) == 48


def test_a_cache_with_more_layers_serves(target, tmp_path):
    config = tiny_run.make_config(tmp_path)
    data = prepare.encode(config, target, prepare.read_conversations(config), lambda text: None)
    whole, _ = prepare.cached(tmp_path / "cache", target, (0, 1), data, lambda text: None)
    built = sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("features-*"))
    for taps in ((1,), (1, 0), ()):
        some, _ = prepare.cached(tmp_path / "cache", target, taps, data, lambda text: None)
        for name in ("tokens", "loss_mask", "hidden"):
            np.testing.assert_array_equal(some[3][name], whole[3][name])
        np.testing.assert_array_equal(some[3]["features"], whole[3]["features"][:, list(taps)])
    assert built == sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("features-*"))
    with pytest.raises(ValueError, match="built for another"):
        prepare.cached(tmp_path / "cache", target, (-1, 1), data, lambda text: None)
    assert features.stored_taps(tmp_path / "none", (4,)) == (4,)


def test_a_start_from_the_target_takes_its_last_layer(target):
    module = create_drafter(target, jax.random.key(1), family="mtp")
    started = warm.start(module, target)
    np.testing.assert_array_equal(started.layer.qkv, target.params.layers[-1].qkv)
    np.testing.assert_array_equal(started.norm, target.params.final_norm)
    np.testing.assert_array_equal(started.embed_norm, module.params.embed_norm)
    eagle = create_drafter(target, jax.random.key(1), family="eagle3", taps=(0, 1))
    started = warm.start(eagle, target)
    np.testing.assert_array_equal(started.layer.qkv[16:], target.params.layers[-1].qkv)
    assert not np.any(started.layer.qkv[:16])
    np.testing.assert_array_equal(started.head, target.params.embed)
    with pytest.raises(ValueError, match="of the target's shape"):
        warm.start(create_drafter(target, jax.random.key(1), family="mtp", intermediate_size=24), target)


def test_a_start_from_the_target_s_own_module(target, tmp_path):
    """A target whose checkpoint carries an MTP module lends that."""
    carried = create_drafter(target, jax.random.key(5), family="mtp")
    save_drafter(tmp_path / "target", carried)
    own = dataclasses.replace(target, source=tmp_path / "target")
    started = warm.start(create_drafter(own, jax.random.key(1), family="mtp"), own)
    for ours, theirs in zip(jax.tree.leaves(started), jax.tree.leaves(carried.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="carries an MTP module of another shape"):
        warm.start(create_drafter(own, jax.random.key(1), family="mtp", qk_norm="before_rope"), own)
