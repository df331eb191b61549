"""config.json of block drafters, on the way out, and which layout can hold which drafter."""

from collections.abc import Mapping
from typing import Any

from angelspec_jax.drafter.config import DrafterConfig, Parts
from angelspec_jax.drafter.layout_block_settings import COMPOSITION, NATIVE
from angelspec_jax.drafter.layout_settings import DRAFT_IDS, rope_scaling

EXPORTS = ("zlab", "angelspec", "deepspec", "specforge", "vllm", "native")
READ_AS = {  # layout -> the block layout that its readers take every drafter to have; vLLM and ours say it in config.json
    "zlab": "same_position",
    "angelspec": "same_position",
    "deepspec": "anchor_first",
}
WITH_DRAFT_VOCABULARY = ("angelspec", "vllm", "native")


def settings_for(config: DrafterConfig, layout: str) -> dict[str, Any]:
    """config.json of an export, without dtype and card."""
    settings = _common(config)
    taps = {"mask_token_id": config.mask_token, "target_layer_ids": list(config.taps)}
    total = {"num_target_layers": config.target_num_layers}
    if layout == "angelspec":
        return settings | taps | _angelspec(config)
    if layout == "native":
        parts = {"layout": config.layout, "context": config.context}
        own = {"architectures": [NATIVE], COMPOSITION: parts, "gate_temperature": config.gate_temperature}
        return settings | taps | total | own | _dspark(config) | _draft_vocabulary(config) | _correction(config)
    if layout == "deepspec":
        return settings | taps | total | {"architectures": ["Qwen3DSparkModel"]} | _dspark(config)
    if config.head == "hidden_correction":  # vLLM
        own = {"architectures": ["Qwen3DFlyModel"], "model_arch": "dfly", "dflash_config": taps} | _vllm(config)
        return settings | taps | total | own | _correction(config)
    if config.markov and layout == "vllm":
        own = {"architectures": ["Qwen3DSparkModel"], "dflash_config": taps} | _vllm(config)
        return settings | taps | total | own | _dspark(config)
    if config.markov:  # SpecForge
        inner = {"projector_type": "dspark", "attention_mode": "gqa"} | taps | _dspark(config)
        if config.confidence is not None:
            inner["confidence_head_alpha"] = 1.0
        own = {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "dflash_config": inner}
        return settings | total | own
    plain = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dflash_config": taps}
    return settings | total | plain | (_vllm(config) if layout == "vllm" else {})


def refuse_export(config: DrafterConfig, layout: str, draft_ids, copies: Mapping[str, Any]) -> None:
    """Raise ValueError with the reason when `layout` cannot express the drafter."""
    if layout not in EXPORTS:
        raise ValueError(f"there is no export layout {layout!r}; choose one of {', '.join(EXPORTS)}")
    expected = READ_AS.get(layout, config.layout)
    if layout == "specforge":
        expected = "anchor_first" if config.markov else "same_position"
    if config.layout != expected:
        raise ValueError(
            f"a {config.layout} drafter cannot be exported to the {layout} layout, whose readers take "
            f"{'a DSpark' if layout == 'specforge' and config.markov else 'every'} block as {expected} and would shift all drafts by one"
        )
    missing = _missing(config, layout)
    if missing:
        raise ValueError(f"the {layout} layout has no place for {missing}; use {'angelspec' if fits(config, 'angelspec') else 'native'}")
    if config.transformer.qk_norm != "before_rope":
        raise ValueError(
            "drafter layouts have query and key norms before the rotation; this drafter has not (qk_norm='before_rope' when made)"
        )
    if config.transformer.sliding_window is not None:
        raise ValueError("sliding-window drafters cannot be exported")
    if (draft_ids is None) != (config.draft_vocab is None) or (draft_ids is not None and len(draft_ids) != config.draft_vocab):
        raise ValueError(f"the drafter has draft_vocab={config.draft_vocab}, so it is exported with that many draft_ids")
    if draft_ids is not None and layout not in WITH_DRAFT_VOCABULARY:
        raise ValueError(
            f"the {layout} layout has no place for a reduced draft vocabulary; use angelspec, or save it with draft_vocab=None"
        )
    if draft_ids is not None and layout == "vllm" and "lm_head" not in copies:
        raise ValueError("the vllm layout holds the head rows of a reduced draft vocabulary; name the target they come from with --target")


