"""Drafter checkpoints in and out: the single entry to every layout.

A checkpoint's family is told from its tensors and config; the module of that family (`READERS`) knows the names and the settings. What a
checkpoint leaves open is never guessed: the reader refuses and names the argument that answers it. A layout module offers

* `FAMILIES`: the families it reads;
* `read(tensors, settings, family, answers) -> (params, config, draft_ids)`;
* `export(params, config, layout, draft_ids, copies) -> (tensors, settings)`, `copies` being the target's "embed" and "lm_head" if given;
* `default_layout(config)`, the layout a drafter is saved in;
* `describe(config)`, what was decided about it, for a table, and where it can, `origins(tensors, settings, answers, config)`, what says so.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from safetensors.numpy import save_file

from angelspec_jax.drafter import layouts_block, layouts_eagle3, layouts_mtp
from angelspec_jax.drafter.card import KEY, DrafterCard
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.eagle3 import Eagle3Config
from angelspec_jax.drafter.layout_settings import CONFIG, parse_overrides
from angelspec_jax.drafter.layout_source import architecture
from angelspec_jax.drafter.mtp import MTPConfig
from angelspec_jax.drafter.registry import AnyConfig, AnyDrafter
from angelspec_jax.target import hf

WEIGHTS = "model.safetensors"
# family -> the module that reads it
READERS: dict[str, ModuleType] = {family: module for module in (layouts_block, layouts_mtp, layouts_eagle3) for family in module.FAMILIES}
# type of the config -> the module that writes it
WRITERS: dict[type, ModuleType] = {DrafterConfig: layouts_block, MTPConfig: layouts_mtp, Eagle3Config: layouts_eagle3}

UNSUPPORTED = {
    "dflash2": "DFlash2 (candidate selector)",
    "gemma4": "DSpark for Gemma 4",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a reader decided about a checkpoint: what, its value, and what says so (empty where the tensors and config.json do)."""

    rows: tuple[tuple[str, str, str], ...] = ()


class Checkpoint(NamedTuple):
    """A drafter as stored: numpy arrays of the file's dtypes."""

    params: AnyDrafter
    config: AnyConfig
    card: DrafterCard
    draft_ids: Int[np.ndarray, "V'"] | None = None
    report: Report = Report()


def read(path, **overrides: Any) -> Checkpoint:
    """Read a drafter directory (config.json and safetensors) of any supported layout.

    `overrides` are fields of `Overrides`. ValueError, one sentence, for families not supported, missing, superfluous or misshapen tensors
    and open decisions; FileNotFoundError where there is no checkpoint.
    """
    answers = parse_overrides(overrides)
    folder = Path(path)
    settings = read_settings(folder)
    tensors = hf.open_tensors(folder)
    family = detect(map(layouts_block.plain_name, tensors.names()), settings)
    refuse_unsupported(family, folder)
    module = READERS[family]
    params, config, draft_ids = module.read(tensors, settings, family, answers)
    said = module.origins(tensors, settings, answers, config) if hasattr(module, "origins") else {}
    report = Report(tuple((name, value, said.get(name, "")) for name, value in module.describe(config).items()))
    return Checkpoint(params, config, DrafterCard.from_dict(settings.get(KEY)), draft_ids, report)


def write(
    path,
    params: AnyDrafter,
    config: AnyConfig,
    card: DrafterCard,
    layout: str | None = None,
    *,
    draft_ids: Int[np.ndarray, "V'"] | None = None,
    embed: np.ndarray | None = None,
    lm_head: np.ndarray | None = None,
) -> None:
    """Write config.json and model.safetensors into the directory `path`, in a layout of the drafter's family.

    By default the one the drafter fits. Layouts that hold copies of the target's `embed` and `lm_head` [V, D] get them where given. Tensors
    keep their dtype, so reading gives the same bits. ValueError when the layout cannot express the drafter.
    """
    module = WRITERS[type(config)]
    given = {name: value for name, value in (("embed", embed), ("lm_head", lm_head)) if value is not None}
    tensors, settings = module.export(params, config, layout or module.default_layout(config), draft_ids, given)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    stored = next(value for name, value in tensors.items() if name.endswith("self_attn.q_proj.weight"))
    settings = settings | {"torch_dtype": stored.dtype.name, KEY: card.to_dict()}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode & 0o777)  # the library writes for the owner alone


def describe(config: AnyConfig) -> dict[str, str]:
    """What a reader decided about a checkpoint, for a table."""
    return WRITERS[type(config)].describe(config)


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
    if family not in READERS:
        raise ValueError(f"{folder} holds a drafter of the family {UNSUPPORTED[family]}, which is not supported; {', '.join(READERS)} are")


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json of a drafter directory."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no drafter directory {folder}; give a directory with {CONFIG} and {WEIGHTS}")
    return hf.read_json(folder / CONFIG)
