"""GGUF files: equal to the Hugging Face checkpoint they were made from, the real SmolLM2 answers, damaged files are refused."""

import dataclasses
import struct

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_file import LLAMA, write_gguf

from angelspec_jax.models import smollm2
from angelspec_jax.target import gguf, kv_cache, layout
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import Rope, TransformerConfig
from angelspec_jax.target.loading import describe, load_target
from angelspec_jax.target.safetensors_io import open_checkpoint
from angelspec_jax.target.transformer import forward, logits

QWEN3 = dataclasses.replace(LLAMA, qk_norm="before_rope", head_dim=16, tie_embeddings=False)
QWEN2 = dataclasses.replace(LLAMA, attention_bias=True)


@pytest.mark.parametrize(("config", "kind"), [(LLAMA, "llama"), (QWEN3, "qwen3"), (QWEN2, "qwen2")], ids=["llama", "qwen3", "qwen2"])
def test_equals_the_checkpoint_it_was_made_from(tmp_path, write_model, config, kind):
    params = write_model(tmp_path, config)
    checkpoint = open_checkpoint(tmp_path)
    file = write_gguf(tmp_path / "toy.gguf", {name: checkpoint.read(name) for name in checkpoint.names()}, config, kind)
    target = load_target(file)
    assert target.config == config
    assert (target.eos_ids, target.tokenizer.bos_token, target.name) == ((1,), "<s>", "toy")
    assert target.tokenizer.encode("ab c</s>") == [28, 29, 4, 1]
    jax.tree.map(np.testing.assert_array_equal, target.params, params)


def test_windows_of_interleaved_and_quantized_rows(tmp_path, write_model):
    write_model(tmp_path, LLAMA)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    file = gguf.open_gguf(write_gguf(tmp_path / "toy.gguf", tensors, LLAMA, "llama", library.GGMLQuantizationType.Q8_0))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        whole = file.read(name, tuple(slice(0, size) for size in file.shape(name)))
        np.testing.assert_allclose(whole, tensors[name], atol=0.02 * np.abs(tensors[name]).max())
        np.testing.assert_array_equal(file.read(name, (slice(3, 21), slice(5, 9))), whole[3:21, 5:9])


