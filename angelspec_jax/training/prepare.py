"""Everything a run needs before its first step, and every mistake that can be told from looking: one sentence each, before any compile."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from angelspec_jax import places
from angelspec_jax.config import DataSection, DrafterSection, OptimizationSection, Stage, TrainConfig
from angelspec_jax.data import conversations as reading
from angelspec_jax.data import features, packing, pipeline
from angelspec_jax.data.chat import encode_conversation
from angelspec_jax.drafter import layouts, mtp
from angelspec_jax.drafter import loading as drafters
from angelspec_jax.drafter.config import DrafterConfig, default_taps
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.drafter.registry import TrainableConfig
from angelspec_jax.target.loading import Target
from angelspec_jax.tokenizer import Tokenizer
from angelspec_jax.training import warm

GIB = 1024**3
AUTOREGRESSIVE = (*mtp.FAMILIES, "eagle3")
PAST = {"drop": "dropped", "truncate": "truncated", "split": "split"}
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some samples of a source: what is trained on, or what is held out."""

    source: pipeline.Source
    indices: tuple[int, ...]
    domains: tuple[str, ...]  # of every sample of the part

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> pipeline.Sample:
        return self.source[self.indices[index]]


@dataclasses.dataclass(frozen=True)
class Data:
    """Tokenized conversations, in the order of their files, and which of them are held out."""

    samples: tuple[dict[str, np.ndarray], ...]  # {"tokens": int32[S], "loss_mask": bool[S]}
    training: Part
    validation: Part
    validation_conversations: tuple[reading.Conversation, ...]

    def over(self, source: pipeline.Source) -> tuple[Part, Part]:
        """(training, validation) of another source with the same samples: the feature cache."""
        return dataclasses.replace(self.training, source=source), dataclasses.replace(self.validation, source=source)


def read_conversations(config: TrainConfig) -> list[reading.Conversation]:
    """The conversations of the data section; some are left to train on."""
    data = config.data
    found = reading.read(data.files, data.domains)
    if not reading.split(found, data.validation_modulus)[0]:
        files = ", ".join(data.files)
        raise ValueError(f"data.validation_modulus {data.validation_modulus} holds out every conversation of {files}; raise it")
    return found


def encode(config: TrainConfig, target: Target, conversations: Sequence[reading.Conversation], say: Say) -> Data:
    """Tokenized data of a run; what did not fit is said, never silent."""
    if target.tokenizer is None:
        raise ValueError(f"target {target.name} has no tokenizer, which training on conversations needs")
    if target.chat_template is None:
        raise ValueError(f"target {target.name} has no chat template, which training on conversations needs")
    section = config.data
    encoded = [_encode(section, target.tokenizer, target.chat_template, conversation) for conversation in conversations]
    kept, report = pipeline.fit(encoded, section.max_length, section.overlong, section.min_supervised)
    samples = tuple({"tokens": sample["tokens"], "loss_mask": sample["loss_mask"]} for sample in kept)
    _, validation = reading.split(conversations, section.validation_modulus)
    held_out = {conversation.id for conversation in validation}
    parts = []
    for name, wanted in (("training", False), ("validation", True)):
        indices = tuple(i for i, sample in enumerate(kept) if (sample["id"] in held_out) == wanted)
        parts.append(Part(samples, indices, tuple(kept[i]["domain"] for i in indices)))
        tokens = sum(len(samples[i]["tokens"]) for i in indices)
        supervised = sum(int(samples[i]["loss_mask"].sum()) for i in indices)
        say(f"{name}: {len(indices)} sequences, {tokens} tokens, {supervised} supervised")
    say(
        f"{report['overlong']} conversations are longer than {section.max_length} tokens ({PAST[section.overlong]}); "
        f"{report['unsupervised']} have fewer than {section.min_supervised} supervised tokens (left out)"
    )
    if not parts[0]:
        files = ", ".join(section.files)
        raise ValueError(f"no conversation of {files} can be trained on: raise data.max_length or set data.overlong=split")
    return Data(samples, parts[0], parts[1], tuple(validation))


def check_objectives(config: TrainConfig, drafter: TrainableConfig) -> None:
    """Raise ValueError for objectives that this drafter, or a run with cached features, cannot be trained on."""
    for number, stage in enumerate(config.train.stages):
        objective, where = stage.objective, f"train.stages.{number}"
        if objective.opd_weight > 0 and not isinstance(drafter, DrafterConfig):
            raise ValueError(f"{where}.opd_weight is for block drafters; set it to 0 ({drafter.family} has train.ttt.on_policy)")
        for name, wanted in (("opd_weight", objective.opd_weight > 0), ("teacher_norm", not objective.teacher_norm)):
            if wanted and config.data.cache is not None:
                raise ValueError(f"{where}.{name} needs the target inside the step, which data.cache leaves out; do without the cache")


def packed(part: Part, config: TrainConfig, say: Say) -> packing.Packed:
    """The training part with several conversations a row."""
    length = config.data.max_length
    rows = packing.pack(part, length, config.train.max_documents)
    filled = sum(len(part[index]["tokens"]) for index in range(len(part))) / (len(rows) * length)
    say(f"packed into {len(rows)} rows of {length} tokens, {100 * filled:.0f} % full")
    return rows


