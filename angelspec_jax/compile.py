"""Whole decode and training steps compiled for TPUs that are not there, from shapes alone, with what the compiler says about them.

No weights and no TPU are needed, only libtpu, which holds the compiler. Every number has an origin and is reported with it: the compiler's
memory analysis is exact; its cost analysis counts the body of a loop once, so each layer's share is measured on programs of one and of two
layers and multiplied by the layers; its seconds are an estimate that leaves out collectives; the floor follows from public figures of the
chips. Nothing here is a run time.
"""

import contextlib
import dataclasses
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

from angelspec_jax import config as configs
from angelspec_jax import mesh as meshes
from angelspec_jax import params
from angelspec_jax.config import DrafterSection, MeshSection, OptimizationSection
from angelspec_jax.decoding import generate, slots
from angelspec_jax.decoding.step import DecodeState, Plan, Weights, speculative_step
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.registry import TrainableConfig
from angelspec_jax.drafter.types import Shared
from angelspec_jax.target import hf, kv_cache, whole
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import Runs, TargetParams, forward, target_specs
from angelspec_jax.training import prepare
from angelspec_jax.training import step as training
from angelspec_jax.training.optimizer import make_optimizer
from pallas_kernels import aot
from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.cache_commit import cache_commit
from pallas_kernels.tree_attention import tree_attention

GIB = 2**30
PARTS = ("kernels", "decode", "train")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Public figures of one chip: bytes of memory, bfloat16 operations and bytes per second."""

    memory: float
    flops: float
    bandwidth: float


CHIPS = {
    "v4": Chip(32 * GIB, 275e12, 1228e9),
    "v5e": Chip(16 * GIB, 197e12, 819e9),
    "v5p": Chip(95 * GIB, 459e12, 2765e9),
    "v6e": Chip(32 * GIB, 918e12, 1640e9),
    "tpu7x": Chip(192 * GIB, 2307e12, 7380e9),
}


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """The target: what its config.json says, and the type of its weights."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantize: Literal["int8"] | None = None


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The decode step: slots, tokens a slot can hold, budgets (none: the drafter's own), devices per mesh axis."""

    requests: int = 32
    capacity: int = 4096
    budgets: tuple[int, ...] = ()
    mesh: MeshSection = dataclasses.field(default_factory=lambda: MeshSection(data=1, tensor=-1))


@dataclasses.dataclass(frozen=True)
class TrainShape:
    """The training step: sequences and their length, the optimization as a training config has it, devices per mesh axis."""

    batch_size: int = 8
    length: int = 2048
    settings: OptimizationSection = dataclasses.field(default_factory=OptimizationSection)
    mesh: MeshSection = dataclasses.field(default_factory=lambda: MeshSection(data=1, fsdp=-1))


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """A model with its drafter, and the programs it runs in."""

    target: TargetShape
    drafter: DrafterSection = dataclasses.field(default_factory=DrafterSection)
    decode: DecodeShape = dataclasses.field(default_factory=DecodeShape)
    train: TrainShape = dataclasses.field(default_factory=TrainShape)


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known about one program, for one device. `origins` says where each number comes from."""

    program: str
    topology: str
    mesh: str  # data x fsdp x tensor, or data x fsdp x sequence x tensor
    layers: int
    compile_seconds: float
    hbm_bytes: int
    hbm_limit: int
    temporary_bytes: int
    vmem_bytes: int
    flops: float
    bytes_accessed: float
    estimated_seconds: float
    floor_seconds: float

    @property
    def ratio(self) -> float:
        return self.estimated_seconds / self.floor_seconds

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio": self.ratio, "origins": ORIGINS}


ORIGINS = {
    "compile_seconds": "measured on this machine",
    "hbm_bytes": "compiler, memory analysis: arguments, outputs that reuse no argument, and temporaries",
    "hbm_limit": "public figure of the chip",
    "temporary_bytes": "compiler, memory analysis",
    "vmem_bytes": "compiler: the most that any one Pallas kernel takes",
    "flops": "compiler, cost analysis; layers multiplied, other loops (parts of a batch too) counted once, of branches the dearest",
    "bytes_accessed": "compiler, cost analysis; as flops, reads and writes of on-chip memory included",
    "estimated_seconds": "compiler's own estimate without collectives; layers multiplied, other loops counted once; experts, whose grouped "
    "products it has no estimate for, with one reading at the chip's bandwidth (public figure)",
    "floor_seconds": "the larger of flops at the chip's peak and one reading of weights and caches at its bandwidth (public figures)",
}


@dataclasses.dataclass(frozen=True)
class Models:
    """Target and drafter by their shapes."""

    target: TransformerConfig
    drafter: TrainableConfig
    dtype: Any
    draft_vocab: int | None


Say = Callable[[str], None]


def run(
    config: CompileConfig, topology: str, *, layers: int | None = None, parts: tuple[str, ...] = PARTS, say: Say | None = None
) -> Iterator[Report]:
    """Compile the programs of a config for a slice, one after the other; `layers` cuts the target short.

    `say` is told what is being compiled and for how long, and what the compiler says of a program before its layers' costs are known.
    Raises RuntimeError when libtpu is missing or a program does not fit, ValueError for a slice that does not exist or a bad config.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"there is no program {part!r} to compile; choose from {', '.join(PARTS)}")
    progress = Progress(say)
    devices = slice_devices(topology)
    models = describe(config, layers)
    if "kernels" in parts:
        yield from compile_kernels(config, models, topology, mesh_of(config.decode.mesh, devices, topology), progress)
    if "decode" in parts:
        yield compile_decode(config.decode, models, topology, mesh_of(config.decode.mesh, devices, topology), progress)
    if "train" in parts:
        yield compile_train(config.train, models, topology, mesh_of(config.train.mesh, devices, topology), progress)


