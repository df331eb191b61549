"""Everything a run needs before its first step, and every mistake that can be told from looking: one sentence each, before any compile."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from angelspec_jax.config import DrafterSection, TrainConfig
from angelspec_jax.data import conversations as reading
from angelspec_jax.data import features, pipeline
from angelspec_jax.data.chat import encode_conversation
from angelspec_jax.drafter import loading as drafters
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.target.loading import Target

GIB = 1024**3
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Tokenized conversations with random access; `domains[i]` is where sequence i comes from."""

    samples: tuple[dict, ...]  # {"tokens": int32[S], "loss_mask": bool[S]}
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        return self.samples[index]


@dataclasses.dataclass(frozen=True)
class Part:
    """A contiguous part of a source."""

    source: pipeline.Source
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> pipeline.Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.source[self.start + index]


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on and what is held out."""

    training: Sequences
    validation: Sequences
    validation_conversations: tuple[reading.Conversation, ...]


def read_conversations(config: TrainConfig) -> tuple[list[reading.Conversation], list[reading.Conversation]]:
    """(training, validation) of the data section; both hold something unless nothing is to be held out."""
    data = config.data
    training, validation = reading.split(reading.read(data.files, data.domains), data.validation_modulus)
    if not training:
        raise ValueError(f"validation_modulus {data.validation_modulus} holds out every conversation of {', '.join(data.files)}; raise it")
    return training, validation


def encode(
    config: TrainConfig, target: Target, training: Sequence[reading.Conversation], validation: Sequence[reading.Conversation], say: Say
) -> Data:
    """Tokenized data of a run; what did not fit is said, never silent."""
    if target.tokenizer is None:
        raise ValueError(f"target {target.name} has no tokenizer, which training on conversations needs")
    if target.chat_template is None:
        raise ValueError(f"target {target.name} has no chat template, which training on conversations needs")
    parts = []
    for name, part in (("training", training), ("validation", validation)):
        sequences, report = _encode_part(config, target, part)
        parts.append(sequences)
        tokens = sum(len(sample["tokens"]) for sample in sequences.samples)
        supervised = sum(int(sample["loss_mask"].sum()) for sample in sequences.samples)
        say(
            f"{name}: {len(sequences)} sequences, {tokens} tokens, {supervised} supervised; {report['overlong']} longer than "
            f"{config.data.max_length} ({_past(config.data.overlong)}), {report['unsupervised']} left out for want of supervised tokens"
        )
    if not len(parts[0]):
        raise ValueError(f"no conversation of {', '.join(config.data.files)} can be trained on: raise data.max_length or set data.overlong=split")
    return Data(parts[0], parts[1], tuple(validation))


def drafter_options(section: DrafterSection, target: Target) -> dict[str, Any]:
    """The section as options of `drafter.loading.create_drafter`; what it leaves open is as the target has it."""
    shape = {
        "num_heads": section.heads,
        "num_kv_heads": section.kv_heads,
        "head_dim": section.head_dim,
        "intermediate_size": section.intermediate_size,
    }
    return {
        "family": section.family,
        "num_layers": section.layers,
        "block_size": section.block_size,
        "taps": section.taps,
        "layout": section.layout,
        "mask_token": mask_token(section.mask_token, target),
        "correction_size": section.correction_size,
        **{name: value for name, value in shape.items() if value is not None},
    }


def drafter_config(section: DrafterSection, target: Target) -> DrafterConfig:
    """The drafter a run trains, checked against its target."""
    config = drafters.drafter_config(target.config, draft_vocab=section.draft_vocab, **drafter_options(section, target))
    if len(set(config.taps)) != len(config.taps):
        raise ValueError(
            f"drafter.taps={section.taps} comes to layers {list(config.taps)} of a target of {target.config.num_layers} layers, "
            "some of them twice; name fewer taps or the layer ids themselves"
        )
    return config


def mask_token(value: int | str, target: Target) -> int:
    """Id of the mask token, given as id or as text."""
    if isinstance(value, int):
        return value
    found = None if target.tokenizer is None else target.tokenizer.token_id(value)
    if found is None:
        raise ValueError(f"drafter.mask_token {value!r} is not a token of {target.name}; name a special token of its tokenizer or an id")
    return found


def check_mask_token(token: int, data: Data, target: Target) -> None:
    """Raise ValueError when the data contains the mask token: the drafter could not tell a hole from a word."""
    for sequences in (data.training, data.validation):
        for sample in sequences.samples:
            if np.any(sample["tokens"] == token):
                text = "" if target.tokenizer is None else f" ({target.tokenizer.decode([token], skip_special_tokens=False)!r})"
                raise ValueError(f"drafter.mask_token {token}{text} occurs in the data; choose a special token that it never uses")


def draft_vocabulary(config: DrafterConfig, data: Data, target: Target) -> Int[np.ndarray, "V'"] | None:
    """Target ids of the draft head's rows: what ends a turn, and the answers' most frequent tokens. None for the whole vocabulary."""
    if config.draft_vocab is None:
        return None
    answers = (sample["tokens"][sample["loss_mask"]] for sample in data.training.samples)
    counts = reading.count_tokens(answers, target.config.vocab_size)
    return reading.rank_vocabulary(counts, config.draft_vocab, target.eos_ids)


def cached(config: TrainConfig, target: Target, taps: tuple[int, ...], data: Data, say: Say) -> tuple[pipeline.Source, pipeline.Source]:
    """(training, validation) with the target's features from disk, computed now where they are missing."""
    folder = Path(config.data.cache)
    both = [*data.training.samples, *data.validation.samples]
    samples = [(sample["tokens"], sample["loss_mask"]) for sample in both]
    tokens = sum(len(sample["tokens"]) for sample in both)
    need = features.size_estimate(tokens, len(taps), target.config.hidden_size)
    say(f"features of {len(both)} sequences take {need / GIB:.2f} GiB in {folder}")
    identity = features.checksum(target.fingerprint, target.chat_template, taps, samples)
    step = max(1, len(samples) // 20)
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if done - shown >= step or done == total:
            shown = done
            say(f"features: {done} of {total} sequences")

    cache = features.build(folder, samples, target.params, target.config, taps, identity, progress=progress)
    count = len(data.training)
    return Part(cache, 0, count), Part(cache, count, len(cache))


def warm_start(params, target: Target):
    """Draft layers as copies of evenly spread target layers, wherever shapes agree; what the target lacks keeps its random start."""
    layers = target.params.layers
    depth, count = target.config.num_layers, len(params.layers)
    chosen = [round(i * (depth - 1) / max(count - 1, 1)) for i in range(count)]
    started = []
    for own, index in zip(params.layers, chosen, strict=True):
        source = layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda x, i=index: x[i], layers)
        values = {}
        for field in dataclasses.fields(own):
            mine, theirs = getattr(own, field.name), getattr(source, field.name)
            if mine is not None and theirs is not None and mine.shape != theirs.shape:
                raise ValueError(
                    f"drafter.init=target needs draft layers of the target's shape, but {field.name} is {mine.shape} against {theirs.shape}; "
                    "leave heads, kv_heads, head_dim and intermediate_size open or set drafter.init=random"
                )
            # A copy: the training step donates its state, and the target's weights must outlive it.
            values[field.name] = mine if mine is None or theirs is None else jnp.array(theirs, mine.dtype)
        started.append(dataclasses.replace(own, **values))
    return dataclasses.replace(params, layers=tuple(started))


