"""The device mesh and the rules that map logical parameter axes to it.

Mesh axes: `data` (requests, sequences), `fsdp` (parameters and optimizer state, also sequences in training), `tensor` (heads, feed-forward
width, vocabulary). Training on long texts adds `sequence`, over which the tokens of every sequence lie; a mesh without it has no such axis.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from angelspec_jax.params import map_params

AXES = ("data", "fsdp", "tensor")
SEQUENCE = "sequence"

# Logical axis -> mesh axis or axes. An axis that does not divide by its mesh axis stays replicated (few kv heads on many chips); one that
# does not divide by several together is spread over the last ones that it does divide by. Parameters are shared out over devices that hold
# parts of one sequence as over those that hold different ones.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": "tensor",
    "embed": ("fsdp", SEQUENCE),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": ("fsdp", "tensor"),
    "batch": ("data", "fsdp"),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices=None, sequence: int = 1) -> Mesh:
    """A mesh of `data x fsdp x tensor` devices; one of them may be -1 and takes what is left.

    With `sequence` other than 1 it has an axis of that name before `tensor`: tokens of a sequence then lie on neighbouring devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, SEQUENCE: sequence, "tensor": tensor}
    if sequence == 1:
        del sizes[SEQUENCE]
    shape, names = "x".join(str(size) for size in sizes.values()), " x ".join(sizes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"at most one mesh axis may be -1, got {' '.join(f'{name}={size}' for name, size in sizes.items())}")
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    for name in open_axes:
        sizes[name] = max(1, len(devices) // known)
    if int(np.prod(list(sizes.values()))) != len(devices):
        shape, needed = "x".join(str(size) for size in sizes.values()), int(np.prod(list(sizes.values())))
        raise ValueError(f"mesh {shape} ({names}) needs {needed} devices, there are {len(devices)}")
    return Mesh(device_grid(tuple(sizes.values()), devices), tuple(sizes))


def is_ours(mesh) -> bool:
    """Whether a mesh, abstract or not, has this package's axes."""
    return set(mesh.axis_names) - {SEQUENCE} == set(AXES)


def sequence_parts(mesh=None) -> int:
    """Over how many devices the tokens of a sequence lie, on `mesh` or the one that the program is traced for under `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return mesh.shape.get(SEQUENCE, 1) if is_ours(mesh) else 1


def dealt_axes(batch: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of rows that are dealt over the sequence axis first and then lie as the batch does."""
    return (SEQUENCE, *((batch,) if isinstance(batch, str) else batch or ()))


def batch_share(processes: np.ndarray, process: int) -> tuple[int, int]:
    """(which, of how many) equal slices of a batch a process holds, given the process of every device [batch shards, other axes].

    Processes that hold parts of the same sequences have the same slice. Raises ValueError where slices are not of one size and in order.
    """
    owned = [tuple(np.flatnonzero((processes == one).any(axis=1))) for one in np.unique(processes)]
    own = tuple(np.flatnonzero((processes == process).any(axis=1)))
    size, slices = len(own), sorted(set(owned))
    expected = [tuple(range(start, start + size)) for start in range(0, len(processes), size)]
    if slices != expected:
        raise ValueError("not every process has an equal slice of the batch; make mesh.data x mesh.fsdp a multiple of the processes")
    return slices.index(own), len(slices)


def device_grid(sizes: Sequence[int], devices: Sequence) -> np.ndarray:
    """Devices as an array of `sizes` (data, fsdp, perhaps sequence, tensor), neighbours in the array being neighbours in the machine.

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
        names = "data x fsdp x tensor" if len(sizes) == len(AXES) else "data x fsdp x sequence x tensor"
        raise ValueError(f"mesh {shape} ({names}) does not spread over {slices} slices; make mesh.data a multiple of {slices}")
    outer = [slices if axis == across else 1 for axis in range(len(sizes))]
    inner = [size // parts for size, parts in zip(sizes, outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, list(devices), allow_split_physical_axes=True)


def partition(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules=None) -> PartitionSpec:
    """Partition of an array with these logical axes; a dimension that does not divide evenly is left whole."""
    rules = RULES if rules is None else rules
    spec: list[str | tuple[str, ...] | None] = []
    for name, size in zip(axes, shape, strict=True):
        target = rules.get(name) if name else None
        names = [axis for axis in ([target] if isinstance(target, str) else target or []) if axis in mesh.shape]
        while names and size % _parts(mesh, tuple(names)):
            names.pop(0)
        spec.append(None if _parts(mesh, tuple(names)) == 1 else tuple(names) if len(names) > 1 else names[0])
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


def placement(param, place: jax.sharding.Sharding, platform: str) -> Any:
    """Where an array of a parameter is put, a sharding or a format: with the order of its axes in memory where the parameter asks for one.

    The order is for the matrix units of a TPU: a weight whose innermost axes are not those of its product would be copied at each use.
    Programs take arrays in the layout they come in, so this is the one place that decides it.
    """
    return place if param.order is None or platform != "tpu" else Format(Layout(param.order), place)


def put_on(device: Any, param, value) -> jax.Array:
    """A whole parameter, or one shard of it, on one device; None: the default device, to which the array is not committed."""
    where = jax.devices()[0] if device is None else device
    if param.order is None or where.platform != "tpu":
        return jnp.asarray(value) if device is None else jax.device_put(value, where)
    return jax.device_put(value, placement(param, SingleDeviceSharding(where), where.platform))


def placements(mesh: Mesh, specs, rules=None):
    """Sharding and layout of every parameter of a specification, of frozen weights that programs read."""
    platform = mesh.devices.flat[0].platform
    return map_params(lambda p: placement(p, sharding(mesh, p.axes, p.shape, rules), platform), specs)


def enable_compilation_cache(folder: str | os.PathLike | None = None) -> None:
    """Keep compiled programs on disk, so that a second run starts at once. `ANGELSPEC_COMPILATION_CACHE` overrides, "off" disables."""
    folder = os.environ.get("ANGELSPEC_COMPILATION_CACHE", folder) or os.path.expanduser("~/.cache/angelspec-jax/compiled")
    if folder == "off":
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