class Progress:
    """Says what is being done, and every so often that it still is."""

    def __init__(self, say: Say | None = None, every: float = 30.0):
        self.say, self.every = say or (lambda text: None), every

    @contextlib.contextmanager
    def step(self, what: str):
        """Announce a step; while it lasts, say how many seconds it has taken."""
        start, over = time.perf_counter(), threading.Event()

        def watch():
            while not over.wait(self.every):
                self.say(f"{what}: {time.perf_counter() - start:.0f} s so far")

        self.say(what)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def slice_devices(topology: str) -> list:
    """The devices of a slice such as v6e:2x4."""
    chip, colon, shape = topology.partition(":")
    if chip not in CHIPS or not colon or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise ValueError(f"topology {topology!r} should look like v6e:2x4, with one of {', '.join(CHIPS)} before the colon")
    try:
        return list(aot.devices(topology))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology {topology!r} does not exist: {_first_line(error)}") from None


def mesh_of(section: MeshSection, devices: list, topology: str) -> Mesh:
    """The mesh of a program over all devices of a slice."""
    try:
        return meshes.make_mesh(section.data, section.fsdp, section.tensor, devices, section.sequence)
    except ValueError as error:
        raise ValueError(f"{topology}: {error}") from None


def describe(config: CompileConfig, layers: int | None) -> Models:
    """Target and drafter of a config; the target scans over its layers, as it does on accelerators."""
    target = hf.parse_config(config.target.config, "target.config")
    target = dataclasses.replace(target, scan_layers=True, quantize=config.target.quantize)
    section, count = config.drafter, target.num_layers
    if not isinstance(section.mask_token, int):
        raise ValueError(f"drafter.mask_token must be a token id here, where there is no tokenizer; got {section.mask_token!r}")
    if layers is not None and not 1 <= layers <= count:
        raise ValueError(f"layers must lie between 1 and the target's {count}, got {layers}")
    if layers is not None and layers < count:
        moe = target.moe
        if moe is not None:
            moe = dataclasses.replace(moe, dense_layers=tuple(index for index in moe.dense_layers if index < layers))
        target = dataclasses.replace(target, num_layers=layers, moe=moe)
        if section.family not in prepare.AUTOREGRESSIVE or section.family == "eagle3":
            section = dataclasses.replace(section, taps=tuple(range(min(layers, 3))))
    shape: Any = _Shape(target)
    drafter = prepare.drafter_config(section, shape)
    return Models(target, drafter, jnp.dtype(config.target.dtype), section.draft_vocab)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The part of a loaded target that its drafter's shape depends on."""

    config: TransformerConfig
    tokenizer: None = None
    name: str = "target"


