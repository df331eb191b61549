"""Checkpoint layouts of EAGLE-3, in and out: AngelSpec, SpecForge and SafeAILab (`midlayer.`), vLLM's keys and DeepSpec (`layers.0.`).

Inside this file a tensor goes by its vLLM name. A reduced vocabulary is two tables: `d2t` holds *offsets* (target id = row + d2t[row]) and
`t2d` marks the tokens that have a row; AngelSpec's pruning tool indexes with the offsets as if they were ids, so a file it pruned does not
pass the check against `t2d`. Layer ids inside `eagle_config` are 0-based outputs, as AngelSpec and SpecForge count; beside it they are
vLLM's, which counts inputs and so says one more. vLLM would take the inner ones as they are, hence an export for it holds both. Where no
ids are given they are the published default, 1, N/2 - 1 and N - 4.

`norm_output` means two things: in AngelSpec, whose files hold the target's embedding, that the next step reads the normed output; in
SpecForge, whose files do not, that the head does, which is always so.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from angelspec_jax.drafter.eagle3 import Eagle3, Eagle3Config, default_taps, drafter_specs
from angelspec_jax.drafter.layout_settings import CONFIG, Overrides, check_draft_ids, how_to_answer, rope_scaling
from angelspec_jax.drafter.layout_source import Renamed, architecture, plain_leaf, read_leaves, strip, transposed_leaf, whole
from angelspec_jax.target import hf
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.layout import Leaf, TensorSource, layer_leaves, layer_tensors

FAMILIES = ("eagle3",)
EXPORTS = ("specforge", "angelspec", "vllm", "deepspec")
LAYER, MIDLAYER = "layers.0.", "midlayer."
EMBED, HEAD, OFFSETS, PRESENT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
DEEPSPEC = "Qwen3Eagle3Model"
DRAFTS = "num_speculative_tokens"  # ours
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def read(
    tensors: TensorSource, settings: Mapping[str, Any], family: str, answers: Overrides
) -> tuple[Eagle3, Eagle3Config, Int[np.ndarray, "V'"] | None]:
    """Parameters, configuration and draft vocabulary of an EAGLE-3 checkpoint."""
    del family
    deepspec = architecture(settings) == DEEPSPEC
    source = Renamed(tensors, lambda name: _plain(name, keep_head=not deepspec))
    model = _transformer(source, settings, answers)
    draft_ids = _draft_ids(source, settings, model.vocab_size)
    drafts = settings.get(DRAFTS, settings.get("ttt_length")) if answers.num_drafts is None else answers.num_drafts
    taps, depth = _taps(source, settings, answers, model.hidden_size)
    try:
        config = Eagle3Config(
            transformer=model,
            taps=taps,
            target_num_layers=depth,
            fc_norm="fc_norm.0.weight" in source.names(),
            feedback_norm=_feedback_norm(tensors, settings, answers),
            own_head=not deepspec,
            draft_vocab=None if draft_ids is None else len(draft_ids),
            **({} if drafts is None else {"num_drafts": drafts}),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source.path}: {error}") from error
    return read_leaves(source, drafter_leaves(config), drafter_specs(config), extra=(OFFSETS, PRESENT)), config, draft_ids


def export(
    params: Eagle3, config: Eagle3Config, layout: str, draft_ids: Int[np.ndarray, "V'"] | None, copies: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config.json in this layout; `copies` are the target's "embed" and "lm_head". ValueError where it cannot express them."""
    refuse_export(config, layout, copies)
    tensors = drafter_tensors(params, config)
    if params.head is None:
        tensors[HEAD] = np.asarray(copies["lm_head"])
    if layout != "specforge" and "embed" in copies:
        tensors[EMBED] = np.asarray(copies["embed"])
    if draft_ids is not None or layout == "specforge":
        vocabulary = config.transformer.vocab_size
        ids = np.arange(vocabulary) if draft_ids is None else np.asarray(draft_ids, np.int64)
        present = np.zeros(vocabulary, bool)
        present[ids] = True
        tensors |= {OFFSETS: ids - np.arange(len(ids)), PRESENT: present}
    if layout in ("specforge", "angelspec"):
        tensors = {f"{MIDLAYER}{name.removeprefix(LAYER)}" if name.startswith(LAYER) else name: x for name, x in tensors.items()}
    return tensors, _settings(config, layout)


def default_layout(config: Eagle3Config) -> str:
    return "specforge" if config.own_head else "deepspec"


def describe(config: Eagle3Config) -> dict[str, str]:
    """What a reader decided about a checkpoint, for a table."""
    return {
        "family": config.family,
        "drafts per round": str(config.num_drafts),
        "target layers": f"{list(config.taps)} of {config.target_num_layers}",
        "head": f"its own, {config.draft_vocab or config.transformer.vocab_size} tokens" if config.own_head else "the target's",
        "next step reads": "the normed output" if config.feedback_norm else "the output",
        "rope base": f"{config.transformer.rope.theta:g}",
    }


