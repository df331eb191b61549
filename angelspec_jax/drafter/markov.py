"""Markov heads (DSpark, arXiv 2607.05147, equations 4 to 6): a low-rank bias on the base logits that depends on the drafts before.

With e = W1[previous token], of rank r, the bias of a slot with hidden state h is W2 of a latent:

* vanilla: e;
* gated: g * e with g = sigmoid(Wg [h; e] + b);
* rnn: tanh(o), with (g, c, o) = W [s; e; h] + b and the state s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), zero at the first draft.

The gated head and the biases are in DeepSpec's code and not in the paper.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.types import Shared
from angelspec_jax.params import Param
from angelspec_jax.target import narrow


@struct.dataclass
class Markov:
    w1: jax.Array  # [V, r], by target token
    w2: jax.Array  # [V', r], by row of the head; zero at initialization, so training starts from the backbone's own logits
    gate: jax.Array | None = None  # [D + r, r]
    gate_bias: jax.Array | None = None  # [r]
    joint: jax.Array | None = None  # [2r + D, 3, r]: gate, candidate, output
    joint_bias: jax.Array | None = None  # [3, r]


def specs(config: DrafterConfig) -> Markov:
    model, rank = config.transformer, config.rank
    assert rank is not None
    rows = config.draft_vocab or model.vocab_size
    gated, rnn = config.head == "markov_gated", config.head == "markov_rnn"
    return Markov(
        w1=Param((model.vocab_size, rank), ("vocab", None), scale=rank**-0.5),
        w2=Param((rows, rank), ("vocab", None), "zeros"),
        gate=Param((model.hidden_size + rank, rank), ("embed", None)) if gated else None,
        gate_bias=Param((rank,), (None,), "zeros") if gated else None,
        joint=Param((2 * rank + model.hidden_size, 3, rank), ("embed", None, None)) if rnn else None,
        joint_bias=Param((3, rank), (None, None), "zeros") if rnn else None,
    )


def start(head: Markov, shape: tuple[int, ...]) -> Float[Array, "*N r"] | None:
    """The state before the first draft of `shape` chains; None for heads that carry none."""
    return None if head.joint is None else jnp.zeros((*shape, head.w1.shape[1]), head.w1.dtype)


def latent(
    head: Markov, hidden: Float[Array, "*N D"], embedding: Float[Array, "*N r"], state: Float[Array, "*N r"] | None
) -> tuple[Float[Array, "*N r"], Float[Array, "*N r"] | None]:
    """The latent that W2 turns into a bias, and the next state."""
    if head.gate is not None:
        mixed = jnp.concatenate([hidden, embedding], axis=-1) @ head.gate
        return jax.nn.sigmoid(mixed + _like(head.gate_bias, mixed)) * embedding, state
    if head.joint is not None:
        assert state is not None, "an rnn head carries a state"
        mixed = jnp.einsum("...i,icr->...cr", jnp.concatenate([state, embedding, hidden], axis=-1), head.joint)
        mixed = mixed + _like(head.joint_bias, mixed)
        keep = jax.nn.sigmoid(mixed[..., 0, :])
        return jnp.tanh(mixed[..., 2, :]), keep * state + (1 - keep) * jnp.tanh(mixed[..., 1, :])
    return embedding, state


def score(
    head: Markov,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "*N D"],
    previous: Int[Array, "*N"],
    ids: Int[Array, "*N M"] | None,
    base: Float[Array, "*N M"],
    state: Float[Array, "*N r"] | None,
) -> tuple[Float[Array, "*N M"], Float[Array, "*N r"] | None]:
    """Base logits of the candidates `ids` (rows of the head; None = all of them) plus their bias, and the next state."""
    del config, shared
    found, state = latent(head, hidden, head.w1[previous].astype(hidden.dtype), state)
    if ids is None:
        bias = jnp.einsum("...r,vr->...v", found, head.w2, preferred_element_type=jnp.float32)
    else:
        bias = jnp.einsum("...r,...mr->...m", found, head.w2[ids], preferred_element_type=jnp.float32)
    return base + bias, state


def rows(
    head: Markov, config: DrafterConfig, embed: Float[Array, "V D"], hidden: Float[Array, "*N K D"], previous: Int[Array, "*N K"]
) -> dict[str, Array]:
    """What the logits of teacher-forced slots are made of: hidden states and latents; the state starts at the first slot that drafts."""
    del embed
    embeddings = head.w1[previous].astype(hidden.dtype)
    if head.joint is None:
        return {"hidden": hidden, "latent": latent(head, hidden, embeddings, None)[0]}
    first = config.first_slot
    begin = jnp.zeros(embeddings.shape[:-2] + embeddings.shape[-1:], hidden.dtype)

    def step(state, slot):
        found, state = latent(head, slot[0], slot[1], state)
        return state, found

    slots = (jnp.moveaxis(hidden[..., first:, :], -2, 0), jnp.moveaxis(embeddings[..., first:, :], -2, 0))
    found = jnp.moveaxis(jax.lax.scan(step, begin, slots)[1], 0, -2)
    padding = [(0, 0)] * (found.ndim - 2) + [(first, 0), (0, 0)]
    return {"hidden": hidden, "latent": jnp.pad(found, padding)}


def logits(head: Markov, rows: dict[str, Array], head_rows: Float[Array, "V' D"]) -> Float[Array, "*N V'"]:
    """Corrected logits of such rows."""
    hidden, found = rows["hidden"], rows["latent"]
    base = narrow.einsum("...d,vd->...v", hidden, head_rows.astype(hidden.dtype), jnp.float32)
    return base + narrow.einsum("...r,vr->...v", found, head.w2.astype(found.dtype), jnp.float32)


def _like(bias: jax.Array | None, x: jax.Array) -> jax.Array:
    assert bias is not None
    return bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
