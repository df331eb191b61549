"""What this machine has, and what fits on it."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.table import Table

import angelspec_jax
from angelspec_jax.target import loading
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import GIB, Requirement

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tokenizers", "safetensors", "numpy")
DTYPES = ("float32", "bfloat16", "float16")
SMALLEST = TransformerConfig(1, 1, 1, 1, 1, 1, 2)  # any model will do to ask for the memory that is free
RESERVE = 0.8  # share of the free memory that weights may take; caches and activations need the rest


def findings() -> list[tuple[str, str]]:
    """(what, value) pairs: versions, devices, memory, and how large a model may be."""
    device = jax.devices()[0]
    free = loading.requirement(SMALLEST, jnp.float32).available
    rows = [("angelspec-jax", angelspec_jax.__version__)]
    rows += [(name, version) for name in PACKAGES if (version := _version(name)) is not None]
    rows += [
        ("devices", f"{jax.device_count()} x {device.device_kind} ({device.platform}), {jax.process_count()} process(es)"),
        ("processor cores", str(os.cpu_count())),
        ("free memory", "not reported" if free is None else f"{free / GIB:.1f} GiB{'' if device.platform == 'cpu' else ' on each device'}"),
        ("compilation cache", str(getattr(jax.config, "jax_compilation_cache_dir", None) or "off")),
    ]
    if free is not None:
        room = free * RESERVE * (1 if device.platform == "cpu" else jax.device_count())
        sizes = ", ".join(f"{room / jnp.dtype(name).itemsize / 1e9:.1f} billion in {name}" for name in DTYPES[:2])
        rows.append(("largest model", f"about {sizes} (parameters)"))
    return rows


def table(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table(show_header=False, box=None)
    for row in rows:
        grid.add_row(*row)
    return grid


def needs(source: str | Path, dtype: str | None = None, quantize: str | None = None) -> Requirement:
    """What a target's parameters take against what is free, in the dtype that `load_target` would take; printed, it is a sentence."""
    described = loading.describe(source)
    wanted = parse_dtype(dtype) or (jnp.float32 if jax.devices()[0].platform == "cpu" else described.dtype)
    return loading.requirement(dataclasses.replace(described.config, quantize=quantize), wanted)


def parse_dtype(name: str | None):
    """A dtype by name; None for None. Raises ValueError for names that weights cannot have."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return jnp.dtype(name)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