# Kernels -----------------------------------------------------------------------------------------------------------------------------


def compile_kernels(
    config: CompileConfig, models: Models, topology: str, mesh: Mesh, progress: Progress | None = None
) -> Iterator[Report]:
    """The kernels of one layer in the shapes one device of the decode mesh has, each alone on one device."""
    model, decode, train = models.target, config.decode, config.train
    heads = mesh.shape["tensor"] if model.num_kv_heads % mesh.shape["tensor"] == 0 else 1
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    requests = decode.requests // shards if decode.requests % shards == 0 else decode.requests
    query, group, size, width = model.num_heads // heads, model.num_kv_heads // heads, model.head_dim, models.drafter.num_drafts + 1
    report = functools.partial(_kernel_report, topology=topology, mesh=mesh, progress=progress or Progress())
    columns, rows = -(-decode.capacity // kv_cache.PAGE), requests * width
    array, whole, row = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32), (rows, group, size)
    packed = 2 * size <= 128
    pages = array((requests * columns, group, kv_cache.PAGE, size * (1 + packed)), models.dtype)
    kv, table = array(row, models.dtype), whole((requests, columns))
    options = {"causal": False, "max_rows": width, "uniform": True, "scale": model.attention_scale, "window": model.sliding_window}
    attention = functools.partial(tree_attention, **options)
    inputs = (array((rows, query, size), models.dtype), kv, kv, pages, None if packed else pages, table, whole((requests + 1,)))
    inputs += (array((rows, 2), jnp.uint32), whole((requests,)), whole((rows,)))
    yield report("tree attention", attention, inputs, pages.size * pages.dtype.itemsize * (2 - packed))

    new = array((*row[:2], pages.shape[3]), models.dtype)
    commit = (pages, new, table, whole((rows,)), whole((rows,)), array((rows,), jnp.bool_))
    yield report("cache commit", cache_commit, commit, 2 * new.size * new.dtype.itemsize, donate=(0,))

    if not isinstance(models.drafter, DrafterConfig):
        return
    draft, block_slots, anchors = models.drafter.transformer, models.drafter.block_size, train.settings.anchors
    group, size, dtype = draft.num_kv_heads, draft.head_dim, jnp.dtype(train.settings.compute_dtype)
    context, block = array((1, train.length, group, size), dtype), array((1, anchors, block_slots, group, size), dtype)
    inputs = (array((1, anchors, block_slots, draft.num_heads, size), dtype), context, context, block, block)
    places = (whole((1, anchors)), array((1, anchors), jnp.bool_), None, None)

    def loss(*arrays):
        return jnp.sum(anchor_attention(*arrays, scale=draft.attention_scale).astype(jnp.float32))

    read = sum(x.size * x.dtype.itemsize for x in inputs)
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    yield report("anchor attention, gradient", gradient, (*inputs, *places), 2 * read)


def _kernel_report(
    name: str, function: Callable, inputs, read: int, donate: tuple[int, ...] = (), *, topology: str, mesh: Mesh, progress: Progress
) -> Report:
    with progress.step(f"{name} for {topology}: compiling"):
        found = aot.compile_kernel(function, *inputs, topology=topology, donate=donate)
    chip, share = _chip(topology, mesh)
    return Report(
        program=name,
        topology=topology,
        mesh="one device",
        layers=1,
        compile_seconds=found.compile_seconds,
        hbm_bytes=found.argument_bytes + found.output_bytes - found.aliased_bytes + found.temporary_bytes,
        hbm_limit=int(chip.memory * share),
        temporary_bytes=found.temporary_bytes,
        vmem_bytes=found.vmem_bytes,
        flops=found.flops,
        bytes_accessed=found.bytes_accessed,
        estimated_seconds=found.estimated_seconds,
        floor_seconds=max(found.flops / (chip.flops * share), read / (chip.bandwidth * share)),
    )


