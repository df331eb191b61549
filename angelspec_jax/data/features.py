"""An optional on-disk cache of target features, for machines where running the target again costs more than reading a file.

A cache folder holds shards of whole conversations: `tokens-00000.npy` [n, 2] int32 (token, supervised), `features-00000.npy` [n, T + 1, D]
bfloat16 stored as uint16 (the taps, then the hidden state after the final norm) and `offsets-00000.npy` [c + 1], written last. A shard is
complete when its offsets exist, so an interrupted build continues where it stopped. `manifest.json` carries a checksum of everything the
features depend on; a folder built for another target, template or layer choice is refused.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from angelspec_jax import mesh as meshes
from angelspec_jax.target import kv_cache, whole
from angelspec_jax.target.attention import Rows, uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import TargetParams, forward

SHARD = 64  # conversations


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Random access to the cached conversations."""

    folder: Path
    starts: np.ndarray  # first conversation of every shard, and the total
    taps: tuple[int, ...]  # layers whose features are stored
    columns: tuple[int, ...] | None = None  # which of them a sample has, in order; None: all

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Tokens int32[S], loss_mask bool[S], features bfloat16[S, T, D] and hidden bfloat16[S, D] of one conversation."""
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        offsets = _load(self.folder, "offsets", shard)
        low, high = offsets[index - self.starts[shard]], offsets[index - self.starts[shard] + 1]
        tokens = np.array(_load(self.folder, "tokens", shard)[low:high])
        stored = _load(self.folder, "features", shard)
        columns = slice(None) if self.columns is None else [*self.columns, stored.shape[1] - 1]
        features = np.array(stored[low:high, columns]).view(ml_dtypes.bfloat16)
        return {
            "tokens": tokens[:, 0],
            "loss_mask": tokens[:, 1].astype(bool),
            "features": features[:, :-1],
            "hidden": features[:, -1],
        }

    def select(self, taps: Sequence[int]) -> "FeatureCache":
        """The cache as a drafter with these taps reads it."""
        return dataclasses.replace(self, columns=None if tuple(taps) == self.taps else tuple(self.taps.index(tap) for tap in taps))


def stored_taps(folder: str | Path, taps: tuple[int, ...]) -> tuple[int, ...]:
    """The taps of the cache in `folder` if they include `taps`, else `taps` (then `build` refuses the folder, or begins it)."""
    manifest = Path(folder) / "manifest.json"
    if not manifest.exists():
        return taps
    found = tuple(json.loads(manifest.read_text()).get("taps", ()))
    return found if set(taps) <= set(found) else taps


def size_estimate(total_tokens: int, taps: int, width: int) -> int:
    """Bytes on disk."""
    return total_tokens * ((taps + 1) * width * 2 + 8)


def checksum(target_fingerprint: str, chat_template: str | None, taps: Sequence[int], samples: Sequence[tuple]) -> str:
    """Everything the cached numbers depend on: target, template, layer ids, and the tokens with their masks."""
    digest = hashlib.sha256(json.dumps([target_fingerprint, chat_template, list(taps), len(samples)]).encode())
    for tokens, mask in samples:
        digest.update(np.asarray(tokens, np.int32).tobytes() + np.asarray(mask, bool).tobytes())
    return digest.hexdigest()


def build(
    folder: str | Path,
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    params: TargetParams,
    config: TransformerConfig,
    taps: tuple[int, ...],
    identity: str,
    *,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureCache:
    """Run the target over `samples` (tokens, loss_mask) and store what a drafter needs; shards already there are kept.

    Raises ValueError when the folder belongs to another target, template, layer choice or data set.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    if manifest.exists():
        found = json.loads(manifest.read_text()).get("identity")
        if found != identity:
            raise ValueError(
                f"feature cache {folder} was built for another target, template, layer choice or data; name another folder or delete it"
            )
    else:
        _atomic(manifest, lambda path: path.write_text(json.dumps({"identity": identity, "taps": list(taps), "shard": SHARD})))
    for shard, start in enumerate(range(0, len(samples), SHARD)):
        group = samples[start : start + SHARD]
        if not _path(folder, "offsets", shard).exists():
            _build_shard(folder, shard, group, params, config, taps, batch)
        if progress is not None:
            progress(start + len(group), len(samples))
    return open_cache(folder)


def open_cache(folder: str | Path) -> FeatureCache:
    """The complete shards of a cache folder, in order."""
    folder, counts = Path(folder), [0]
    while _path(folder, "offsets", len(counts) - 1).exists():
        counts.append(len(_load(folder, "offsets", len(counts) - 1)) - 1)
    if len(counts) == 1:
        raise FileNotFoundError(f"{folder} holds no feature shard; build the cache first")
    taps = json.loads((folder / "manifest.json").read_text())["taps"]
    return FeatureCache(folder, np.cumsum(counts), tuple(taps))


