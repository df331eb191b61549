"""A target from disk: checked before anything is allocated, then read straight to its sharding (reading.py)."""

import dataclasses
import hashlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax import mesh as meshes
from angelspec_jax import places
from angelspec_jax import tokenizer as tokenizers
from angelspec_jax.params import is_param
from angelspec_jax.target import gguf, hf, layout, reading
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.gguf import GgufFile
from angelspec_jax.target.safetensors_io import Checkpoint
from angelspec_jax.target.torch_io import PickledCheckpoint
from angelspec_jax.target.transformer import TargetParams, target_specs
from angelspec_jax.tokenizer import Tokenizer

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded language model and everything needed to talk to it."""

    params: TargetParams
    config: TransformerConfig
    tokenizer: Tokenizer | None  # None only where load_target was told that token ids suffice
    chat_template: str | None
    eos_ids: tuple[int, ...]
    name: str
    source: Path
    fingerprint: str  # of configuration, tensor headers and the first bytes of every tensor: 16 hexadecimal digits
    bytes_read: int = 0  # of the weights, by this process

    @property
    def identity(self) -> str:
        """The fingerprint, and how the weights were rounded: what the model says depends on both."""
        return self.fingerprint if self.config.quantize is None else f"{self.fingerprint}-{self.config.quantize}"


@dataclasses.dataclass(frozen=True)
class Description:
    """What a source holds, known before any weight is read."""

    path: Path
    tensors: Checkpoint | PickledCheckpoint | GgufFile
    config: TransformerConfig
    prefix: str
    tokenizer: Tokenizer | None
    chat_template: str | None
    eos_ids: tuple[int, ...]
    name: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Requirement:
    """Memory the parameters take, against what is there (None: the device does not say)."""

    total: int  # bytes, all devices together
    per_device: int
    devices: int
    local_need: int  # bytes in the memory that `available` counts
    available: int | None
    place: str
    dtype: np.dtype
    quantize: str | None = None

    @property
    def kind(self) -> str:
        return f"{self.dtype}" if self.quantize is None else f"{self.quantize} and {self.dtype}"

    @property
    def fits(self) -> bool:
        return self.available is None or self.local_need <= self.available

    def __str__(self) -> str:
        shared = f" ({self.per_device / GIB:.2f} GiB on each of {self.devices} devices)" if self.devices > 1 else ""
        need = f"the parameters take {self.total / GIB:.2f} GiB in {self.kind}{shared}"
        if self.available is None:
            return f"{need}; {self.place} does not report its memory"
        verdict = "which fits" if self.fits else "which does not fit"
        return f"{need}, {verdict} the {self.available / GIB:.2f} GiB free in {self.place}"


def load_target(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype=None,
    mesh: jax.sharding.Mesh | None = None,
    rules=None,
    scan_layers: bool | None = None,
    need_tokenizer: bool = True,
    quantize: str | None = None,
) -> Target:
    """Load a target from a Hugging Face directory or a GGUF file: a path, a hub id (at `revision`) or a `gs://` address.

    `dtype` defaults to the file's on accelerators and to float32 on CPU; `scan_layers` to True on accelerators and False on CPU.
    `quantize="int8"` keeps the layers' matrices in 8 bits (embedding, head and norms stay as they are), which changes the model a little:
    decoding is exact for the model that is then loaded. With a `mesh` every process reads what its devices hold straight from the file;
    without one everything goes to the default device. `need_tokenizer=False` accepts a checkpoint without a tokenizer, for work on token
    ids. Raises FileNotFoundError or ValueError with one sentence before any large allocation when the source is missing, damaged,
    inconsistent or too large.
    """
    described = describe(source, revision)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    dtype = np.dtype(jnp.dtype(dtype)) if dtype is not None else np.dtype(np.float32) if on_cpu else described.dtype
    scan_layers = (not on_cpu) if scan_layers is None else scan_layers
    config = dataclasses.replace(described.config, scan_layers=scan_layers, quantize=quantize)
    if config.moe is not None:
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, mesh=mesh))
    if described.tokenizer is None and need_tokenizer:
        raise ValueError(
            f"{source} has no tokenizer.json; add the model's (transformers' AutoTokenizer writes it with save_pretrained), "
            "or pass need_tokenizer=False to work on token ids"
        )
    if described.tokenizer is not None:
        tokenizers.check_vocabulary(described.tokenizer, config.vocab_size, source)
    leaves = layout.target_leaves(config, described.prefix)
    layout.check(described.tensors, leaves)
    needs = requirement(config, dtype, mesh, rules)
    if not needs.fits:
        smaller = "a smaller dtype" if quantize else "a smaller dtype, quantize='int8'"
        raise ValueError(f"{source} cannot be loaded here: {needs}; use {smaller}, more devices or a smaller model")
    return Target(
        params=reading.read_params(described.tensors, config, leaves, dtype, mesh, rules),
        config=config,
        tokenizer=described.tokenizer,
        chat_template=described.chat_template,
        eos_ids=described.eos_ids,
        name=described.name,
        source=described.path,
        fingerprint=fingerprint(described.tensors, config, leaves),
        bytes_read=described.tensors.meter.bytes,
    )


def describe(source: str | Path, revision: str | None = None) -> Description:
    """Read configuration, tokenizer and tensor headers of a source, no weights."""
    path = places.resolve(source, revision)
    name = places.name(source, path)
    if not path.exists():
        raise FileNotFoundError(f"{source} does not exist; give a Hugging Face model directory or a GGUF file")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            found = f"{len(files)} GGUF files" if files else "neither a config.json nor a GGUF file"
            raise FileNotFoundError(f"{source} holds {found}; give a Hugging Face model directory or one GGUF file")
        path = files[0]
    return _describe_directory(path, name) if path.is_dir() else _describe_gguf(path)


def requirement(config: TransformerConfig, dtype, mesh: jax.sharding.Mesh | None = None, rules=None) -> Requirement:
    """What the parameters need and whether it fits: print it before loading."""
    dtype = np.dtype(jnp.dtype(dtype))
    total = per_device = 0
    for spec in jax.tree.leaves(target_specs(config), is_leaf=is_param):
        size = np.dtype(spec.dtype or dtype).itemsize
        shard = spec.shape if mesh is None else meshes.sharding(mesh, spec.axes, spec.shape, rules).shard_shape(spec.shape)
        total += math.prod(spec.shape) * size
        per_device += math.prod(shard) * size
    here = [jax.devices()[0]] if mesh is None else list(mesh.local_devices)
    devices = 1 if mesh is None else mesh.devices.size
    if here[0].platform == "cpu":
        need, place = per_device * len(here), "this machine's memory"
        return Requirement(total, per_device, devices, need, _host_memory(), place, dtype, config.quantize)
    available = _device_memory(here[0])
    return Requirement(total, per_device, devices, per_device, available, f"each {here[0].device_kind}", dtype, config.quantize)


def fingerprint(tensors: layout.TensorSource, config: TransformerConfig, leaves) -> str:
    """A cheap, stable checksum of a target: the same for any dtype, sharding or layer stacking it is loaded with."""
    digest = hashlib.sha256()
    # Fields at their default are left out, so a field added later does not change old fingerprints.
    plain = config.plain()
    for field in dataclasses.fields(plain):
        value = getattr(plain, field.name)
        if value != field.default:
            digest.update(f"{field.name}={value!r};".encode())
    names = {name for leaf in jax.tree.leaves(leaves, is_leaf=layout.is_leaf) for name, _ in leaf.tensors}
    for name in sorted(names):
        digest.update(f"{name}{tensors.shape(name)}".encode() + tensors.sample(name, 256))
    return digest.hexdigest()[:16]


def _describe_gguf(path: Path) -> Description:
    file = gguf.open_gguf(path)
    return Description(
        path=path,
        tensors=file,
        config=gguf.read_config(file.metadata, file.tensors, path),
        prefix="model.",
        tokenizer=tokenizers.from_gguf(file.metadata, path),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        eos_ids=gguf.eos_ids(file.metadata, path),
        name=path.stem,
        dtype=np.dtype(jnp.bfloat16),  # dequantized weights have no dtype of their own
    )


def _describe_directory(path: Path, name: str) -> Description:
    config, eos = hf.read_config(path)
    tensors = hf.open_tensors(path)
    layout.check_counts(config, len(tensors.names()), path)
    prefix = hf.name_prefix(tensors)
    embedding = f"{prefix}embed_tokens.weight"
    return Description(
        path=path,
        tensors=tensors,
        config=config,
        prefix=prefix,
        tokenizer=tokenizers.from_directory(path),
        chat_template=hf.read_chat_template(path),
        eos_ids=eos,
        name=name,
        dtype=tensors.dtype(embedding) if embedding in tensors.names() else np.dtype(np.float32),
    )


def _host_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(free[0]) * 1024 if free else None


def _device_memory(device) -> int | None:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
