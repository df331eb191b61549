"""One folder of reference numbers: what it holds, and how far our numbers are from it."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

STATES, LOSSES, GRADIENTS = 1e-4, 1e-5, 1e-4  # hidden states and logits absolute; losses absolute below 1, relative above; relative


class Unsupported(Exception):
    """The case is of a family, or asks for a quantity, that this package does not have."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    what: str
    error: float
    tolerance: float

    @property
    def share(self) -> float:
        """Error in units of what is allowed; an exact comparison allows nothing."""
        return self.error / self.tolerance if self.tolerance else np.inf if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.error:.1e} of {self.tolerance:.0e} ({self.what})" if self.tolerance else f"{self.error:g} differ ({self.what})"


class Numbers(Mapping[str, np.ndarray]):
    """Tensors by name, which remember what was looked at."""

    def __init__(self, tensors: Mapping[str, np.ndarray], prefix="", row: int | None = None, batch=1, seen: set[str] | None = None):
        self.tensors, self.prefix, self.chosen, self.batch = tensors, prefix, row, batch
        self.seen: set[str] = set() if seen is None else seen

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.tensors[self.prefix + name]
        self.seen.add(self.prefix + name)
        whole = self.chosen is None or name.endswith("_weight") or not value.ndim or value.shape[0] != self.batch
        return value if whole else value[self.chosen : self.chosen + 1]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.tensors if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return f"{self.prefix}{name}" in self.tensors

    def under(self, prefix: str) -> "Numbers":
        """Those of a prefix, by the rest of their names."""
        return Numbers(self.tensors, self.prefix + prefix, self.chosen, self.batch, self.seen)

    def row(self, index: int, batch: int) -> "Numbers":
        """Those of one sequence of a batch, as a batch of one; the target's weights have no batch."""
        return Numbers(self.tensors, self.prefix, index, batch, self.seen)


@dataclasses.dataclass
class Case:
    """`io` holds `in.*` and `out.*`; comparisons are collected, so a failure shows everything that is wrong and a pass how close it is."""

    folder: Path
    kind: str
    params: dict[str, Any]
    io: Numbers
    deviations: list[Deviation] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)

    @property
    def family(self) -> str:
        """What the numbers are of, as far as the files say."""
        if "family" in self.params:
            return str(self.params["family"])
        named = self.config.get("architectures") or [self.config.get("model_type") or self.kind]
        return str(named[0])

    @property
    def config(self) -> dict[str, Any]:
        file = self.folder / "config.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor of the checkpoint, by the names of the file."""
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(self.folder.glob("model*.safetensors")):
            tensors |= load_file(file)
        return {name: value if value.dtype.kind in "iub" else value.astype(np.float32) for name, value in tensors.items()}

    def rows(self, of: str) -> list["Case"]:
        """The case of every sequence of the batch that the tensor `of` holds; what is compared there counts here."""
        batch = len(self.io[of])
        return [dataclasses.replace(self, io=self.io.row(index, batch)) for index in range(batch)]

    def close(self, what: str, ours, expected, tolerance: float = STATES, *, relative: bool = False) -> None:
        """Compare real numbers; `relative` measures in units of the largest expected one."""
        ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
        if ours.shape != expected.shape:
            raise AssertionError(f"{what} has shape {list(ours.shape)} here and {list(expected.shape)} in the reference")
        apart = np.abs(ours - expected)
        scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6) if relative else 1.0
        error = float(apart.max(initial=0.0)) / scale
        self.deviations.append(Deviation(what, error if np.isfinite(error) else np.inf, tolerance))

    def same(self, what: str, ours, expected) -> None:
        """Compare integers, which must be equal."""
        ours, expected = np.asarray(ours).astype(np.int64), np.asarray(expected).astype(np.int64)
        if ours.shape != expected.shape:
            raise AssertionError(f"{what} has shape {list(ours.shape)} here and {list(expected.shape)} in the reference")
        self.deviations.append(Deviation(what, float(np.sum(ours != expected)), 0.0))

    @property
    def worst(self) -> Deviation | None:
        return max(self.deviations, key=lambda deviation: deviation.share, default=None)

    def finish(self) -> None:
        """Note which reference numbers nothing looked at, every kind of name once."""
        left = {name for name in self.io if name.startswith("out.")} - self.io.seen
        self.unchecked += sorted({re.sub(r"\d+", "*", name.removeprefix("out.")) for name in left})

    def verdict(self) -> None:
        """Raise AssertionError naming what is further away than allowed, or when nothing was compared."""
        beyond = [str(deviation) for deviation in self.deviations if deviation.share > 1]
        if beyond:
            raise AssertionError(f"{self.folder}: {len(beyond)} of {len(self.deviations)} comparisons fail: {'; '.join(beyond[:12])}")
        if not self.deviations:
            raise AssertionError(f"{self.folder}: nothing was compared")


def find(root: Path) -> list[Path]:
    """Every case folder at or below `root`."""
    return sorted(file.parent for file in root.rglob("case.json"))


def load(folder: Path) -> Case:
    description = json.loads((folder / "case.json").read_text())
    return Case(folder, str(description["kind"]), description.get("params") or {}, Numbers(load_file(folder / "io.safetensors")))


def as_arrays(params):
    """Parameters on the device; the references calculate in float32 whatever the file holds."""
    return jax.tree.map(lambda x: jnp.asarray(x) if x.dtype.kind in "iub" else jnp.asarray(np.asarray(x, np.float32)), params)


def supported(function, *arguments, **options):
    """Call a loader; its refusal of a family becomes `Unsupported`, every other error stays what it is."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        if "not supported" in str(error):
            raise Unsupported(str(error)) from error
        raise