# Decoding ----------------------------------------------------------------------------------------------------------------------------


def compile_decode(shape: DecodeShape, models: Models, topology: str, mesh: Mesh, progress: Progress | None = None) -> Report:
    """One step of a full batch: draft, cut, verify, accept, commit."""
    drafts = models.drafter.num_drafts
    plan = Plan(models.target, models.drafter, budgets=shape.budgets or (0, drafts))
    weights = abstract_weights(models, mesh)
    with jax.set_mesh(mesh):
        state, policy = jax.eval_shape(
            lambda: (generate.create_state(plan, models.dtype, shape.requests, shape.capacity), generate.even_policy(plan))
        )
    state, policy = spread_state(state, mesh), _placed(policy, mesh, lambda x: (None,) * x.ndim)
    outputs = (_shardings(state), None)
    step = jax.jit(speculative_step, static_argnums=0, donate_argnums=3, out_shardings=outputs)
    program = functools.partial(step.lower, plan, weights, policy, state)
    rows = functools.partial(_decode_rows, shape.requests, drafts + 1)
    layers = functools.partial(_layer_cost, models, functools.partial(_row_pass, models, mesh, shape.requests, shape.capacity, rows))
    read = local_bytes((weights, state)) - (0 if models.target.tie_embeddings else local_bytes(weights.target.embed))
    experts = expert_bytes(weights.target)
    return _report("decode step", topology, mesh, models, program, layers, progress or Progress(), read, experts)


def abstract_weights(models: Models, mesh: Mesh) -> Weights:
    """Weights of target and drafter as shapes with their shardings."""
    specs = target_specs(models.target)
    target: TargetParams = params.abstract(specs, models.dtype, meshes.placements(mesh, specs))
    own = registry.module(models.drafter).drafter_specs(models.drafter)
    drafter = params.abstract(own, models.dtype, meshes.placements(mesh, own))
    return Weights(target, drafter, Shared(target.embed, *_head(models, target, mesh)))


def _head(models: Models, target: TargetParams, mesh: Mesh) -> tuple[Any, Any]:
    """Rows of the head that the drafter uses, and their token ids where they are not all of them."""
    head: Any = target.embed if target.lm_head is None else target.lm_head
    if models.draft_vocab is None:
        return head, None
    shape = (models.draft_vocab, head.shape[1])
    rows = jax.ShapeDtypeStruct(shape, head.dtype, sharding=meshes.sharding(mesh, ("vocab", "embed"), shape))
    return rows, jax.ShapeDtypeStruct((models.draft_vocab,), jnp.int32, sharding=meshes.replicated(mesh))


def spread_state(state: DecodeState, mesh: Mesh) -> DecodeState:
    """A decode state's shapes with the shardings that a running state has."""
    return slots.with_axes(lambda leaf, axes: _placed(leaf, mesh, lambda _: axes), state)


def _decode_rows(requests: int, width: int, prefix):
    rows = uniform_rows(prefix, width)
    return rows, jnp.repeat(prefix, width)


# Training ----------------------------------------------------------------------------------------------------------------------------


