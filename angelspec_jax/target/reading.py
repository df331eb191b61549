"""Parameters from a checkpoint: every process reads what its devices hold, pieces in parallel, straight into the arrays they get.

Beside the parameters themselves a host holds one array on its way to a device and a few pieces of tensors.
"""

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from angelspec_jax import mesh as meshes
from angelspec_jax.params import Param, is_param
from angelspec_jax.target import int8
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.int8 import Int8
from angelspec_jax.target.layout import Leaf, Piece, TensorSource, Window, pieces
from angelspec_jax.target.transformer import TargetParams, target_specs

PIECE = 1 << 22  # numbers of one tensor read at a time by one thread
THREADS = 8
EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}  # all set in infinities and NaNs


def read_params(tensors: TensorSource, config: TransformerConfig, leaves, dtype, mesh=None, rules=None) -> TargetParams:
    """Every parameter in its sharding. ValueError naming the first tensor with values that are not finite."""

    def is_spec(node) -> bool:
        return is_param(node) or int8.is_int8(node)

    with ThreadPoolExecutor(THREADS) as pool:

        def read(spec, leaf: Leaf) -> Any:
            if isinstance(spec, Int8):
                return _read_int8(tensors, spec, leaf, mesh, rules, pool)
            wanted = np.dtype(spec.dtype or dtype)
            return _place(spec, mesh, rules, lambda window: (_assemble(tensors, leaf, window, wanted, pool),))[0]

        return jax.tree.map(read, target_specs(config), leaves, is_leaf=is_spec)


def _read_int8(tensors: TensorSource, spec: Any, leaf: Leaf, mesh, rules, pool) -> Int8:
    """Matrices of an `Int8` specification. A channel's scale needs all its inputs: a device that holds some of them reads all."""
    shape, scales = spec.values.shape, spec.scale.shape
    axes = tuple(axis for axis, size in enumerate(scales) if size == 1)
    stored = np.result_type(*{tensors.dtype(name) for name, _ in leaf.tensors})

    def quantize(window: Window):
        whole = tuple(slice(0, shape[axis]) if axis in axes else part for axis, part in enumerate(window))
        values, scale = int8.round_to(_assemble(tensors, leaf, whole, stored, pool), axes)
        own = tuple(part if axis in axes else slice(None) for axis, part in enumerate(window))
        return np.ascontiguousarray(values[own]), scale

    return Int8(*_place(spec.values, mesh, rules, quantize, (spec.values, spec.scale)))


def _place(spec: Param, mesh, rules, make, specs: Sequence[Param] | None = None) -> list[jax.Array]:
    """Arrays of `specs` (default: one of `spec`) on their devices; `make(window)` gives what a window of `spec` needs of each."""
    specs = [spec] if specs is None else specs
    if mesh is None:
        made = make(tuple(slice(0, size) for size in spec.shape))
        return [meshes.put_on(None, each, part) for each, part in zip(specs, made, strict=True)]
    # A host's replicas share one reading.
    holders: dict[tuple, list] = {}
    sharding = meshes.sharding(mesh, spec.axes, spec.shape, rules)
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        window = tuple(part.indices(size)[:2] for part, size in zip(index or (), spec.shape, strict=True))
        holders.setdefault(window, []).append(device)
    shards: list[list[jax.Array]] = [[] for _ in specs]
    for window, devices in holders.items():
        made = make(tuple(slice(*bounds) for bounds in window))
        for each, parts, part in zip(specs, shards, made, strict=True):
            parts += [meshes.put_on(device, each, part) for device in devices]
        jax.block_until_ready([parts[-len(devices) :] for parts in shards])  # what is on its way is not held twice
        del made, part
        gc.collect(0)  # JAX keeps an array that it has copied until Python collects
    shardings: list[Sharding] = [meshes.sharding(mesh, each.axes, each.shape, rules) for each in specs]
    return [
        jax.make_array_from_single_device_arrays(each.shape, sharding, parts)
        for each, sharding, parts in zip(specs, shardings, shards, strict=True)
    ]


def _assemble(tensors: TensorSource, leaf: Leaf, window: Window, dtype: np.dtype, pool: ThreadPoolExecutor) -> np.ndarray:
    out = np.empty([part.stop - part.start for part in window], dtype)
    for _ in pool.map(lambda piece: _fill(tensors, piece), pieces(leaf, window, out, PIECE)):
        pass
    return out


def _fill(tensors: TensorSource, piece: Piece) -> None:
    values = tensors.read(piece.name, piece.window)
    if not finite(values):
        raise ValueError(f"{tensors.path}: tensor {piece.name} holds values that are not finite; the file is damaged, get it again")
    assign(piece.target, values.reshape(piece.target.shape))


def finite(values: np.ndarray) -> bool:
    """Whether no value is infinite or NaN. Exponents of 16-bit floats are looked at as whole numbers, which is quicker."""
    mask = EXPONENTS.get(values.dtype)
    if mask is not None:
        return not np.any((values.view(np.uint16) & mask) == mask)
    return values.dtype.kind in "iub" or bool(np.all(np.isfinite(values)))


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """`target[...] = values`. bfloat16 is not a type of NumPy's own, and as such slow and serial; as bits it is neither."""
    if values.dtype == ml_dtypes.bfloat16 and target.dtype == ml_dtypes.bfloat16:
        target.view(np.uint16)[...] = values.view(np.uint16)
    elif values.dtype == ml_dtypes.bfloat16 and target.dtype == np.float32:
        np.left_shift(values.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = values
