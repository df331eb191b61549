"""EAGLE-3: one layer over tapped target features, with a head of its own over a reduced vocabulary (arXiv 2503.01840).

    g = W_fc [h_low ; h_mid ; h_high],  u = [input_norm(E x[j+1]) ; hidden_norm(g)],  a = g + attention(u),  y = a + mlp(a)
    logits = head(norm(y));  y takes the place of g in the next step

Queries, keys and values read both halves of u; the residual is g as it is. `fc_norm` norms each tapped feature before the projection.

References disagree on what the next step reads, and two of them call opposite things `norm_output`: the raw y is right for SafeAILab,
SpecForge and DeepSpec, and AngelSpec's default; AngelSpec's norm_output=true feeds norm(y) back (`feedback_norm`). SpecForge's norm_output
only says that the head reads norm(y), which all do. Heads are trained, except DeepSpec's, which is the target's (`own_head=False`).
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
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.layers import Layer, layer_specs, rms_norm


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter for one target."""

    transformer: TransformerConfig  # one layer; vocab_size is the target's
    taps: tuple[int, ...]  # 0-based target layers whose outputs are fused
    target_num_layers: int
    num_drafts: int = 5  # most drafts a round
    fc_norm: bool = False
    feedback_norm: bool = False  # the next step reads norm(y), not y
    own_head: bool = True  # a trained head, or the target's
    draft_vocab: int | None = None  # rows of the head; None = the target's whole vocabulary

    def __post_init__(self):
        if not self.taps:
            raise ValueError("taps must name at least one target layer")
        autoregressive.check(self.transformer, self.taps, self.target_num_layers, self.num_drafts, self.draft_vocab)

    @property
    def family(self) -> str:
        return "eagle3"


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high layer, as in all public EAGLE-3 code: 1, N/2 - 1 and N - 4 (0-based outputs)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def config_for(
    target: TransformerConfig,
    *,
    family: str = "eagle3",
    taps: tuple[int, ...] | None = None,
    num_drafts: int = 5,
    fc_norm: bool = False,
    feedback_norm: bool = False,
    own_head: bool = True,
    draft_vocab: int | None = None,
    **layer: Any,
) -> Eagle3Config:
    """Configuration of a new drafter for a target: a Llama layer of its shape, without q/k norms unless `qk_norm` says so.

    Further options are fields of TransformerConfig (`intermediate_size`, `num_heads`, ...).
    """
    del family
    return Eagle3Config(
        transformer=autoregressive.layer_config(target, {"qk_norm": None}, layer),
        taps=default_taps(target.num_layers) if taps is None else tuple(taps),
        target_num_layers=target.num_layers,
        num_drafts=num_drafts,
        fc_norm=fc_norm,
        feedback_norm=feedback_norm,
        own_head=own_head,
        draft_vocab=draft_vocab,
    )


@struct.dataclass
class Eagle3:
    fc: jax.Array  # [T * D, D]
    hidden_norm: jax.Array  # [D]
    layer: Layer  # its input norm is the embedding's, and qkv [2D, G, H/G + 2, E] reads [embedding ; hidden]
    norm: jax.Array  # [D]
    fc_norm: jax.Array | None = None  # [T, D]
    head: jax.Array | None = None  # [V', D]


def drafter_specs(config: Eagle3Config) -> Eagle3:
    """Declaration of every trainable parameter; the embedding is the target's."""
    model, taps = config.transformer, len(config.taps)
    width = model.hidden_size
    norm = Param((width,), (None,), "ones", dtype=jnp.float32)
    rows = config.draft_vocab or model.vocab_size
    return Eagle3(
        fc=Param((taps * width, width), (None, "embed")),
        hidden_norm=norm,
        layer=layer_specs(model, inputs=2 * width),
        norm=norm,
        fc_norm=Param((taps, width), (None, None), "ones", dtype=jnp.float32) if config.fc_norm else None,
        head=Param((rows, width), ("vocab", "embed"), scale=0.02) if config.own_head else None,
    )


def _condition(
    params: Eagle3, config: Eagle3Config, features: Float[Array, "*N T D"], hidden: Float[Array, "*N D"]
) -> Float[Array, "*N D"]:
    if params.fc_norm is not None:
        eps = config.transformer.rms_norm_eps
        features = jnp.stack([rms_norm(features[..., t, :], norm, eps) for t, norm in enumerate(params.fc_norm)], axis=-2)
    return narrow.einsum("...c,ce->...e", features.reshape(*features.shape[:-2], -1), params.fc)


def _read(
    params: Eagle3, config: Eagle3Config, embedded: Float[Array, "*N D"], hidden: Float[Array, "*N D"], positions: Int[Array, "*N"]
):
    eps = config.transformer.rms_norm_eps
    both = [rms_norm(embedded, params.layer.input_norm, eps), rms_norm(hidden, params.hidden_norm, eps)]
    return hidden, jnp.concatenate(both, axis=-1)


def _write(params: Eagle3, config: Eagle3Config, y: Float[Array, "*N D"]):
    normed = rms_norm(y, params.norm, config.transformer.rms_norm_eps)
    return normed if config.feedback_norm else y, normed


def _head(params: Eagle3, config: Eagle3Config, head: Float[Array, "V D"]) -> Float[Array, "V D"]:
    return head if params.head is None else params.head


CELL = Cell(_condition, _read, _write, _head)
create_state = autoregressive.create_state
extend = functools.partial(autoregressive.extend, CELL)
draft = functools.partial(autoregressive.draft, CELL)
tree_lanes = autoregressive.tree_lanes
start_tree = autoregressive.start_tree
expand = functools.partial(autoregressive.expand, CELL)