def compile_train(shape: TrainShape, models: Models, topology: str, mesh: Mesh, progress: Progress | None = None) -> Report:
    """One step: the frozen target's features, anchors, loss, gradient and update."""
    settings = dataclasses.replace(shape.settings, batch_size=shape.batch_size)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if shape.batch_size % shards:
        raise ValueError(f"train.batch_size {shape.batch_size} must be a multiple of the {shards} data x fsdp shards on {topology}")
    if meshes.sequence_parts(mesh) > 1:
        prepare.check_parts(meshes.sequence_parts(mesh), models.drafter.family, shape.length, settings)
    specs = registry.module(models.drafter).drafter_specs(models.drafter)
    optimizer, _ = make_optimizer(settings, specs)
    train, _ = training.build(settings, models.drafter, models.target, optimizer)
    weights = abstract_weights(models, mesh)
    state = abstract_state(specs, optimizer, mesh)
    shared: Any = weights.shared
    index: Any = None
    if shared.draft_ids is not None:
        index = jax.ShapeDtypeStruct((models.target.vocab_size,), jnp.int32, sharding=meshes.replicated(mesh))
    frozen = training.Frozen(weights.target, shared.embed, shared.head, index, shared.draft_ids)
    tokens = (shape.batch_size, shape.length)
    batch = {"tokens": tokens, "loss_mask": tokens, "lengths": tokens[:1]}
    batch = {name: jax.ShapeDtypeStruct(size, jnp.int32) for name, size in batch.items()}
    batch = _placed(batch, mesh, lambda x: ("batch", *[None] * (x.ndim - 1)))
    program = functools.partial(train.lower, state, frozen, batch, 0)
    rows = functools.partial(_train_rows, shape.length)
    once = shape.batch_size // settings.accumulate  # the loop over the parts of a batch counts once, so its layers do
    passed = functools.partial(_row_pass, models, mesh, once, 1, rows)
    if meshes.sequence_parts(mesh) > 1:
        passed = functools.partial(_whole_pass, models, mesh, once, shape.length)
    layers = functools.partial(_layer_cost, models, passed)
    read, experts = local_bytes((state, frozen)), expert_bytes(weights.target)
    return _report("training step", topology, mesh, models, program, layers, progress or Progress(), read, experts)


def abstract_state(specs, optimizer: optax.GradientTransformation, mesh: Mesh) -> training.TrainState:
    """The state of a drafter's training as shapes with their shardings."""
    masters: Any = params.abstract(specs, jnp.float32, meshes.shardings(mesh, specs))
    own = {x.shape: x.sharding for x in jax.tree.leaves(masters)}
    state = jax.eval_shape(lambda masters: training.create_state(masters, optimizer, jax.random.key(0)), masters)
    # Moments follow their parameters: arrays of a parameter's shape are placed like it.
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own.get(x.shape, meshes.replicated(mesh))), state)


def _train_rows(length: int, prefix):
    requests = prefix.shape[0]
    return uniform_rows(prefix, length, causal=True), jnp.tile(jnp.arange(length, dtype=jnp.int32), requests)


# What the compiler says --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    flops: float
    bytes: float
    seconds: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def times(self, factor: float) -> "Cost":
        return Cost(self.flops * factor, self.bytes * factor, self.seconds * factor)


def _report(
    name: str,
    topology: str,
    mesh: Mesh,
    models: Models,
    program: Callable,
    layers: Callable[[], Cost],
    progress: Progress,
    read: int,
    experts: int,
) -> Report:
    chip, share = _chip(topology, mesh)
    limit, count = int(chip.memory * share), models.target.num_layers
    if read > limit:
        raise RuntimeError(_too_large(name, topology, read, limit))
    named = f"{name} of {count} layers for {topology}"
    try:
        with jax.set_mesh(mesh):
            with progress.step(f"{named}: tracing"):
                lowered = program()
            start = time.perf_counter()
            with progress.step(f"{named}: compiling"):
                compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RuntimeError(_too_large(name, topology, None, limit, _first_line(error))) from None
    found: Any = compiled.memory_analysis()
    report = Report(
        program=name,
        topology=topology,
        mesh="x".join(str(size) for size in mesh.shape.values()),
        layers=count,
        compile_seconds=time.perf_counter() - start,
        hbm_bytes=found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes,
        hbm_limit=limit,
        temporary_bytes=found.temp_size_in_bytes,
        vmem_bytes=aot.kernel_memory(compiled.as_text()),
        flops=0.0,
        bytes_accessed=0.0,
        estimated_seconds=0.0,
        floor_seconds=0.0,
    )
    progress.say(f"{named}: {_needs(report)}")
    cost = _cost(compiled)
    del compiled, lowered
    with progress.step(f"{named}: compiling single layers, for the cost of the others"):
        cost += layers()
    # A grouped product reads its layer's experts out of the stack of all (`target.moe`), which the whole program counts at full length: no
    # more is to be multiplied. The compiler has no seconds for it.
    cost += Cost(0.0, -experts * _multiplied(models.target, True) / max(_sparse(models.target), 1), experts / (chip.bandwidth * share))
    floor = max(cost.flops / (chip.flops * share), read / (chip.bandwidth * share))
    return dataclasses.replace(
        report, flops=cost.flops, bytes_accessed=cost.bytes, estimated_seconds=cost.seconds, floor_seconds=floor
    )


