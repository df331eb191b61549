"""Drafters bound to a target: loaded from disk, made anew for training, saved."""

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from angelspec_jax import places
from angelspec_jax.drafter import eagle3, layouts, mtp, registry, untrained
from angelspec_jax.drafter.block import BlockDrafter
from angelspec_jax.drafter.card import DrafterCard, card_for, check_shapes, check_target
from angelspec_jax.drafter.config import DEFAULT_RANK, FAMILIES, MARKOV_HEADS, DrafterConfig, Parts, default_taps, family_of
from angelspec_jax.drafter.context import fusion_prior
from angelspec_jax.drafter.layout_settings import check_draft_ids
from angelspec_jax.drafter.types import Shared
from angelspec_jax.mesh import placements, put_on, shardings
from angelspec_jax.params import initialize, map_params
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import head_rows

_initialize = jax.jit(initialize, static_argnums=(0, 2))  # one program instead of one per parameter


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter ready to draft for one target."""

    params: registry.AnyDrafter  # None where nothing was trained
    config: registry.AnyConfig
    shared: Shared  # the target's embedding and head rows
    card: DrafterCard
    name: str


def load_drafter(
    source,
    target,
    *,
    revision: str | None = None,
    dtype=None,
    mesh: Mesh | None = None,
    frozen: bool = True,
    thinking: str | None = None,
    allow_template_mismatch: bool = False,
    **overrides: Any,
) -> Drafter:
    """Load a drafter (a directory, a hub id, or a `gs://` address) for `target` (with `params`, `config`, `name` and `chat_template`).

    A name of `untrained.NAMES` makes a drafter that needs no checkpoint.

    Matrices are cast to `dtype`, by default the target's; norms and fusion weights stay float32. `mesh` shards the parameters. Parameters
    that are not `frozen`, because they will be trained, lie in memory as updates leave them. `overrides` answer what the checkpoint leaves
    open (`layout_settings.Overrides`). ValueError, one sentence, when the drafter does not fit.
    """
    if untrained.is_name(source):
        return Drafter(None, untrained.named(source, target.config), share(target.params), DrafterCard(), source)
    path = places.resolve(source, revision)
    params, config, card, draft_ids, _ = layouts.read(path, **{"present_layers": target.config.num_layers} | overrides)
    check_target(config, card, target, thinking=thinking, allow_template_mismatch=allow_template_mismatch)
    specs = registry.module(config).drafter_specs(config)
    dtype = target.params.embed.dtype if dtype is None else jnp.dtype(dtype)
    params = jax.tree.map(lambda leaf, spec: np.asarray(leaf, spec.dtype or dtype), params, specs)
    return Drafter(place(params, specs, mesh, frozen), config, share(target.params, draft_ids, dtype), card, places.name(source, path))


def create_drafter(
    target, key: jax.Array, *, dtype=jnp.float32, mesh: Mesh | None = None, draft_ids=None, name="new", **options: Any
) -> Drafter:
    """A randomly initialized drafter for `target`, to be trained; `options` are those of `drafter_config`.

    A hidden correction starts at zero and the fusion weights at `fusion_prior`. `draft_ids` int32[V'], ascending token ids, reduce the
    vocabulary the drafter proposes from.
    """
    ids = None if draft_ids is None else check_draft_ids(draft_ids, target.config.vocab_size)
    config = drafter_config(target.config, draft_vocab=None if ids is None else len(ids), **options)
    specs = registry.module(config).drafter_specs(config)
    dtype = jnp.dtype(dtype)
    if mesh is None:
        params = _initialize(specs, key, dtype)
    else:
        params = jax.jit(functools.partial(initialize, specs, dtype=dtype), out_shardings=shardings(mesh, specs))(key)
    if isinstance(params, BlockDrafter) and params.context.fusion is not None:
        prior = jnp.asarray(fusion_prior(*params.context.fusion.shape))
        prior = prior if mesh is None else jax.device_put(prior, params.context.fusion.sharding)
        params = dataclasses.replace(params, context=dataclasses.replace(params.context, fusion=prior))
    drafter = Drafter(params, config, share(target.params, ids), card_for(target, config), name)
    check_shapes(config, target)
    return drafter


def save_drafter(path, drafter: Drafter, *, layout: str | None = None, dtype=None) -> None:
    """Write a drafter directory in a layout of `layouts.EXPORTS`, matrices as `dtype` (default: as they are).

    The directory appears complete or not at all: it is written beside its place and renamed; what was there is replaced at the end.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    params = jax.tree.map(np.asarray, jax.device_get(drafter.params))
    if dtype is not None:
        wanted = jnp.dtype(dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(wanted), params)
    ids = drafter.shared.draft_ids
    copies: Any = {"embed": drafter.shared.embed, "lm_head": drafter.shared.head}  # fetched from the device where a layout holds them
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = work / "new"
        layouts.write(fresh, params, drafter.config, drafter.card, layout, draft_ids=None if ids is None else np.asarray(ids), **copies)
        replaced = path.exists()
        if replaced:
            os.replace(path, work / "old")
        try:
            os.replace(fresh, path)
        except OSError:
            if replaced:
                os.replace(work / "old", path)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def drafter_config(target: TransformerConfig, *, family: str = "dfly", **options: Any) -> registry.TrainableConfig:
    """Configuration of a new drafter for a target; `options` are those of `block_config`, `mtp.config_for` or `eagle3.config_for`."""
    if family not in CONFIGS:
        raise ValueError(f"drafter family must be one of {', '.join(CONFIGS)}, got {family!r}")
    return CONFIGS[family](target.plain(), family=family, **options)


def block_config(
    target: TransformerConfig,
    *,
    mask_token: int,
    family: str = "dfly",
    block_size: int = 8,
    num_layers: int = 3,
    taps: tuple[int, ...] | int = 5,
    layout: str = "same_position",
    context: str | None = None,
    head: str | None = None,
    correction_size: int | None = None,
    rank: int | None = None,
    confidence: str | None = None,
    draft_vocab: int | None = None,
    **transformer: Any,
) -> DrafterConfig:
    """Configuration of a new block drafter for a target: its width, vocabulary and rope, Qwen3-style layers with q/k norms.

    `taps` are 0-based target layers or how many to spread evenly; `family` decides `context`, `head` and `confidence` unless they are given
    ("none" leaves out the head or the trained confidence of a family); a Markov head has rank 256 unless `rank` says otherwise. Further
    options are fields of TransformerConfig for the draft layers (`intermediate_size`, `num_heads`, ...), by default the target's.
    """
    fixed = {"hidden_size", "vocab_size", "scan_layers", "tie_embeddings", "num_layers", "attention_bias", "sliding_window", "moe"}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - fixed
    for option in transformer:
        if option not in fields:
            raise ValueError(f"a drafter has no option {option!r}; the options of its layers are {', '.join(sorted(fields))}")
    own: dict[str, Any] = {"num_layers": num_layers, "qk_norm": "before_rope", "attention_bias": False}
    own |= {"tie_embeddings": False, "sliding_window": None, "scan_layers": False, "moe": None}
    parts = FAMILIES[family]
    head = _chosen(head, parts.head)
    rank = DEFAULT_RANK if rank is None and head in MARKOV_HEADS else rank
    parts = Parts(context or parts.context, head, parts.separate_kv, _chosen(confidence, parts.confidence))
    return DrafterConfig(
        family=family_of(parts),
        transformer=dataclasses.replace(target, **(own | transformer)),
        block_size=block_size,
        mask_token=mask_token,
        taps=default_taps(target.num_layers, taps) if isinstance(taps, int) else tuple(taps),
        target_num_layers=target.num_layers,
        layout=layout,
        context=parts.context,
        separate_kv=parts.separate_kv,
        head=parts.head,
        correction_size=correction_size,
        rank=rank,
        confidence=parts.confidence,
        draft_vocab=draft_vocab,
    )


def _chosen(given: str | None, family: str | None) -> str | None:
    return family if given is None else None if given == "none" else given


CONFIGS: dict[str, Callable[..., registry.TrainableConfig]] = {
    **dict.fromkeys(FAMILIES, block_config),
    **dict.fromkeys(mtp.FAMILIES, mtp.config_for),
    "eagle3": eagle3.config_for,
}


def share(target_params, draft_ids=None, dtype=None) -> Shared:
    """The target's weights a drafter borrows; the head rows of a reduced vocabulary are gathered once.

    The head is copied when it is not of `dtype`, the drafter's: a product of mixed types would convert it at every draft.
    """
    head = head_rows(target_params)
    head = head if dtype is None else head.astype(dtype)
    if draft_ids is None:
        return Shared(target_params.embed, head)
    ids = jnp.asarray(draft_ids, jnp.int32)
    return Shared(target_params.embed, jnp.take(head, ids, axis=0), ids)


def place(params: registry.AnyDrafter, specs: registry.AnyDrafter, mesh: Mesh | None, frozen: bool = True) -> Any:
    """Parameters on the devices: sharded by their logical axes, or on the default device without a mesh."""
    if mesh is None:
        return map_params(lambda spec, leaf: put_on(None, spec, leaf), specs, params) if frozen else jax.tree.map(jnp.asarray, params)

    def put(spec, leaf, where):
        host = np.asarray(leaf)
        return jax.make_array_from_callback(spec.shape, where, lambda index: host[index])

    return map_params(put, specs, params, (placements if frozen else shardings)(mesh, specs))
