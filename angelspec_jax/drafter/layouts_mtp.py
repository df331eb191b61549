"""Checkpoint layout of MTP modules, in and out: AngelSpec's export, which serving engines and the targets that carry a module share.

The tensors stand at `model.layers.<N>.`, N being the number of the target's layers, and config.json is the target's with
`num_nextn_predict_layers`. Inside this file a tensor goes by its name below that prefix. What AngelSpec's trainer writes before that export
is another form of the same (layout_mtp_training.py), which is read too and written as the layout "angelspec_training".
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from angelspec_jax.drafter import layout_mtp_training as training
from angelspec_jax.drafter.layout_settings import CONFIG, DRAFT_IDS, Overrides, how_to_answer, read_draft_ids, rope_scaling
from angelspec_jax.drafter.layout_source import Renamed, plain_leaf, read_leaves, strip, transposed_leaf
from angelspec_jax.drafter.mtp import MTP, MTPConfig, drafter_specs
from angelspec_jax.target import hf
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.layout import HEAD_NORMS, TensorSource, check_counts, layer_leaves, layer_tensors

FAMILIES = ("mtp",)
TRAINING = "angelspec_training"
EXPORTS = ("angelspec", "vllm", TRAINING)  # the first two are the same thing under two names
POSTNORM, DRAFTS = "mtp_draft_input_postnorm", "num_speculative_tokens"  # AngelSpec's name of the switch, and ours of the depth
AT_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
DROPPED = ("embed_tokens.weight", "lm_head.weight", "lm_head_weight", "shared_head.head.weight")  # the target's
ARCHITECTURES = {"hy3": ("HYV3ForCausalLM", "hy_v3"), "qwen3": ("Qwen3MoeForCausalLM", "qwen3_moe")}


def read(
    tensors: TensorSource, settings: Mapping[str, Any], family: str, answers: Overrides
) -> tuple[MTP, MTPConfig, Int[np.ndarray, "V'"] | None]:
    """Parameters, configuration and draft vocabulary of an MTP checkpoint, or of the module a target's own checkpoint carries."""
    del family
    if training.is_training(settings):
        settings = training.as_target(settings, answers, tensors.path / CONFIG)
    source, depth = open_module(tensors, settings)
    draft_ids = read_draft_ids(source, settings)
    postnorm = settings.get(POSTNORM) if answers.input_postnorm is None else answers.input_postnorm
    if not isinstance(postnorm, bool):
        raise ValueError(
            f"{source.path}: config.json does not say {POSTNORM}, whether the module reads the target's hidden state after its final norm; "
            f"{how_to_answer('input_postnorm=True')}; true is what serving engines hand over"
        )
    drafts = settings.get(DRAFTS) if answers.num_drafts is None else answers.num_drafts
    if drafts is not None and type(drafts) is not int:
        raise ValueError(f"{source.path}: {DRAFTS} must be an integer, got {drafts!r}")
    config = MTPConfig(
        transformer=_transformer(source, settings, answers),
        target_num_layers=depth if answers.target_num_layers is None else answers.target_num_layers,
        input_postnorm=postnorm,
        draft_vocab=None if draft_ids is None else len(draft_ids),
        **({} if drafts is None else {"num_drafts": drafts}),
    )
    leaves = drafter_leaves(config, fused=_is_fused(source, config.transformer))
    return read_leaves(source, leaves, drafter_specs(config), extra=(DRAFT_IDS,)), config, draft_ids


