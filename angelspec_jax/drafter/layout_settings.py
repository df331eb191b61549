"""config.json of drafters, in and out: every layout's way to say what a drafter is.

z-lab nests mask token and layer ids in `dflash_config` and counts the target's layers in `num_target_layers`; AngelSpec has them flat, and
its `num_target_layers` counts the *captured* layers; DeepSpec has them flat and counts all. Nothing that a file leaves open is guessed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from angelspec_jax.drafter.config import LAYOUTS as BLOCK_LAYOUTS
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.layout_source import Renamed, architecture, whole
from angelspec_jax.target import hf
from angelspec_jax.target.config import Rope, TransformerConfig

CONFIG = "config.json"
SAME_POSITION = ("DFlashDraftModel", "Qwen3DFlyModel", "DSparkDraftModel")
ANCHOR_FIRST = ("Qwen3DSparkModel",)
EXPORTS = ("angelspec", "zlab", "deepspec")
DRAFT_IDS = "draft_ids"  # ours: int32[V'], the target token of each row of a reduced draft head, ascending
CORRECTION = "hidden_correction."
NATIVE_FC = "context_proj.weight"  # AngelSpec's name of the projection that others call fc


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Answers to what a checkpoint leaves open; None takes the checkpoint's own."""

    block_size: int | None = None
    mask_token: int | None = None
    taps: tuple[int, ...] | None = None
    target_num_layers: int | None = None
    layout: str | None = None  # of the block: "same_position" or "anchor_first"
    rope_theta: float | None = None
    num_drafts: int | None = None  # of an autoregressive drafter: most drafts a round
    input_postnorm: bool | None = None  # MTP: it reads the target's hidden state after the final norm


def parse_overrides(overrides: Mapping[str, Any]) -> Overrides:
    known = [field.name for field in dataclasses.fields(Overrides)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"load_drafter has no override {name!r}; it knows {', '.join(known)}")
    answers = Overrides(**overrides)
    return answers if answers.taps is None else dataclasses.replace(answers, taps=tuple(answers.taps))


def derive_config(
    source: Renamed, settings: Mapping[str, Any], family: str, draft_ids: np.ndarray | None, answers: Overrides
) -> DrafterConfig:
    """Configuration of a checkpoint. Counts that config.json may contradict come from the shapes of the tensors."""
    where, names = source.path, set(source.names())
    model = _transformer(source, settings, answers)
    taps = _taps(source, settings, answers, model)
    head = "hidden_correction" if any(name.startswith(CORRECTION) for name in names) or settings.get("enable_hidden_correction") else None
    size = settings.get("hidden_correction_intermediate_size") if head else None
    gate = f"{CORRECTION}gate_proj.weight"
    if size is not None:
        _integer(size, "hidden_correction_intermediate_size", where)
    elif gate in names and len(source.shape(gate)) == 2:
        size = source.shape(gate)[0]
    try:
        return DrafterConfig(
            family=family,
            transformer=model,
            block_size=_open_decision(answers.block_size, settings, "block_size", "block_size=8", where),
            mask_token=_open_decision(answers.mask_token, settings, "mask_token_id", "mask_token=151669", where),
            taps=taps,
            target_num_layers=_target_depth(source, settings, answers, taps),
            layout=answers.layout or _block_layout(settings, where),
            context="fc_fusion" if family == "dfly" else "fc",
            head=head,
            correction_size=None if size == model.hidden_size else size,
            draft_vocab=None if draft_ids is None else len(draft_ids),
        )
    except ValueError as error:
        raise error if str(where) in str(error) else ValueError(f"{where}: {error}") from error


def read_draft_ids(source: Renamed, settings: Mapping[str, Any]) -> Int[np.ndarray, "V'"] | None:
    """The reduced draft vocabulary, where the checkpoint has one."""
    if DRAFT_IDS not in source.names():
        if settings.get("draft_vocab_ids") is not None:
            raise ValueError(f"{source.path}: config.json announces a draft vocabulary but there is no tensor {DRAFT_IDS}")
        return None
    vocab = _integer(settings.get("vocab_size"), "vocab_size", source.path)
    ids = source.read(DRAFT_IDS, whole(source.shape(DRAFT_IDS)))
    return check_draft_ids(ids, vocab, f"{source.path}: {DRAFT_IDS}")


