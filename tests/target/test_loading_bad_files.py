"""Damaged, hostile and mismatched checkpoints: refused with one sentence that names the file and what is wrong with it."""

import json
import struct
import sys

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from angelspec_jax.target import hf
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.safetensors_io import open_checkpoint

TOY = TransformerConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, attention_bias=True
)  # fmt: skip


def raw_file(path, header, body: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = {
    "header longer than the file": ({}, b"", 2**63, "truncated or no safetensors file"),
    "header is no JSON": (b"{not json", b"", None, "not valid JSON"),
    "header is no UTF-8": (b"\xff\xfe{}", b"", None, "not valid JSON"),
    "header nests without end": (b"[" * 100_000, b"", None, "not valid JSON"),
    "header is a list": ([], b"", None, "not a JSON object"),
    "name twice": (b'{"a": {}, "a": {}}', b"", None, "occurs twice"),
    "entry without offsets": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), None, "lacks dtype, shape or data_offsets"),
    "unknown dtype": ({"a": entry([1], [0, 4], "Q4")}, bytes(4), None, "unknown dtype 'Q4'"),
    "dtype is no string": ({"a": entry([1], [0, 4], ["F32"])}, bytes(4), None, "unknown dtype"),
    "negative shape": ({"a": entry([-1, -1], [0, 4])}, bytes(4), None, "impossible shape"),
    "boolean shape": ({"a": entry([True], [0, 4])}, bytes(4), None, "impossible shape"),
    "huge dimension": ({"a": entry([2**64], [0, 4])}, bytes(4), None, "impossible shape"),
    "absurd shape": ({"a": entry([2**40, 2**40], [0, 4])}, bytes(4), None, "takes .* bytes, but its data_offsets span 4"),
    "shape and bytes differ": ({"a": entry([2], [0, 4])}, bytes(4), None, "takes 8 bytes"),
    "offsets reversed": ({"a": entry([1], [4, 0])}, bytes(4), None, "impossible data_offsets"),
    "offsets past the end": ({"a": entry([2**40], [0, 2**42])}, bytes(4), None, "is truncated: tensor a ends at byte"),
    "overlapping": ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12), None, "tensors a and b overlap"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_header(tmp_path, case):
    header, body, length, message = HEADERS[case]
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(raw_file(tmp_path / "model.safetensors", header, body, length))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_truncated_file(tmp_path, write_model, size):
    write_model(tmp_path, TOY)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="truncated"):
        load_target(tmp_path, need_tokenizer=False)


def test_empty_tensors_and_metadata_are_fine(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": entry([0, 3], [0, 0]), "b": entry([1], [0, 4])}
    checkpoint = open_checkpoint(raw_file(tmp_path / "x.safetensors", header, struct.pack("<f", 1.5)))
    assert checkpoint.read("a").shape == (0, 3) and checkpoint.read("b").tolist() == [1.5]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", "C:x", "nul\0"])
def test_index_may_not_leave_its_directory(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="not a plain file name in its own directory; refused"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ("{", ValueError, "not a readable index"),
        ("[]", ValueError, "not a readable index"),
        ('{"weight_map": {"a": 1}}', ValueError, "weight_map should name the file"),
        ('{"weight_map": {"a": "gone.safetensors"}}', FileNotFoundError, "names gone.safetensors, which is not there"),
        ('{"weight_map": {"b": "one.safetensors"}}', ValueError, "tensor b is in one.safetensors, but that file does not hold it"),
    ],
)
def test_bad_index(tmp_path, index, error, message):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


def test_missing_tensor_is_named(tmp_path, write_model):
    write_model(tmp_path, TOY)
    tensors = open_checkpoint(tmp_path)
    kept = {name: tensors.read(name) for name in tensors.names() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(tmp_path, need_tokenizer=False)


def test_layers_that_cannot_be_there(tmp_path, write_model):
    write_model(tmp_path, TOY, num_hidden_layers=999)
    with pytest.raises(ValueError, match="claims 999 layers but holds only 27 tensors"):
        load_target(tmp_path, need_tokenizer=False)


def test_more_layers_than_any_model_has(tmp_path, write_model):
    write_model(tmp_path, TOY, num_hidden_layers=2**31 - 1)
    with pytest.raises(ValueError, match="num_hidden_layers 2147483647 is more than any model has"):
        load_target(tmp_path, need_tokenizer=False)


def test_wrong_shape_is_named(tmp_path, write_model):
    write_model(tmp_path, TOY, intermediate_size=23)
    with pytest.raises(ValueError, match=r"gate_proj\.weight has shape \[24, 16\] but the configuration implies \[23, 16\]"):
        load_target(tmp_path, need_tokenizer=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture .*GPT2LMHeadModel.* is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "16"}, "hidden_size should be an integer, not '16'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_attention_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "hidden_size .16. is no multiple of num_attention_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias and mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type .* is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "does not say factor"),
        ({"rope_scaling": "linear"}, "rope_scaling should be an object"),
        ({"rope_theta": -1.0}, "rope_theta should be a positive number"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 and 1000000.0 in rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between kinds of layers"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "1 of 2 layers use a sliding window"),
        ({"layer_types": ["full_attention"]}, "layer_types should name 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "only full_attention and sliding_attention"),
        ({"eos_token_id": [1, 40]}, "eos_token_id 40 is not a token of a vocabulary of 40"),
    ],
)
def test_unsupported_or_contradictory_config(tmp_path, llama_json, change, message):
    (tmp_path / "config.json").write_text(json.dumps(llama_json | change))
    with pytest.raises(ValueError, match=message) as caught:
        hf.read_config(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_config_that_is_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        hf.read_config(tmp_path)


def test_no_weights(tmp_path, llama_json, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(llama_json))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_target(tmp_path, need_tokenizer=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"pytorch_model.bin holds pickled weights, .*: pip install 'angelspec-jax\[torch\]', or save"):
        load_target(tmp_path, need_tokenizer=False)


def test_places_that_hold_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a Hugging Face model directory or a GGUF file"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither a config.json nor a GGUF file"):
        load_target(tmp_path)


def test_tokenizer_missing_damaged_or_of_another_model(tmp_path, write_model):
    write_model(tmp_path, TOY)
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        load_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a readable tokenizer"):
        load_target(tmp_path)
    vocabulary = {f"t{i}": i for i in range(TOY.vocab_size + 1)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="token ids up to 40, but the model's vocabulary has 40 entries; .* belongs to another model"):
        load_target(tmp_path)
