"""Only the bytes that are needed, by each process its own, within a bound on memory; nothing that is not finite."""

import json
import math
import os
import socket
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from angelspec_jax import mesh as meshes
from angelspec_jax.params import is_param
from angelspec_jax.target import hf, layout, reading
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import load_target, requirement
from angelspec_jax.target.safetensors_io import open_checkpoint
from angelspec_jax.target.transformer import target_specs

ROOT = Path(__file__).parents[2]
TOY = TransformerConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm="before_rope"
)  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("shape", [(7, 5, 300), (300, 40), (11,), (64, 3000), ()])
def test_a_window_reads_its_bytes(tmp_path, shape):
    random = np.random.default_rng(0)
    value = random.normal(size=shape).astype(np.float16)
    save_file({"before": np.ones(3, np.float32), "a": np.asarray(value), "after": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(checkpoint.read("a"), value)
    assert checkpoint.meter.bytes == value.nbytes
    for _ in range(50):
        starts = [int(random.integers(0, size)) for size in shape]
        window = tuple(slice(start, int(random.integers(start + 1, size + 1))) for start, size in zip(starts, shape, strict=True))
        seen = checkpoint.meter.bytes
        np.testing.assert_array_equal(checkpoint.read("a", window), value[window])
        rows = math.prod(part.stop - part.start for part in window[:-1]) * (shape[-1] if shape else 1) * 2
        assert checkpoint.meter.bytes - seen <= max(value[window].nbytes, rows if len(shape) < 3 else value.nbytes)
    wide = (slice(8, 16), slice(1000, 2000))
    if shape == (64, 3000):  # long stretches are read alone
        seen = checkpoint.meter.bytes
        checkpoint.read("a", wide)
        assert checkpoint.meter.bytes - seen == value[wide].nbytes


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.ones(5000, np.float32)}, file)
    checkpoint = open_checkpoint(file)
    os.truncate(file, 9000)
    with pytest.raises(ValueError, match=r"x.safetensors ended at byte 9000 while it was read"):
        checkpoint.read("a")


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_numbers_are_cast_as_numpy_casts_them(stored, wanted):
    values = np.random.default_rng(0).normal(size=(6, 8)).astype(stored)
    out = np.zeros((8, 12), wanted)
    reading.assign(out[:, ::2].T, values)
    np.testing.assert_array_equal(out[:, ::2], values.T.astype(wanted))
    assert not out[:, 1::2].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(tmp_path, write_model, dtype, bad):
    write_model(tmp_path, TOY)
    tensors = {name: value.astype(dtype) for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_target(tmp_path, need_tokenizer=False)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        load_target(tmp_path, need_tokenizer=False)


@pytest.mark.parametrize("size", [1, 100, 10**6])
def test_pieces_of_any_size_make_the_same_parameters(tmp_path, write_model, monkeypatch, size):
    params = write_model(tmp_path, TOY)
    monkeypatch.setattr(reading, "PIECE", size)
    target = load_target(tmp_path, need_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, target.params, params)
    assert target.bytes_read == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_a_host_holds_one_array_beside_the_parameters(tmp_path, write_model, monkeypatch):
    config = TransformerConfig(8192, 128, 256, 2, 4, 2, 32)
    write_model(tmp_path, config)
    largest = 4 * config.vocab_size * config.hidden_size
    monkeypatch.setattr(reading, "PIECE", 1 << 14)
    addresses, assemble = [], reading._assemble

    def watched(*given):
        out = assemble(*given)
        addresses.append(out.ctypes.data)
        return out

    monkeypatch.setattr(reading, "_assemble", watched)
    tracemalloc.start()
    try:
        target = load_target(tmp_path, need_tokenizer=False, mesh=meshes.make_mesh(devices=jax.devices()[:1]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # What the parameters take is JAX's memory, unless a CPU made an array that was aligned by chance a parameter as it was.
    leaves = zip(jax.tree.leaves(target.params), addresses, strict=True)
    assert peak - sum(leaf.nbytes for leaf, address in leaves if leaf.unsafe_buffer_pointer() == address) < 1.3 * largest
    assert target.params.embed.nbytes == largest


def sparse_model(folder: Path, settings: dict, shards: int) -> int:
    """A checkpoint of zeros that takes no room on disk; its largest tensor in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    config, _ = hf.read_config(folder)
    leaves = jax.tree.leaves(layout.target_leaves(config), is_leaf=layout.is_leaf)
    shapes = sorted({name: shape for leaf in leaves for name, shape in leaf.tensors}.items())
    where = {}
    for index in range(shards):
        file, header, end = f"model-{index:05}.safetensors", {}, 0
        for name, shape in shapes[index::shards]:
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * math.prod(shape)]}
            where[name] = file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / file, 8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return max(2 * math.prod(shape) for _, shape in shapes)


def load_together(folder: Path, count: int, *more: str) -> list[dict]:
    """What each of `count` processes says after loading over one mesh."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    call = [sys.executable, str(ROOT / "tests" / "support" / "reading_worker.py"), str(folder), address, str(count)]
    running = [
        subprocess.Popen([*call, str(index), *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    said = [process.communicate(timeout=900) for process in running]
    assert all(process.returncode == 0 for process in running), [errors[-2000:] for _, errors in said]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_two_processes_read_half_each(tmp_path, write_model):
    config = TransformerConfig(8192, 4096, 256, 1, 4, 2, 32)
    params = write_model(tmp_path, config)
    size = (tmp_path / "model.safetensors").stat().st_size
    said = load_together(tmp_path, 2, "sum")
    for process in said:
        assert 0.49 * size < process["read"] < 0.52 * size  # norms and what does not divide are read by both
    expected = sum(float(np.abs(leaf.astype(jnp.bfloat16).astype(np.float64)).sum()) for leaf in jax.tree.leaves(params))
    assert all(abs(process["total"] / expected - 1) < 1e-3 for process in said)


@pytest.mark.slow
def test_an_8b_model_is_read_within_its_bound(tmp_path):
    """Qwen3-8B's shape in shards of a sparse file: as many of its layers as half of the free memory holds."""
    free = int(next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))) * 1024
    layers = 36
    while layers > 1 and requirement(hf.parse_config(QWEN3_8B | {"num_hidden_layers": layers}, "8b"), jnp.bfloat16).total > free / 2:
        layers -= 1
    largest = sparse_model(tmp_path / "model", QWEN3_8B | {"num_hidden_layers": layers}, 5)
    total = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    for process in load_together(tmp_path / "model", 2):
        print(f"{layers} layers, {total / 1e9:.2f} GB: {process}")
        assert process["read"] < 0.51 * total
        assert process["peak"] - process["held"] < 1.3 * largest


def test_a_quarter_of_a_mesh_reads_a_quarter(tmp_path, write_model):
    write_model(tmp_path, TOY)
    tensors = open_checkpoint(tmp_path)
    spec, leaf = target_specs(TOY).layers[0].qkv, layout.target_leaves(TOY).layers[0].qkv
    assert is_param(spec)
    window = (slice(0, 64), slice(1, 2), slice(0, spec.shape[2]), slice(0, 16))  # one of two groups of heads
    whole = leaf.read(tensors, tuple(slice(0, size) for size in spec.shape))
    seen = tensors.meter.bytes
    np.testing.assert_array_equal(leaf.read(tensors, window), whole[window])
    assert tensors.meter.bytes - seen == whole.nbytes // 2
