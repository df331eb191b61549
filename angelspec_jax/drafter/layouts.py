"""The one place that knows the checkpoint layouts of drafters, in and out.

Inside this file a tensor goes by its *plain* name, the one z-lab, DeepSpec and the serving engines use (`fc.weight`, `hidden_norm.weight`,
`norm.weight`, `layers.0...`). Other layouts are renamings of it, wrappers' prefixes and frozen copies of the target's weights apart. What a
checkpoint leaves open is never guessed: the reader refuses and names the argument that answers it.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from safetensors.numpy import save_file

from angelspec_jax.drafter.block import BlockDrafter, drafter_specs
from angelspec_jax.drafter.card import KEY, DrafterCard
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.context import Context
from angelspec_jax.drafter.heads import Correction
from angelspec_jax.drafter.layout_settings import (
    CONFIG,
    CORRECTION,
    DRAFT_IDS,
    NATIVE_FC,
    architecture,
    derive_config,
    parse_overrides,
    read_draft_ids,
    refuse_export,
    settings_for,
    whole,
)  # fmt: skip
from angelspec_jax.target import hf
from angelspec_jax.target.layout import Leaf, TensorSource, Window, check, is_leaf, layer_leaves, layer_tensors

WEIGHTS = "model.safetensors"
PREFIXES = ("module.draft_model.", "draft_model.", "model.")
ANGELSPEC_NAMES = {  # plain name -> AngelSpec's
    "fc.weight": NATIVE_FC,
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
DROPPED = re.compile(r"(embed_tokens\.weight|lm_head\.weight|t2d|d2t|(.*\.)?rotary_emb\.inv_freq)")  # the target's, or derived

UNSUPPORTED = {
    "dflare": "DFlare (per-layer fusion with its own key and value projections)",
    "gated_sum": "DFlash with a gated sum of target layers",
    "dflash2": "DFlash2 (candidate selector)",
    "dspark": "DSpark (Markov head)",
    "mtp": "MTP (next-token-prediction module)",
    "eagle3": "EAGLE-3",
    "gemma4": "DSpark for Gemma 4",
}


class Checkpoint(NamedTuple):
    """A drafter as stored: numpy arrays of the file's dtypes."""

    params: BlockDrafter
    config: DrafterConfig
    card: DrafterCard
    draft_ids: Int[np.ndarray, "V'"] | None = None


def read(path, **overrides: Any) -> Checkpoint:
    """Read a drafter directory (config.json and safetensors) of any supported layout.

    `overrides` are fields of `Overrides`. ValueError, one sentence, for families not supported, missing, superfluous or misshapen tensors
    and open decisions; FileNotFoundError where there is no checkpoint.
    """
    answers = parse_overrides(overrides)
    folder = Path(path)
    settings = read_settings(folder)
    source = Renamed(hf.open_tensors(folder))
    family = detect(source.names(), settings)
    refuse_unsupported(family, folder)
    draft_ids = read_draft_ids(source, settings)
    config = derive_config(source, settings, family, draft_ids, answers)
    leaves = drafter_leaves(config)
    _refuse_leftovers(source, leaves)
    check(source, leaves)
    params = jax.tree.map(lambda leaf, spec: leaf.read(source, whole(spec.shape)), leaves, drafter_specs(config), is_leaf=is_leaf)
    _refuse_non_finite(params, folder)
    return Checkpoint(params, config, DrafterCard.from_dict(settings.get(KEY)), draft_ids)


def write(
    path,
    params: BlockDrafter,
    config: DrafterConfig,
    card: DrafterCard,
    layout: str | None = None,
    *,
    draft_ids: Int[np.ndarray, "V'"] | None = None,
    embed: np.ndarray | None = None,
    lm_head: np.ndarray | None = None,
) -> None:
    """Write config.json and model.safetensors into the directory `path`, in the layout "angelspec", "zlab" or "deepspec".

    By default the one the drafter fits. DeepSpec's holds copies of the target's `embed` and `lm_head` [V, D] where given. Tensors keep
    their dtype, so reading gives the same bits. ValueError when the layout cannot express the drafter.
    """
    layout = layout or ("deepspec" if config.layout == "anchor_first" else "angelspec")
    refuse_export(config, layout, draft_ids)
    tensors = drafter_tensors(params, config)
    if layout == "angelspec":
        tensors = {ANGELSPEC_NAMES.get(name, name): value for name, value in tensors.items()}
    if layout == "deepspec":
        tensors |= {name: np.asarray(x) for name, x in (("embed_tokens.weight", embed), ("lm_head.weight", lm_head)) if x is not None}
    if draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    settings = settings_for(config, layout) | {"torch_dtype": tensors["layers.0.self_attn.q_proj.weight"].dtype.name, KEY: card.to_dict()}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode & 0o777)  # the library writes for the owner alone


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


def detect(names: Iterable[str], settings: Mapping[str, Any]) -> str:
    """Family of a checkpoint from its plain tensor names, then its architecture."""
    names = set(names)
    named = architecture(settings)

    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    fusion, fc = "layer_fusion_weights" in names, "fc.weight" in names
    if has(r"\.k_proj_target\."):
        return "dflare"
    if has(r"^hidden_correction\.") or (fusion and fc):
        return "dfly"
    rules = (
        ("dflash2", has(r"^candidate_selector\.")),
        ("dspark", has(r"^(logit_head\.)?(markov_head|confidence_head)\.")),
        ("mtp", has(r"(^|\.)eh_proj\.")),
        ("eagle3", "Eagle3" in named or has(r"^(midlayer|layers\.\d+)\.hidden_norm\.")),
        ("gated_sum", has(r"^(layer_gate$|candidate_norms\.)")),
        ("dflare", fusion),
        ("gemma4", named.startswith("Gemma4")),
    )
    return next((family for family, found in rules if found), "dflash")


