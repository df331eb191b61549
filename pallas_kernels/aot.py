"""Compile one kernel for a TPU that is not there, with the real XLA:TPU and Mosaic compilers of libtpu.

A block that does not fit fails here with the true VMEM figures. Nothing here is a run time: `estimated_seconds` is a guess of the compiler.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import topologies

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}  # one small slice per generation


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says about one program on one device of `topology`. Bytes are HBM; `flops` and `bytes_accessed` of a Pallas call
    are those of its `pl.CostEstimate`; `estimated_seconds` is NaN where the compiler has no estimate."""

    topology: str
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    vmem_bytes: int  # of the Pallas kernel that takes most
    flops: float
    bytes_accessed: float
    estimated_seconds: float


def available() -> bool:
    """Whether libtpu, which holds the TPU compiler, is installed."""
    return importlib.util.find_spec("libtpu") is not None


def devices(topology: str) -> list:
    """The devices of a slice that is not there (a key of `TOPOLOGIES` or a name such as "v6e:2x4"). Raises RuntimeError without libtpu."""
    if not available():
        raise RuntimeError('compiling for a TPU needs its compiler, libtpu, which is not installed: pip install "jax[tpu]"')
    # Read when libtpu is first loaded: no cloud metadata server to ask here, and other processes may compile at the same time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    name = TOPOLOGIES.get(topology, topology)
    # A host has four chips or more; a smaller slice is one host that has as many as it says.
    sizes = [int(size) for size in name.partition(":")[2].split("x") if size.isdigit()]
    small = {"chips_per_host_bounds": [*sizes, *[1] * (3 - len(sizes))]} if 0 < math.prod(sizes) < 4 and sizes else {}
    return topologies.get_topology_desc(topology_name=name, platform="tpu", **small).devices


def compile_kernel(function: Callable, *arguments, topology: str = "v6e", donate: tuple[int, ...] = ()) -> Report:
    """Compile `function(*arguments)` for one device of `topology` (a key of `TOPOLOGIES` or a name such as "v6e:2x4").

    `arguments` are arrays or `jax.ShapeDtypeStruct`s, `donate` the positions of donated ones. Run with `JAX_PLATFORMS=cpu` on a machine
    without a TPU. Raises RuntimeError if libtpu is not installed; compiler errors pass through.
    """
    name = TOPOLOGIES.get(topology, topology)
    mesh = jax.sharding.Mesh(np.array(devices(name)[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):  # Pallas asks the mesh which chip it compiles for
        lowered = jax.jit(function, donate_argnums=donate, out_shardings=sharding).lower(*abstract)
        start = time.perf_counter()
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    if memory is None:
        raise RuntimeError(f"the compiler for {name} reports no memory figures: install the libtpu that matches this jax")
    estimate = cost.get("optimal_seconds", -1.0)
    return Report(
        topology=name,
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        vmem_bytes=kernel_memory(compiled.as_text() or ""),
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        estimated_seconds=estimate if estimate > 0 else float("nan"),
    )


def kernel_memory(text: str) -> int:
    """Bytes of VMEM of the Pallas kernel of a compiled program (its text) that takes most."""
    pattern = r'custom_call_target="tpu_custom_call".*?used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return max((int(size) for size in re.findall(pattern, text)), default=0)