def drafter_options(section: DrafterSection, target: Target) -> dict[str, Any]:
    """The section as options of `drafter.loading.create_drafter`; what it leaves open is as the target has it."""
    shape = {
        "num_heads": section.heads,
        "num_kv_heads": section.kv_heads,
        "head_dim": section.head_dim,
        "intermediate_size": section.intermediate_size,
    }
    shape = {name: value for name, value in shape.items() if value is not None}
    if section.family in AUTOREGRESSIVE:
        return {"family": section.family, "num_drafts": section.drafts} | _autoregressive_options(section, target) | shape
    return {
        "family": section.family,
        "num_layers": section.layers,
        "block_size": section.block_size,
        "taps": 5 if section.taps is None else section.taps,
        "layout": section.layout,
        "mask_token": mask_token(section.mask_token, target),
        "context": section.context,
        "head": section.head,
        "confidence": section.confidence,
        "correction_size": section.correction_size,
        "rank": section.rank,
        **shape,
    }


def _autoregressive_options(section: DrafterSection, target: Target) -> dict[str, Any]:
    norm = {} if section.qk_norm is None else {"qk_norm": "before_rope" if section.qk_norm else None}
    if section.family in mtp.FAMILIES:
        if section.taps is not None:
            raise ValueError("drafter.taps has no meaning for MTP, which reads the hidden state; leave it out")
        return norm | {"input_postnorm": section.input_postnorm} | ({"moe": section.moe} if section.family == "mtp_moe" else {})
    taps = default_taps(target.config.num_layers, section.taps) if isinstance(section.taps, int) else section.taps
    return norm | {"taps": taps, "fc_norm": section.fc_norm, "feedback_norm": section.feedback_norm, "own_head": section.own_head}


def drafter_config(section: DrafterSection, target: Target) -> TrainableConfig:
    """The drafter a run trains, checked against its target."""
    config = drafters.drafter_config(target.config, draft_vocab=section.draft_vocab, **drafter_options(section, target))
    if len(set(config.taps)) != len(config.taps):
        raise ValueError(
            f"drafter.taps={section.taps} comes to layers {list(config.taps)} of a target of {target.config.num_layers} layers, "
            "some of them twice; name fewer taps or the layer ids themselves"
        )
    return config


def check_sequence(config: TrainConfig, parts: int) -> None:
    """Raise ValueError when a run cannot have its sequences spread over `parts` devices, the size of mesh.sequence."""
    if parts > 1:
        check_parts(parts, config.drafter.family, config.data.max_length, config.train)
        if config.data.cache is not None:
            raise ValueError("data.cache holds whole sequences, which mesh.sequence spreads; leave the cache out or set mesh.sequence=1")


def check_parts(parts: int, family: str, length: int, train: OptimizationSection) -> None:
    """Raise ValueError unless texts of `length` tokens and their chains of a `family` drafter divide over `parts` devices."""
    if family not in AUTOREGRESSIVE:
        raise ValueError(f"mesh.sequence={parts} trains MTP and EAGLE-3 only, not {family}; set mesh.sequence=1 and use mesh.fsdp instead")
    if length % (8 * parts):
        raise ValueError(f"mesh.sequence={parts} needs a length in multiples of {8 * parts} tokens, got {length}; round data.max_length up")
    if train.anchors % parts:
        raise ValueError(f"mesh.sequence={parts} deals out train.anchors, which must be a multiple of it, got {train.anchors}")
    if train.max_documents > 1:
        raise ValueError(f"mesh.sequence={parts} takes one conversation a row; set train.max_documents=1")


def check_confidence(config: TrainableConfig, stages: Sequence[Stage]) -> None:
    """Raise ValueError when a confidence head would be trained that the drafter has not, or one that it has would not be."""
    trained = any(stage.objective.confidence_weight > 0 for stage in stages)
    has = isinstance(config, DrafterConfig) and config.confidence is not None
    if trained and not has:
        raise ValueError("a stage has a confidence_weight but the drafter has no confidence head; leave it out or set drafter.confidence")
    if has and not trained:
        raise ValueError(
            "no stage has a confidence_weight, so the drafter's confidence head would stay as it starts and cut drafts at random; "
            "set the weight (DSpark: 1.0) or drafter.confidence=none"
        )


def mask_token(value: int | str, target: Target) -> int:
    """Id of the mask token, given as id or as text."""
    if isinstance(value, int):
        return value
    found = None if target.tokenizer is None else target.tokenizer.token_id(value)
    if found is None:
        raise ValueError(f"drafter.mask_token {value!r} is not a token of {target.name}; name a special token of its tokenizer or an id")
    return found


def check_mask_token(token: int | None, data: Data, target: Target) -> None:
    """Raise ValueError when the data contains the mask token: the drafter could not tell a hole from a word. None: it has no holes."""
    if token is None:
        return
    for sample in data.samples:
        if np.any(sample["tokens"] == token):
            text = "" if target.tokenizer is None else f" ({target.tokenizer.decode([token], skip_special_tokens=False)!r})"
            raise ValueError(f"drafter.mask_token {token}{text} occurs in the data; choose a special token that it never uses")


