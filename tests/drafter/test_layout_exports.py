"""Block drafters from layout to layout: bit-equal there and back, refused with the reason where a layout has no place for them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from angelspec_jax.drafter import layouts
from angelspec_jax.drafter.block import drafter_specs
from angelspec_jax.drafter.card import card_for
from angelspec_jax.drafter.loading import Drafter, drafter_config, load_drafter, save_drafter, share

GOLDENS = Path(__file__).parents[1] / "goldens" / "drafters"
OPTIONS = {"mask_token": 96, "num_layers": 2, "taps": 3, "block_size": 5}


def _assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _write(folder, found, layout, **options):
    layouts.write(folder, found.params, found.config, found.card, layout, draft_ids=found.draft_ids, **options)
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def made(tiny_target, randomize):
    """`made(family=..., ...)`: a random drafter for the tiny target."""

    def make(**options):
        config = drafter_config(tiny_target.config, **OPTIONS, **options)
        ids = None if config.draft_vocab is None else np.array([1, 5, 90], np.int32)[: config.draft_vocab]
        return Drafter(randomize(drafter_specs(config)), config, share(tiny_target.params, ids), card_for(tiny_target, config), "made")

    return make


@pytest.fixture
def edited(tmp_path):
    """`edited(case, tensors, config)`: a copy of a case after changes; None deletes a key."""

    def edit(case, tensors, config):
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        weights = load_file(GOLDENS / case / "model.safetensors") | tensors
        save_file({name: value for name, value in weights.items() if value is not None}, folder / "model.safetensors")
        settings = json.loads((GOLDENS / case / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
        return folder

    return edit


PLACES = {
    "zlab_dflash": ("specforge", "vllm", "native"),
    "angelspec_dflare": ("native",),
    "angelspec_dfly": ("vllm", "native"),
    "angelspec_dspark": ("vllm", "native"),
    "deepspec_dflash": ("native",),
    "deepspec_dspark_vanilla": ("specforge", "vllm", "native"),
    "deepspec_dspark_gated": ("specforge", "native"),
    "deepspec_dspark_rnn": ("specforge", "native"),
    "deepspec_dspark_conf_nomarkov": ("specforge", "vllm"),
}


@pytest.mark.parametrize(("case", "layout"), [(case, layout) for case, others in PLACES.items() for layout in others])
def test_there_and_back_is_bit_equal(case, layout, tmp_path):
    before = layouts.read(GOLDENS / case)
    _write(tmp_path / layout, before, layout)
    there = layouts.read(tmp_path / layout)
    assert there.config == before.config
    _assert_same(there.params, before.params)
    home = case.split("_")[0]
    _write(tmp_path / "back", there, home)
    own = {name: value for name, value in load_file(GOLDENS / case / "model.safetensors").items() if "embed_tokens" not in name}
    back = load_file(tmp_path / "back" / "model.safetensors")
    own.pop("lm_head.weight", None)
    assert back.keys() == own.keys()
    assert all(back[name].tobytes() == value.tobytes() for name, value in own.items())


def test_what_each_project_reads_is_said(tmp_path):
    dspark = layouts.read(GOLDENS / "deepspec_dspark_vanilla")
    forge = _write(tmp_path / "forge", dspark, "specforge")
    assert forge["architectures"] == ["DSparkDraftModel"]
    assert forge["dflash_config"]["projector_type"] == "dspark"
    assert forge["dflash_config"]["markov_rank"] == 16
    served = _write(tmp_path / "served", dspark, "vllm")
    assert (served["architectures"], served["dspark_bonus_anchor"]) == (["Qwen3DSparkModel"], False)
    assert served["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert served["dflash_config"]["target_layer_ids"] == [0, 1, 3]
    same = _write(tmp_path / "same", layouts.read(GOLDENS / "angelspec_dspark"), "vllm")
    assert (same["architectures"], same["dspark_bonus_anchor"]) == (["Qwen3DSparkModel"], True)
    dfly = _write(tmp_path / "dfly", layouts.read(GOLDENS / "angelspec_dfly"), "vllm")
    assert (dfly["architectures"], dfly["model_arch"]) == (["Qwen3DFlyModel"], "dfly")


IMPOSSIBLE = {
    "same_position drafter cannot be exported to the deepspec layout.*shift all drafts by one": ("angelspec_dspark", "deepspec"),
    "anchor_first drafter cannot be exported to the angelspec layout": ("deepspec_dspark_vanilla", "angelspec"),
    "takes? a DSpark block as anchor_first": ("angelspec_dspark", "specforge"),
    "no place for the fusion weights and hidden correction.*use angelspec": ("angelspec_dfly", "specforge"),
    "no place for the fusion weights of a DFlare drafter": ("angelspec_dflare", "vllm"),
    "no place for a gated Markov head, vanilla being the only one that is served": ("deepspec_dspark_gated", "vllm"),
    "anchor_first drafter cannot be exported to the zlab layout": ("deepspec_dspark_rnn", "zlab"),
    "no place for a Markov head or a confidence head": ("angelspec_dspark", "zlab"),
    "no place for an anchor-first DFlash; use native": ("deepspec_dflash", "vllm"),
}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_impossible_exports_say_why(reason, tmp_path):
    case, layout = IMPOSSIBLE[reason]
    with pytest.raises(ValueError, match=reason):
        _write(tmp_path / "there", layouts.read(GOLDENS / case), layout)
    assert not (tmp_path / "there").exists()


def test_a_reduced_draft_vocabulary_is_served_with_its_head_rows(made, tiny_target, tmp_path):
    ids = [1, 5, 90]
    save_drafter(tmp_path / "own", made(family="dspark", rank=3, draft_vocab=3))
    found = layouts.read(tmp_path / "own")
    with pytest.raises(ValueError, match="no place for a reduced draft vocabulary"):
        _write(tmp_path / "forge", found._replace(config=dataclasses.replace(found.config, layout="anchor_first")), "specforge")
    with pytest.raises(ValueError, match="name the target they come from with --target"):
        _write(tmp_path / "served", found, "vllm")
    _write(tmp_path / "served", found, "vllm", lm_head=np.asarray(tiny_target.params.lm_head))
    tensors = load_file(tmp_path / "served" / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], np.asarray(tiny_target.params.lm_head)[ids])
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(3), ids)
    assert np.flatnonzero(tensors["t2d"]).tolist() == ids
    again = layouts.read(tmp_path / "served")
    np.testing.assert_array_equal(again.draft_ids, ids)
    assert again.config == found.config
    _assert_same(again.params, found.params)


COMPOSITIONS = {
    "gated_sum": ({"family": "dflash", "context": "gated_sum"}, "dflash", "DFlashDraftModel"),
    "anchor-first DFly": ({"family": "dfly", "layout": "anchor_first"}, "dfly", "AngelSpecJaxDrafter"),
    "DFly with a Markov head": ({"family": "dfly", "head": "markov_rnn", "rank": 3, "confidence": "hidden"}, "dfly", "AngelSpecJaxDrafter"),
    "same-position gated DSpark": ({"family": "dspark", "head": "markov_gated", "rank": 3}, "dspark", "AngelSpecJaxDrafter"),
    "anchor-first gated sum": ({"family": "dflash", "context": "gated_sum", "layout": "anchor_first"}, "dflash", "AngelSpecJaxDrafter"),
    "anchor-first DSpark": ({"family": "dspark", "rank": 3, "layout": "anchor_first"}, "dspark", "Qwen3DSparkModel"),
    "anchor-first with fewer tokens": ({"family": "dflash", "layout": "anchor_first", "draft_vocab": 2}, "dflash", "AngelSpecJaxDrafter"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_composition_can_be_saved(name, made, tiny_target, tmp_path):
    options, family, named = COMPOSITIONS[name]
    drafter = made(**options)
    temperatures = tuple(1.0 + 0.1 * draft for draft in range(drafter.config.num_drafts))
    drafter = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, confidence_temperatures=temperatures))
    save_drafter(tmp_path / "d", drafter)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == [named]
    again = load_drafter(tmp_path / "d", tiny_target)
    assert again.config == drafter.config
    assert again.config.family == family
    _assert_same(again.params, drafter.params)


def test_specforge_s_older_wrapper_is_the_same_drafter(edited):
    weights = load_file(GOLDENS / "deepspec_dspark_rnn" / "model.safetensors")
    heads = {name: value for name, value in weights.items() if name.startswith(("markov_head.", "confidence_head."))}
    wrapped = dict.fromkeys(heads) | {f"logit_head.{name}": value for name, value in heads.items()}
    expected = layouts.read(GOLDENS / "deepspec_dspark_rnn")
    found = layouts.read(edited("deepspec_dspark_rnn", wrapped, {}))
    assert found.config == expected.config
    _assert_same(found.params, expected.params)


def test_counts_and_kinds_that_config_contradicts_or_omits_come_from_the_tensors(edited):
    for case in ("deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dspark_conf_nomarkov"):
        expected = layouts.read(GOLDENS / case).config
        silent = {"markov_head_type": None, "markov_rank": 7, "confidence_head_with_markov": None, "enable_confidence_head": None}
        assert layouts.read(edited(case, {}, silent)).config == expected


def test_a_lost_confidence_head_is_a_decision(edited):
    lost = {"confidence_head.proj.weight": None, "confidence_head.proj.bias": None}
    folder = edited("deepspec_dspark_vanilla", lost, {})
    with pytest.raises(ValueError, match="announces a confidence head but there is none.*--set confidence=none"):
        layouts.read(folder)
    expected = dataclasses.replace(layouts.read(GOLDENS / "deepspec_dspark_vanilla").config, confidence=None)
    assert layouts.read(folder, confidence="none").config == expected
    assert layouts.read(GOLDENS / "deepspec_dspark_vanilla", confidence="none").config == expected


NAN = np.full((256, 16), np.nan, np.float32)
WRONG = {
    "does not tell whether slot k.*--set layout=same_position": (
        "angelspec_dspark", {},
        {"target_hidden_size": None, "target_num_hidden_layers": None, "num_target_layers": 5}, "context_proj.weight",
    ),
    "announces a Markov head of rank 16 but there is none": (
        "deepspec_dspark_vanilla",
        {"markov_head.markov_w1.weight": None, "markov_head.markov_w2.weight": None}, {"enable_confidence_head": False}, None,
    ),
    "no tensor markov_head.gate_proj.weight": ("deepspec_dspark_vanilla", {}, {"markov_head_type": "gated"}, None),
    "head must be one of": ("deepspec_dspark_vanilla", {}, {"markov_head_type": "lstm"}, None),
    "a drafter has one sequential head": ("angelspec_dspark", {}, {"enable_hidden_correction": True}, None),
    "head.w1 holds values that are not finite": ("deepspec_dspark_vanilla", {"markov_head.markov_w1.weight": NAN}, {}, None),
    "confidence_temperatures must be 8 positive numbers": ("deepspec_dspark_vanilla", {}, {"confidence_temperatures": [1.0]}, None),
    "no tensor layers.1.self_attn.v_proj_target.weight": (
        "angelspec_dflare", {"layers.1.self_attn.v_proj_target.weight": None}, {}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_files_that_do_not_fit_get_a_sentence(message, edited):
    case, tensors, config, renamed = WRONG[message]
    if renamed:  # under its plain name the tensor no longer tells who wrote it
        tensors = tensors | {renamed: None, "fc.weight": load_file(GOLDENS / case / "model.safetensors")[renamed]}
    with pytest.raises(ValueError, match=message):
        layouts.read(edited(case, tensors, config))


def test_the_report_says_what_decided():
    rows = layouts.read(GOLDENS / "zlab_dflash", rope_theta=1e5).report.rows
    report = {name: (value, origin) for name, value, origin in rows}
    assert report["block layout"] == ("same_position", "architecture DFlashDraftModel")
    assert report["mask token"] == ("253", "dflash_config.mask_token_id")
    assert report["target layers"] == ("[0, 1, 3] of 5", "dflash_config.target_layer_ids, confirmed by fc.weight")
    assert report["rope base"] == ("100000", "given")
    assert report["drafts per round"][0] == "7"