def _needs(report: Report) -> str:
    temporary, kernel = report.temporary_bytes / 2**20, report.vmem_bytes / 2**20
    memory = f"{report.hbm_bytes / GIB:.2f} of {report.hbm_limit / GIB:.1f} GiB HBM, {temporary:.0f} MiB of it temporary"
    return f"compiled in {report.compile_seconds:.0f} s, needs {memory}, and {kernel:.1f} MiB VMEM for its largest kernel"


def _chip(topology: str, mesh: Mesh) -> tuple[Chip, float]:
    """Figures of a slice's chips, and which share of one a device has: some generations show the two cores of a chip as two devices."""
    kind, _, shape = topology.partition(":")
    return CHIPS[kind], math.prod(int(size) for size in shape.split("x")) / mesh.size


def _layer_cost(models: Models, passed: Callable) -> Cost:
    """What the scanned layers cost beyond the one of each stack that the whole program counts: the difference of two layers and one.

    `passed(config)` lowers the target's pass over what the program has it read.
    """
    total = Cost(0.0, 0.0, 0.0)
    for sparse in (False, True):
        more = _multiplied(models.target, sparse)
        if more:
            one, two = (_forward_cost(models, passed, sparse, count) for count in (1, 2))
            total = total + (two + one.times(-1.0)).times(more)
    return total


def _multiplied(config: TransformerConfig, sparse: bool) -> int:
    """Layers of a kind beyond the first of each stack."""
    indices = [index for index in range(config.num_layers) if config.is_sparse(index) == sparse]
    return sum(1 for index in indices if index - 1 in indices)


def _sparse(config: TransformerConfig) -> int:
    return sum(map(config.is_sparse, range(config.num_layers)))


def _forward_cost(models: Models, passed: Callable, sparse: bool, count: int) -> Cost:
    """The target's pass with a few unrolled layers of one kind."""
    moe = None if not sparse or models.target.moe is None else dataclasses.replace(models.target.moe, dense_layers=())
    config = dataclasses.replace(models.target, num_layers=count, scan_layers=False, moe=moe)
    return _cost(passed(config).compile())


def _row_pass(models: Models, mesh: Mesh, requests: int, capacity: int, rows: Callable, config: TransformerConfig):
    """Packed rows against a cache."""
    specs = target_specs(config)
    weights = params.abstract(specs, models.dtype, meshes.placements(mesh, specs))

    def run(weights, prefix, cache):
        own, positions = rows(prefix)
        return forward(weights, config, jnp.zeros_like(positions), positions, own, cache, (0,))

    prefix = jax.ShapeDtypeStruct((requests,), jnp.int32, sharding=meshes.sharding(mesh, ("batch",), (requests,)))
    with jax.set_mesh(mesh):
        cache = jax.eval_shape(lambda: kv_cache.create(config, requests, capacity, models.dtype))
        cache = _placed(cache, mesh, lambda page: ("batch", "kv_heads", None, None))
        return jax.jit(run).lower(weights, prefix, cache)