def refuse_unsupported(family: str, folder: Path) -> None:
    """Raise ValueError for a family that is recognised but cannot be run."""
    if family in UNSUPPORTED:
        raise ValueError(f"{folder} holds a drafter of the family {UNSUPPORTED[family]}, which is not supported; DFlash and DFly are")


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json of a drafter directory."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no drafter directory {folder}; give a directory with {CONFIG} and {WEIGHTS}")
    return hf.read_json(folder / CONFIG)


class Renamed:
    """A checkpoint under plain names: prefixes stripped, AngelSpec's names translated, the target's copies left out."""

    def __init__(self, source: TensorSource):
        self.source, self.path = source, source.path
        self.original: dict[str, str] = {}
        for original in source.names():
            plain = plain_name(original)
            if DROPPED.fullmatch(plain):
                continue
            if plain in self.original:
                raise ValueError(f"{self.path}: tensors {self.original[plain]} and {original} are the same parameter under two names")
            self.original[plain] = original

    def names(self) -> list[str]:
        return list(self.original)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.source.shape(self.original[name]))

    def dtype(self, name: str) -> np.dtype:
        return self.source.dtype(self.original[name])

    def read(self, name: str, window: Window) -> np.ndarray:
        return self.source.read(self.original[name], window)

    def sample(self, name: str, size: int) -> bytes:
        return self.source.sample(self.original[name], size)


def plain_name(name: str) -> str:
    """The plain name of a checkpoint tensor."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    back = {angelspec: plain for plain, angelspec in ANGELSPEC_NAMES.items()}
    return back.get(name, name)


def drafter_leaves(config: DrafterConfig) -> BlockDrafter:
    """Where each parameter comes from, by plain name, in the tree of `drafter_specs(config)`."""
    model, taps = config.transformer, len(config.taps)
    d, inner = model.hidden_size, config.correction_size or model.hidden_size
    context = Context(
        norm=_vector("hidden_norm.weight", d),
        fc=_leaf((("fc.weight", (d, taps * d)),), functools.partial(_read_fc, taps)) if "fc" in config.context else None,
        fusion=_leaf((("layer_fusion_weights", (model.num_layers, taps)),), functools.partial(_read_plain, "layer_fusion_weights"))
        if "fusion" in config.context
        else None,
    )
    gate_up = tuple(f"{CORRECTION}{name}_proj.weight" for name in ("gate", "up"))
    head = Correction(
        hidden_norm=_vector(f"{CORRECTION}hidden_norm.weight", d),
        embed_norm=_vector(f"{CORRECTION}embed_norm.weight", d),
        gate_up=_leaf(tuple((name, (inner, 2 * d)) for name in gate_up), functools.partial(_read_pair, gate_up)),
        down=_leaf(((f"{CORRECTION}down_proj.weight", (d, inner)),), functools.partial(_read_transposed, f"{CORRECTION}down_proj.weight")),
    )
    return BlockDrafter(
        context=context,
        layers=tuple(layer_leaves(model, f"layers.{index}.") for index in range(model.num_layers)),
        norm=_vector("norm.weight", d),
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


def _refuse_leftovers(source: Renamed, leaves: BlockDrafter) -> None:
    used = {name for leaf in jax.tree.leaves(leaves, is_leaf=is_leaf) for name, _ in leaf.tensors} | {DRAFT_IDS}
    unused = [original for plain, original in source.original.items() if plain not in used]
    if unused:
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        raise ValueError(f"{source.path} holds tensors that its configuration gives no place: {shown}; the two do not belong together")


def _refuse_non_finite(params: BlockDrafter, folder: Path) -> None:
    for key, value in jax.tree_util.tree_leaves_with_path(params):
        if not np.all(np.isfinite(value)):
            raise ValueError(f"{folder}: parameter {jax.tree_util.keystr(key).lstrip('.')} holds values that are not finite")


def _leaf(tensors, reader) -> Any:  # a tree of leaves has the type of the tree of arrays it stands for
    return Leaf(tensors, reader)


def _vector(name: str, size: int) -> Any:
    return Leaf(((name, (size,)),), functools.partial(_read_plain, name))


def _read_plain(name: str, source: TensorSource, window: Window) -> np.ndarray:
    return source.read(name, window)


def _read_transposed(name: str, source: TensorSource, window: Window) -> np.ndarray:
    return source.read(name, (window[1], window[0])).T


def _read_pair(names: tuple[str, ...], source: TensorSource, window: Window) -> np.ndarray:
    rows, which, columns = window
    return np.stack([source.read(name, (columns, rows)).T for name in names[which]], axis=1)


def _read_fc(taps: int, source: TensorSource, window: Window) -> np.ndarray:
    """[T, D, D] from the checkpoint's [D, T * D]."""
    which, rows, columns = window
    width = source.shape("fc.weight")[1] // taps
    parts = [
        source.read("fc.weight", (columns, slice(tap * width + rows.start, tap * width + rows.stop))).T
        for tap in range(which.start, which.stop)
    ]
    return np.stack(parts)
