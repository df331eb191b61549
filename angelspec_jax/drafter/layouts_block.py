"""Checkpoint layouts of block drafters, in and out: z-lab, AngelSpec, DeepSpec, SpecForge, vLLM, and our own.

Inside this file a tensor goes by its *plain* name, the one z-lab, DeepSpec and the serving engines use (`fc.weight`, `hidden_norm.weight`,
`norm.weight`, `layers.0...`). Other layouts are renamings of it, wrappers' prefixes and frozen copies of the target's weights apart.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from angelspec_jax.drafter.block import BlockDrafter, drafter_specs
from angelspec_jax.drafter.confidence import Confidence
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.context import Context
from angelspec_jax.drafter.correction import Correction
from angelspec_jax.drafter.layout_block_exports import fits, refuse_export, settings_for
from angelspec_jax.drafter.layout_block_settings import CONFIDENCE, CORRECTION, GATE, MARKOV, NATIVE_FC, derive_config, explain
from angelspec_jax.drafter.layout_settings import DRAFT_IDS, OFFSETS, Overrides, read_draft_ids
from angelspec_jax.drafter.layout_source import Renamed, pair_leaf, plain_leaf, read_leaves, strip, transposed_leaf
from angelspec_jax.drafter.markov import Markov
from angelspec_jax.target.layout import Leaf, TensorSource, Window, layer_leaves, layer_tensors

FAMILIES = ("dflash", "dflare", "dfly", "dspark", "gated_sum")
ANGELSPEC_NAMES = {  # plain name -> AngelSpec's
    "fc.weight": NATIVE_FC,
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
WRAPPER = "logit_head."  # around SpecForge's heads in its older checkpoints
DROPPED = re.compile(r"(embed_tokens\.weight|lm_head\.weight|t2d|(.*\.)?rotary_emb\.inv_freq)")  # the target's, or derived
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def read(
    tensors: TensorSource, settings: Mapping[str, Any], family: str, answers: Overrides
) -> tuple[BlockDrafter, DrafterConfig, Int[np.ndarray, "V'"] | None]:
    """Parameters, configuration and draft vocabulary of a checkpoint of this family."""
    source = Renamed(tensors, _kept)
    draft_ids = read_draft_ids(source, settings)
    config = derive_config(source, settings, family, draft_ids, answers)
    extra = [DRAFT_IDS, OFFSETS]
    if answers.confidence == "none":
        extra += [name for name in source.names() if name.startswith(CONFIDENCE)]
    return read_leaves(source, drafter_leaves(config), drafter_specs(config), extra), config, draft_ids


def export(
    params: BlockDrafter, config: DrafterConfig, layout: str, draft_ids: Int[np.ndarray, "V'"] | None, copies: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config.json in this layout; `copies` are the target's "embed" and "lm_head". ValueError where it cannot express them."""
    refuse_export(config, layout, draft_ids, copies)
    tensors = drafter_tensors(params, config)
    if layout == "angelspec":
        tensors = {ANGELSPEC_NAMES.get(name, name): value for name, value in tensors.items()}
    if layout == "deepspec":
        tensors |= {COPIES[key]: np.asarray(value) for key, value in copies.items()}
    if draft_ids is not None and layout == "vllm":
        tensors |= _served_vocabulary(config, draft_ids, copies)
    elif draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    return tensors, settings_for(config, layout)


def default_layout(config: DrafterConfig) -> str:
    """The layout that a drafter is saved in: a public one if it has a place for every part."""
    public = "deepspec" if config.layout == "anchor_first" else "angelspec"
    return public if fits(config, public) and (public == "angelspec" or config.draft_vocab is None) else "native"


def describe(config: DrafterConfig) -> dict[str, str]:
    """What a reader decided about a checkpoint, for a table."""
    head = config.head or "none"
    return {
        "family": config.family,
        "context": config.context + (" with its own keys and values" if config.separate_kv else ""),
        "block layout": config.layout,
        "drafts per round": str(config.num_drafts),
        "target layers": f"{list(config.taps)} of {config.target_num_layers}",
        "mask token": str(config.mask_token),
        "head": head if config.rank is None else f"{head} of rank {config.rank}",
        "confidence": config.confidence or "own probability",
        "rope base": f"{config.transformer.rope.theta:g}",
    }


def origins(tensors: TensorSource, settings: Mapping[str, Any], answers: Overrides, config: DrafterConfig) -> dict[str, str]:
    """Where each entry of `describe` comes from."""
    return explain(Renamed(tensors, _kept), settings, answers, config)


def plain_name(name: str) -> str:
    """The plain name of a checkpoint tensor."""
    back = {angelspec: plain for plain, angelspec in ANGELSPEC_NAMES.items()}
    name = strip(name).removeprefix(WRAPPER)
    return back.get(name, name)


def _kept(name: str) -> str | None:
    plain = plain_name(name)
    return None if DROPPED.fullmatch(plain) else plain


