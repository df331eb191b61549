"""Small GGUF files, as llama.cpp's converter would write them."""

import gguf as library
import numpy as np

from angelspec_jax.target import gguf
from angelspec_jax.target.config import Rope, TransformerConfig

LLAMA = TransformerConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope=Rope(1e5), rms_norm_eps=1e-5, tie_embeddings=True, max_positions=128,
)  # fmt: skip


def interleave(rows: np.ndarray, head: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama: halves of a head side by side."""
    return rows.reshape(-1, 2, head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, tensors: dict, config: TransformerConfig, kind: str, quantization=None, change=lambda writer: None):
    """A GGUF file of Hugging Face tensors, with a tokenizer of bytes and two special tokens."""
    writer = library.GGUFWriter(str(path), kind)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "ab", "Ġ"]
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    change(writer)
    names = dict(gguf.OUTER_NAMES)
    for layer in range(config.num_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in gguf.LAYER_NAMES.items()}
    for name, value in tensors.items():
        value = np.asarray(value, np.float32)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleave(value, config.head_dim)
        if quantization is not None and value.ndim == 2:
            writer.add_tensor(names[name], library.quants.quantize(value, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(names[name], value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