def data_digest(data: Data) -> str:
    """SHA-256 of every token and mask of the run's data, for its checkpoints and card."""
    digest = hashlib.sha256()
    for sequences in (data.training, data.validation):
        for sample in sequences.samples:
            digest.update(np.asarray(sample["tokens"], np.int32).tobytes() + np.asarray(sample["loss_mask"], bool).tobytes())
    return digest.hexdigest()


def _encode_part(config: TrainConfig, target: Target, part: Sequence[reading.Conversation]) -> tuple[Sequences, dict[str, int]]:
    samples = []
    for conversation in part:
        try:
            tokens, mask = encode_conversation(
                target.tokenizer,
                target.chat_template,
                conversation.messages,
                last_turn_only=config.data.last_turn_only,
                **config.data.template,
            )
        except ValueError as error:
            raise ValueError(f"conversation {conversation.id} of {', '.join(config.data.files)}: {error}") from error
        samples.append({"tokens": tokens, "loss_mask": mask, "domain": conversation.domain})
    kept, report = pipeline.fit(samples, config.data.max_length, config.data.overlong, config.data.min_supervised)
    arrays = tuple({"tokens": sample["tokens"], "loss_mask": sample["loss_mask"]} for sample in kept)
    return Sequences(arrays, tuple(sample["domain"] for sample in kept)), report


def _past(overlong: str) -> str:
    return {"drop": "dropped", "truncate": "truncated", "split": "split"}[overlong]
