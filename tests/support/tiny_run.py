"""The smallest run there is: a random two-layer target over a vocabulary of words, and a dozen conversations.

`python tiny_run.py FOLDER STEP [key=value ...]` trains in a process of its own and is killed (SIGKILL) after STEP.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import tokenizers

from angelspec_jax import config as configs
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import Target
from angelspec_jax.target.transformer import target_specs
from angelspec_jax.tokenizer import Tokenizer

SPECIAL = ("<pad>", "<start>", "<end>", "<mask>")
WORDS = tuple(f"w{i}" for i in range(60))
TEMPLATE = (
    "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)


def make_target(mesh=None) -> Target:
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, "user", "assistant", *WORDS))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    config = TransformerConfig(
        vocab_size=72, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True
    )
    return Target(
        params=initialize(target_specs(config), jax.random.key(7)),
        config=config,
        tokenizer=Tokenizer(backend, eos_token="<end>"),
        chat_template=TEMPLATE,
        eos_ids=(2,),
        name="tiny",
        source=Path("tiny"),
        fingerprint="0123456789abcdef",
    )


def write_data(path: Path, count: int = 16) -> Path:
    draw = random.Random(0)
    lines = []
    for index in range(count):
        turns = [{"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(4, 12)))} for role in ("user", "assistant")]
        record = {"id": index, "domain": ("math", "chat")[index % 2], "finished": index % 3 > 0, "conversations": turns}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


def make_config(folder: Path, overrides=()) -> configs.TrainConfig:
    data = folder / "answers.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_data(data)
    values = {
        "target": {"source": "tiny"},
        "drafter": {"layers": 1, "block_size": 4, "taps": [0, 1], "mask_token": "<mask>", "draft_vocab": 48},
        "data": {"paths": str(data), "validation_modulus": 5, "max_length": 32},
        "train": {
            "steps": 8,
            "batch_size": 4,
            "anchors": 4,
            "learning_rate": 1e-2,
            "min_learning_rate": 1e-3,
            "save_every": 3,
            "log_every": 2,
            "stages": [{"until": 0.5, "lk_weight": 1.0, "position_weighting": "dpace_masked"}, {"ce_weight": 0.0, "e2e_tv_weight": 1.0}],
        },
        "evaluation": {"every": 4, "batches": 2, "prompts": 0},
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
        "export_dtype": "float32",
        "output": str(folder / "run"),
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(values))
    return configs.load(path, overrides)


def killer(folder: Path, at: int, number: int):
    """An online evaluation that ends this process with a signal at a step, once the first checkpoint is on disk."""

    def evaluate(job):
        def measure(drafter, step: int) -> dict:
            if step == at:
                while not (folder / "checkpoints" / "3").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), number)
            return {"tau": {"math": 1.5}}

        return measure

    return evaluate


if __name__ == "__main__":
    from angelspec_jax.training.trainer import train

    config = make_config(Path(sys.argv[1]), sys.argv[3:])
    train(config, target=make_target(), evaluate=killer(Path(config.output), int(sys.argv[2]), signal.SIGKILL))