def export(
    params: MTP, config: MTPConfig, layout: str, draft_ids: Int[np.ndarray, "V'"] | None, copies: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config.json in this layout. ValueError where it cannot express them."""
    if layout not in EXPORTS:
        raise ValueError(f"an MTP module cannot be exported to the layout {layout!r}; choose one of {', '.join(EXPORTS)}")
    if layout == TRAINING:
        return _training_export(params, config, draft_ids, copies)
    if draft_ids is not None and layout != "angelspec":
        raise ValueError(f"the {layout} layout of MTP has no place for a reduced draft vocabulary; use angelspec")
    prefix = f"model.layers.{config.target_num_layers}."
    tensors = {f"{prefix}{name}": value for name, value in drafter_tensors(params, config).items()}
    if draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    return tensors, _settings(config)


def default_layout(config: MTPConfig) -> str:
    return "angelspec"


def describe(config: MTPConfig) -> dict[str, str]:
    """What a reader decided about a checkpoint, for a table."""
    return {
        "family": config.family,
        "drafts per round": str(config.num_drafts),
        "reads": f"the hidden state {'after' if config.input_postnorm else 'before'} the final norm of {config.target_num_layers} layers",
        "rope base": f"{config.transformer.rope.theta:g}",
    }


def origins(tensors: TensorSource, settings: Mapping[str, Any], answers: Overrides, config: MTPConfig) -> dict[str, str]:
    """What says so, for the rows of `describe` that a tensor does not tell."""
    del tensors, config
    answered = {"drafts per round": answers.num_drafts, "reads": answers.input_postnorm, "rope base": answers.rope_theta}
    said = {"drafts per round": DRAFTS if DRAFTS in settings else "our default", "reads": POSTNORM, "rope base": "config.json"}
    return {name: said[name] if answer is None else "the caller" for name, answer in answered.items()}


def open_module(tensors: TensorSource, settings: Mapping[str, Any]) -> tuple[Renamed, int]:
    """The module's tensors under plain names, and the number of the target's layers."""
    found = {match[1] for name in tensors.names() if (match := AT_LAYER.fullmatch(strip(name))) and match[2] == "eh_proj.weight"}
    if len(found) > 1:
        raise ValueError(f"{tensors.path} holds {len(found)} MTP modules; only checkpoints with one are supported")
    index = found.pop() if found else None

    def rename(name: str) -> str | None:
        name = strip(name)
        match = AT_LAYER.fullmatch(name)
        if match is not None:
            return match[2] if match[1] == index and match[2] not in DROPPED else None
        if index is not None:  # beside the module a target's checkpoint holds the target
            return name if name == DRAFT_IDS else None
        return None if name in DROPPED else name.removeprefix("midlayer.")

    depth = int(index) if index is not None else settings.get("num_hidden_layers")
    if type(depth) is not int or depth < 1:
        raise ValueError(f"{tensors.path}: config.json does not say num_hidden_layers, the number of layers of the target")
    return Renamed(tensors, rename), depth


def drafter_leaves(config: MTPConfig, *, fused: bool = False) -> MTP:
    """Where each parameter comes from, by plain name, in the tree of `drafter_specs(config)`; `fused` experts are stored together."""
    model = config.transformer
    d = model.hidden_size
    layer = layer_leaves(model, "", model.is_sparse(0))
    if fused and model.moe is not None and layer.moe is not None:
        gate_up, down = training.fused_leaves(model.moe, d)
        layer = dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, gate_up=gate_up, down=down))
    return MTP(
        embed_norm=plain_leaf("enorm.weight", (d,)),
        hidden_norm=plain_leaf("hnorm.weight", (d,)),
        projection=transposed_leaf("eh_proj.weight", (d, 2 * d)),
        layer=layer,
        norm=plain_leaf("final_layernorm.weight", (d,)),
    )


def drafter_tensors(params: MTP, config: MTPConfig) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a module under plain names: the inverse of `drafter_leaves`."""
    return {
        "enorm.weight": np.asarray(params.embed_norm),
        "hnorm.weight": np.asarray(params.hidden_norm),
        "eh_proj.weight": np.asarray(params.projection).T,
        "final_layernorm.weight": np.asarray(params.norm),
        **layer_tensors(params.layer, config.transformer, ""),
    }


def _is_fused(source: Renamed, model: TransformerConfig) -> bool:
    """Whether the experts are stored together. ValueError where there are others than config.json says, before a leaf is made for each."""
    if model.moe is None:
        return False
    shape = source.shape(training.GATE) if training.GATE in source.original else None
    if shape is None:
        check_counts(model, len(source.original), source.path)
    elif shape[:1] != (model.moe.num_experts,):
        raise ValueError(f"{source.path}: {training.GATE} has shape {list(shape)} but config.json claims {model.moe.num_experts} experts")
    return shape is not None


def _training_export(params: MTP, config: MTPConfig, draft_ids, copies: Mapping[str, np.ndarray]):
    """Tensors and config.json of AngelSpec's training form; `copies` may hold the target's "embed"."""
    moe = config.transformer.moe
    if draft_ids is not None:
        raise ValueError(f"the {TRAINING} layout of MTP has no place for a reduced draft vocabulary; use angelspec")
    if moe is not None and moe.names != "hy3":
        raise ValueError(f"the {TRAINING} layout has no place for experts routed as {moe.names}'s; use angelspec")
    if config.transformer.rope.scaling is not None:
        raise ValueError(f"the {TRAINING} layout has no place for rope scaling; use angelspec")
    tensors = {name: value for name, value in drafter_tensors(params, config).items() if not name.startswith("mlp.experts.")}
    if moe is not None and params.layer.moe is not None:
        tensors |= training.fused_tensors(params.layer.moe, moe)
    tensors = {training.trained_name(name): value for name, value in tensors.items()}
    if "embed" in copies:
        tensors["embed_tokens.weight"] = np.asarray(copies["embed"])
    return tensors, training.settings_of(_settings(config) | {"qk_norm": config.transformer.qk_norm is not None})


def _transformer(source: Renamed, settings: Mapping[str, Any], answers: Overrides) -> TransformerConfig:
    """The layer: the target's kind, but for what the tensors show (norms, biases, experts, the width of a dense one)."""
    file, names = source.path / CONFIG, set(source.names())
    values = dict(settings)
    if answers.rope_theta is not None:
        values |= {"rope_theta": answers.rope_theta, "rope_parameters": None}
    model = hf.parse_config(values, file)
    norms = [kind for kind, (query, _) in HEAD_NORMS.items() if f"self_attn.{query}.weight" in names]
    dense, gate = "mlp.gate_proj.weight" in names, "mlp.gate_proj.weight"
    if not dense and model.moe is None:
        raise ValueError(f"{source.path} has no tensor {gate}, and {file} describes no experts; the checkpoint is incomplete")
    return dataclasses.replace(
        model,
        num_layers=1,
        intermediate_size=source.shape(gate)[0] if dense and source.shape(gate) else model.intermediate_size,
        qk_norm=norms[0] if norms else None,
        attention_bias="self_attn.q_proj.bias" in names,
        tie_embeddings=False,
        moe=None if dense or model.moe is None else dataclasses.replace(model.moe, dense_layers=()),
        scan_layers=False,
    )


def _settings(config: MTPConfig) -> dict[str, Any]:
    """config.json of an export, without dtype and card: as of a target of the same shape."""
    model, moe = config.transformer, config.transformer.moe
    named = ("Qwen3ForCausalLM", "qwen3") if model.qk_norm else ("LlamaForCausalLM", "llama")
    if moe is not None:
        if moe.names not in ARCHITECTURES:
            raise ValueError(f"MTP modules with experts named as {moe.names}'s cannot be exported; {', '.join(ARCHITECTURES)} can")
        named = ARCHITECTURES[moe.names]
    if model.qk_norm == "after_rope" or model.attention_bias or model.sliding_window is not None:
        raise ValueError("MTP modules with norms after the rotation, attention biases or a sliding window cannot be exported")
    settings: dict[str, Any] = {
        "architectures": [named[0]],
        "model_type": named[1],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": config.target_num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "rope_scaling": rope_scaling(model.rope),
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": False,
        "mlp_type": "dense" if moe is None else "moe",
        "num_nextn_predict_layers": 1,
        "_mtp_spec_layer": config.target_num_layers,
        POSTNORM: config.input_postnorm,
        DRAFTS: config.num_drafts,
    }
    if config.draft_vocab is not None:
        settings |= {"draft_vocab_size": config.draft_vocab, "draft_vocab_ids": DRAFT_IDS}
    if moe is None:
        return settings
    settings |= {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
    }
    if moe.names == "qwen3":
        return settings | {"norm_topk_prob": moe.normalize}
    return settings | {
        "qk_norm": model.qk_norm is not None,
        "num_shared_experts": moe.shared_size // moe.intermediate_size,
        "moe_router_use_sigmoid": moe.scores == "sigmoid",
        "moe_router_enable_expert_bias": moe.selection_bias,
        "route_norm": moe.normalize,
        "router_scaling_factor": moe.scale,
        "first_k_dense_replace": 1,
    }
