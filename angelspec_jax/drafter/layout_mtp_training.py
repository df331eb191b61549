"""AngelSpec's training form of an MTP module, in and out: what its trainer writes, before its own conversion for serving engines.

The layer is called `midlayer.`, experts are stored together as `[expert, in, out]`, and config.json describes the module alone: nothing in
it says how many layers the target has. Its rotary embedding is always the plain one (MTPAttention builds it from `rope_theta` alone).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from angelspec_jax.drafter.layout_settings import Overrides, how_to_answer
from angelspec_jax.drafter.layout_source import architecture
from angelspec_jax.target.config import MoEConfig
from angelspec_jax.target.layout import Box, boxed, tensors_of
from angelspec_jax.target.moe import MoE

ARCHITECTURE, MODEL_TYPE = "MTPDraftModel", "mtp"
GATE, UP, DOWN = "mlp.experts_gate_proj", "mlp.experts_up_proj", "mlp.experts_down_proj"
TOP = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")  # stand beside the layer, not in it


def is_training(settings: Mapping[str, Any]) -> bool:
    """Whether config.json is that of the trainer."""
    return architecture(settings) == ARCHITECTURE or settings.get("model_type") == MODEL_TYPE


def as_target(settings: Mapping[str, Any], answers: Overrides, file: Path) -> dict[str, Any]:
    """The trainer's config.json as that of a target with layers of the module's kind. ValueError where the depth is open."""
    depth = answers.target_num_layers or settings.get("num_hidden_layers") or answers.present_layers
    if depth is None:
        raise ValueError(f"{file} does not say how many layers the target has; {how_to_answer('target_num_layers=36')}")
    if settings.get("rope_scaling") is not None:
        raise ValueError(
            f"{file}: rope_scaling is set, but AngelSpec's MTP layer is trained without; set it to null, or convert a drafter "
            "whose layer was trained with the scaling"
        )
    kind = settings.get("mlp_type", "moe")
    if kind not in ("moe", "dense"):
        raise ValueError(f"{file}: mlp_type should be moe or dense, not {kind!r}")
    named = "HYV3ForCausalLM" if kind == "moe" else "Qwen3ForCausalLM"
    # The tensors say whether there are norms of queries and keys, and all layers of such a target route.
    return dict(settings) | {"architectures": [named], "num_hidden_layers": depth, "qk_norm": True, "first_k_dense_replace": 0}


def fused_leaves(config: MoEConfig, width: int) -> tuple[Any, Any]:
    """Where `gate_up` [X, D, 2F] and `down` [X, F, D] of experts stored together come from."""
    x, f = config.num_experts, config.intermediate_size
    half = ((x,), (width,), (f,))
    gate_up = boxed(*(Box(name, half, (0, 1, 2), (0, 0, which * f)) for which, name in enumerate((GATE, UP))))
    return gate_up, boxed(Box(DOWN, ((x,), (f,), (width,)), (0, 1, 2), (0, 0, 0)))


def fused_tensors(moe: MoE, config: MoEConfig) -> dict[str, np.ndarray]:
    """The experts' matrices under their plain names: the inverse of `fused_leaves`."""
    gate_up, down = fused_leaves(config, moe.router.shape[0])
    return {**tensors_of(gate_up, np.asarray(moe.gate_up)), **tensors_of(down, np.asarray(moe.down))}


def trained_name(plain: str) -> str:
    """The trainer's name of a tensor."""
    return plain if plain in TOP else f"midlayer.{plain}"


def settings_of(exported: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's config.json from that of an export for serving."""
    dropped = ("num_nextn_predict_layers", "_mtp_spec_layer", "rope_scaling")
    kept = {key: value for key, value in exported.items() if key not in dropped}
    return kept | {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "target_hidden_size": exported["hidden_size"],
        "tie_lm_head": True,
    }
