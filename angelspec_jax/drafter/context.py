"""How the target's features condition a block drafter.

`fc`: one projection of the concatenated features, shared by all draft layers (DFlash). `fusion`: each draft layer mixes the features with
its own softmax weights (DFlare). `fc_fusion`: the projection plus that mixture (DFly; AngelSpec section on target conditioning). One
RMSNorm follows, shared by the layers. The context never passes a layer's own input norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.params import Param
from angelspec_jax.target.layers import rms_norm


@struct.dataclass
class Context:
    norm: jax.Array  # [D]
    fc: jax.Array | None = None  # [T, D, D]
    fusion: jax.Array | None = None  # [L, T] logits of each layer's mixture


def context_specs(config: DrafterConfig) -> Context:
    taps, width, layers = len(config.taps), config.transformer.hidden_size, config.transformer.num_layers
    return Context(
        norm=Param((width,), (None,), "ones", dtype=jnp.float32),
        fc=Param((taps, width, width), (None, None, "embed"), inputs=2) if "fc" in config.context else None,
        fusion=Param((layers, taps), (None, None), "zeros", dtype=jnp.float32) if "fusion" in config.context else None,
    )


def fusion_prior(layers: int, taps: int) -> np.ndarray:
    """Initial fusion logits [L, T]: -2 |t - t*|, where t* spreads the draft layers over the taps (AngelSpec, DFlare)."""
    own = np.round(np.arange(layers) / max(layers - 1, 1) * (taps - 1))
    return (-2.0 * np.abs(np.arange(taps)[None, :] - own[:, None])).astype(np.float32)


def conditions(
    params: Context, config: DrafterConfig, features: Float[Array, "*N T D"]
) -> tuple[Float[Array, "*N D"], ...]:
    """The normed context of every draft layer."""
    eps, layers = config.transformer.rms_norm_eps, config.transformer.num_layers
    base = None if params.fc is None else jnp.einsum("...td,tde->...e", features, params.fc)
    if params.fusion is None:
        assert base is not None, "a context has a projection, fusion weights or both"
        return (rms_norm(base, params.norm, eps),) * layers
    weights = jax.nn.softmax(params.fusion, axis=-1).astype(features.dtype)
    mixtures = jnp.einsum("...td,lt->l...d", features, weights)
    return tuple(rms_norm(mix if base is None else base + mix, params.norm, eps) for mix in mixtures)
