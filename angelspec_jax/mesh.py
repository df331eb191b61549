"""The device mesh and the rules that map logical parameter axes to it.

Mesh axes: `data` (requests, sequences), `fsdp` (parameters and optimizer state, also sequences in training), `tensor` (heads, feed-forward
width, vocabulary).
"""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
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
    return Mesh(device_grid(sizes, devices), AXES)


def device_grid(sizes: Sequence[int], devices: Sequence) -> np.ndarray:
    """Devices as an array of `sizes` (data, fsdp, tensor), neighbours in the array being neighbours in the machine.

    Slices of TPUs are joined by the data-centre network (DCN), far slower than the links inside a slice (ICI). Only the outermost axis that
    the number of slices divides crosses it: `data`, else `fsdp`, whose traffic is once a step; never `tensor`. Inside a slice the
    axes follow the torus. Other devices keep their order, which is by process: outer axes cross processes first.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        if devices[0].platform != "tpu":
            return np.asarray(devices).reshape(tuple(sizes))
        return mesh_utils.create_device_mesh(tuple(sizes), list(devices), allow_split_physical_axes=True)
    across = next((axis for axis in (0, 1) if sizes[axis] % slices == 0), None)
    if across is None:
        shape = "x".join(map(str, sizes))
        raise ValueError(f"mesh {shape} (data x fsdp x tensor) does not spread over {slices} slices; make mesh.data a multiple of {slices}")
    outer = [slices if axis == across else 1 for axis in range(3)]
    inner = [size // parts for size, parts in zip(sizes, outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, list(devices), allow_split_physical_axes=True)


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


def replicate(value: jax.Array, mesh: Mesh) -> jax.Array:
    """A value that every process has, on every device of the mesh."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):  # a typed key goes as its bits: it cannot be put on devices of other processes
        return jax.random.wrap_key_data(replicate(jax.random.key_data(value), mesh), impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, replicated(mesh), lambda index: host[index])


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
