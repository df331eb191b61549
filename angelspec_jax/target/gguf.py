"""GGUF files (llama.cpp): header, dequantized tensors under their Hugging Face names, and the configuration they imply.

The header is parsed here, every count checked against the file before anything is allocated; the `gguf` package dequantizes.
"""

import dataclasses
import itertools
import math
import mmap
import struct
from pathlib import Path

import numpy as np

from angelspec_jax.target.config import Rope, TransformerConfig
from angelspec_jax.target.layout import Meter, Window, check_depth

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# llama.cpp's names, in terms of the Hugging Face names that layout.py asks for.
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]  # rows first, as Hugging Face has it
    quantization: int  # ggml's type number
    start: int  # in the file
    stop: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A parsed file: `metadata` by key, `tensors` by llama.cpp name. Implements `layout.TensorSource` under Hugging Face names."""

    path: Path
    metadata: dict
    tensors: dict[str, TensorInfo]
    renamed: dict[str, str]  # Hugging Face name -> llama.cpp name
    interleaved: dict[str, int]  # Hugging Face names whose rows llama.cpp interleaved for its rope -> head size
    meter: Meter = dataclasses.field(default_factory=Meter, compare=False)

    def names(self) -> list[str]:
        return list(self.renamed)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[self.renamed[name]].shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32)

    def sample(self, name: str, size: int) -> bytes:
        info = self.tensors[self.renamed[name]]
        with self.path.open("rb") as file:
            file.seek(info.start)
            return file.read(min(size, info.stop - info.start))

    def read(self, name: str, window: Window) -> np.ndarray:
        """A window of a tensor in float32; only its rows are dequantized."""
        head = self.interleaved.get(name)
        if head is None:
            return self._rows(name, window[0])[(slice(None), *window[1:])]
        # llama.cpp stores row 2j + s of a head where Hugging Face has row s * E/2 + j (s the half, j the frequency).
        whole = slice(window[0].start // head * head, -(-window[0].stop // head) * head)
        rows = self._rows(name, whole)
        rows = rows.reshape(-1, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return rows[(slice(window[0].start - whole.start, window[0].stop - whole.start), *window[1:])]

    def _rows(self, name: str, rows: slice) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        info = self.tensors[self.renamed[name]]
        count, width = (info.shape[0], info.shape[1:]) if len(info.shape) > 1 else (1, info.shape)
        row_bytes = (info.stop - info.start) // count
        if len(info.shape) == 1:
            rows, inner = slice(0, 1), rows
        else:
            inner = slice(None)
        raw = np.memmap(self.path, np.uint8, "r", info.start + rows.start * row_bytes, (rows.stop - rows.start, row_bytes))
        self.meter.add(raw.size)
        kind = GGMLQuantizationType(info.quantization)
        plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}.get(kind)
        if plain is not None:
            values = np.asarray(raw).view(plain).astype(np.float32)
        else:
            try:
                values = quants.dequantize(np.asarray(raw), kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: tensor {self.renamed[name]} is quantized as {kind.name}, which the gguf package cannot dequantize; "
                    "use a file in Q4_0, Q4_1, Q8_0, a K-quant, F16 or F32"
                ) from None
        return values.reshape(-1)[inner] if len(info.shape) == 1 else values.reshape(-1, *width)


def open_gguf(path: str | Path) -> GgufFile:
    """Parse a GGUF file's header. Raises ValueError with one sentence when it is corrupt, truncated or of an unknown architecture."""
    path = Path(path)
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path} is {size} bytes long, too short for a GGUF file; it was probably not downloaded completely")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            metadata, infos = _parse(_Cursor(data, path), path, size)
        except (UnicodeDecodeError, struct.error) as error:
            raise ValueError(f"{path} is not a readable GGUF file: {error}; download it again") from None
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"{path} holds a model of architecture {architecture!r}; supported GGUF architectures are {supported}")
    renamed = {ours: theirs for ours, theirs in OUTER_NAMES.items() if theirs in infos}
    layers = _integer(metadata, f"{architecture}.block_count", path)
    check_depth(layers, len(infos), path)
    for layer in range(layers):
        for ours, theirs in LAYER_NAMES.items():
            if f"blk.{layer}.{theirs}" in infos:
                renamed[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    config = read_config(metadata, infos, path)
    rotated = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias") if architecture == "llama" else ()
    interleaved = {name: config.head_dim for name in renamed if name.endswith(rotated)} if rotated else {}
    for name in interleaved:
        if infos[renamed[name]].shape[0] % config.head_dim:
            raise ValueError(f"{path}: {renamed[name]} does not consist of whole heads of {config.head_dim} rows; the file is inconsistent")
    return GgufFile(path, metadata, infos, renamed, interleaved)


def read_config(metadata: dict, tensors: dict[str, TensorInfo], path: Path) -> TransformerConfig:
    """The architecture that a GGUF file's metadata describes."""
    kind = metadata["general.architecture"]
    heads = _integer(metadata, f"{kind}.attention.head_count", path)
    hidden = _integer(metadata, f"{kind}.embedding_length", path)
    head_dim = _integer(metadata, f"{kind}.attention.key_length", path, hidden // max(heads, 1))
    if _integer(metadata, f"{kind}.attention.value_length", path, head_dim) != head_dim:
        raise ValueError(f"{path}: keys and values have different head sizes, which is not supported")
    if _integer(metadata, f"{kind}.rope.dimension_count", path, head_dim) != head_dim:
        raise ValueError(f"{path}: only a part of each head is rotated ({kind}.rope.dimension_count), which is not supported")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} has no tensor token_embd.weight; the file is incomplete")
    epsilon = _number(metadata, f"{kind}.attention.layer_norm_rms_epsilon", path, 1e-6)
    return TransformerConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_integer(metadata, f"{kind}.feed_forward_length", path),
        num_layers=_integer(metadata, f"{kind}.block_count", path),
        num_heads=heads,
        num_kv_heads=_integer(metadata, f"{kind}.attention.head_count_kv", path, heads),
        head_dim=head_dim,
        rope=_rope(metadata, tensors, kind, head_dim, path),
        rms_norm_eps=float(f"{epsilon:.7g}"),  # stored in float32: 9.9999997e-06 means 1e-5
        qk_norm="before_rope" if kind == "qwen3" else None,
        attention_bias=kind == "qwen2",
        tie_embeddings="output.weight" not in tensors,
        max_positions=_integer(metadata, f"{kind}.context_length", path, 2048),
    )


