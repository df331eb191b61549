"""Drafter checkpoints: bit-equal round trips, detection, and a sentence for everything that does not fit."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from angelspec_jax.drafter import layout_source, layouts, layouts_block
from angelspec_jax.drafter.card import DrafterCard

GOLDENS = Path(__file__).parents[1] / "goldens" / "drafters"
CASES = [
    "zlab_dflash", "zlab_dflash_wide_heads", "angelspec_dflash", "angelspec_dflare", "angelspec_dfly", "angelspec_dfly_wide_heads",
    "angelspec_dspark", "deepspec_dflash", "deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn",
    "deepspec_dspark_conf_nomarkov",
]  # fmt: skip


@pytest.fixture
def edited(tmp_path):
    """`edited(case, tensors=..., config=...)`: a copy of a case after changes; None deletes a key."""

    def edit(case, tensors=(), config=()):
        folder = tmp_path / "drafter"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        weights = load_file(GOLDENS / case / "model.safetensors") | dict(tensors)
        save_file({name: value for name, value in weights.items() if value is not None}, folder / "model.safetensors")
        settings = json.loads((GOLDENS / case / "config.json").read_text()) | dict(config)
        (folder / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
        return folder

    return edit


def _assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal(case, dtype, tmp_path):
    params, config, card, *_ = layouts.read(GOLDENS / case)
    params = jax.tree.map(lambda x: np.ascontiguousarray(x.astype(dtype)), params)
    card = DrafterCard(target_name="t", tau={"code": 3.1}, steps=10, extra={"later": [1]})
    layouts.write(tmp_path, params, config, card)
    again = layouts.read(tmp_path)
    _assert_same(jax.tree.map(np.ascontiguousarray, again.params), params)
    assert again.config == config and again.card == card and again.draft_ids is None


@pytest.mark.parametrize("case", CASES)
def test_export_writes_the_tensors_it_read(case, tmp_path):
    """The file, not only our view of it: the names and bits of the original, the target's frozen copies apart."""
    layout = case.split("_")[0]
    params, config, card, *_ = layouts.read(GOLDENS / case)
    layouts.write(tmp_path, params, config, card, layout)
    before, after = load_file(GOLDENS / case / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    before = {name: value for name, value in before.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    original, written = (json.loads((folder / "config.json").read_text()) for folder in (GOLDENS / case, tmp_path))
    keys = (
        "architectures",
        "num_target_layers",
        "target_layer_ids",
        "dflash_config",
        "mask_token_id",
        "block_size",
        "target_num_hidden_layers",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "model_arch",
    )
    for key in keys:
        assert written.get(key) == original.get(key), key


def test_conversion_between_layouts(tmp_path):
    params, config, card, *_ = layouts.read(GOLDENS / "zlab_dflash")
    layouts.write(tmp_path, params, config, card, "angelspec")
    assert "context_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["num_target_layers"] == 3
    again = layouts.read(tmp_path)
    assert again.config == config
    _assert_same(again.params, params)


def test_draft_vocabulary_travels(tmp_path):
    params, config, card, *_ = layouts.read(GOLDENS / "angelspec_dfly")
    ids = np.array([0, 3, 4, 200, 253], np.int32)
    config = dataclasses.replace(config, draft_vocab=5)
    layouts.write(tmp_path, params, config, card, draft_ids=ids)
    again = layouts.read(tmp_path)
    np.testing.assert_array_equal(again.draft_ids, ids)
    assert again.config == config
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 5
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"draft_ids": ids[::-1].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="ascending token ids below 256"):
        layouts.read(tmp_path)
    del weights["draft_ids"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="announces a draft vocabulary"):
        layouts.read(tmp_path)


@pytest.mark.parametrize("prefix", layout_source.PREFIXES)
def test_prefixes_and_serving_names(prefix, edited):
    """A training wrapper's prefix, and a DFly file that a serving engine renamed, are the same drafter."""
    expected = layouts.read(GOLDENS / "angelspec_dfly")
    weights = load_file(GOLDENS / "angelspec_dfly" / "model.safetensors")
    renamed = dict.fromkeys(weights)
    renamed |= {prefix + layouts_block.plain_name(name): value for name, value in weights.items()}
    renamed |= {"t2d": np.zeros(256, bool), "d2t": np.zeros(256, np.int64)}
    found = layouts.read(edited("angelspec_dfly", renamed))
    assert found.config == expected.config
    _assert_same(found.params, expected.params)


UNSUPPORTED = {
    "DFlash2": {"candidate_selector.hidden_projection.weight": np.zeros((4, 64), np.float32)},
    "EAGLE-3": {"midlayer.hidden_norm.weight": np.zeros(64, np.float32)},
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_other_families_are_named(family, edited):
    with pytest.raises(ValueError, match=f"{family}.*not supported"):
        layouts.read(edited("zlab_dflash", UNSUPPORTED[family]))


def test_architecture_tells_eagle3(edited):
    with pytest.raises(ValueError, match="EAGLE-3"):
        layouts.read(edited("deepspec_dflash", config={"architectures": ["Qwen3Eagle3Model"]}))


OPEN = {  # what is missing -> (case, config changes, override that answers it)
    "block_size": ("angelspec_dflash", {"block_size": None}, {"block_size": 8}),
    "mask_token": ("angelspec_dfly", {"mask_token_id": None}, {"mask_token": 253}),
    "taps": ("angelspec_dflash", {"target_layer_ids": None}, {"taps": (0, 1, 3)}),
    "nested taps": ("zlab_dflash", {"dflash_config": {"mask_token_id": 253}}, {"taps": [0, 1, 3]}),
    "target_num_layers": ("angelspec_dfly", {"target_num_hidden_layers": None}, {"target_num_layers": 5}),
    "captured count": ("zlab_dflash", {"num_target_layers": 3}, {"target_num_layers": 5}),
    "layout": ("zlab_dflash", {"architectures": ["SomethingNew"]}, {"layout": "same_position"}),
    "rope_theta": ("zlab_dflash", {"rope_theta": None}, {"rope_theta": 1e4}),
}


@pytest.mark.parametrize("what", OPEN)
def test_open_decisions_are_refused_until_answered(what, edited):
    case, changes, answer = OPEN[what]
    folder = edited(case, config=changes)
    with pytest.raises(ValueError, match=rf"{next(iter(answer))}="):
        layouts.read(folder)
    assert layouts.read(folder, **answer).config == layouts.read(GOLDENS / case).config


def test_unknown_override():
    with pytest.raises(ValueError, match="no override 'blocksize'.*block_size"):
        layouts.read(GOLDENS / "zlab_dflash", blocksize=8)


def test_derived_from_shapes(edited):
    """AngelSpec's templates omit head_dim, which is not hidden_size / heads here, and may omit the correction's width."""
    gone = {"head_dim": None, "hidden_correction_intermediate_size": None}
    expected = layouts.read(GOLDENS / "angelspec_dfly_wide_heads").config
    assert layouts.read(edited("angelspec_dfly_wide_heads", config=gone)).config == expected


NAN = np.full(64, np.nan, np.float32)
WRONG = {  # message -> (case, tensors, config)
    "holds tensors that its configuration gives no place: surprise": ("zlab_dflash", {"surprise": NAN}, {}),
    "no tensor layers.1.mlp.up_proj.weight": ("zlab_dflash", {"layers.1.mlp.up_proj.weight": None}, {}),
    r"_proj.weight has shape \[96, 64\] but the configuration implies \[95, 64\]": (
        "zlab_dflash", {}, {"intermediate_size": 95},
    ),
    r"fc.weight has shape \[64, 192\], that is 3 target layers of width 64, but target_layer_ids names 2": (
        "zlab_dflash", {}, {"dflash_config": {"mask_token_id": 253, "target_layer_ids": [0, 1]}},
    ),
    "no tensor layer_fusion_weights": ("angelspec_dfly", {"layer_fusion_weights": None}, {}),
    r"hidden_correction.gate_proj.weight has shape \[64, 128\]": ("angelspec_dfly", {}, {"hidden_correction_intermediate_size": 32}),
    "parameter context.norm holds values that are not finite": ("zlab_dflash", {"hidden_norm.weight": NAN}, {}),
    "the weights hold 2 draft layers": ("zlab_dflash", {}, {"num_hidden_layers": 40, "layer_types": None}),
    "mask_token 300 is outside": ("angelspec_dflash", {}, {"mask_token_id": 300}),
    r"says 9 for target_num_hidden_layers.* with layer ids \[0, 1, 9\]": (
        "angelspec_dflash", {}, {"target_layer_ids": [0, 1, 9], "target_num_hidden_layers": 9},
    ),
    "block_size must be an integer, got '8'": ("angelspec_dflash", {}, {"block_size": "8"}),
    "sliding window": ("zlab_dflash", {}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}),
    'field "steps" of the drafter card must be int': ("zlab_dflash", {}, {"angelspec_jax": {"steps": "many"}}),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_files_that_do_not_fit_get_a_sentence(message, edited):
    case, tensors, config = WRONG[message]
    with pytest.raises(ValueError, match=message):
        layouts.read(edited(case, tensors, config))


def test_damaged_files(tmp_path, edited):
    with pytest.raises(FileNotFoundError, match="no drafter directory"):
        layouts.read(tmp_path / "nowhere")
    folder = edited("zlab_dflash")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="truncated"):
        layouts.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        layouts.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        layouts.read(folder)


IMPOSSIBLE = {
    "shift all drafts by one": ("zlab_dflash", "deepspec"),
    "anchor_first drafter cannot be exported": ("deepspec_dflash", "zlab"),
    "no place for the fusion weights": ("angelspec_dfly", "zlab"),
    "no export layout 'gguf'": ("zlab_dflash", "gguf"),
}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_impossible_exports_say_why(reason, tmp_path):
    case, layout = IMPOSSIBLE[reason]
    params, config, card, *_ = layouts.read(GOLDENS / case)
    with pytest.raises(ValueError, match=reason):
        layouts.write(tmp_path, params, config, card, layout)
    assert not list(tmp_path.iterdir())