def _build_shard(folder, shard, samples, params, config, taps, batch):
    lengths = np.array([len(tokens) for tokens, _ in samples])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    features = np.zeros((offsets[-1], len(taps) + 1, config.hidden_size), np.uint16)
    order = np.argsort(-lengths, kind="stable")  # similar lengths share a batch
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        width = -(-int(lengths[chosen].max()) // 64) * 64  # few distinct shapes
        tokens = np.zeros((batch, width), np.int32)
        for row, index in enumerate(chosen):
            tokens[row, : lengths[index]] = samples[index][0]
        values = np.asarray(target_features(params, config, jnp.asarray(tokens), taps)).view(np.uint16)
        for row, index in enumerate(chosen):
            features[offsets[index] : offsets[index + 1]] = values[row, : lengths[index]]
    pairs = np.concatenate([np.stack([np.asarray(t), np.asarray(m)], axis=1) for t, m in samples]).astype(np.int32)
    for name, array in (("tokens", pairs), ("features", features), ("offsets", offsets)):
        _atomic(_path(folder, name, shard), functools.partial(_save, array=array))


@functools.partial(jax.jit, static_argnames=("config", "taps", "dtype", "most"))
def target_features(
    params: TargetParams,
    config: TransformerConfig,
    tokens: Int[Array, "B S"],
    taps: tuple[int, ...],
    dtype=jnp.bfloat16,
    documents: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B S"] | None = None,
    most: int = 1,
) -> Float[Array, "B S T+1 D"]:
    """Tapped features and final hidden state of whole sequences: one causal pass, nothing cached.

    With `documents` (see `data.packing`; at most `most` in a row) each sees itself only, and `positions` begin anew in it. On a mesh with a
    sequence axis the tokens lie over it; raises ValueError for packed rows there.
    """
    batch, width = tokens.shape
    if meshes.sequence_parts() > 1:
        if documents is not None:
            raise ValueError("rows of several documents are not spread over mesh.sequence; set train.max_documents=1")
        tapped, hidden = whole.forward(params, config, tokens, taps)
        return jnp.concatenate([tapped, hidden[:, :, None]], axis=2).astype(dtype)
    if documents is None or positions is None:
        rows = uniform_rows(jnp.zeros(batch, jnp.int32), width, causal=True)
        positions = jnp.tile(jnp.arange(width, dtype=jnp.int32), (batch, 1))
    else:
        rows = document_rows(documents, most)
    empty = kv_cache.create(config, rows.prefix_length.shape[0], 1, params.embed.dtype)
    tapped, hidden, _ = forward(params, config, tokens.reshape(-1), positions.reshape(-1), rows, empty, taps)
    both = jnp.concatenate([tapped, hidden[:, None]], axis=1).astype(dtype)
    return both.reshape(batch, width, len(taps) + 1, config.hidden_size)


def document_rows(documents: Int[Array, "B S"], most: int) -> Rows:
    """Rows in which every document is a request of its own; the padding of a row follows its last document.

    The plain-JAX twin of attention pads each request to a whole row, so there a packed row costs `most` times the scores of another.
    """
    batch, width = documents.shape
    number = jnp.arange(most, dtype=jnp.int32)
    before = (documents[:, :, None] >= 0) & (documents[:, :, None] < number[None, None])
    first = jnp.sum(before, axis=1, dtype=jnp.int32) + jnp.arange(batch, dtype=jnp.int32)[:, None] * width
    owner = jnp.where(documents >= 0, documents, most - 1) + jnp.arange(batch, dtype=jnp.int32)[:, None] * most
    return Rows(
        request=owner.reshape(-1),
        row_start=jnp.concatenate([first.reshape(-1), jnp.full((1,), batch * width, jnp.int32)]),
        ancestors=jnp.zeros((batch * width, 2), jnp.uint32),
        prefix_length=jnp.zeros((batch * most,), jnp.int32),
        valid=jnp.ones((batch * width,), bool),
        causal=True,
        max_rows=width,
        uniform=False,
    )


def _path(folder: Path, name: str, shard: int) -> Path:
    return folder / f"{name}-{shard:05d}.npy"


def _load(folder: Path, name: str, shard: int) -> np.ndarray:
    return np.load(_path(folder, name, shard), mmap_mode="r")


def _save(path: Path, *, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def _atomic(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_suffix(".partial")
    write(temporary)
    os.replace(temporary, path)