def origins(tensors: TensorSource, settings: Mapping[str, Any], answers: Overrides, config: Eagle3Config) -> dict[str, str]:
    """What says so, for the rows of `describe` that a tensor does not tell."""
    del tensors, config
    inner = settings.get("eagle_config")
    nested = inner.get(AUX_IDS) if isinstance(inner, Mapping) else None
    stated = {"target_layer_ids": settings.get("target_layer_ids"), "eagle_config": nested, AUX_IDS: settings.get(AUX_IDS)}
    ids = next((key for key, value in stated.items() if value is not None), "the published default")
    drafts = next((key for key in (DRAFTS, "ttt_length") if key in settings), "our default")
    norm = "norm_output" if settings.get("norm_output") is not None else "all trainers' default"
    said = {"drafts per round": drafts, "target layers": ids, "next step reads": norm, "rope base": "config.json"}
    answered = {
        "drafts per round": answers.num_drafts,
        "target layers": answers.taps,
        "next step reads": answers.feedback_norm,
        "rope base": answers.rope_theta,
    }
    return {name: said[name] if answer is None else "the caller" for name, answer in answered.items()}


def refuse_export(config: Eagle3Config, layout: str, copies: Mapping[str, Any]) -> None:
    """Raise ValueError with the reason when `layout` cannot express the drafter."""
    if layout not in EXPORTS:
        raise ValueError(f"an EAGLE-3 drafter cannot be exported to the layout {layout!r}; choose one of {', '.join(EXPORTS)}")
    normed = config.transformer.qk_norm == "before_rope"
    if layout == "deepspec":
        if config.own_head or config.draft_vocab or config.fc_norm or config.feedback_norm or not normed:
            raise ValueError(
                "the deepspec layout has no place for a head of the drafter's own, a reduced vocabulary, norms of the tapped features or a "
                "normed feedback, and needs query and key norms"
            )
    elif config.transformer.qk_norm is not None:
        raise ValueError(f"the {layout} layout has a Llama layer, without query and key norms; use deepspec")
    if layout == "specforge" and config.feedback_norm:
        raise ValueError("the specforge layout cannot say that the next step reads the normed output; use angelspec")
    if not config.own_head and "lm_head" not in copies:
        raise ValueError(f"the {layout} layout holds a copy of the target's head; give it as lm_head")


def drafter_leaves(config: Eagle3Config) -> Eagle3:
    """Where each parameter comes from, by plain name, in the tree of `drafter_specs(config)`."""
    model, taps = config.transformer, len(config.taps)
    d = model.hidden_size
    norms = [f"fc_norm.{index}.weight" for index in range(taps)]
    stacked: Any = Leaf(
        tuple((name, (d,)) for name in norms),
        lambda source, window: np.stack([source.read(name, window[1:]) for name in norms[window[0]]]),
    )
    return Eagle3(
        fc=transposed_leaf("fc.weight", (d, taps * d)),
        hidden_norm=plain_leaf(f"{LAYER}hidden_norm.weight", (d,)),
        layer=layer_leaves(model, LAYER, inputs=2 * d),
        norm=plain_leaf("norm.weight", (d,)),
        fc_norm=stacked if config.fc_norm else None,
        head=plain_leaf(HEAD, (config.draft_vocab or model.vocab_size, d)) if config.own_head else None,
    )


