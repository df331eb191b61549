"""config.json of block drafters, on the way in.

z-lab and SpecForge nest mask token and layer ids in `dflash_config` and count the target's layers in `num_target_layers`; AngelSpec has
them flat, and its `num_target_layers` counts the *captured* layers; DeepSpec has them flat and counts all. What a drafter is composed of is
read from its tensors; nothing that a file leaves open is guessed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from angelspec_jax.drafter.config import LAYOUTS as BLOCK_LAYOUTS
from angelspec_jax.drafter.config import DrafterConfig, Parts, family_of
from angelspec_jax.drafter.layout_settings import CONFIG, Overrides, how_to_answer, integer
from angelspec_jax.drafter.layout_source import Renamed, architecture
from angelspec_jax.target import hf
from angelspec_jax.target.config import TransformerConfig

SAME_POSITION = ("DFlashDraftModel", "Qwen3DFlyModel", "QwenDFlareDraftModel", "DFlareQwen3Model")
ANCHOR_FIRST = ("Qwen3DSparkModel",)
NATIVE = "AngelSpecJaxDrafter"  # our own architecture, for compositions that no other project has
COMPOSITION = "composition"  # of a native checkpoint: its parts and its block layout
CORRECTION, MARKOV, CONFIDENCE = "hidden_correction.", "markov_head.", "confidence_head."
TARGET_KEYS, GATE = "self_attn.k_proj_target.weight", "layer_gate"
NATIVE_FC = "context_proj.weight"  # AngelSpec's name of the projection that others call fc
CONTEXTS = {"dflare": "fusion", "dfly": "fc_fusion", "gated_sum": "gated_sum"}  # of the other families: fc


class Decided(NamedTuple):
    """A value and where it comes from."""

    value: Any
    origin: str


def derive_config(
    source: Renamed, settings: Mapping[str, Any], family: str, draft_ids: np.ndarray | None, answers: Overrides
) -> DrafterConfig:
    """Configuration of a checkpoint. Counts that config.json may contradict come from the shapes of the tensors."""
    where = source.path
    model = _transformer(source, settings, answers)
    taps = _taps(source, settings, answers, model)
    try:
        parts = composition(source, settings, family, answers)
        return DrafterConfig(
            family=family_of(parts),
            transformer=model,
            block_size=_open_decision(answers.block_size, settings, "block_size", "block_size=8", where),
            mask_token=_open_decision(answers.mask_token, settings, "mask_token_id", "mask_token=151669", where),
            taps=taps,
            target_num_layers=_target_depth(source, settings, answers, taps),
            layout=block_layout(source, settings, answers).value,
            context=parts.context,
            separate_kv=parts.separate_kv,
            gate_temperature=float(_number(settings.get("gate_temperature", 1.0), "gate_temperature", where)),
            head=parts.head,
            correction_size=_correction_size(source, settings, model) if parts.head == "hidden_correction" else None,
            rank=_columns(source, f"{MARKOV}markov_w1.weight") if parts.head and parts.head.startswith("markov") else None,
            confidence=parts.confidence,
            confidence_temperatures=_temperatures(settings, where),
            draft_vocab=None if draft_ids is None else len(draft_ids),
        )
    except ValueError as error:
        raise error if str(where) in str(error) else ValueError(f"{where}: {error}") from error


def composition(source: Renamed, settings: Mapping[str, Any], family: str, answers: Overrides) -> Parts:
    """Context, head and confidence, told by the tensors; a native checkpoint says its context itself."""
    names = source.names()
    own = settings.get(COMPOSITION)
    context = own.get("context") if isinstance(own, Mapping) else CONTEXTS.get(family, "fc")
    return Parts(
        context=str(context),
        head=_head(source, settings),
        separate_kv=any(name.endswith(TARGET_KEYS) for name in names),
        confidence=None if answers.confidence == "none" else _confidence(source, settings),
    )


def block_layout(source: Renamed, settings: Mapping[str, Any], answers: Overrides) -> Decided:
    """Which token slot k of a block predicts, and what says so."""
    if answers.layout is not None:
        return Decided(answers.layout, "given")
    own, named = settings.get(COMPOSITION), architecture(settings)
    if isinstance(own, Mapping):
        return Decided(own.get("layout"), COMPOSITION)
    for key, first in (("sample_from_anchor", True), ("dspark_bonus_anchor", False)):
        said = nested(settings, key)
        if isinstance(said, bool):
            return Decided("anchor_first" if said is first else "same_position", f"{key}={said}")
    if nested(settings, "projector_type") == "dspark":
        return Decided("anchor_first", "SpecForge's projector_type dspark")
    if named in ANCHOR_FIRST:
        return Decided("anchor_first", f"architecture {named}")
    if named in SAME_POSITION or (named == "DSparkDraftModel" and _of_angelspec(source, settings)):
        return Decided("same_position", f"architecture {named}")
    raise ValueError(
        f"{source.path}: architecture {named!r} does not tell whether slot k of a block predicts the token at its own place or the next; "
        f"{how_to_answer('layout=' + BLOCK_LAYOUTS[0])}, or layout={BLOCK_LAYOUTS[1]}"
    )


def explain(source: Renamed, settings: Mapping[str, Any], answers: Overrides, config: DrafterConfig) -> dict[str, str]:
    """Where each of a reader's decisions comes from, by the names of `layouts_block.describe`."""

    def said(given, key: str) -> str:
        return "given" if given is not None else f"dflash_config.{key}" if settings.get(key) is None else key

    return {
        "family": "tensors",
        "context": "tensors",
        "block layout": block_layout(source, settings, answers).origin,
        "drafts per round": f"{said(answers.block_size, 'block_size')} {config.block_size} and the block layout",
        "target layers": said(answers.taps, "target_layer_ids") + (", confirmed by fc.weight" if "fc.weight" in source.names() else ""),
        "mask token": said(answers.mask_token, "mask_token_id"),
        "head": "tensors",
        "confidence": "given" if answers.confidence else "tensors",
        "rope base": "given" if answers.rope_theta is not None else CONFIG,
    }


