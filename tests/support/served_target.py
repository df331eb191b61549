"""A target and a drafter as vLLM reads them: `python tests/support/served_target.py TARGET DRAFTER FOLDER` (CONTRIBUTING.md).

Writes FOLDER/target, a Hugging Face directory in float32 with tokenizer and chat template, and FOLDER/drafter in vLLM's layout. The drafter
`new:dflash` or `new:eagle3` is a random one, with which loading can be tried.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from angelspec_jax.cli_models import find_drafter, find_target
from angelspec_jax.drafter.loading import create_drafter, load_drafter, save_drafter
from angelspec_jax.target.layout import target_tensors
from angelspec_jax.target.loading import Target, load_target

NEW = {
    "new:dflash": {"family": "dflash", "mask_token": 5, "block_size": 5, "num_layers": 2, "taps": 3},
    "new:eagle3": {"family": "eagle3", "num_drafts": 4},
}


def write_target(folder: Path, target: Target) -> None:
    """A Llama of any source as a Hugging Face directory."""
    config = target.config
    if config.qk_norm or config.attention_bias or config.moe is not None or config.rope.scaling is not None:
        raise SystemExit(f"{target.name} is no plain Llama; give vLLM its own Hugging Face directory")
    folder.mkdir(parents=True)
    tensors = target_tensors(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), target.params), config)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu", "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta, "max_position_embeddings": config.max_positions, "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32", "eos_token_id": list(target.eos_ids),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    assert target.tokenizer is not None
    target.tokenizer.backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": target.tokenizer.eos_token, "chat_template": target.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def main(target_name: str, drafter_name: str, folder: Path) -> None:
    target = load_target(find_target(target_name), scan_layers=False)
    write_target(folder / "target", target)
    if drafter_name in NEW:
        drafter = create_drafter(target, jax.random.key(0), **NEW[drafter_name])
    else:
        source = find_drafter(drafter_name, target_name)
        if source is None:
            raise SystemExit("name a drafter with a checkpoint")
        drafter = load_drafter(source, target)
    save_drafter(folder / "drafter", drafter, layout="vllm")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
