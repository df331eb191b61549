"""Exact speculative decoding in JAX: train a small drafter for a language model, then decode faster with unchanged output.

The names below load on first use, so that importing the package costs nothing.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from angelspec_jax.config import load as load_config
    from angelspec_jax.decoding.engine import Engine, QueueFull, Settings
    from angelspec_jax.decoding.router import Router
    from angelspec_jax.drafter.loading import Drafter, load_drafter, save_drafter
    from angelspec_jax.target.loading import Target, load_target
    from angelspec_jax.text import Completion, generate, measure_policy, stream
    from angelspec_jax.training.trainer import train

_HOMES = {  # name -> module, name there
    "Completion": ("text", "Completion"),
    "Engine": ("decoding.engine", "Engine"),
    "QueueFull": ("decoding.engine", "QueueFull"),
    "Router": ("decoding.router", "Router"),
    "Settings": ("decoding.engine", "Settings"),
    "Drafter": ("drafter.loading", "Drafter"),
    "Target": ("target.loading", "Target"),
    "generate": ("text", "generate"),
    "load_config": ("config", "load"),
    "load_drafter": ("drafter.loading", "load_drafter"),
    "load_target": ("target.loading", "load_target"),
    "measure_policy": ("text", "measure_policy"),
    "save_drafter": ("drafter.loading", "save_drafter"),
    "stream": ("text", "stream"),
    "train": ("training.trainer", "train"),
}

__all__ = [
    "Completion", "Drafter", "Engine", "QueueFull", "Router", "Settings", "Target",
    "generate", "load_config", "load_drafter", "load_target", "measure_policy", "save_drafter", "stream", "train",
]  # fmt: skip


def __getattr__(name: str):
    if name == "__version__":
        try:
            return importlib.metadata.version("angelspec-jax")
        except importlib.metadata.PackageNotFoundError:
            return "0+source"  # a checkout that was never installed
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