def check_draft_ids(draft_ids, vocab_size: int, what: str = DRAFT_IDS) -> Int[np.ndarray, "V'"]:
    """The ids as int32, or ValueError when they are not ascending token ids."""
    ids = np.asarray(draft_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"{what} must be a list of token ids, got {ids.dtype} of shape {list(ids.shape)}")
    if np.any(np.diff(ids.astype(np.int64)) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{what} must be ascending token ids below {vocab_size}")
    return ids.astype(np.int32)


def settings_for(config: DrafterConfig, layout: str) -> dict[str, Any]:
    """config.json of an export, without dtype and card."""
    model, taps = config.transformer, list(config.taps)
    settings: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "layer_types": ["full_attention"] * model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "rope_scaling": rope_scaling(model.rope),
        "max_position_embeddings": model.max_positions,
        "attention_bias": model.attention_bias,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
    }
    if layout == "zlab":
        nested = {"mask_token_id": config.mask_token, "target_layer_ids": taps}
        return settings | {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "dflash_config": nested,
            "num_target_layers": config.target_num_layers,
        }
    settings |= {"mask_token_id": config.mask_token, "target_layer_ids": taps}
    if layout == "deepspec":
        extra = {"num_target_layers": config.target_num_layers, "markov_rank": 0, "enable_confidence_head": False}
        return settings | {"architectures": ["Qwen3DSparkModel"]} | extra
    settings |= {
        "num_target_layers": len(taps),
        "target_hidden_size": model.hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "draft_vocab_size": config.draft_vocab or model.vocab_size,
    }
    if config.draft_vocab is not None:
        settings["draft_vocab_ids"] = DRAFT_IDS
    if config.family == "dflash":
        return settings | {"model_type": "dflash"}
    correction = {"enable_hidden_correction": config.head is not None, "hidden_correction_intermediate_size": config.correction_size}
    return settings | {"architectures": ["Qwen3DFlyModel"]} | correction


def refuse_export(config: DrafterConfig, layout: str, draft_ids) -> None:
    """Raise ValueError with the reason when `layout` cannot express the drafter."""
    if layout not in EXPORTS:
        raise ValueError(f"there is no export layout {layout!r}; choose one of {', '.join(EXPORTS)}")
    expected = "anchor_first" if layout == "deepspec" else "same_position"
    if config.layout != expected:
        raise ValueError(
            f"a {config.layout} drafter cannot be exported to the {layout} layout, whose readers take every block as {expected} "
            "and would shift all drafts by one"
        )
    if layout != "angelspec" and (config.head is not None or config.context != "fc"):
        raise ValueError(f"the {layout} layout has no place for the fusion weights and hidden correction of a DFly drafter; use angelspec")
    if config.context not in ("fc", "fc_fusion"):
        raise ValueError(f"no export layout holds a drafter with the context {config.context!r}")
    if config.transformer.qk_norm != "before_rope":
        raise ValueError(
            "drafter layouts have query and key norms before the rotation; this drafter has not (qk_norm='before_rope' when made)"
        )
    if config.transformer.sliding_window is not None:
        raise ValueError("sliding-window drafters cannot be exported")
    if (draft_ids is None) != (config.draft_vocab is None) or (draft_ids is not None and len(draft_ids) != config.draft_vocab):
        raise ValueError(f"the drafter has draft_vocab={config.draft_vocab}, so it is exported with that many draft_ids")
    if draft_ids is not None and layout != "angelspec":
        raise ValueError(
            f"the {layout} layout has no place for a reduced draft vocabulary; use angelspec, or save it with draft_vocab=None"
        )


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
        raise ValueError(f"{file} does not say rope_theta; pass it, as in load_drafter(..., rope_theta=1e6)")
    model = hf.parse_config(values, file)
    if model.sliding_window is not None:
        raise ValueError(f"{file}: the draft layers use a sliding window, which is not supported; full attention is")
    present = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if len(present) != model.num_layers:
        raise ValueError(f"{file} says num_hidden_layers {model.num_layers} but the weights hold {len(present)} draft layers")
    return dataclasses.replace(model, qk_norm="before_rope" if norm in names else None, tie_embeddings=False)