def eos_ids(metadata: dict, path: Path) -> tuple[int, ...]:
    """Every token that ends a sequence or a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(_integer(metadata, key, path) for key in keys if key in metadata))


def _integer(metadata: dict, key: str, path: Path, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        what = "no" if value is None else "an unusable"
        raise ValueError(f"{path} has {what} metadata value {key}; the file is incomplete or of a form that is not supported")
    return value


def _number(metadata: dict, key: str, path: Path, default: float) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: the metadata value {key} should be a positive number, not {str(value)[:80]}; the file is corrupt")
    return float(value)


def _rope(metadata: dict, tensors: dict[str, TensorInfo], kind: str, head_dim: int, path: Path) -> Rope:
    theta = _number(metadata, f"{kind}.rope.freq_base", path, 10000.0)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        return Rope(theta, "linear", _number(metadata, f"{kind}.rope.scaling.factor", path, 1.0))
    if scaling != "none":
        raise ValueError(f"{path}: rope scaling {scaling!r} is not supported; supported are none, linear and llama3")
    if "rope_freqs.weight" not in tensors:
        return Rope(theta)
    # Llama 3.1 and later: the file holds only the divisors of each frequency. Their published parameters differ in the factor alone,
    # which is the largest divisor; the others are checked against the tensor.
    info = tensors["rope_freqs.weight"]
    if info.shape != (head_dim // 2,) or info.stop - info.start != 4 * (head_dim // 2):
        raise ValueError(f"{path}: rope_freqs.weight should hold {head_dim // 2} float32 values, it has shape {list(info.shape)}")
    divisors = np.fromfile(path, "<f4", head_dim // 2, offset=info.start)
    rope = Rope(theta, "llama3", float(divisors.max()), 1.0, 4.0, 8192)
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((rope.original_max_positions * frequency / (2 * math.pi) - 1.0) / 3.0, 0.0, 1.0)
    if not np.allclose(1.0 / ((1 - blend) / rope.factor + blend), divisors, rtol=1e-3):
        raise ValueError(f"{path}: rope_freqs.weight is not the llama3 scaling of 8192 positions; load the Hugging Face checkpoint instead")
    return rope


class _Cursor:
    """Reads forward through the header and refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.position = data, path, 0

    def take(self, size: int) -> int:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ValueError(f"{self.path} ends inside its header (or the header is corrupt); download it again")
        return start

    def number(self, form: str):
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        size = self.number("<Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8")

    def value(self, kind: int):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.number("<I"), self.number("<Q")
            if item == STRING:
                if count * 8 > len(self.data) - self.position:
                    self.take(count * 8)
                return [self.string() for _ in range(count)]
            dtype = self._scalar(item)
            start = self.take(count * dtype.itemsize)
            return np.frombuffer(self.data[start : self.position], dtype).tolist()
        dtype = self._scalar(kind)
        start = self.take(dtype.itemsize)
        return np.frombuffer(self.data[start : self.position], dtype)[0].item()

    def _scalar(self, kind: int) -> np.dtype:
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: metadata of unknown type {kind}; the header is corrupt or nests arrays, which is not supported")
        return np.dtype(SCALARS[kind])


