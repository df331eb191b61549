"""Sequential heads: what turns the marginals of a block into a chain of tokens.

A head scores a *shortlist*: one pass over the LM head gives base logits of every slot, the top `M` candidates of each slot are kept, and
each step corrects only those by gathering their head rows. Seven dependent steps then do not read the vocabulary seven times, and the draft
distribution stays exact because it is supported on the shortlist.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.drawing import draw, shortlist
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Shared, Sparse
from angelspec_jax.params import Param
from angelspec_jax.target.layers import rms_norm, swiglu


@struct.dataclass
class Correction:
    """Hidden correction (TreeFlash formula 1, AngelSpec DFly): a SwiGLU of the slot's hidden state and the previous token's embedding."""

    hidden_norm: jax.Array  # [D]
    embed_norm: jax.Array  # [D]
    gate_up: jax.Array  # [2D, 2, I]
    down: jax.Array  # [I, D]; zero at initialization, so training starts from the uncorrected backbone


def head_specs(config: DrafterConfig) -> Correction | None:
    if config.head is None:
        return None
    width = config.transformer.hidden_size
    inner = config.correction_size or width
    norm = Param((width,), (None,), "ones", dtype=jnp.float32)
    return Correction(
        hidden_norm=norm,
        embed_norm=norm,
        gate_up=Param((2 * width, 2, inner), ("embed", None, "mlp")),
        down=Param((inner, width), ("mlp", "embed"), "zeros"),
    )


def correct(
    head: Correction | None, config: DrafterConfig, hidden: Float[Array, "*N D"], previous: Float[Array, "*N D"]
) -> Float[Array, "*N D"]:
    """Hidden states corrected for the token before each slot, given that token's embedding; unchanged without a head."""
    if head is None:
        return hidden
    eps = config.transformer.rms_norm_eps
    both = [rms_norm(hidden, head.hidden_norm, eps), rms_norm(previous.astype(hidden.dtype), head.embed_norm, eps)]
    return hidden + swiglu(jnp.concatenate(both, axis=-1), head.gate_up, head.down)


def propose(
    head: Correction | None,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "R K D"],
    anchor: Int[Array, "R"],
    positions: Int[Array, "R K"],
    noise: Noise | None,
    policy: DraftPolicy,
) -> Draft:
    """Draw a chain of K tokens from the block's hidden states, left to right.

    `positions` are where the drafts will stand; `noise=None` drafts greedily. The loop over depth ends when no request's chain survives
    with `policy.min_survival`; the remaining drafts have survival 0.
    """
    base = jnp.einsum("rkd,vd->rkv", hidden, shared.head, preferred_element_type=jnp.float32)
    scores, ids = shortlist(base, policy.candidates)
    requests, depth, size = ids.shape

    def step(carry):
        k, previous, survival, tokens, probabilities, survivals = carry
        slot_ids, slot_scores = _slot(ids, k), _slot(scores, k)
        if head is not None:
            corrected = correct(head, config, _slot(hidden, k), shared.embed[previous])
            rows = shared.head[slot_ids]
            slot_scores = jnp.einsum("rd,rmd->rm", corrected, rows, preferred_element_type=jnp.float32)
        target_ids = slot_ids if shared.draft_ids is None else shared.draft_ids[slot_ids]
        choice, p, confidence = draw(slot_scores, target_ids, _slot(positions, k), noise)
        token = jnp.take_along_axis(target_ids, choice[:, None], axis=1)[:, 0]
        survival = survival * confidence
        return (
            k + 1,
            token,
            survival,
            _put(tokens, k, token),
            _put(probabilities, k, p),
            _put(survivals, k, survival),
        )

    def worthwhile(carry):
        k, _, survival, *_ = carry
        return (k < depth) & (jnp.max(survival) >= policy.min_survival)

    start = (
        jnp.int32(0),
        anchor,
        jnp.ones(requests, jnp.float32),
        jnp.zeros((requests, depth), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
    )
    _, _, _, tokens, probabilities, survivals = jax.lax.while_loop(worthwhile, step, start)
    target_ids = ids if shared.draft_ids is None else shared.draft_ids[ids]
    return Draft(
        tokens=tokens,
        q=OneHot() if noise is None else Sparse(target_ids, probabilities),
        survival=survivals,
    )


def _slot(x, k):
    return jax.lax.dynamic_index_in_dim(x, k, axis=1, keepdims=False)


def _put(x, k, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, k, axis=1)
