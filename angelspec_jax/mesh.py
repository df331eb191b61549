"""The device mesh and the rules that map logical parameter axes to it.

Mesh axes: `data` (requests, sequences), `fsdp` (parameters and optimizer state, also sequences in training), `tensor` (heads, feed-forward
width, vocabulary).
"""

import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angelspec_jax.params import map_params

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axis or axes. An axis that does not divide by its mesh axis stays replicated (few kv heads on many chips); one that
# does not divide by several together is spread over the last ones that it does divide by.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": ("fsdp", "tensor"),
    "batch": ("data", "fsdp"),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh of `data x fsdp x tensor` devices; one of the three may be -1 and takes what is left."""
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1:
        raise ValueError(f"at most one mesh axis may be -1, got data={data} fsdp={fsdp} tensor={tensor}")
    known = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(1, len(devices) // known)
    if int(np.prod(sizes)) != len(devices):
        shape, needed = "x".join(map(str, sizes)), int(np.prod(sizes))
        raise ValueError(f"mesh {shape} (data x fsdp x tensor) needs {needed} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def partition(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules=None) -> PartitionSpec:
    """Partition of an array with these logical axes; a dimension that does not divide evenly is left whole."""
    rules = RULES if rules is None else rules
    spec: list[str | tuple[str, ...] | None] = []
    for name, size in zip(axes, shape, strict=True):
        target = rules.get(name) if name else None
        names = (target,) if isinstance(target, str) else (target or ())
        while names and size % _parts(mesh, names):
            names = names[1:]
        spec.append((names if isinstance(target, tuple) else target) if _parts(mesh, names) > 1 else None)
    return PartitionSpec(*spec)


def _parts(mesh: Mesh, names: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in names], dtype=np.int64))


def sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules=None) -> NamedSharding:
    return NamedSharding(mesh, partition(mesh, axes, shape, rules))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def shardings(mesh: Mesh, specs, rules=None):
    """Sharding of every parameter of a specification (see `params.Param`)."""
    return map_params(lambda p: sharding(mesh, p.axes, p.shape, rules), specs)


def enable_compilation_cache(folder: str | os.PathLike | None = None) -> None:
    """Keep compiled programs on disk, so that a second run starts at once. `ANGELSPEC_COMPILATION_CACHE` overrides, "off" disables."""
    folder = os.environ.get("ANGELSPEC_COMPILATION_CACHE", folder) or os.path.expanduser("~/.cache/angelspec-jax/compiled")
    if folder == "off":
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