def drafter_tensors(params: Eagle3, config: Eagle3Config) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a drafter under plain names: the inverse of `drafter_leaves`."""
    tensors = {
        "fc.weight": np.asarray(params.fc).T,
        f"{LAYER}hidden_norm.weight": np.asarray(params.hidden_norm),
        "norm.weight": np.asarray(params.norm),
        **layer_tensors(params.layer, config.transformer, LAYER),
    }
    if params.fc_norm is not None:
        tensors |= {f"fc_norm.{index}.weight": norm for index, norm in enumerate(np.asarray(params.fc_norm))}
    if params.head is not None:
        tensors[HEAD] = np.asarray(params.head)
    return tensors


def plain_name(name: str) -> str:
    """The plain name of a checkpoint tensor."""
    name = strip(name)
    return f"{LAYER}{name.removeprefix(MIDLAYER)}" if name.startswith(MIDLAYER) else name


def _plain(name: str, keep_head: bool) -> str | None:
    plain = plain_name(name)
    dropped = plain == EMBED or plain.endswith("rotary_emb.inv_freq") or (plain == HEAD and not keep_head)
    return None if dropped else plain


def _transformer(source: Renamed, settings: Mapping[str, Any], answers: Overrides) -> TransformerConfig:
    file, names = source.path / CONFIG, source.names()
    values = dict(settings) | {"architectures": ["LlamaForCausalLM"]}
    if answers.rope_theta is not None:
        values |= {"rope_theta": answers.rope_theta, "rope_parameters": None}
    if values.get("rope_theta") is None and not values.get("rope_parameters"):
        raise ValueError(f"{file} does not say rope_theta; {how_to_answer('rope_theta=1e6')}")
    model = hf.parse_config(values, file)
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if model.num_layers != 1 or layers != {"0"}:
        count = max(model.num_layers, len(layers))
        raise ValueError(f"{file} describes an EAGLE-3 drafter of {count} layers, which is not supported; one is")
    if settings.get("target_hidden_size") not in (None, model.hidden_size):
        raise ValueError(f"{file}: target_hidden_size differs from hidden_size {model.hidden_size}, which is not supported")
    norms = f"{LAYER}self_attn.q_norm.weight" in names
    return dataclasses.replace(model, qk_norm="before_rope" if norms else None, tie_embeddings=False, sliding_window=None)


def _draft_ids(source: Renamed, settings: Mapping[str, Any], vocabulary: int) -> Int[np.ndarray, "V'"] | None:
    names, where = source.names(), source.path
    rows = source.shape(HEAD)[0] if HEAD in names and source.shape(HEAD) else vocabulary
    if OFFSETS not in names:
        if rows != vocabulary:
            raise ValueError(f"{where}: the head has {rows} rows for a vocabulary of {vocabulary} and there is no table {OFFSETS}")
        return None
    offsets = source.read(OFFSETS, whole(source.shape(OFFSETS)))
    if offsets.shape != (rows,) or offsets.dtype.kind not in "iu":
        raise ValueError(f"{where}: {OFFSETS} must hold {rows} integers, got {offsets.dtype} of shape {list(offsets.shape)}")
    ids = check_draft_ids(offsets.astype(np.int64) + np.arange(rows), vocabulary, f"{where}: the rows plus their offsets in {OFFSETS}")
    if PRESENT in names:
        present = source.read(PRESENT, whole(source.shape(PRESENT))).astype(bool)
        if present.shape != (vocabulary,) or not np.array_equal(np.flatnonzero(present), ids):
            raise ValueError(f"{where}: {OFFSETS} and {PRESENT} name different tokens; {OFFSETS} must hold offsets, not token ids")
    return None if rows == vocabulary else ids


def _taps(source: Renamed, settings: Mapping[str, Any], answers: Overrides, width: int) -> tuple[tuple[int, ...], int]:
    """Layer ids and the number of the target's layers."""
    where, inner = source.path, settings.get("eagle_config")
    depth = next(
        (
            value
            for value in (answers.target_num_layers, settings.get("target_num_hidden_layers"), settings.get("num_target_layers"))
            if type(value) is int
        ),
        answers.present_layers,
    )
    if depth is None:
        raise ValueError(
            f"{where}: config.json does not say how many layers the target has; {how_to_answer('target_num_layers=36')}"
        )
    ids = settings.get("target_layer_ids", inner.get(AUX_IDS) if isinstance(inner, Mapping) else None)
    served = settings.get(AUX_IDS)
    if ids is None and served is not None:
        counted = isinstance(served, list) and all(type(index) is int for index in served)
        ids = [index - 1 for index in served] if counted else served
    ids = default_taps(depth) if answers.taps is None and ids is None else ids if answers.taps is None else answers.taps
    if not isinstance(ids, list | tuple) or any(type(index) is not int for index in ids):
        raise ValueError(f"{where}: the layer ids must be a list of integers, got {ids!r}")
    shape = source.shape("fc.weight") if "fc.weight" in source.names() else ()
    if len(shape) == 2 and shape[1] != len(ids) * width:
        raise ValueError(
            f"{where}: fc.weight has shape {list(shape)}, that is {shape[1] / width:g} target layers of width {width}, but the layer ids "
            f"are {list(ids)}; pass the right ones with taps="
        )
    return tuple(ids), depth


def _feedback_norm(tensors: TensorSource, settings: Mapping[str, Any], answers: Overrides) -> bool:
    if answers.feedback_norm is not None:
        return answers.feedback_norm
    if not settings.get("norm_output"):
        return False
    if not any(strip(name) == EMBED for name in tensors.names()):
        raise ValueError(
            f"{tensors.path}: norm_output=true means in AngelSpec that the next step reads the normed output and in SpecForge that it does "
            "not; pass feedback_norm=True or feedback_norm=False to load_drafter"
        )
    return True


def _settings(config: Eagle3Config, layout: str) -> dict[str, Any]:
    """config.json of an export, without dtype and card."""
    model, deepspec = config.transformer, layout == "deepspec"
    settings: dict[str, Any] = {
        "architectures": [DEEPSPEC if deepspec else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if deepspec else "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "draft_vocab_size": config.draft_vocab or model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "rope_scaling": rope_scaling(model.rope),
        "max_position_embeddings": model.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        DRAFTS: config.num_drafts,
    }
    if deepspec:
        return settings | {
            "target_layer_ids": list(config.taps),
            "num_target_layers": config.target_num_layers,
            "draft_num_hidden_layers": 1,
            "ttt_length": config.num_drafts,
        }
    return settings | {
        "target_hidden_size": model.hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "num_aux_hidden_states": len(config.taps),
        "eagle_config": {AUX_IDS: list(config.taps)},
        "fc_norm": config.fc_norm,
        **({AUX_IDS: [tap + 1 for tap in config.taps]} if layout == "vllm" else {}),
        **({"norm_output": config.feedback_norm} if layout != "specforge" else {}),
    }