def draft_vocabulary(config: TrainableConfig, data: Data, target: Target) -> Int[np.ndarray, "V'"] | None:
    """Target ids of the draft head's rows: what ends a turn, and the answers' most frequent tokens. None for the whole vocabulary."""
    if config.draft_vocab is None:
        return None
    answers = (sample["tokens"][sample["loss_mask"]] for sample in map(data.training.__getitem__, range(len(data.training))))
    counts = reading.count_tokens(answers, target.config.vocab_size)
    return reading.rank_vocabulary(counts, config.draft_vocab, target.eos_ids)


def cached(folder: Path, target: Target, taps: tuple[int, ...], data: Data, say: Say) -> tuple[Part, Part]:
    """(training, validation) with the target's features from disk, computed now where they are missing.

    A cache that was built with more taps serves as well.
    """
    samples = [(sample["tokens"], sample["loss_mask"]) for sample in data.samples]
    stored = features.stored_taps(folder, taps)
    need = features.size_estimate(sum(len(tokens) for tokens, _ in samples), len(stored), target.config.hidden_size)
    say(f"features of {len(samples)} sequences take {need / GIB:.2f} GiB in {folder}")
    identity = features.checksum(target.identity, target.chat_template, stored, samples)
    tenth = max(1, len(samples) // 10)
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if done - shown >= tenth or done == total:
            shown = done
            say(f"features: {done} of {total} sequences")

    cache = features.build(folder, samples, target.params, target.config, stored, identity, progress=progress)
    return data.over(cache.select(taps))


def check_initial(init: str, config: TrainableConfig) -> None:
    """Raise FileNotFoundError or ValueError when `drafter.init` names a folder whose drafter is not of the run's shape."""
    if init in ("random", "target"):
        return
    folder = places.resolve(init)
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter.init {init!r} is neither random nor target nor the folder of a saved drafter")
    found, wanted = layouts.read(folder).config, config
    if not isinstance(found, TrainableConfig) or type(found) is not type(wanted):
        raise ValueError(f"drafter.init {init} holds a drafter of the family {found.family}, this run trains one of {wanted.family}")
    layer_fields = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "qk_norm", "rope")
    pairs = {name: (getattr(found.transformer, name), getattr(wanted.transformer, name)) for name in layer_fields}
    # No weight depends on how much is drafted, so a run may change it; it makes temperatures of confidence obsolete.
    free = ("transformer", "block_size", "num_drafts", "confidence_temperatures")
    pairs |= {f.name: (getattr(found, f.name), getattr(wanted, f.name)) for f in dataclasses.fields(config) if f.name not in free}
    for name, (old, new) in pairs.items():
        if old != new:
            raise ValueError(f"drafter.init {init} holds a drafter with {name}={old}, this run trains one with {new}")


def initial_params(init: str, drafter: Drafter, target: Target, mesh: Mesh):
    """Parameters a run starts from; `drafter` is the random one. A saved drafter must have the same draft vocabulary."""
    if init == "random":
        return drafter.params
    if init == "target":
        return warm.start(drafter, target)
    saved = drafters.load_drafter(init, target, dtype=jnp.float32, mesh=mesh, frozen=False)
    own, theirs = drafter.shared.draft_ids, saved.shared.draft_ids
    if (own is None) != (theirs is None) or (own is not None and theirs is not None and not np.array_equal(own, theirs)):
        raise ValueError(f"drafter.init {init} has another draft vocabulary than this data gives; train on the same data or start anew")
    return saved.params


def data_digest(data: Data) -> str:
    """SHA-256 of every token and mask of the run's data and of what is held out."""
    digest = hashlib.sha256(np.asarray(data.validation.indices, np.int64).tobytes())
    for sample in data.samples:
        digest.update(np.asarray(sample["tokens"], np.int32).tobytes() + np.asarray(sample["loss_mask"], bool).tobytes())
    return digest.hexdigest()


def _encode(section: DataSection, tokenizer: Tokenizer, template: str, conversation: reading.Conversation) -> dict:
    try:
        tokens, mask = encode_conversation(
            tokenizer, template, conversation.messages, last_turn_only=section.last_turn_only, **section.template
        )
    except ValueError as error:
        raise ValueError(f"conversation {conversation.id} of {', '.join(section.files)}: {error}") from error
    if not conversation.finished and mask.any():
        tokens, mask = _unfinished(tokens, mask, tokenizer.special_ids())
    return {"tokens": tokens, "loss_mask": mask, "id": conversation.id, "domain": conversation.domain}


def _unfinished(tokens: np.ndarray, mask: np.ndarray, special: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
    """A conversation up to its last word: the token that ends the turn would teach the drafter to stop where a limit did."""
    stop = int(np.flatnonzero(mask)[-1]) + 1
    if int(tokens[stop - 1]) in special:
        stop -= 1
    return tokens[:stop], mask[:stop]
