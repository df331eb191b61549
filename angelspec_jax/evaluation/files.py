"""Measurements as JSON files, and where they were made."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


def machine() -> dict[str, Any]:
    """Where something was measured."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def write_json(path: str | Path, values: Mapping[str, Any]) -> Path:
    """Write measurements, floats to six digits; a run that is stopped leaves the old file or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_short(values), indent=2) + "\n", "utf-8")
    os.replace(part, path)
    return path


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