def _parse(cursor: _Cursor, path: Path, size: int) -> tuple[dict, dict[str, TensorInfo]]:
    start = cursor.take(4)
    if cursor.data[start : start + 4] != MAGIC:
        raise ValueError(f"{path} is not a GGUF file (it does not start with 'GGUF')")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version} is not supported (only little-endian versions 2 and 3 are)")
    tensor_count, entries = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    declared = []
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.number("<I")
        if dimensions > 4:
            raise ValueError(f"{path}: tensor {name!r} claims {dimensions} dimensions; the header is corrupt")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))
        declared.append((name, shape[::-1], cursor.number("<I"), cursor.number("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}, not a power of two; the header is corrupt")
    base = -(-cursor.position // alignment) * alignment
    return metadata, _locate(declared, base, size, path)


def _locate(declared: list, base: int, size: int, path: Path) -> dict[str, TensorInfo]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind) for kind in GGMLQuantizationType}
    infos: dict[str, TensorInfo] = {}
    for name, shape, quantization, offset in declared:
        if quantization not in known:
            raise ValueError(f"{path}: tensor {name!r} has unknown type {quantization}; update the gguf package or use another file")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantization)]
        elements = math.prod(shape)
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"{path}: tensor {name!r} cannot have shape {list(shape)} in blocks of {block}; the header is corrupt")
        start = base + offset
        stop = start + elements // block * block_bytes
        if stop > size:
            raise ValueError(
                f"{path}: tensor {name!r} of shape {list(shape)} would end at byte {stop} of a file of {size}; it is truncated or corrupt"
            )
        if name in infos:
            raise ValueError(f"{path}: tensor {name!r} occurs twice; the header is corrupt")
        infos[name] = TensorInfo(shape, quantization, start, stop)
    ordered = sorted(infos.items(), key=lambda item: item[1].start)
    for (first, before), (second, after) in itertools.pairwise(ordered):
        if after.start < before.stop:
            raise ValueError(f"{path}: tensors {first!r} and {second!r} overlap; the header is corrupt")
    return infos
