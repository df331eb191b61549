"""How sure a drafter is that a draft will be accepted, given that the drafts before it are.

Two strategies: the drafter's own probability of the token it drew (AngelSpec), or a trained head, a logistic regression on the slot's
hidden state and the previous token's Markov embedding (DSpark, arXiv 2607.05147, equation 7). Either may carry the temperatures of
sequential temperature scaling (DSpark section 3.2.1): the logit of draft j is divided by the j-th.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.params import Param


@struct.dataclass
class Confidence:
    weight: jax.Array  # [D], or [D + r] with Markov features: hidden state first
    bias: jax.Array  # [1]


def specs(config: DrafterConfig) -> Confidence | None:
    if config.confidence is None:
        return None
    width = config.transformer.hidden_size + (config.rank or 0 if config.confidence == "hidden_markov" else 0)
    return Confidence(weight=Param((width,), (None,), "zeros"), bias=Param((1,), (None,), "zeros"))


def logits(params: Confidence, hidden: Float[Array, "*N D"], embedding: Float[Array, "*N r"] | None = None) -> Float[Array, "*N"]:
    """The trained head's logits; `embedding` is W1 of the previous token where the head has Markov features."""
    features = hidden if embedding is None else jnp.concatenate([hidden, embedding.astype(hidden.dtype)], axis=-1)
    found = jnp.einsum("...i,i->...", features, params.weight.astype(features.dtype), preferred_element_type=jnp.float32)
    return found + params.bias.astype(jnp.float32).reshape((1,) * found.ndim)


def from_logits(values: Float[Array, "*N"], config: DrafterConfig, draft: Int[Array, ""] | int) -> Float[Array, "*N"]:
    """Acceptance probability of the draft with this index (from 0) from its uncalibrated logit."""
    return jax.nn.sigmoid(values / _temperature(config, draft))


def from_probability(own: Float[Array, "*N"], config: DrafterConfig, draft: Int[Array, ""] | int) -> Float[Array, "*N"]:
    """Acceptance probability from the drafter's own probability of its draft."""
    if not config.confidence_temperatures:
        return own
    inside = jnp.clip(own, 1e-7, 1 - 1e-7)  # so that the logit is finite in float32
    return jax.nn.sigmoid((jnp.log(inside) - jnp.log1p(-inside)) / _temperature(config, draft))


def _temperature(config: DrafterConfig, draft) -> Float[Array, ""]:
    if not config.confidence_temperatures:
        return jnp.float32(1.0)
    return jnp.asarray(config.confidence_temperatures, jnp.float32)[draft]
