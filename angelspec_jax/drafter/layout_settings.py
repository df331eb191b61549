"""What the config.json of every drafter layout shares: answers to open decisions, reduced draft vocabularies, rope scaling."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from angelspec_jax.drafter.layout_source import Renamed, whole
from angelspec_jax.target.config import Rope

CONFIG = "config.json"
DRAFT_IDS = "draft_ids"  # ours: int32[V'], the target token of each row of a reduced draft head, ascending
OFFSETS = "d2t"  # the others': int64[V'], what to add to a row's number


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Answers to what a checkpoint leaves open; None takes the checkpoint's own."""

    block_size: int | None = None
    mask_token: int | None = None
    taps: tuple[int, ...] | None = None
    target_num_layers: int | None = None
    layout: str | None = None  # of the block: "same_position" or "anchor_first"
    rope_theta: float | None = None
    confidence: str | None = None  # "none": of a block drafter, its own probability instead of a trained confidence head
    num_drafts: int | None = None  # of an autoregressive drafter: most drafts a round
    input_postnorm: bool | None = None  # MTP: it reads the target's hidden state after the final norm
    feedback_norm: bool | None = None  # EAGLE-3: its next step reads the normed output
    present_layers: int | None = None  # of the target at hand, for checkpoints that say nothing of theirs


def parse_overrides(overrides: Mapping[str, Any]) -> Overrides:
    known = [field.name for field in dataclasses.fields(Overrides)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"load_drafter has no override {name!r}; it knows {', '.join(known)}")
    if overrides.get("confidence") not in (None, "none"):
        raise ValueError(f"the override confidence can only be 'none' (the drafter's own probability), got {overrides['confidence']!r}")
    answers = Overrides(**overrides)
    return answers if answers.taps is None else dataclasses.replace(answers, taps=tuple(answers.taps))


def how_to_answer(example: str) -> str:
    """How to answer an open decision, for the end of a sentence."""
    setting = example.replace("=True", "=true")  # as JSON has it
    return f"pass it, as in load_drafter(..., {example}), or as --set {setting} to angelspec convert or inspect"


def integer(value, key: str, where) -> int:
    """`value` if it is an integer, else ValueError naming its key and file."""
    if type(value) is not int:
        raise ValueError(f"{where}: {key} must be an integer, got {value!r}")
    return value


def read_draft_ids(source: Renamed, settings: Mapping[str, Any]) -> Int[np.ndarray, "V'"] | None:
    """The reduced draft vocabulary, where the checkpoint has one."""
    if OFFSETS in source.names() and DRAFT_IDS not in source.names():
        return _from_offsets(source, settings)
    if DRAFT_IDS not in source.names():
        if settings.get("draft_vocab_ids") is not None:
            raise ValueError(f"{source.path}: config.json announces a draft vocabulary but there is no tensor {DRAFT_IDS}")
        return None
    vocab = integer(settings.get("vocab_size"), "vocab_size", source.path)
    ids = source.read(DRAFT_IDS, whole(source.shape(DRAFT_IDS)))
    return check_draft_ids(ids, vocab, f"{source.path}: {DRAFT_IDS}")


def _from_offsets(source: Renamed, settings: Mapping[str, Any]) -> Int[np.ndarray, "V'"] | None:
    """Draft vocabulary of a d2t tensor; one that covers the target's vocabulary in its own order reduces nothing."""
    vocab = integer(settings.get("vocab_size"), "vocab_size", source.path)
    offsets = source.read(OFFSETS, whole(source.shape(OFFSETS)))
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError(f"{source.path}: {OFFSETS} must be a list of offsets, got {offsets.dtype} of shape {list(offsets.shape)}")
    ids = check_draft_ids(offsets.astype(np.int64) + np.arange(len(offsets)), vocab, f"{source.path}: {OFFSETS} plus the row number")
    return None if len(ids) == vocab else ids


def check_draft_ids(draft_ids, vocab_size: int, what: str = DRAFT_IDS) -> Int[np.ndarray, "V'"]:
    """The ids as int32, or ValueError when they are not ascending token ids."""
    ids = np.asarray(draft_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"{what} must be a list of token ids, got {ids.dtype} of shape {list(ids.shape)}")
    if np.any(np.diff(ids.astype(np.int64)) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{what} must be ascending token ids below {vocab_size}")
    return ids.astype(np.int32)


def rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    if rope.scaling is None:
        return None
    if rope.scaling == "ntk":  # Hunyuan's name for it
        return {"rope_type": "dynamic", "alpha": rope.factor}
    scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling |= {"original_max_position_embeddings": rope.original_max_positions}
    return scaling
