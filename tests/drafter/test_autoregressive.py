"""MTP and EAGLE-3 as drafters: exact text, trees, drafts that follow from committed text alone, an early end, every layout."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.decoding import tree
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import autoregressive, layouts, registry
from angelspec_jax.drafter.loading import create_drafter, load_drafter, save_drafter
from angelspec_jax.drafter.types import DraftPolicy, Noise, Seen
from angelspec_jax.params import initialize
from angelspec_jax.target.config import MoEConfig, TransformerConfig
from angelspec_jax.target.transformer import target_specs

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]
NEW, DRAFTS = 20, 3
EXPERTS = MoEConfig(4, 2, 16, shared_size=16, scores="sigmoid", selection_bias=True, scale=2.0, names="hy3")
OPTIONS = {
    "mtp": {"draft_vocab": 64},
    "mtp_raw": {"family": "mtp", "input_postnorm": False, "qk_norm": "before_rope"},
    "mtp_moe": {"moe": EXPERTS, "qk_norm": "before_rope"},
    "eagle3": {"taps": (0, 2, 4), "draft_vocab": 64},
    "eagle3_normed": {"family": "eagle3", "taps": (1, 3), "fc_norm": True, "feedback_norm": True},
    "eagle3_deepspec": {"family": "eagle3", "taps": (0, 1, 2, 3), "own_head": False, "qk_norm": "before_rope"},
}


@pytest.fixture(scope="module")
def target():
    config = TransformerConfig(96, 32, 48, 6, 4, 2, 8, max_positions=128)
    params = initialize(target_specs(config), jax.random.key(0))
    return types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0123", source="toy")


@pytest.fixture(scope="module")
def make(target):
    def make(name: str):
        options = dict(OPTIONS[name])
        rows = options.pop("draft_vocab", None)
        ids = None if rows is None else np.sort(np.random.default_rng(0).permutation(96)[:rows])
        return create_drafter(target, jax.random.key(1), draft_ids=ids, num_drafts=DRAFTS, **{"family": name, **options})

    return make


def _generate(target, drafter, temperature, nodes=None):
    sampling = make_sampling(len(PROMPTS), temperature=temperature, seed=7)
    if drafter is None:
        return generate(Plan(target.config, prefill_chunk=4), Weights(target.params), PROMPTS, NEW, sampling=sampling, capacity=64)
    plan = Plan(target.config, drafter.config, prefill_chunk=4, tree=nodes)
    return generate(plan, Weights(target.params, drafter.params, drafter.shared), PROMPTS, NEW, sampling=sampling, capacity=64)


@pytest.mark.parametrize(("name", "nodes"), [("mtp", 9), ("eagle3", 30)])  # fewer and more nodes than lanes
def test_trees_leave_the_text_alone(target, make, name, nodes):
    drafter = make(name)
    for temperature in (0.0, [0.0, 2.0, 2.0, 1.0]):
        alone, drafted = _generate(target, None, temperature), _generate(target, drafter, temperature, nodes)
        assert drafted.texts() == alone.texts()
    assert int(np.max(drafted.statistics.accepted[:, 1:])) > 0, "no path went past its first draft"


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
@pytest.mark.parametrize("page", [None, 8])
def test_every_path_of_a_tree_scores_as_a_chain_does_alone(make, monkeypatch, name, page):
    drafter = make(name)
    module, taps, draw = registry.module(drafter.config), len(drafter.config.taps), np.random.default_rng(5)
    text = draw.integers(0, 96, 7).tolist()
    features, hidden = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((6, taps, 32), (6, 32)))
    at = np.arange(6)
    state = _digest(drafter, module.create_state(drafter.config, 1, 32, page=page), text[1:], features, hidden, at, at >= 0)
    seen = Seen(jnp.asarray(text[-1:], jnp.int32), jnp.asarray([6], jnp.int32), jnp.asarray([text], jnp.int32))
    policy = DraftPolicy(jnp.float32(0.0), candidates=4)
    grown = jax.jit(lambda state: tree.grow(drafter.params, drafter.config, drafter.shared, seen, state, None, policy, 30))(state)
    tokens, parents = np.asarray(grown.tokens[0]), np.asarray(grown.parents[0])

    def forced(scores, ids, positions, noise):
        """The chain's next token is the one of the path."""
        choice = jnp.argmax(ids == noise[positions - 7][:, None], axis=-1)
        p = jax.nn.softmax(scores, axis=-1)
        return choice.astype(jnp.int32), p, jnp.take_along_axis(p, choice[:, None], axis=1)[:, 0]

    monkeypatch.setattr(autoregressive, "draw", forced)
    chain = jax.jit(lambda path: module.draft(drafter.params, drafter.config, drafter.shared, seen, state, path, policy))
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), int(tokens[node])])
        alone = chain(jnp.asarray((paths[-1] + [0] * DRAFTS)[:DRAFTS], jnp.int32))
        assert np.asarray(alone.tokens[0, : len(paths[-1])]).tolist() == paths[-1]
        np.testing.assert_allclose(float(grown.survival[0, node]), float(alone.survival[0, len(paths[-1]) - 1]), rtol=1e-4)
    assert len({tuple(path[:2]) for path in paths if len(path) == DRAFTS}) > 1  # of several branches


