"""MTP: a next-token-prediction module, one layer of the target's kind over [embedding ; hidden state] (AngelSpec; DeepSeek-V3 section 2.2).

    z = W [embed_norm(E x[j+1]) ; hidden_norm(h[j])],  o = norm(layer(z)),  logits = the target's head of o

The *normed* output goes to the head and to the next step. The embedding is zeroed at position 0, before its norm.

References disagree on h: AngelSpec captures the last layer's raw output by default, serving engines hand over the state after the target's
final norm. `input_postnorm` (default) takes the second, so that a drafter trained here is fed the same thing when it is served; False takes
the first (`taps` then names the last layer). A checkpoint does not say which it was trained with.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.drafter import autoregressive
from angelspec_jax.drafter.autoregressive import Cell
from angelspec_jax.params import Param
from angelspec_jax.target import narrow
from angelspec_jax.target.config import MoEConfig, TransformerConfig
from angelspec_jax.target.layers import Layer, layer_specs, rms_norm

FAMILIES = ("mtp", "mtp_moe")


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """An MTP drafter for one target; its layer routes to experts where `transformer.moe` is set."""

    transformer: TransformerConfig  # one layer; vocab_size is the target's
    target_num_layers: int
    num_drafts: int = 4  # most drafts a round
    input_postnorm: bool = True  # reads the target's hidden state after its final norm, or the last layer's raw output
    draft_vocab: int | None = None  # rows of the frequency-ranked draft head; None = the target's whole vocabulary

    def __post_init__(self):
        autoregressive.check(self.transformer, self.taps, self.target_num_layers, self.num_drafts, self.draft_vocab)

    @property
    def family(self) -> str:
        return "mtp" if self.transformer.moe is None else "mtp_moe"

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.input_postnorm else (self.target_num_layers - 1,)


def config_for(
    target: TransformerConfig,
    *,
    family: str = "mtp",
    num_drafts: int = 4,
    input_postnorm: bool = True,
    moe: MoEConfig | None = None,
    draft_vocab: int | None = None,
    **layer: Any,
) -> MTPConfig:
    """Configuration of a new module for a target, its layer of the target's kind; further options are fields of TransformerConfig.

    The family "mtp_moe" takes experts like the target's unless `moe` is given.
    """
    moe = moe or target.moe
    if family == "mtp_moe" and moe is None:
        raise ValueError("an mtp_moe drafter needs experts: the target has none to take after, so describe them in moe")
    own = {"moe": dataclasses.replace(moe, dense_layers=()) if family == "mtp_moe" and moe is not None else None}
    return MTPConfig(
        transformer=autoregressive.layer_config(target, own | {"attention_bias": target.attention_bias}, layer),
        target_num_layers=target.num_layers,
        num_drafts=num_drafts,
        input_postnorm=input_postnorm,
        draft_vocab=draft_vocab,
    )


@struct.dataclass
class MTP:
    embed_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    projection: jax.Array  # [2D, D], the embedding's half first
    layer: Layer
    norm: jax.Array  # [D]


def drafter_specs(config: MTPConfig) -> MTP:
    """Declaration of every trainable parameter; embedding and LM head are the target's."""
    model = config.transformer
    norm = Param((model.hidden_size,), (None,), "ones", dtype=jnp.float32)
    return MTP(
        embed_norm=norm,
        hidden_norm=norm,
        projection=Param((2 * model.hidden_size, model.hidden_size), (None, "embed")),
        layer=layer_specs(model, model.is_sparse(0)),
        norm=norm,
    )


def _condition(params: MTP, config: MTPConfig, features: Float[Array, "*N T D"], hidden: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    return hidden if config.input_postnorm else features[..., 0, :]


def _read(params: MTP, config: MTPConfig, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], positions: Int[Array, "*N"]):
    eps = config.transformer.rms_norm_eps
    embedded = jnp.where((positions == 0)[..., None], jnp.zeros((), embedded.dtype), embedded)
    both = [rms_norm(embedded, params.embed_norm, eps), rms_norm(hidden, params.hidden_norm, eps)]
    z = narrow.einsum("...c,cd->...d", jnp.concatenate(both, axis=-1), params.projection)
    return z, rms_norm(z, params.layer.input_norm, eps)


def _write(params: MTP, config: MTPConfig, y: Float[Array, "*N D"]):
    normed = rms_norm(y, params.norm, config.transformer.rms_norm_eps)
    return normed, normed


def _head(params: MTP, config: MTPConfig, head: Float[Array, "V D"]) -> Float[Array, "V D"]:
    return head


CELL = Cell(_condition, _read, _write, _head)
create_state = autoregressive.create_state
extend = functools.partial(autoregressive.extend, CELL)
draft = functools.partial(autoregressive.draft, CELL)
tree_lanes = autoregressive.tree_lanes
start_tree = autoregressive.start_tree
expand = functools.partial(autoregressive.expand, CELL)
