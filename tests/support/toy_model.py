"""Fixtures of tests with `pytest_plugins = ["toy_model"]`: a toy model directory with tokenizer and chat template, and what it loads to."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from angelspec_jax.drafter.loading import create_drafter, save_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target import hf, layout
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.transformer import target_specs

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet is defined %}{{ quiet }}{% endif %}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<mask>")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "rope_theta": 1e4, "eos_token_id": 257,
}  # fmt: skip


@pytest.fixture(scope="session")
def toy_directory(tmp_path_factory):
    """A Hugging Face directory: random Llama of 4 layers whose vocabulary is the 256 bytes and three special tokens."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": SPECIAL[1]}))
    config = hf.parse_config(CONFIG, folder / "config.json")
    params = initialize(target_specs(config), jax.random.key(0), np.float32)
    save_file(layout.target_tensors(params, config), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def toy_target(toy_directory):
    return load_target(toy_directory)


@pytest.fixture(scope="session")
def toy_drafter(toy_target):
    """A random drafter of 3 drafts a round."""
    return create_drafter(toy_target, jax.random.key(1), mask_token=258, block_size=4, num_layers=1, taps=2, name="toy-dfly")


@pytest.fixture(scope="session")
def drafter_directory(toy_drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters") / "toy-dfly"
    save_drafter(folder, toy_drafter)
    return folder
