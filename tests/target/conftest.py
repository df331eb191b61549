"""Toy model directories."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from angelspec_jax.params import map_params
from angelspec_jax.target import layout
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip


def _config_json(config: TransformerConfig, **more) -> dict:
    """config.json of a toy model."""
    family = "Qwen2" if config.attention_bias else "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
    } | more


def _write_model(folder, config: TransformerConfig, prefix: str = "model.", **more):
    random = np.random.default_rng(0)
    params = map_params(lambda spec: random.standard_normal(spec.shape, np.float32), target_specs(config))
    save_file(layout.target_tensors(params, config, prefix), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config_json(config, **more)))
    return params


@pytest.fixture
def llama_json() -> dict:
    """config.json of a toy Llama."""
    return dict(LLAMA)


@pytest.fixture
def write_model():
    """`write_model(folder, config, prefix="model.", **more) -> params`: a model directory with random weights; `more`: in config.json."""
    return _write_model
