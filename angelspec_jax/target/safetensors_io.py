"""safetensors files read by byte range: the header is checked against the file before anything is allocated.

Format: an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the tensors' bytes, row-major.
"""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from angelspec_jax.target.layout import Meter, Window

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes
SHORT = 1024  # bytes: shorter stretches are not read one by one, what lies between them is read along
SPAN = 1 << 23  # bytes read along at a time


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: where its bytes are."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The tensors of one file or of a sharded set. Implements `layout.TensorSource`; keeps no file open."""

    path: Path
    entries: dict[str, Entry]
    meter: Meter = dataclasses.field(default_factory=Meter, compare=False)

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._entry(name).dtype

    def read(self, name: str, window: Window | None = None) -> np.ndarray:
        """A window of a tensor (all of it by default) as a fresh array. Only the bytes it needs are read, or those of its rows if few."""
        entry = self._entry(name)
        window = (slice(None),) * len(entry.shape) if window is None else window
        spans = [slice(*part.indices(size)[:2]) for part, size in zip(window, entry.shape, strict=True)]
        out = np.empty([max(span.stop - span.start, 0) for span in spans], entry.dtype)
        if out.size:
            descriptor = os.open(entry.file, os.O_RDONLY)
            try:
                _read_window(descriptor, entry, spans, out, self.meter)
            finally:
                os.close(descriptor)
        return out

    def sample(self, name: str, size: int) -> bytes:
        """The first bytes of a tensor."""
        entry = self._entry(name)
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            return file.read(min(size, entry.stop - entry.start))

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self.entries[name]


def _read_window(descriptor: int, entry: Entry, spans: list[slice], out: np.ndarray, meter: Meter) -> None:
    """Fill `out` with the window `spans` of a tensor, one stretch of consecutive bytes at a time."""
    shape = entry.shape
    split = max((axis for axis, span in enumerate(spans) if span != slice(0, shape[axis])), default=0)  # axes behind it are whole
    inner = math.prod(shape[split + 1 :]) * entry.dtype.itemsize
    run, first = (spans[split].stop - spans[split].start) * inner if shape else inner, spans[split].start * inner if shape else 0
    stride = shape[split] * inner if shape else inner
    rows = _row_starts(shape, spans, split, stride)
    target = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    together = max(SPAN // stride, 1) if run < SHORT else 1
    for begin in range(0, len(rows), together):
        group = rows[begin : begin + together]
        here = target[begin * run : (begin + len(group)) * run]
        length = group[-1] - group[0] + run
        if len(group) == 1 or length > SPAN + run:  # rows of different blocks may lie far apart
            for index, row in enumerate(group):
                _fill(descriptor, here[index * run : (index + 1) * run], entry.start + row + first, entry.file, meter)
            continue
        along = memoryview(bytearray(length))
        _fill(descriptor, along, entry.start + group[0] + first, entry.file, meter)
        for index, row in enumerate(group):
            here[index * run : (index + 1) * run] = along[row - group[0] : row - group[0] + run]


def _row_starts(shape: tuple[int, ...], spans: list[slice], split: int, stride: int) -> list[int]:
    """Byte offset of every row of the axes before `split` that the window has."""
    starts = [0]
    for axis in range(split):
        starts = [start * shape[axis] + index for start in starts for index in range(spans[axis].start, spans[axis].stop)]
    return [start * stride for start in starts]


def _fill(descriptor: int, target: memoryview, offset: int, file: Path, meter: Meter) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{file} ended at byte {offset + done} while it was read; it is being rewritten or was cut short")
        done += count
    meter.add(done)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .safetensors file, an index file, or a directory holding model.safetensors or model.safetensors.index.json."""
    path = Path(path)
    if path.is_dir():
        single, index = path / "model.safetensors", path / "model.safetensors.index.json"
        if single.exists():
            return Checkpoint(path, read_header(single))
        if index.exists():
            return _open_index(index)
        raise FileNotFoundError(f"{path} holds neither model.safetensors nor model.safetensors.index.json; save its weights as safetensors")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return _open_index(path) if path.suffix == ".json" else Checkpoint(path, read_header(path))


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file. Raises ValueError with one sentence when the header and the file do not agree."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} has {size} bytes but its header would take {length + 8}; it is truncated or no safetensors file")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes, more than the {LONGEST_HEADER} the format allows; it is corrupt")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a header that is not valid JSON ({error}); it is corrupt or no safetensors file") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is not a JSON object; it is corrupt")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}
    ordered = sorted((entry.start, entry.stop, name) for name, entry in entries.items() if entry.stop > entry.start)
    for (_, stop, first), (start, _, second) in itertools.pairwise(ordered):
        if start < stop:
            raise ValueError(f"{path}: the byte ranges of tensors {first} and {second} overlap; the file is corrupt")
    return entries


def _entry(path: Path, name: str, fields, base: int, size: int) -> Entry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError(f"{path}: tensor {name} lacks dtype, shape or data_offsets; the header is corrupt")
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{path}: tensor {name} has unknown dtype {kind!r}; known are {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > 32:
        raise ValueError(f"{path}: tensor {name} has an impossible shape {str(shape)[:80]}; the header is corrupt")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: tensor {name} has impossible data_offsets {str(offsets)[:80]}; the header is corrupt")
    dtype = np.dtype(DTYPES[kind])
    expected, given = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != given:
        raise ValueError(
            f"{path}: tensor {name} of shape {shape} in {kind} takes {expected} bytes, but its data_offsets span {given}; it is corrupt"
        )
    if base + offsets[1] > size:
        raise ValueError(f"{path} is truncated: tensor {name} ends at byte {base + offsets[1]}, the file at {size}; download it again")
    return Entry(path, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def read_index(index: Path) -> dict[str, str]:
    """The file of every tensor of a sharded checkpoint; all of them lie beside the index, which may name nothing else."""
    try:
        mapping = json.loads(index.read_text("utf-8"))["weight_map"]
        named = isinstance(mapping, dict) and all(isinstance(file, str) for file in mapping.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not a readable index of shards: {error!r}") from None
    if not named or not mapping:
        raise ValueError(f"{index}: weight_map should name the file of every tensor")
    for file in sorted(set(mapping.values())):
        # Shards lie beside their index. Anything else would read files the checkpoint does not own.
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file or ":" in file:
            raise ValueError(f"{index} names {file!r}, which is not a plain file name in its own directory; refused")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index} names {file}, which is not there; the checkpoint is incomplete, download it again")
    return mapping


def _open_index(index: Path) -> Checkpoint:
    mapping = read_index(index)
    headers = {file: read_header(index.parent / file) for file in sorted(set(mapping.values()))}
    entries = {}
    for name, file in mapping.items():
        if name not in headers[file]:
            raise ValueError(f"{index} says tensor {name} is in {file}, but that file does not hold it")
        entries[name] = headers[file][name]
    return Checkpoint(index.parent, entries)


def _counts(values) -> bool:
    """A JSON list of non-negative integers small enough for a file offset."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key occurs twice")
    return keys
