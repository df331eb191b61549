"""What goes into a model and what comes out of it, as text and as token ids."""

import dataclasses
from typing import Any

from angelspec_jax.data import chat
from angelspec_jax.data.chat import Messages
from angelspec_jax.target.loading import Target
from angelspec_jax.tokenizer import Tokenizer

Prompt = str | Messages


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model answered to one prompt."""

    text: str
    tokens: tuple[int, ...]  # the answer's token ids, without the stop token
    finish_reason: str  # "stop": the model or a stop string ended it; "length": max_new_tokens did; "cancelled"; "deadline"
    rounds: int  # target passes it took
    tau: float  # tokens emitted per round, the stop token included; 1.0 is plain decoding
    logprobs: tuple[float, ...] | None = None  # of `tokens`, where asked for: the model's own, at temperature 1


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one round of a streamed answer added."""

    text: str  # characters that became final, possibly none
    tokens: tuple[int, ...]  # token ids, the stop token included


def encode(target: Target, prompt: Prompt, **switches: Any) -> list[int]:
    """Token ids of a prompt, up to where the model's answer begins."""
    tokenizer = require_tokenizer(target)
    if target.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError(f"{target.name} has no chat template, so it cannot take a conversation; give the prompt as one text")
        if switches:
            raise ValueError(f"{target.name} has no chat template that could take {', '.join(sorted(switches))}")
        return tokenizer.encode(prompt, add_special_tokens=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return chat.encode_prompt(tokenizer, target.chat_template, messages, **switches)


def require_tokenizer(target: Target) -> Tokenizer:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} was loaded without a tokenizer; give prompts as token ids, or add its tokenizer.json")
    return target.tokenizer