def test_llama3_frequencies_are_recognized(tmp_path, write_model):
    config = dataclasses.replace(LLAMA, rope=Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192), head_dim=16)
    write_model(tmp_path, config)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    wavelength = 2 * np.pi * 5e5 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    good = write_gguf(tmp_path / "good.gguf", tensors, config, "llama", change=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    assert gguf.read_config(gguf.open_gguf(good).metadata, gguf.open_gguf(good).tensors, good).rope == config.rope
    with pytest.raises(ValueError, match="rope_freqs.weight is not the llama3 scaling"):
        bad = np.linspace(1, 32, 8, dtype=np.float32)
        gguf.open_gguf(write_gguf(tmp_path / "bad.gguf", tensors, config, "llama", change=lambda w: w.add_tensor("rope_freqs.weight", bad)))


@pytest.fixture
def toy(tmp_path, write_model):
    write_model(tmp_path, LLAMA)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    return tensors, write_gguf(tmp_path / "toy.gguf", tensors, LLAMA, "llama")


def test_truncation_anywhere_is_refused(toy):
    _, file = toy
    data = file.read_bytes()
    for size in (0, 3, 23, 24, 100, 400, 1000, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:size])
        with pytest.raises(ValueError, match="too short|ends inside its header|truncated"):
            gguf.open_gguf(file)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 99), "GGUF version 99 is not supported"),
        (4, struct.pack(">I", 3), "GGUF version .* is not supported"),
        (8, struct.pack("<Q", 2**60), "ends inside its header|claims|occurs twice|not a readable"),
        (16, struct.pack("<Q", 2**60), "ends inside its header|unknown type|not a readable"),
        (24, struct.pack("<Q", 2**62), "ends inside its header"),
    ],
)
def test_corrupt_header(toy, offset, value, message):
    _, file = toy
    data = bytearray(file.read_bytes())
    data[offset : offset + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        gguf.open_gguf(file)


def rewrite(data: bytes, name: str, field: str, value: int) -> bytes:
    """Change a tensor's entry in the header: `rows` (its outer dimension), `kind` or `offset`."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, at)[0]
    place = {"rows": at + 4 + 8 * (dimensions - 1), "kind": at + 4 + 8 * dimensions, "offset": at + 8 + 8 * dimensions}[field]
    form = "<I" if field == "kind" else "<Q"
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", 2**50, "'blk.0.attn_q.weight' of shape .* would end at byte"),
        ("rows", 0, "cannot have shape"),
        ("kind", 12345, "unknown type 12345"),
        ("offset", 2**60, "would end at byte"),
        ("offset", 0, "overlap"),
    ],
)
def test_corrupt_tensor_entry(toy, field, value, message):
    _, file = toy
    file.write_bytes(rewrite(file.read_bytes(), "blk.0.attn_q.weight", field, value))
    with pytest.raises(ValueError, match=message):
        gguf.open_gguf(file)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path, toy):
    tensors, _ = toy
    name = "model.layers.1.mlp.up_proj.weight"
    fewer = {other: value for other, value in tensors.items() if other != name}
    with pytest.raises(ValueError, match=f"has no tensor {name}"):
        load_target(write_gguf(tmp_path / "fewer.gguf", fewer, LLAMA, "llama"))
    with pytest.raises(ValueError, match=rf"tensor {name} has shape \[63, 32\] but the configuration implies \[64, 32\]"):
        load_target(write_gguf(tmp_path / "odd.gguf", tensors | {name: tensors[name][:-1]}, LLAMA, "llama"))
    no_embedding = {other: value for other, value in tensors.items() if "embed" not in other}
    with pytest.raises(ValueError, match="has no tensor token_embd.weight"):
        load_target(write_gguf(tmp_path / "none.gguf", no_embedding, LLAMA, "llama"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_tokenizer_pre("deepseek-v9"), "splits text by rule 'deepseek-v9'"),
        (lambda w: w.add_tokenizer_model("llama"), "tokenizer of kind 'llama'"),
        (lambda w: w.add_token_types([1]), "incomplete tokenizer"),
        (lambda w: w.add_token_merges(["x nonsense"]), "inconsistent tokenizer"),
        (lambda w: w.add_rope_scaling_type(library.RopeScalingType.YARN), "rope scaling 'yarn' is not supported"),
        (lambda w: w.add_block_count(2**31), "claims 2147483648 layers but holds"),
        (lambda w: w.add_rope_dimension_count(4), "only a part of each head is rotated"),
        (lambda w: w.add_string("llama.block_count", "two"), "an unusable metadata value llama.block_count"),
    ],
)
def test_metadata_that_is_not_supported(tmp_path, toy, change, message):
    tensors, _ = toy

    def overwrite(writer):
        before = {key: dict(part) for key, part in enumerate(writer.kv_data)}
        writer.kv_data[0].clear()
        change(writer)
        changed = dict(writer.kv_data[0])
        writer.kv_data[0].clear()
        writer.kv_data[0].update(before[0] | changed)

    with pytest.raises(ValueError, match=message):
        load_target(write_gguf(tmp_path / "changed.gguf", tensors, LLAMA, "llama", change=overwrite))


def test_other_architecture(tmp_path, toy):
    tensors, _ = toy
    with pytest.raises(ValueError, match="architecture 'mamba'; supported GGUF architectures are llama, qwen2, qwen3"):
        describe(write_gguf(tmp_path / "mamba.gguf", tensors, LLAMA, "mamba"))


@pytest.fixture(scope="module")
def real():
    try:
        return smollm2(fetch=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.smollm2
def test_smollm2_answers(real):
    target = load_target(real, scan_layers=True)
    assert target.config == TransformerConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        rope=Rope(1e5), rms_norm_eps=1e-5, tie_embeddings=True, max_positions=8192, scan_layers=True,
    )  # fmt: skip
    assert target.eos_ids == (2,) and target.tokenizer.size == 49152
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = target.tokenizer.encode("The capital of France is Paris.<|im_end|>")
    tokens = jnp.asarray(target.tokenizer.encode(prompt) + answer, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = uniform_rows(jnp.zeros((1,), jnp.int32), tokens.shape[0], causal=True)
    cache = kv_cache.create(target.config, 1, 8)
    _, hidden, _ = jax.jit(forward, static_argnums=1)(target.params, target.config, tokens, positions, rows, cache)
    said = jnp.argmax(logits(target.params, hidden), axis=-1)[-len(answer) - 1 : -1]
    assert said.tolist() == answer


@pytest.mark.smollm2
def test_smollm2_rows_follow_their_window(real):
    file = gguf.open_gguf(real)
    leaf = layout.target_leaves(gguf.read_config(file.metadata, file.tensors, real)).layers[3].qkv
    whole = leaf.read(file, (slice(0, 576), slice(0, 3), slice(0, 5), slice(0, 64)))
    np.testing.assert_array_equal(leaf.read(file, (slice(10, 20), slice(1, 3), slice(2, 5), slice(0, 32))), whole[10:20, 1:3, 2:5, :32])