def nested(settings: Mapping[str, Any], key: str):
    """A value of config.json, or of its dflash_config, where z-lab and SpecForge keep theirs."""
    inner = settings.get("dflash_config")
    found = inner.get(key) if isinstance(inner, Mapping) else None
    return found if settings.get(key) is None else settings[key]


def _of_angelspec(source: Renamed, settings: Mapping[str, Any]) -> bool:
    return source.original.get("fc.weight") == NATIVE_FC or "target_hidden_size" in settings or "target_num_hidden_layers" in settings


def _head(source: Renamed, settings: Mapping[str, Any]) -> str | None:
    names = source.names()
    corrected = any(name.startswith(CORRECTION) for name in names) or settings.get("enable_hidden_correction")
    markov = any(name.startswith(MARKOV) for name in names)
    if corrected and markov:
        raise ValueError(f"{source.path} holds a hidden correction and a Markov head; a drafter has one sequential head")
    if corrected:
        return "hidden_correction"
    rank = nested(settings, "markov_rank")
    if not markov:
        if rank:
            raise ValueError(
                f"{source.path}: config.json announces a Markov head of rank {rank} but there is none; the checkpoint is incomplete"
            )
        return None
    said = nested(settings, "markov_head_type")
    if said is None:
        kinds = {"gate_proj": "gated", "joint_proj": "rnn"}
        said = next((kind for part, kind in kinds.items() if f"{MARKOV}{part}.weight" in names), "vanilla")
    return f"markov_{said}"


def _confidence(source: Renamed, settings: Mapping[str, Any]) -> str | None:
    name = f"{CONFIDENCE}proj.weight"
    if name not in source.names():
        if nested(settings, "enable_confidence_head"):
            raise ValueError(
                f"{source.path}: config.json announces a confidence head but there is none; to go by the drafter's own probability "
                + how_to_answer("confidence=none")
            )
        return None
    return "hidden_markov" if _columns(source, name) > integer(settings.get("hidden_size"), "hidden_size", source.path) else "hidden"


def _temperatures(settings: Mapping[str, Any], where) -> tuple[float, ...]:
    values = settings.get("confidence_temperatures") or ()
    if not isinstance(values, list | tuple):
        raise ValueError(f"{where}: confidence_temperatures must be a list of numbers, got {values!r}")
    return tuple(float(_number(value, "confidence_temperatures", where)) for value in values)


def _correction_size(source: Renamed, settings: Mapping[str, Any], model: TransformerConfig) -> int | None:
    size, gate = settings.get("hidden_correction_intermediate_size"), f"{CORRECTION}gate_proj.weight"
    if size is not None:
        integer(size, "hidden_correction_intermediate_size", source.path)
    elif gate in source.names() and len(source.shape(gate)) == 2:
        size = source.shape(gate)[0]
    return None if size == model.hidden_size else size


