"""Files made by chance: whatever they say, they are read or refused with a sentence, and nothing large is allocated for them."""

import contextlib
import json
import struct
import tracemalloc

import pytest
from gguf_file import LLAMA as GGUF_MODEL
from gguf_file import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from angelspec_jax.drafter import layouts
from angelspec_jax.target import hf
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import describe, load_target
from angelspec_jax.target.safetensors_io import DTYPES, open_checkpoint

FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOY = TransformerConfig(40, 16, 24, 2, 4, 2, 8, qk_norm="before_rope")
ROOM = 64 * 2**20  # bytes
SIZES = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, 10**30]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(sorted(DTYPES)), JSON),
        "shape": st.one_of(st.lists(SIZES, max_size=4), JSON),
        "data_offsets": st.one_of(st.tuples(SIZES, SIZES), JSON),
        "more": JSON,
    },
)
NAMES = st.one_of(st.text(max_size=6), st.sampled_from(["a", "b", "__metadata__"]))
HEADERS = st.dictionaries(NAMES, st.one_of(ENTRY, ENTRY, JSON), max_size=4)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64,
}  # fmt: skip
KEYS = sorted({*CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "eos_token_id",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "moe_topk",
    "num_shared_expert",
    "first_k_dense_replace", "mlp_layer_types", "router_scaling_factor", "expert_hidden_dim", "tie_word_embeddings", "rms_norm_eps",
    "quantization_config", "hidden_act", "dflash_config", "block_size", "mask_token_id", "target_layer_ids", "markov_rank"})  # fmt: skip
ARCHITECTURES = [[name] for name in (*hf.ARCHITECTURES, "DFlashDraftModel", "Qwen3DSparkModel", "LlamaForCausalLMEagle3", "Unknown")]
CHANGES = st.dictionaries(st.sampled_from(KEYS), st.one_of(JSON, st.sampled_from(ARCHITECTURES), SIZES), max_size=5)


@contextlib.contextmanager
def sentence():
    """A refusal is one sentence of ours, and cost little memory."""
    tracemalloc.start()
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        assert str(error) and "\n" not in str(error).strip()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ROOM


@FUZZ
@given(header=HEADERS, body=st.binary(max_size=64), excess=st.sampled_from([0, 0, 0, -1, 1, 2**40]))
def test_headers(tmp_path, header, body, excess):
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", max(len(text) + excess, 0)) + text + body)
    with sentence():
        checkpoint = open_checkpoint(file)
        for name in checkpoint.names():
            assert checkpoint.read(name).nbytes <= len(body)


@FUZZ
@given(content=st.binary(max_size=200))
def test_bytes(tmp_path, content):
    for name in ("x.safetensors", "x.gguf"):
        (tmp_path / name).write_bytes(content)
    with sentence():
        open_checkpoint(tmp_path / "x.safetensors")
    with sentence():
        describe(tmp_path / "x.gguf")


@FUZZ
@given(index=st.one_of(JSON, st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=6), JSON, max_size=3)})))
def test_indices(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with sentence():
        open_checkpoint(tmp_path)


@pytest.fixture
def model(tmp_path, write_model):
    write_model(tmp_path, TOY)
    return tmp_path


@FUZZ
@given(changes=CHANGES)
def test_configs_of_targets(model, changes):
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    with sentence():
        load_target(model, need_tokenizer=False)


@FUZZ
@given(changes=CHANGES)
def test_configs_of_drafters(model, changes):
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["DFlashDraftModel"]} | changes))
    with sentence():
        layouts.read(model)


@pytest.fixture
def gguf_file(tmp_path, write_model):
    write_model(tmp_path, GGUF_MODEL)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    return write_gguf(tmp_path / "toy.gguf", tensors, GGUF_MODEL, "llama")


@FUZZ
@given(data=st.data())
def test_gguf_headers(gguf_file, tmp_path, data):
    content = bytearray(gguf_file.read_bytes())
    header = content.index(b"blk.1.attn_output") + 200
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x09\0\0\0"])))
        content[at : at + len(new)] = new
    (tmp_path / "changed.gguf").write_bytes(content)
    with sentence():
        load_target(tmp_path / "changed.gguf")