def fits(config: DrafterConfig, layout: str) -> bool:
    """Whether a drafter of this composition can be saved in `layout`."""
    return READ_AS.get(layout, config.layout) == config.layout and not _missing(config, layout)


def _missing(config: DrafterConfig, layout: str) -> str:
    """The part of the drafter that `layout` has no place for, in words; nothing when it has them all."""
    if layout == "native":
        return ""
    parts = Parts(config.context, config.head, config.separate_kv, config.confidence)
    if layout == "angelspec":
        if parts.head in ("markov_gated", "markov_rnn"):
            return f"a {parts.head.removeprefix('markov_')} Markov head, vanilla being its only one"
        known = {
            ("fc", None, False), ("gated_sum", None, False), ("fusion", None, True), ("fc_fusion", None, False),
            ("fc_fusion", "hidden_correction", False), ("fc", "markov_vanilla", False),
        }  # fmt: skip
        if parts[:3] not in known:
            return f"the context {parts.context} with {'separate' if parts.separate_kv else 'shared'} projections and the head {parts.head}"
        return "a confidence head without a Markov head" if parts.confidence and not config.markov else ""
    if layout == "vllm" and parts == Parts("fc_fusion", "hidden_correction"):
        if config.draft_vocab is not None:
            return "a reduced draft vocabulary beside a hidden correction"
        return "" if config.layout == "same_position" else "an anchor-first DFly"
    if parts.head == "hidden_correction" or parts.context == "fc_fusion":
        return "the fusion weights and hidden correction of a DFly drafter"
    if parts.context != "fc" or parts.separate_kv:
        return "the fusion weights of a DFlare drafter" if parts.context == "fusion" else f"the context {parts.context}"
    if layout == "deepspec":
        return ""
    if layout == "zlab" and (config.markov or parts.confidence):
        return "a Markov head or a confidence head"
    if layout == "vllm" and parts.head in ("markov_gated", "markov_rnn"):
        return f"a {parts.head.removeprefix('markov_')} Markov head, vanilla being the only one that is served"
    if parts.confidence and not config.markov:
        return "a confidence head without a Markov head"
    if layout == "vllm" and not config.markov and config.layout == "anchor_first":
        return "an anchor-first DFlash"
    return ""


def _common(config: DrafterConfig) -> dict[str, Any]:
    model = config.transformer
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
    if config.confidence_temperatures:
        settings["confidence_temperatures"] = list(config.confidence_temperatures)
    return settings


def _angelspec(config: DrafterConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_target_layers": len(config.taps),
        "target_hidden_size": config.transformer.hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "draft_vocab_size": config.draft_vocab or config.transformer.vocab_size,
    } | _draft_vocabulary(config)
    if config.context == "fc_fusion":
        return settings | {"architectures": ["Qwen3DFlyModel"]} | _correction(config)
    if config.markov:
        return settings | {"architectures": ["DSparkDraftModel"], "model_type": "dspark"} | _dspark(config)
    settings |= {"model_type": "dflash"}
    if config.context == "fusion":
        return settings | {"model_arch": "dflare"}
    if config.context == "gated_sum":
        return settings | {"fusion_type": "gated_sum", "gate_temperature": config.gate_temperature}
    return settings


def _dspark(config: DrafterConfig) -> dict[str, Any]:
    """Keys of a Markov head and of a confidence head, which say so where there is none."""
    settings: dict[str, Any] = {"markov_rank": config.rank or 0, "enable_confidence_head": config.confidence is not None}
    if config.head is not None and config.markov:
        settings["markov_head_type"] = config.head.removeprefix("markov_")
    if config.confidence is not None:
        settings["confidence_head_with_markov"] = config.confidence == "hidden_markov"
    return settings


def _correction(config: DrafterConfig) -> dict[str, Any]:
    return {"enable_hidden_correction": config.head == "hidden_correction", "hidden_correction_intermediate_size": config.correction_size}


def _draft_vocabulary(config: DrafterConfig) -> dict[str, Any]:
    return {} if config.draft_vocab is None else {"draft_vocab_ids": DRAFT_IDS}


def _vllm(config: DrafterConfig) -> dict[str, Any]:
    """vLLM counts captured hidden states from the embedding, so its ids are one higher; and it says the block layout of a DSpark."""
    same = config.layout == "same_position"
    return {
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "draft_vocab_size": config.draft_vocab or config.transformer.vocab_size,
        "target_hidden_size": config.transformer.hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "dspark_bonus_anchor": same,
        "sample_from_anchor": not same,
    }
