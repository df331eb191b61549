"""Hidden correction (TreeFlash formula 1, AngelSpec DFly): the slot's hidden state moves with the token before it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.types import Shared
from angelspec_jax.params import Param
from angelspec_jax.target.layers import rms_norm, swiglu


@struct.dataclass
class Correction:
    """A SwiGLU of the slot's hidden state and the previous token's embedding."""

    hidden_norm: jax.Array  # [D]
    embed_norm: jax.Array  # [D]
    gate_up: jax.Array  # [2D, 2, I]
    down: jax.Array  # [I, D]; zero at initialization, so training starts from the uncorrected backbone


def specs(config: DrafterConfig) -> Correction:
    width = config.transformer.hidden_size
    inner = config.correction_size or width
    norm = Param((width,), (None,), "ones", dtype=jnp.float32)
    return Correction(
        hidden_norm=norm,
        embed_norm=norm,
        gate_up=Param((2 * width, 2, inner), ("embed", None, "mlp"), order=(1, 0, 2)),
        down=Param((inner, width), ("mlp", "embed"), "zeros"),
    )


def correct(head: Correction, config: DrafterConfig, hidden: Float[Array, "*N D"], previous: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Hidden states corrected for the token before each slot, given that token's embedding."""
    eps = config.transformer.rms_norm_eps
    both = [rms_norm(hidden, head.hidden_norm, eps), rms_norm(previous.astype(hidden.dtype), head.embed_norm, eps)]
    return hidden + swiglu(jnp.concatenate(both, axis=-1), head.gate_up, head.down)


def score(
    head: Correction,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "*N D"],
    previous: Int[Array, "*N"],
    ids: Int[Array, "*N M"] | None,
    base: Float[Array, "*N M"],
    state: None,
) -> tuple[Float[Array, "*N M"], None]:
    """Scores of the candidates `ids` (rows of the head; None = all of them) by the corrected hidden state."""
    del base
    corrected = correct(head, config, hidden, shared.embed[previous])
    if ids is None:
        return jnp.einsum("...d,vd->...v", corrected, shared.head, preferred_element_type=jnp.float32), state
    return jnp.einsum("...d,...md->...m", corrected, shared.head[ids], preferred_element_type=jnp.float32), state


def rows(
    head: Correction, config: DrafterConfig, embed: Float[Array, "V D"], hidden: Float[Array, "*N K D"], previous: Int[Array, "*N K"]
) -> Float[Array, "*N K D"]:
    """What the logits of teacher-forced slots are made of: the corrected hidden states."""
    return correct(head, config, hidden, embed[previous])