def _columns(source: Renamed, name: str) -> int:
    if name not in source.names() or len(source.shape(name)) != 2:
        found = f"has shape {list(source.shape(name))}" if name in source.names() else "is missing"
        raise ValueError(f"{source.path}: tensor {name} {found}, a matrix is expected; the checkpoint is incomplete")
    return source.shape(name)[1]


def _number(value, key: str, where) -> float | int:
    if type(value) not in (int, float):
        raise ValueError(f"{where}: {key} must be a number, got {value!r}")
    return value


def _transformer(source: Renamed, settings: Mapping[str, Any], answers: Overrides) -> TransformerConfig:
    """The draft layers. The norms tell the head size, which AngelSpec's templates may omit, and whether there are norms at all."""
    file, names = source.path / CONFIG, source.names()
    values = dict(settings) | {"architectures": ["Qwen3ForCausalLM"]}
    norm = "layers.0.self_attn.k_norm.weight"
    if values.get("head_dim") is None and norm in names and len(source.shape(norm)) == 1:
        values["head_dim"] = source.shape(norm)[0]
    if answers.rope_theta is not None:
        values |= {"rope_theta": answers.rope_theta, "rope_parameters": None}
    if values.get("rope_theta") is None and not values.get("rope_parameters"):
        raise ValueError(f"{file} does not say rope_theta; {how_to_answer('rope_theta=1e6')}")
    model = hf.parse_config(values, file)
    if model.sliding_window is not None:
        raise ValueError(f"{file}: the draft layers use a sliding window, which is not supported; full attention is")
    present = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if len(present) != model.num_layers:
        raise ValueError(f"{file} says num_hidden_layers {model.num_layers} but the weights hold {len(present)} draft layers")
    return dataclasses.replace(model, qk_norm="before_rope" if norm in names else None, tie_embeddings=False)


def _open_decision(answer: int | None, settings: Mapping[str, Any], key: str, example: str, where) -> int:
    value = nested(settings, key) if answer is None else answer
    if value is None:
        raise ValueError(f"{where}: config.json does not say {key}; {how_to_answer(example)}")
    return integer(value, key, where)


def _taps(source: Renamed, settings, answers: Overrides, model: TransformerConfig) -> tuple[int, ...]:
    where, width = source.path, model.hidden_size
    ids = nested(settings, "target_layer_ids") if answers.taps is None else answers.taps
    if ids is None:
        raise ValueError(f"{where}: config.json does not say target_layer_ids, the 0-based target layers; {how_to_answer('taps=[1,9,17]')}")
    if type(ids) not in (list, tuple) or not ids:
        raise ValueError(f"{where}: target_layer_ids must be a list of integers, got {ids!r}")
    if settings.get("target_hidden_size") not in (None, width):
        raise ValueError(
            f"{where}: target_hidden_size {settings['target_hidden_size']} differs from hidden_size {width}, which is not supported"
        )
    taps = tuple(integer(value, "target_layer_ids", where) for value in ids)
    if "fc.weight" in source.names():
        shape = source.shape("fc.weight")
        if len(shape) != 2 or shape[1] != len(taps) * width:
            read = f", that is {shape[1] / width:g} target layers of width {width}," if len(shape) == 2 else ""
            raise ValueError(
                f"{where}: {source.original['fc.weight']} has shape {list(shape)}{read} but target_layer_ids names {len(taps)}: "
                f"{list(taps)}; pass the right ones with taps=, or as --set taps=[..] to angelspec convert or inspect"
            )
    return taps


def _target_depth(source: Renamed, settings, answers: Overrides, taps: tuple[int, ...]) -> int:
    """Total layers of the target: AngelSpec says so in target_num_hidden_layers, the others in num_target_layers."""
    if answers.target_num_layers is not None:
        return answers.target_num_layers
    key = "target_num_hidden_layers" if _of_angelspec(source, settings) else "num_target_layers"
    depth = settings.get(key)
    if depth is None or integer(depth, key, source.path) <= max(taps):
        said = "does not say" if depth is None else f"says {depth} for"
        raise ValueError(
            f"{source.path}: config.json {said} {key}, the number of layers of the target, with layer ids {list(taps)}; "
            + how_to_answer("target_num_layers=36")
        )
    return depth
