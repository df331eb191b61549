"""MTP modules as AngelSpec's trainer writes them: experts stored together, a config.json that says nothing of the target."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from angelspec_jax.drafter import layouts

GOLDENS = Path(__file__).parents[1] / "goldens" / "drafters"
ANSWERS = {"target_num_layers": 5, "input_postnorm": True}
NORMS = ("enorm", "hnorm", "eh_proj", "final_layernorm")


def _training_form(case: str, dtype=np.float32) -> tuple[dict[str, np.ndarray], dict]:
    """Tensors and config.json of a served module in the form that its training had, routers and norms in float32."""
    tensors: dict[str, np.ndarray] = {"embed_tokens.weight": np.ones((256, 64), dtype)}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in load_file(GOLDENS / case / "model.safetensors").items():
        plain = re.sub(r"^model\.layers\.\d+\.", "", name)
        value = value if value.ndim == 1 or "router" in name else value.astype(dtype)
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", plain)
        if expert:
            experts.setdefault(f"midlayer.mlp.experts_{expert[2]}", {})[int(expert[1])] = value.T
        else:
            tensors[plain if plain.startswith(NORMS) else f"midlayer.{plain}"] = value
    tensors |= {name: np.ascontiguousarray(np.stack([of[index] for index in sorted(of)])) for name, of in experts.items()}
    settings = json.loads((GOLDENS / case / "case.json").read_text())["params"]["mtp_config"]
    return tensors, {"architectures": ["MTPDraftModel"], "model_type": "mtp", **settings}


@pytest.fixture
def stored(tmp_path):
    """`stored(case, tensors, config)`: a training checkpoint after changes; None deletes a key."""

    def store(case="mtp_moe", tensors=None, config=None, dtype=np.float32, prefix=""):
        folder = tmp_path / "trained"
        folder.mkdir(exist_ok=True)
        own, settings = _training_form(case, dtype)
        own |= tensors or {}
        settings |= config or {}
        save_file({f"{prefix}{name}": value for name, value in own.items() if value is not None}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        return folder

    return store


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", ["mtp_dense", "mtp_moe"])
def test_a_training_checkpoint_is_the_module_that_is_served(case, dtype, stored, tmp_path):
    folder = stored(case, dtype=dtype)
    found, served = layouts.read(folder, **ANSWERS), layouts.read(GOLDENS / case, input_postnorm=True)
    assert found.config == served.config
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(served.params), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ours.dtype))

    layouts.write(tmp_path / "served", found.params, found.config, found.card, "angelspec")
    exported = load_file(tmp_path / "served" / "model.safetensors")
    expected = load_file(GOLDENS / case / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, value in exported.items():
        np.testing.assert_array_equal(value, expected[name].astype(value.dtype))

    embed = np.ones((256, 64), dtype)
    layouts.write(tmp_path / "back", found.params, found.config, found.card, "angelspec_training", embed=embed)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and before[name].tobytes() == after[name].tobytes() for name in before)
    assert layouts.read(tmp_path / "back").config == found.config  # our own export says how deep the target is


def test_the_depth_is_asked_for_or_the_target_s(stored):
    folder = stored(prefix="draft_model.")
    with pytest.raises(ValueError, match=r"does not say how many layers the target has; pass it, as in .*target_num_layers=36"):
        layouts.read(folder, input_postnorm=True)
    assert layouts.read(folder, input_postnorm=True, present_layers=7).config.target_num_layers == 7


WRONG = {
    "holds tensors that its configuration gives no place: hidden_proj": {"tensors": {"hidden_proj.weight": np.ones((64, 32), np.float32)}},
    r"experts_gate_proj has shape \[8, 64, 24\] but config.json claims 1000000000 experts": {"config": {"num_experts": 10**9}},
    "experts_up_proj has shape .* implies": {"tensors": {"midlayer.mlp.experts_up_proj": np.ones((8, 24, 64), np.float32)}},
    "has no tensor mlp.experts_down_proj": {"tensors": {"midlayer.mlp.experts_down_proj": None}},
    "rope_scaling is set": {"config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "mlp_type should be moe or dense, not 'thin'": {"config": {"mlp_type": "thin"}},
    "values that are not finite": {"tensors": {"midlayer.mlp.experts_down_proj": np.full((8, 24, 64), np.nan, np.float32)}},
}


@pytest.mark.parametrize("message", WRONG)
def test_files_that_do_not_fit_get_a_sentence(message, stored):
    with pytest.raises(ValueError, match=message):
        layouts.read(stored(**WRONG[message]), **ANSWERS)


def test_experts_one_by_one_cannot_be_more_than_the_tensors(tmp_path):
    for file in ("model.safetensors", "config.json"):
        (tmp_path / file).write_bytes((GOLDENS / "mtp_moe" / file).read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text()) | {"num_experts": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="claims 1000000000 experts but holds only"):
        layouts.read(tmp_path, input_postnorm=True)