def drafter_leaves(config: DrafterConfig) -> BlockDrafter:
    """Where each parameter comes from, by plain name, in the tree of `drafter_specs(config)`."""
    model, taps = config.transformer, len(config.taps)
    d, inner = model.hidden_size, config.correction_size or model.hidden_size
    gated = config.context == "gated_sum"
    context = Context(
        norm=plain_leaf("hidden_norm.weight", (d,)),
        fc=_fc_leaf(d, taps) if "fc" in config.context else None,
        fusion=plain_leaf("layer_fusion_weights", (model.num_layers, taps)) if "fusion" in config.context else None,
        fusion_gate=plain_leaf(GATE, (taps,)) if gated else None,
        candidate_norm=_stacked_leaf([f"candidate_norms.{tap}.weight" for tap in range(taps)], d) if gated else None,
        kv=tuple(_target_kv_leaf(config, index) for index in range(model.num_layers)) if config.separate_kv else None,
    )
    return BlockDrafter(
        context=context,
        layers=tuple(layer_leaves(model, f"layers.{index}.") for index in range(model.num_layers)),
        norm=plain_leaf("norm.weight", (d,)),
        head=_markov_leaves(config) if config.markov else _correction_leaves(d, inner) if config.head else None,
        confidence=_confidence_leaves(config) if config.confidence else None,
    )


def _correction_leaves(width: int, inner: int) -> Correction:
    return Correction(
        hidden_norm=plain_leaf(f"{CORRECTION}hidden_norm.weight", (width,)),
        embed_norm=plain_leaf(f"{CORRECTION}embed_norm.weight", (width,)),
        gate_up=pair_leaf((f"{CORRECTION}gate_proj.weight", f"{CORRECTION}up_proj.weight"), (inner, 2 * width)),
        down=transposed_leaf(f"{CORRECTION}down_proj.weight", (width, inner)),
    )


def _markov_leaves(config: DrafterConfig) -> Markov:
    model, rank = config.transformer, config.rank
    assert rank is not None
    gate, joint = f"{MARKOV}gate_proj.", f"{MARKOV}joint_proj."
    gated, rnn = config.head == "markov_gated", config.head == "markov_rnn"
    return Markov(
        w1=plain_leaf(f"{MARKOV}markov_w1.weight", (model.vocab_size, rank)),
        w2=plain_leaf(f"{MARKOV}markov_w2.weight", (config.draft_vocab or model.vocab_size, rank)),
        gate=transposed_leaf(f"{gate}weight", (rank, model.hidden_size + rank)) if gated else None,
        gate_bias=plain_leaf(f"{gate}bias", (rank,)) if gated else None,
        joint=_leaf({f"{joint}weight": (3 * rank, 2 * rank + model.hidden_size)}, _read_joint, rank) if rnn else None,
        joint_bias=_leaf({f"{joint}bias": (3 * rank,)}, _read_joint_bias, rank) if rnn else None,
    )


def _confidence_leaves(config: DrafterConfig) -> Confidence:
    width = config.transformer.hidden_size + (config.rank or 0 if config.confidence == "hidden_markov" else 0)
    return Confidence(weight=_leaf({f"{CONFIDENCE}proj.weight": (1, width)}, _read_row), bias=plain_leaf(f"{CONFIDENCE}proj.bias", (1,)))


