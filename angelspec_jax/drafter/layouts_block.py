"""Checkpoint layouts of block drafters, in and out: z-lab, AngelSpec, DeepSpec.

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
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.context import Context
from angelspec_jax.drafter.correction import Correction
from angelspec_jax.drafter.layout_settings import (
    CORRECTION,
    DRAFT_IDS,
    NATIVE_FC,
    Overrides,
    derive_config,
    read_draft_ids,
    refuse_export,
    settings_for,
)  # fmt: skip
from angelspec_jax.drafter.layout_source import Renamed, pair_leaf, plain_leaf, read_leaves, strip, transposed_leaf
from angelspec_jax.target.layout import Leaf, TensorSource, Window, layer_leaves, layer_tensors

FAMILIES = ("dflash", "dfly")
ANGELSPEC_NAMES = {  # plain name -> AngelSpec's
    "fc.weight": NATIVE_FC,
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
DROPPED = re.compile(r"(embed_tokens\.weight|lm_head\.weight|t2d|d2t|(.*\.)?rotary_emb\.inv_freq)")  # the target's, or derived


def read(
    tensors: TensorSource, settings: Mapping[str, Any], family: str, answers: Overrides
) -> tuple[BlockDrafter, DrafterConfig, Int[np.ndarray, "V'"] | None]:
    """Parameters, configuration and draft vocabulary of a checkpoint of this family."""
    source = Renamed(tensors, _kept)
    draft_ids = read_draft_ids(source, settings)
    config = derive_config(source, settings, family, draft_ids, answers)
    return read_leaves(source, drafter_leaves(config), drafter_specs(config), extra=(DRAFT_IDS,)), config, draft_ids


def export(
    params: BlockDrafter, config: DrafterConfig, layout: str, draft_ids: Int[np.ndarray, "V'"] | None, copies: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config.json in this layout; `copies` are the target's "embed" and "lm_head". ValueError where it cannot express them."""
    refuse_export(config, layout, draft_ids)
    tensors = drafter_tensors(params, config)
    if layout == "angelspec":
        tensors = {ANGELSPEC_NAMES.get(name, name): value for name, value in tensors.items()}
    if layout == "deepspec":
        names = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}
        tensors |= {names[key]: np.asarray(value) for key, value in copies.items()}
    if draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    return tensors, settings_for(config, layout)


def default_layout(config: DrafterConfig) -> str:
    """The layout that a drafter is saved in."""
    return "deepspec" if config.layout == "anchor_first" else "angelspec"


def describe(config: DrafterConfig) -> dict[str, str]:
    """What a reader decided about a checkpoint, for a table."""
    return {
        "family": config.family,
        "block layout": config.layout,
        "drafts per round": str(config.num_drafts),
        "target layers": f"{list(config.taps)} of {config.target_num_layers}",
        "mask token": str(config.mask_token),
        "rope base": f"{config.transformer.rope.theta:g}",
    }


def plain_name(name: str) -> str:
    """The plain name of a checkpoint tensor."""
    back = {angelspec: plain for plain, angelspec in ANGELSPEC_NAMES.items()}
    name = strip(name)
    return back.get(name, name)


def _kept(name: str) -> str | None:
    plain = plain_name(name)
    return None if DROPPED.fullmatch(plain) else plain


def drafter_leaves(config: DrafterConfig) -> BlockDrafter:
    """Where each parameter comes from, by plain name, in the tree of `drafter_specs(config)`."""
    model, taps = config.transformer, len(config.taps)
    d, inner = model.hidden_size, config.correction_size or model.hidden_size
    context = Context(
        norm=plain_leaf("hidden_norm.weight", (d,)),
        fc=_fc_leaf(d, taps) if "fc" in config.context else None,
        fusion=plain_leaf("layer_fusion_weights", (model.num_layers, taps)) if "fusion" in config.context else None,
    )
    head = Correction(
        hidden_norm=plain_leaf(f"{CORRECTION}hidden_norm.weight", (d,)),
        embed_norm=plain_leaf(f"{CORRECTION}embed_norm.weight", (d,)),
        gate_up=pair_leaf((f"{CORRECTION}gate_proj.weight", f"{CORRECTION}up_proj.weight"), (inner, 2 * d)),
        down=transposed_leaf(f"{CORRECTION}down_proj.weight", (d, inner)),
    )
    return BlockDrafter(
        context=context,
        layers=tuple(layer_leaves(model, f"layers.{index}.") for index in range(model.num_layers)),
        norm=plain_leaf("norm.weight", (d,)),
        head=head if config.head == "hidden_correction" else None,
    )


def drafter_tensors(params: BlockDrafter, config: DrafterConfig) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a drafter under plain names: the inverse of `drafter_leaves`."""
    tensors = {"hidden_norm.weight": np.asarray(params.context.norm), "norm.weight": np.asarray(params.norm)}
    if params.context.fc is not None:
        tensors["fc.weight"] = np.asarray(params.context.fc).reshape(-1, config.transformer.hidden_size).T
    if params.context.fusion is not None:
        tensors["layer_fusion_weights"] = np.asarray(params.context.fusion)
    for index, layer in enumerate(params.layers):
        tensors |= layer_tensors(layer, config.transformer, f"layers.{index}.")
    if params.head is not None:
        gate_up = np.asarray(params.head.gate_up)
        tensors |= {
            f"{CORRECTION}hidden_norm.weight": np.asarray(params.head.hidden_norm),
            f"{CORRECTION}embed_norm.weight": np.asarray(params.head.embed_norm),
            f"{CORRECTION}gate_proj.weight": gate_up[:, 0].T,
            f"{CORRECTION}up_proj.weight": gate_up[:, 1].T,
            f"{CORRECTION}down_proj.weight": np.asarray(params.head.down).T,
        }
    return tensors


def _fc_leaf(width: int, taps: int) -> Any:
    return Leaf((("fc.weight", (width, taps * width)),), functools.partial(_read_fc, taps))


def _read_fc(taps: int, source: TensorSource, window: Window) -> np.ndarray:
    """[T, D, D] from the checkpoint's [D, T * D]."""
    which, rows, columns = window
    width = source.shape("fc.weight")[1] // taps
    parts = [
        source.read("fc.weight", (columns, slice(tap * width + rows.start, tap * width + rows.stop))).T
        for tap in range(which.start, which.stop)
    ]
    return np.stack(parts)
