"""Windows, round trips, shardings, settings files: what load_target promises about good checkpoints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import mesh as meshes
from angelspec_jax.target import hf, layout, loading
from angelspec_jax.target.config import Rope, TransformerConfig
from angelspec_jax.target.loading import load_target, requirement
from angelspec_jax.target.safetensors_io import open_checkpoint
from angelspec_jax.target.transformer import target_specs

QWEN2 = TransformerConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, attention_bias=True
)  # fmt: skip
QWEN3 = dataclasses.replace(QWEN2, attention_bias=False, qk_norm="before_rope", tie_embeddings=True)


@pytest.mark.parametrize("config", [QWEN2, QWEN3, dataclasses.replace(QWEN3, scan_layers=True)], ids=["qwen2", "qwen3", "stacked"])
def test_written_parameters_come_back(tmp_path, write_model, config):
    params = write_model(tmp_path, config)
    target = load_target(tmp_path, scan_layers=config.scan_layers, need_tokenizer=False)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, target.params, params)


@pytest.mark.parametrize("config", [QWEN2, dataclasses.replace(QWEN3, scan_layers=True)], ids=["qwen2", "stacked"])
def test_any_window_is_that_window_of_the_whole(tmp_path, write_model, config):
    params = write_model(tmp_path, config)
    tensors = open_checkpoint(tmp_path)
    random = np.random.default_rng(0)
    leaves = jax.tree.leaves(layout.target_leaves(config), is_leaf=layout.is_leaf)
    for leaf, whole in zip(leaves, jax.tree.leaves(params), strict=True):
        for _ in range(5):
            starts = [int(random.integers(0, size)) for size in whole.shape]
            window = tuple(slice(start, int(random.integers(start + 1, size + 1))) for start, size in zip(starts, whole.shape, strict=True))
            np.testing.assert_array_equal(leaf.read(tensors, window), np.asarray(whole)[window], err_msg=str(leaf.tensors))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_shards_are_read_straight_from_the_file(tmp_path, write_model, monkeypatch):
    params = write_model(tmp_path, QWEN2)
    mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])
    sizes = []
    read = type(open_checkpoint(tmp_path)).read

    def counted(self, name, window=None):
        part = read(self, name, window)
        sizes.append((name, part.size))
        return part

    monkeypatch.setattr(type(open_checkpoint(tmp_path)), "read", counted)
    target = load_target(tmp_path, mesh=mesh, need_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, target.params, params)
    assert target.params.layers[0].qkv.sharding == meshes.sharding(mesh, ("embed", "kv_heads", None, None), (16, 2, 4, 8))
    largest = max(size for name, size in sizes if name.endswith("q_proj.weight"))
    assert largest == 32 * 16 // 4  # a quarter of q_proj at a time, never the whole
    total = sum(size for _, size in sizes)
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params))  # replicas share one reading


def test_requirement_counts_bytes_and_refuses_what_cannot_fit(tmp_path, write_model, monkeypatch):
    write_model(tmp_path, QWEN2)
    needs = requirement(QWEN2, jnp.bfloat16)
    norms = (2 * 2 + 1) * 16
    scalars = sum(int(np.prod(spec.shape)) for spec in jax.tree.leaves(target_specs(QWEN2), is_leaf=lambda x: hasattr(x, "axes")))
    assert needs.total == needs.per_device == 2 * (scalars - norms) + 4 * norms and needs.fits
    assert "GiB in bfloat16, which fits" in str(needs)
    monkeypatch.setattr(loading, "_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match="cannot be loaded here: the parameters take .* does not fit the .* GiB free"):
        load_target(tmp_path, need_tokenizer=False)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [(2, None, (2,)), (None, None, ()), (2, {"eos_token_id": [5, 2, 5]}, (5, 2)), (2, {"eos_token_id": 7}, (7,)), ([3, 4], {}, (3, 4))],
)
def test_every_eos_id(tmp_path, llama_json, config_eos, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(llama_json | {"eos_token_id": config_eos}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert hf.read_config(tmp_path)[1] == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(5e5, "linear", 2.0)),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, Rope(1e4, "llama3", 8.0, 1.0, 4.0, 32)),
        ({"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}, Rope(5e5, "llama3", 8.0, 1.0, 4.0, 32)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None}, Rope(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e6, "rope_scaling": {"type": "default"}}, Rope(1e6)),
    ],
)
def test_rope_in_both_forms(llama_json, settings, expected):
    assert hf.parse_config(llama_json | settings, "config.json").rope == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention"]}, 64),
    ],
)
def test_sliding_window(llama_json, settings, expected):
    assert hf.parse_config(llama_json | settings, "config.json").sliding_window == expected


def test_defaults_of_llama(llama_json):
    short = {key: value for key, value in llama_json.items() if key not in ("head_dim", "num_key_value_heads", "rms_norm_eps")}
    config = hf.parse_config(short, "config.json")
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps, config.tie_embeddings) == (4, 4, 1e-6, False)


def test_chat_template_file_wins_over_settings(tmp_path):
    assert hf.read_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert hf.read_chat_template(tmp_path) == "d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "s"}))
    assert hf.read_chat_template(tmp_path) == "s"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert hf.read_chat_template(tmp_path) == "f"


def test_bare_backbone_names(tmp_path, write_model):
    params = write_model(tmp_path, QWEN3, prefix="")
    jax.tree.map(np.testing.assert_array_equal, load_target(tmp_path, need_tokenizer=False).params, params)