@pytest.mark.parametrize("name", ["mtp", "mtp_moe", "eagle3"])
def test_text_is_the_target_s_own(target, make, name):
    """Greedy and by seed, four prompts of different lengths; at temperature 2 the shared noise alone makes drafts right now and then."""
    drafter = make(name)
    for temperature in (0.0, [0.0, 2.0, 2.0, 1.0]):
        alone, drafted = _generate(target, None, temperature), _generate(target, drafter, temperature)
        assert drafted.texts() == alone.texts()
    assert int(np.sum(drafted.statistics.accepted)) > 0
    assert int(np.max(drafted.statistics.accepted[:, 1:])) > 0, "no chain went past its first draft"


def _digest(drafter, state, tokens, features, hidden, positions, accepted):
    rows = jnp.zeros(len(positions), jnp.int32), jnp.asarray(positions, jnp.int32), jnp.asarray(accepted)
    extend = jax.jit(registry.module(drafter.config).extend, static_argnums=1)
    return extend(drafter.params, drafter.config, drafter.shared, features, hidden, jnp.asarray(tokens, jnp.int32), *rows, state)


def _draft(drafter, state, tokens, survival=0.0, noise=None):
    seen = Seen(jnp.asarray(tokens[-1:], jnp.int32), jnp.asarray([len(tokens) - 1], jnp.int32), jnp.asarray([tokens], jnp.int32))
    draft = jax.jit(registry.module(drafter.config).draft, static_argnums=1)
    policy = DraftPolicy(jnp.float32(survival), candidates=16)
    return draft(drafter.params, drafter.config, drafter.shared, seen, state, noise, policy)


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_drafts_follow_from_committed_text_alone(make, name):
    """Rows that were refused leave no trace, nor does what stands in the cache behind the text, nor how the text was cut into chunks."""
    drafter = make(name)
    module, taps, draw = registry.module(drafter.config), len(drafter.config.taps), np.random.default_rng(3)
    text = draw.integers(0, 96, 10).tolist()
    count = len(text) - 1
    features, hidden = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((count, taps, 32), (count, 32)))
    at = np.arange(count)

    clean = _digest(drafter, module.create_state(drafter.config, 1, 32), text[1:], features, hidden, at, at >= 0)
    expected = _draft(drafter, clean, text)

    state = module.create_state(drafter.config, 1, 32)
    state = _digest(drafter, state, text[1:], features, hidden, at, at < 4)  # four accepted rows, the others refused
    wrong = (np.asarray(text[1:]) + 1) % 96
    state = _digest(drafter, state, wrong, -features, hidden[::-1], at, at < 0)  # a round of which nothing was accepted
    state = _digest(drafter, state, text[5:], features[4:], hidden[4:], at[4:], at[4:] >= 4)
    behind = jnp.arange(32) >= count
    garbled = dataclasses.replace(
        state.cache,
        k=tuple(jnp.where(behind[None, None, None], 7.0, k) for k in state.cache.k),
        v=tuple(jnp.where(behind[None, None, :, None], -9.0, v) for v in state.cache.v),
    )
    found = _draft(drafter, state.replace(cache=garbled), text)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.survival, expected.survival, rtol=1e-5)

    paged = _digest(drafter, module.create_state(drafter.config, 1, 32, page=8), text[1:], features, hidden, at, at >= 0)
    found = _draft(drafter, paged, text)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.survival, expected.survival, rtol=1e-5)


def test_a_chain_that_will_not_survive_ends(make):
    drafter = make("mtp")
    state = registry.module(drafter.config).create_state(drafter.config, 1, 32)
    whole, cut = (_draft(drafter, state, [1, 2, 3], survival) for survival in (0.0, 0.5))
    assert (np.asarray(whole.survival) > 0).all() and (np.diff(np.asarray(whole.survival)) <= 0).all()
    assert float(whole.survival[0, 0]) < 0.5  # a random drafter is never that sure
    np.testing.assert_array_equal(np.asarray(cut.survival) > 0, [[True, False, False]])
    assert int(cut.tokens[0, 0]) == int(whole.tokens[0, 0])


