"""Checkpoints that exist only as pickled PyTorch files (`pytorch_model.bin`), read by torch's weights-only loader and by nothing else.

A pickle is a program. The loader runs none of it but the few steps that build tensors. torch is imported here alone, for such files only.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from angelspec_jax.target.layout import Meter, Window
from angelspec_jax.target.safetensors_io import read_index

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
OLDEST = (2, 6)  # before it, a crafted file could run code even through the weights-only loader (CVE-2025-32434)


@dataclasses.dataclass(frozen=True)
class PickledCheckpoint:
    """Tensors that torch maps into memory. Implements `layout.TensorSource`."""

    path: Path
    tensors: dict[str, Any]  # torch.Tensor
    meter: Meter = dataclasses.field(default_factory=Meter, compare=False)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> np.dtype:
        return _array(self._tensor(name)[(slice(0, 0),) * self._tensor(name).ndim]).dtype

    def read(self, name: str, window: Window | None = None) -> np.ndarray:
        """A window of a tensor, all of it by default, as a fresh array."""
        tensor = self._tensor(name)
        values = np.array(_array(tensor if window is None else tensor[window]))
        self.meter.add(values.nbytes)
        return values

    def sample(self, name: str, size: int) -> bytes:
        """The first bytes of a tensor, row-major."""
        tensor = self._tensor(name).reshape(-1)
        return np.array(_array(tensor[: -(-size // tensor.element_size())])).tobytes()[:size]

    def _tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self.tensors[name]


def find(directory: Path) -> Path | None:
    """The pickled weights of a model directory, or their index."""
    return next((directory / name for name in (SINGLE, INDEX) if (directory / name).is_file()), None)


def open_pickled(file: Path) -> PickledCheckpoint:
    """Map pickled weights. ValueError with one sentence without torch, or when a file holds anything but plain tensors."""
    try:
        torch = importlib.import_module("torch")  # optional, so not where a type checker would look for it
    except ImportError:
        raise ValueError(
            f"{file} holds pickled weights, which are read with torch alone: pip install 'angelspec-jax[torch]', "
            "or save the model as safetensors"
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise ValueError(f"{file} holds pickled weights, which torch {torch.__version__} cannot read safely; install torch 2.6 or later")
    if file.suffix != ".json":
        return PickledCheckpoint(file.parent, _load(torch, file))
    mapping = read_index(file)
    parts = {name: _load(torch, file.parent / name) for name in sorted(set(mapping.values()))}
    for name, part in mapping.items():
        if name not in parts[part]:
            raise ValueError(f"{file} says tensor {name} is in {part}, but that file does not hold it")
    return PickledCheckpoint(file.parent, {name: parts[part][name] for name, part in mapping.items()})


def _load(torch: Any, file: Path) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # an unpickler, an archive reader and torch each have exceptions of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{file} is not a file of weights that torch's weights-only loader reads ({reason}); nothing in it was run; save safetensors"
        ) from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{file} holds {type(found).__name__}, not tensors by name; save the model's state_dict, or safetensors")
    size = file.stat().st_size
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{file}: entry {str(name)[:80]!r} is no plain tensor; save the model's state_dict, or safetensors")
        if tensor.numel() * tensor.element_size() > size:
            raise ValueError(f"{file}: tensor {name} of shape {list(tensor.shape)} is larger than the file; it is corrupt")
    return found


def _array(tensor: Any) -> np.ndarray:
    """The same values as NumPy has them; bfloat16, which it lacks, goes by its bits."""
    torch = importlib.import_module("torch")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
