"""What this machine has, and what fits on it."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

import angelspec_jax
from angelspec_jax import compile as compiling
from angelspec_jax.config import TrainConfig
from angelspec_jax.drafter import registry
from angelspec_jax.target import loading
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import GIB, Requirement
from angelspec_jax.training import prepare, trainer
from angelspec_jax.training.optimizer import make_optimizer

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


@dataclasses.dataclass(frozen=True)
class TrainingNeeds:
    """Bytes that every device holds during training, without activations, against what is free there (None: it does not say)."""

    target: int
    masters: int  # the drafter's float32 parameters
    gradients: int
    optimizer: int
    devices: int
    available: int | None

    @property
    def total(self) -> int:
        return self.target + self.masters + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {"target": self.target, "drafter": self.masters, "its gradient": self.gradients, "optimizer": self.optimizer}
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        need = f"training takes {self.total / GIB:.2f} GiB on each of {self.devices} device(s) before activations ({listed})"
        if self.available is None:
            return f"{need}; how much is free is not reported"
        verdict = "fits" if self.total <= self.available else "does not fit"
        return f"{need}, which {verdict} {self.available / GIB:.2f} GiB free for each; angelspec compile counts activations as well"


def training_needs(config: TrainConfig) -> TrainingNeeds:
    """What a run's target, drafter, gradient and optimizer take on the devices at hand, from headers and shapes; no weight is read.

    Raises what `angelspec train` would for a target, drafter or mesh that cannot be.
    """
    mesh = trainer.make_mesh(config.mesh)
    described: Any = loading.describe(config.target.source)
    drafter = prepare.drafter_config(config.drafter, described)
    specs = registry.module(drafter).drafter_specs(drafter)
    optimizer, _ = make_optimizer(config.train, specs)
    state = compiling.abstract_state(specs, optimizer, mesh)
    target = dataclasses.replace(described.config, quantize=config.target.quantize)
    need = loading.requirement(target, jnp.dtype(config.target.dtype), mesh)
    shared = len(mesh.local_devices) if mesh.devices.flat[0].platform == "cpu" else 1  # virtual devices divide the machine's memory
    masters = compiling.local_bytes(state.params)
    return TrainingNeeds(
        target=need.per_device,
        masters=masters,
        gradients=masters,
        optimizer=compiling.local_bytes(state.opt_state),
        devices=mesh.devices.size,
        available=None if need.available is None else need.available // shared,
    )


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