def _nested(settings: Mapping[str, Any], key: str):
    """A value of config.json, or of its dflash_config, where z-lab and SpecForge keep theirs."""
    inner = settings.get("dflash_config")
    nested = inner.get(key) if isinstance(inner, Mapping) else None
    return nested if settings.get(key) is None else settings[key]


def _open_decision(answer: int | None, settings: Mapping[str, Any], key: str, example: str, where) -> int:
    value = _nested(settings, key) if answer is None else answer
    if value is None:
        raise ValueError(f"{where}: config.json does not say {key}; pass it, as in load_drafter(..., {example})")
    return _integer(value, key, where)


def _integer(value, key: str, where) -> int:
    if type(value) is not int:
        raise ValueError(f"{where}: {key} must be an integer, got {value!r}")
    return value


def _taps(source: Renamed, settings, answers: Overrides, model: TransformerConfig) -> tuple[int, ...]:
    where, width = source.path, model.hidden_size
    ids = _nested(settings, "target_layer_ids") if answers.taps is None else answers.taps
    if ids is None:
        raise ValueError(
            f"{where}: config.json does not say target_layer_ids; pass the 0-based target layers, as in load_drafter(..., taps=(1, 9, 17))"
        )
    if type(ids) not in (list, tuple) or not ids:
        raise ValueError(f"{where}: target_layer_ids must be a list of integers, got {ids!r}")
    if settings.get("target_hidden_size") not in (None, width):
        raise ValueError(
            f"{where}: target_hidden_size {settings['target_hidden_size']} differs from hidden_size {width}, which is not supported"
        )
    taps = tuple(_integer(value, "target_layer_ids", where) for value in ids)
    if "fc.weight" in source.names():
        shape = source.shape("fc.weight")
        if len(shape) != 2 or shape[1] != len(taps) * width:
            read = f", that is {shape[1] / width:g} target layers of width {width}," if len(shape) == 2 else ""
            raise ValueError(
                f"{where}: {source.original['fc.weight']} has shape {list(shape)}{read} but target_layer_ids names {len(taps)}: "
                f"{list(taps)}; pass the right ones with taps="
            )
    return taps


def _target_depth(source: Renamed, settings, answers: Overrides, taps: tuple[int, ...]) -> int:
    """Total layers of the target: AngelSpec says so in target_num_hidden_layers, the others in num_target_layers."""
    if answers.target_num_layers is not None:
        return answers.target_num_layers
    angelspec = source.original.get("fc.weight") == NATIVE_FC or "target_hidden_size" in settings
    key = "target_num_hidden_layers" if angelspec or "target_num_hidden_layers" in settings else "num_target_layers"
    depth = settings.get(key)
    if depth is None or _integer(depth, key, source.path) <= max(taps):
        said = "does not say" if depth is None else f"says {depth} for"
        raise ValueError(
            f"{source.path}: config.json {said} {key}, the number of layers of the target, with layer ids {list(taps)}; "
            "pass it, as in load_drafter(..., target_num_layers=36)"
        )
    return depth


def _block_layout(settings: Mapping[str, Any], where) -> str:
    named = architecture(settings)
    if named in ANCHOR_FIRST or _nested(settings, "projector_type") == "dspark":
        return "anchor_first"
    if named in SAME_POSITION:
        return "same_position"
    raise ValueError(
        f"{where}: architecture {named!r} does not tell whether slot k of a block predicts the token at its own place or the next; "
        f"pass layout= one of {', '.join(map(repr, BLOCK_LAYOUTS))} to load_drafter"
    )
