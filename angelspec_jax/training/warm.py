"""Where a drafter starts that takes after its target: layers as copies of the target's own, or the MTP module of its checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from angelspec_jax.data.features import target_features
from angelspec_jax.drafter import layouts_mtp
from angelspec_jax.drafter.block import BlockDrafter
from angelspec_jax.drafter.eagle3 import Eagle3
from angelspec_jax.drafter.layout_settings import CONFIG, Overrides
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.drafter.mtp import MTP, MTPConfig
from angelspec_jax.target import hf
from angelspec_jax.target.layers import Layer
from angelspec_jax.target.loading import Target
from angelspec_jax.target.transformer import layer_at


def start(drafter: Drafter, target: Target):
    """The drafter's parameters with what the target can lend; what it lacks keeps its random start.

    A block drafter's layers become evenly spread target layers. An MTP module becomes the one that the target's checkpoint carries; where
    there is none its layer becomes the target's last one, reading the hidden state and the embedding side by side, and its norm the
    target's final norm. EAGLE-3 takes the last layer as well, which then reads the highest tapped feature, the final norm and the head.
    """
    params, last = drafter.params, target.config.num_layers - 1
    if isinstance(params, BlockDrafter):
        count = len(params.layers)
        chosen = [round(i * last / max(count - 1, 1)) for i in range(count)]
        layers = tuple(_copy(own, _layer(target, index)) for own, index in zip(params.layers, chosen, strict=True))
        return dataclasses.replace(params, layers=layers, context=_context(params, layers))
    if isinstance(params, MTP):
        carried = _carried(drafter, target)
        return _last_layer_mtp(params, drafter, target) if carried is None else carried
    if isinstance(params, Eagle3):
        return _last_layer_eagle3(params, drafter, target)
    raise ValueError(f"a drafter of the family {drafter.config.family} has nothing to train")


def _context(params: BlockDrafter, layers: tuple[Layer, ...]):
    """Context projections of their own start as those of their layers."""
    if params.context.kv is None:
        return params.context
    kv = tuple(jnp.array(layer.qkv[:, :, -2:], own.dtype) for own, layer in zip(params.context.kv, layers, strict=True))
    return dataclasses.replace(params.context, kv=kv)


def _last_layer_mtp(params: MTP, drafter: Drafter, target: Target) -> MTP:
    """The target's last layer over its own residual stream, of which hidden state and norms tell direction and `_residual_scale` the size.

    Only then does the layer weigh against what it is added to as in the target; the embedding, small beside it, is left to training. (On
    SmolLM2 the loss after 20 steps is 4.9, and 5.9 after ten where the stream is five times too small.)
    """
    layer = _copy(params.layer, _layer(target, target.config.num_layers - 1))
    final, width = jnp.array(target.params.final_norm, params.norm.dtype), params.norm.shape[0]
    size = jnp.sqrt(jnp.mean(jnp.square(final)))
    undone = jnp.where(jnp.abs(final) > 0.05 * size, size / final, 0.0)
    postnorm = isinstance(drafter.config, MTPConfig) and drafter.config.input_postnorm
    through = _residual_scale(target) * jnp.eye(width, dtype=params.projection.dtype)
    return dataclasses.replace(
        params,
        layer=layer,
        norm=final,
        hidden_norm=undone if postnorm else params.hidden_norm,
        projection=params.projection.at[width:].set(through),
    )


def _residual_scale(target: Target) -> float:
    """Root mean square of the last layer's input: the median over some arbitrary tokens, as first ones may be a hundred times larger."""
    tokens = jnp.linspace(0, target.config.vocab_size - 1, 64).astype(jnp.int32)[None]
    states = target_features(target.params, target.config, tokens, (target.config.num_layers - 2,), jnp.float32)[0, :, 0]
    return float(jnp.median(jnp.sqrt(jnp.mean(jnp.square(states), axis=-1))))


def _last_layer_eagle3(params: Eagle3, drafter: Drafter, target: Target) -> Eagle3:
    last, width = _layer(target, target.config.num_layers - 1), params.norm.shape[0]
    # Attention reads the hidden half as the target's layer reads its input, and the embedding's half not yet.
    both = jnp.concatenate([jnp.zeros_like(last.qkv), last.qkv])
    layer = _copy(params.layer, dataclasses.replace(last, qkv=both))
    fc = jnp.zeros_like(params.fc).at[-width:].set(jnp.eye(width, dtype=params.fc.dtype))
    return dataclasses.replace(
        params,
        layer=layer,
        fc=fc,
        hidden_norm=jnp.array(last.input_norm, params.hidden_norm.dtype),
        norm=jnp.array(target.params.final_norm, params.norm.dtype),
        head=None if params.head is None else jnp.array(drafter.shared.head, params.head.dtype),
    )


def _carried(drafter: Drafter, target: Target) -> MTP | None:
    """The MTP module of the target's own checkpoint, None where it has none. ValueError when it is of another shape than the drafter."""
    folder, config = Path(target.source), drafter.config
    if not (folder / CONFIG).is_file() or not isinstance(config, MTPConfig):
        return None
    tensors, settings = hf.open_tensors(folder), hf.read_json(folder / CONFIG)
    if not any(name.endswith(".eh_proj.weight") for name in tensors.names()):
        return None
    answers = Overrides(num_drafts=config.num_drafts, input_postnorm=config.input_postnorm)
    found, shape, _ = layouts_mtp.read(tensors, settings, "mtp", answers)
    if shape.transformer != config.transformer:
        raise ValueError(
            f"{folder} carries an MTP module of another shape ({shape.family}) than the drafter; leave heads, kv_heads, head_dim, "
            f"intermediate_size, qk_norm and moe open and set drafter.family={shape.family}, or set drafter.init=random"
        )
    return jax.tree.map(lambda own, given: jax.device_put(given.astype(own.dtype), own.sharding), drafter.params, found)


def _layer(target: Target, index: int) -> Any:
    if target.config.quantize is not None:
        raise ValueError("drafter.init=target copies weights, and those of this target are 8-bit; set drafter.init=random")
    return layer_at(target.params.layers, index)


def _copy(own: Layer, source: Layer) -> Layer:
    """`source` in the dtypes of `own`; ValueError where their shapes differ."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(own):
        mine, theirs = getattr(own, field.name), getattr(source, field.name)
        if mine is not None and theirs is not None and jax.tree.map(jnp.shape, mine) != jax.tree.map(jnp.shape, theirs):
            raise ValueError(
                f"drafter.init=target needs draft layers of the target's shape, but {field.name} is {mine.shape}, not {theirs.shape}; "
                "leave heads, kv_heads, head_dim and intermediate_size open or set drafter.init=random"
            )
        # A copy: the training step donates its state, and the target's weights must outlive it.
        taken = mine is not None and theirs is not None
        values[field.name] = jax.tree.map(lambda m, t: jnp.array(t, m.dtype), mine, theirs) if taken else mine
    return dataclasses.replace(own, **values)