def drafter_tensors(params: BlockDrafter, config: DrafterConfig) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a drafter under plain names: the inverse of `drafter_leaves`."""
    tensors = {"hidden_norm.weight": np.asarray(params.context.norm), "norm.weight": np.asarray(params.norm)}
    if params.context.fc is not None:
        tensors["fc.weight"] = np.asarray(params.context.fc).reshape(-1, config.transformer.hidden_size).T
    if params.context.fusion is not None:
        tensors["layer_fusion_weights"] = np.asarray(params.context.fusion)
    if params.context.fusion_gate is not None:
        tensors[GATE] = np.asarray(params.context.fusion_gate)
        tensors |= {f"candidate_norms.{tap}.weight": norm for tap, norm in enumerate(np.asarray(params.context.candidate_norm))}
    for index, layer in enumerate(params.layers):
        tensors |= layer_tensors(layer, config.transformer, f"layers.{index}.")
        if params.context.kv is not None:
            kv = np.asarray(params.context.kv[index])  # [D, G, 2, E]
            for which, name in enumerate(_target_names(index)):
                tensors[name] = kv[:, :, which].reshape(len(kv), -1).T
    if config.markov:
        tensors |= _markov_tensors(params.head)
    elif params.head is not None:
        tensors |= _correction_tensors(params.head)
    if params.confidence is not None:
        weight, bias = np.asarray(params.confidence.weight), np.asarray(params.confidence.bias)
        tensors |= {f"{CONFIDENCE}proj.weight": weight[None], f"{CONFIDENCE}proj.bias": bias}
    return tensors


def _correction_tensors(head: Correction) -> dict[str, np.ndarray]:
    gate_up = np.asarray(head.gate_up)
    return {
        f"{CORRECTION}hidden_norm.weight": np.asarray(head.hidden_norm),
        f"{CORRECTION}embed_norm.weight": np.asarray(head.embed_norm),
        f"{CORRECTION}gate_proj.weight": gate_up[:, 0].T,
        f"{CORRECTION}up_proj.weight": gate_up[:, 1].T,
        f"{CORRECTION}down_proj.weight": np.asarray(head.down).T,
    }


def _markov_tensors(head: Markov) -> dict[str, np.ndarray]:
    tensors = {f"{MARKOV}markov_w1.weight": np.asarray(head.w1), f"{MARKOV}markov_w2.weight": np.asarray(head.w2)}
    if head.gate is not None:
        tensors |= {f"{MARKOV}gate_proj.weight": np.asarray(head.gate).T, f"{MARKOV}gate_proj.bias": np.asarray(head.gate_bias)}
    if head.joint is not None:
        joint = np.asarray(head.joint)
        tensors[f"{MARKOV}joint_proj.weight"] = joint.reshape(len(joint), -1).T
        tensors[f"{MARKOV}joint_proj.bias"] = np.asarray(head.joint_bias).reshape(-1)
    return tensors


def _served_vocabulary(config: DrafterConfig, draft_ids: np.ndarray, copies: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A reduced draft vocabulary as vLLM reads it: offsets, membership, and the head's rows."""
    ids, rows = np.asarray(draft_ids, np.int64), np.asarray(copies["lm_head"])
    member = np.zeros(config.transformer.vocab_size, bool)
    member[ids] = True
    return {
        OFFSETS: ids - np.arange(len(ids)),
        "t2d": member,
        COPIES["lm_head"]: rows if len(rows) == len(ids) else rows[ids],
    }


def _target_names(index: int) -> tuple[str, str]:
    return f"layers.{index}.self_attn.k_proj_target.weight", f"layers.{index}.self_attn.v_proj_target.weight"


def _leaf(tensors: Mapping[str, tuple[int, ...]], reader, *fixed) -> Any:
    """A parameter that `reader(name, *fixed, source, window)` reads."""
    (name,) = tensors
    return Leaf(tuple(tensors.items()), functools.partial(reader, name, *fixed))


def _fc_leaf(width: int, taps: int) -> Any:
    return Leaf((("fc.weight", (width, taps * width)),), functools.partial(_read_fc, taps))


def _stacked_leaf(names: list[str], size: int) -> Any:
    return Leaf(tuple((name, (size,)) for name in names), functools.partial(_read_stacked, names))


def _target_kv_leaf(config: DrafterConfig, index: int) -> Any:
    model = config.transformer
    shape = (model.num_kv_heads * model.head_dim, model.hidden_size)
    return Leaf(
        tuple((name, shape) for name in _target_names(index)), functools.partial(_read_target_kv, _target_names(index), model.head_dim)
    )


def _read_stacked(names: list[str], source: TensorSource, window: Window) -> np.ndarray:
    return np.stack([source.read(name, window[1:]) for name in names[window[0]]])


def _read_row(name: str, source: TensorSource, window: Window) -> np.ndarray:
    return source.read(name, (slice(0, 1), *window))[0]


def _read_target_kv(names: tuple[str, str], size: int, source: TensorSource, window: Window) -> np.ndarray:
    """[D, G, 2, E] from two matrices [G * E, D]."""
    columns, heads, which, inside = window
    parts = []
    for name in names[which]:
        rows = source.read(name, (slice(heads.start * size, heads.stop * size), columns))
        parts.append(np.moveaxis(rows.reshape(heads.stop - heads.start, size, -1)[:, inside], -1, 0))
    return np.stack(parts, axis=2)


def _read_joint(name: str, rank: int, source: TensorSource, window: Window) -> np.ndarray:
    """[2r + D, 3, r] from the checkpoint's [3r, 2r + D]."""
    inputs, which, columns = window
    parts = [source.read(name, (_at(part, rank, columns), inputs)).T for part in range(which.start, which.stop)]
    return np.stack(parts, axis=1)


def _read_joint_bias(name: str, rank: int, source: TensorSource, window: Window) -> np.ndarray:
    which, columns = window
    return np.stack([source.read(name, (_at(part, rank, columns),)) for part in range(which.start, which.stop)])


def _at(part: int, rank: int, columns: slice) -> slice:
    return slice(part * rank + columns.start, part * rank + columns.stop)


def _read_fc(taps: int, source: TensorSource, window: Window) -> np.ndarray:
    """[T, D, D] from the checkpoint's [D, T * D]."""
    which, rows, columns = window
    width = source.shape("fc.weight")[1] // taps
    parts = [
        source.read("fc.weight", (columns, slice(tap * width + rows.start, tap * width + rows.stop))).T
        for tap in range(which.start, which.stop)
    ]
    return np.stack(parts)