def _whole_pass(models: Models, mesh: Mesh, sequences: int, length: int, config: TransformerConfig):
    """Whole sequences whose tokens lie over the mesh."""
    specs = target_specs(config)
    weights = params.abstract(specs, models.dtype, meshes.placements(mesh, specs))
    tokens = jax.ShapeDtypeStruct((sequences, length), jnp.int32, sharding=meshes.sharding(mesh, ("batch", None), (sequences, length)))
    with jax.set_mesh(mesh):
        return jax.jit(lambda weights, tokens: whole.forward(weights, config, tokens, (0,))).lower(weights, tokens)


def _cost(compiled) -> Cost:
    found = compiled.cost_analysis() or {}
    seconds = found.get("optimal_seconds", 0.0)
    # An operation without an estimate, such as a collective, counts -1 s.
    seconds = seconds if seconds >= 0 else seconds + math.ceil(-seconds)
    return Cost(found.get("flops", 0.0), found.get("bytes accessed", 0.0), seconds)


def expert_bytes(target: TargetParams) -> int:
    """Bytes that one device holds of all experts of a scanned target."""
    stacks = target.layers.stacks if isinstance(target.layers, Runs) else (target.layers,)
    return sum(local_bytes((stack.moe.gate_up, stack.moe.down)) for stack in stacks if stack.moe is not None)  # pyright: ignore


def local_bytes(tree) -> int:
    """Bytes that one device holds of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x.dtype) for x in jax.tree.leaves(tree))


def _itemsize(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize


def _placed(tree, mesh: Mesh, axes: Callable):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=meshes.sharding(mesh, axes(x), x.shape)), tree)


def _shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def _too_large(name: str, topology: str, needed: int | None, limit: int, said: str = "") -> str:
    size = f"{needed / GIB:.1f} GiB of weights and state a device" if needed is not None else said
    room = f"{topology}, which has {limit / GIB:.1f} GiB a device"
    return f"the {name} does not fit {room}: {size}; take a larger slice, or fewer requests, sequences or tokens"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


COLUMNS = {
    "compile\nseconds": lambda r: f"{r.compile_seconds:.0f}",
    "HBM\nGiB": lambda r: f"{r.hbm_bytes / GIB:.2f}",
    "of": lambda r: f"{r.hbm_limit / GIB:.1f}",
    "temporary\nMiB": lambda r: f"{r.temporary_bytes / 2**20:.0f}",
    "VMEM\nMiB": lambda r: f"{r.vmem_bytes / 2**20:.1f}",
    "GFLOP": lambda r: f"{r.flops / 1e9:.1f}",
    "GB": lambda r: f"{r.bytes_accessed / 1e9:.2f}",
    "estimate\nms": lambda r: f"{r.estimated_seconds * 1e3:.2f}",
    "floor\nms": lambda r: f"{r.floor_seconds * 1e3:.2f}",
    "ratio": lambda r: f"{r.ratio:.1f}",
}


def table(found: list[Report]) -> Table:
    """One row a program, for one device each."""
    result = Table(title="for one device", title_justify="left", caption=LEGEND, caption_justify="left")
    result.add_column("program")
    for name in COLUMNS:
        result.add_column(name, justify="right")
    for report in found:
        named = f"{report.program}\n{report.topology}, mesh {report.mesh}, {report.layers} layers"
        result.add_row(named, *(show(report) for show in COLUMNS.values()))
    return result


LEGEND = (
    "HBM, temporaries and VMEM (of the largest kernel) as the compiler allocates them. GFLOP, GB and estimate by the compiler: layers "
    "multiplied, other loops counted once, no collectives. Floor: peak flops, or one reading of weights and caches, by public figures. "
    "Compile time on this machine. Nothing here is a run time."
)


def load(name: str, overrides: list[str]) -> CompileConfig:
    """A compile config by file or packaged name, with overrides."""
    return configs.load(name, overrides, CompileConfig)
