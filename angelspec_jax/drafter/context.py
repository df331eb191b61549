"""How the target's features condition a block drafter.

`fc`: one projection of the concatenated features, shared by all draft layers (DFlash). `fusion`: each draft layer mixes the features with
its own softmax weights (DFlare). `fc_fusion`: the projection plus that mixture (DFly; AngelSpec section on target conditioning).
`gated_sum`: one mixture for all layers, of features that were normed one by one, so that its weights rank the target's layers
(AngelSpec's layer selection). One RMSNorm follows, shared by the layers. The context never passes a layer's own input norm. Its keys and
values come from the layer's projections, or from projections of their own (DFlare).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.params import Param
from angelspec_jax.target import narrow
from angelspec_jax.target.layers import Layer, Rotation, project_kv, rms_norm, rotate_and_norm


@struct.dataclass
class Context:
    norm: jax.Array  # [D]
    fc: jax.Array | None = None  # [T, D, D]
    fusion: jax.Array | None = None  # [L, T] logits of each layer's mixture
    fusion_gate: jax.Array | None = None  # [T] logits of the one mixture
    candidate_norm: jax.Array | None = None  # [T, D]
    kv: tuple[jax.Array, ...] | None = None  # per draft layer [D, G, 2, E]: keys, values


def context_specs(config: DrafterConfig) -> Context:
    model, taps, width = config.transformer, len(config.taps), config.transformer.hidden_size
    gated = config.context == "gated_sum"
    kv = Param((width, model.num_kv_heads, 2, model.head_dim), ("embed", "kv_heads", None, None))
    return Context(
        norm=Param((width,), (None,), "ones", dtype=jnp.float32),
        fc=Param((taps, width, width), (None, None, "embed"), inputs=2) if "fc" in config.context else None,
        fusion=Param((model.num_layers, taps), (None, None), "zeros", dtype=jnp.float32) if "fusion" in config.context else None,
        fusion_gate=Param((taps,), (None,), "zeros", dtype=jnp.float32) if gated else None,
        candidate_norm=Param((taps, width), (None, None), "ones", dtype=jnp.float32) if gated else None,
        kv=(kv,) * model.num_layers if config.separate_kv else None,
    )


def fusion_prior(layers: int, taps: int) -> np.ndarray:
    """Initial fusion logits [L, T]: -2 |t - t*|, where t* spreads the draft layers over the taps (AngelSpec, DFlare)."""
    own = np.round(np.arange(layers) / max(layers - 1, 1) * (taps - 1))
    return (-2.0 * np.abs(np.arange(taps)[None, :] - own[:, None])).astype(np.float32)


def conditions(params: Context, config: DrafterConfig, features: Float[Array, "*N T D"]) -> tuple[Float[Array, "*N D"], ...]:
    """The normed context of every draft layer."""
    eps, layers = config.transformer.rms_norm_eps, config.transformer.num_layers
    if params.fusion_gate is not None:
        return (rms_norm(_gated_sum(params, config, features), params.norm, eps),) * layers
    base = None if params.fc is None else _projected(params.fc, features)
    if params.fusion is None:
        assert base is not None, "a context has a projection, fusion weights or both"
        return (rms_norm(base, params.norm, eps),) * layers
    weights = jax.nn.softmax(params.fusion, axis=-1).astype(features.dtype)
    mixtures = jnp.einsum("...td,lt->l...d", features, weights)
    return tuple(rms_norm(mix if base is None else base + mix, params.norm, eps) for mix in mixtures)


def _projected(fc: Float[Array, "T D D"], features: Float[Array, "*N T D"]) -> Float[Array, "*N D"]:
    """All taps side by side times one matrix: contracted over two axes, XLA:CPU would turn the weights round in memory at every call."""
    taps, width = features.shape[-2:]
    return narrow.einsum("...c,ce->...e", features.reshape(*features.shape[:-2], taps * width), fc.reshape(taps * width, -1))


def context_kv(
    params: Context, config: DrafterConfig, index: int, layer: Layer, context: Float[Array, "*N D"], turned: Rotation
) -> tuple[Float[Array, "*N G E"], Float[Array, "*N G E"]]:
    """Keys and values of context rows for draft layer `index`; the keys carry the layer's key norm and rotation."""
    if params.kv is None:
        return project_kv(layer, config.transformer, context, turned)
    fused = narrow.einsum("...d,dgce->...gce", context, params.kv[index])
    return rotate_and_norm(fused[..., 0, :], layer.k_norm, config.transformer, turned), fused[..., 1, :]


def _gated_sum(params: Context, config: DrafterConfig, features: Float[Array, "*N T D"]) -> Float[Array, "*N D"]:
    assert params.fusion_gate is not None and params.candidate_norm is not None
    eps = config.transformer.rms_norm_eps
    normed = [rms_norm(features[..., t, :], params.candidate_norm[t], eps) for t in range(len(config.taps))]
    weights = jax.nn.softmax(params.fusion_gate / config.gate_temperature).astype(features.dtype)
    return jnp.einsum("...td,t->...d", jnp.stack(normed, axis=-2), weights)