def test_drafts_are_drawn_from_what_is_reported(make):
    """q sums to one over candidates of the draft vocabulary, and holds the drawn token."""
    drafter = make("eagle3")
    state = registry.module(drafter.config).create_state(drafter.config, 1, 32)
    noise = Noise(jnp.asarray([5], jnp.uint32), jnp.asarray([1.0], jnp.float32))
    drawn = _draft(drafter, state, [1, 2, 3], noise=noise)
    np.testing.assert_allclose(np.sum(drawn.q.p, axis=-1), 1.0, rtol=1e-5)
    assert np.isin(np.asarray(drawn.q.ids), np.asarray(drafter.shared.draft_ids)).all()
    assert (np.asarray(drawn.q.ids) == np.asarray(drawn.tokens)[..., None]).any(axis=-1).all()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mtp", "angelspec"),
        ("mtp_raw", "angelspec"),
        ("mtp_raw", "vllm"),
        ("mtp_moe", "angelspec"),
        ("eagle3", "specforge"),
        ("eagle3", "angelspec"),
        ("eagle3", "vllm"),
        ("eagle3_normed", "angelspec"),
        ("eagle3_normed", "vllm"),
        ("eagle3_deepspec", "deepspec"),
    ],
)
def test_layouts_return_the_same_bits(target, make, tmp_path, name, layout):
    drafter = make(name)
    save_drafter(tmp_path / "saved", drafter, layout=layout)
    loaded = load_drafter(tmp_path / "saved", target)
    assert loaded.config == drafter.config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(drafter.params)
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(drafter.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(loaded.shared.head, drafter.shared.head)
    assert layouts.describe(loaded.config)["family"] == drafter.config.family


def test_what_a_layout_cannot_hold_is_refused(make, tmp_path):
    for name, layout, reason in (
        ("mtp", "zlab", "choose one of angelspec"),
        ("mtp", "vllm", "no place for a reduced draft vocabulary"),
        ("eagle3", "deepspec", "no place for a head"),
        ("eagle3_normed", "specforge", "normed output"),
        ("eagle3_deepspec", "specforge", "Llama layer"),
    ):
        with pytest.raises(ValueError, match=reason):
            save_drafter(tmp_path / "never", make(name), layout=layout)
        assert not (tmp_path / "never").exists()


def _rewrite(folder, **changes):
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_open_decisions_are_refused_and_named(target, make, tmp_path):
    save_drafter(tmp_path / "mtp", make("mtp_raw"))
    _rewrite(tmp_path / "mtp", mtp_draft_input_postnorm=None)
    with pytest.raises(ValueError, match="pass it, as in load_drafter.*input_postnorm=True"):
        load_drafter(tmp_path / "mtp", target)
    assert load_drafter(tmp_path / "mtp", target, input_postnorm=True).config.taps == ()

    save_drafter(tmp_path / "eagle3", make("eagle3"))
    _rewrite(tmp_path / "eagle3", target_num_hidden_layers=None, eagle_config=None, norm_output=True)
    with pytest.raises(ValueError, match="feedback_norm=True or feedback_norm=False"):
        load_drafter(tmp_path / "eagle3", target)
    found = load_drafter(tmp_path / "eagle3", target, feedback_norm=False).config
    assert found.taps == (1, 2, 2) and not found.feedback_norm  # the published default for six layers
    with pytest.raises(ValueError, match="pass the right ones with taps="):
        load_drafter(tmp_path / "eagle3", target, feedback_norm=False, taps=(0, 1))


def test_vllm_counts_the_inputs_of_layers(target, make, tmp_path):
    save_drafter(tmp_path / "served", make("eagle3"), layout="vllm")
    settings = json.loads((tmp_path / "served" / "config.json").read_text())
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # what it collects before these layers
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    _rewrite(tmp_path / "served", eagle_config=None)
    assert load_drafter(tmp_path / "served", target).config.taps == (0, 2, 4)
    _rewrite(tmp_path / "served", eagle_aux_hidden_state_layer_ids=["one", 3, 5])
    with pytest.raises(ValueError, match="the layer ids must be a list of integers"):
        load_drafter(tmp_path / "served", target)


def test_a_vocabulary_table_of_ids_is_refused(target, make, tmp_path):
    from safetensors.numpy import load_file, save_file

    save_drafter(tmp_path / "eagle3", make("eagle3"))
    file = tmp_path / "eagle3" / layouts.WEIGHTS
    tensors = load_file(file)
    ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    save_file(tensors | {"d2t": ids}, file)
    with pytest.raises(ValueError, match="d2t"):
        load_drafter(tmp_path / "eagle3", target)
