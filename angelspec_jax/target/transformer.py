"""The frozen language model: parameters, forward pass over packed rows, and logits."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.params import Param, stack
from angelspec_jax.target import moe
from angelspec_jax.target.attention import Rows, attend
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.layers import Layer, decoder_layer, layer_specs, rms_norm, rotation


@struct.dataclass
class Runs:
    """Layers of a scanned model that are not all alike: one stack for each run of consecutive layers of one kind."""

    stacks: tuple[Layer, ...]  # each a Layer with the run's length leading


@struct.dataclass
class TargetParams:
    embed: jax.Array  # [V, D]
    layers: tuple[Layer, ...] | Layer | Runs  # a tuple (unrolled), one Layer with a leading L (scan), or several such
    final_norm: jax.Array  # [D]
    lm_head: jax.Array | None  # [V, D], rows like `embed`; None when tied to it


def target_specs(config: TransformerConfig) -> TargetParams:
    """Declaration of every parameter of the model."""
    kinds = {sparse: layer_specs(config, sparse) for sparse in (False, True)}
    layers = tuple(kinds[config.is_sparse(index)] for index in range(config.num_layers))
    return TargetParams(
        embed=Param((config.vocab_size, config.hidden_size), ("vocab", "embed"), scale=0.02),
        layers=arrange(config, layers, lambda alike: stack(alike[0], len(alike))),
        final_norm=Param((config.hidden_size,), (None,), "ones", dtype=jnp.float32),
        lm_head=None if config.tie_embeddings else Param((config.vocab_size, config.hidden_size), ("vocab", "embed"), scale=0.02),
    )


def arrange(config: TransformerConfig, layers: tuple[Layer, ...], stacked: Callable[[tuple[Layer, ...]], Layer]):
    """All layers as `TargetParams.layers` holds them; `stacked` makes one Layer of several that are alike."""
    if not config.scan_layers:
        return layers
    runs = [stacked(tuple(layers[i] for i in run)) for _, run in itertools.groupby(range(config.num_layers), config.is_sparse)]
    return runs[0] if len(runs) == 1 else Runs(tuple(runs))


def layer_at(layers: tuple[Layer, ...] | Layer | Runs, index: int) -> Layer:
    """One layer's parameters, however the model holds them."""
    if isinstance(layers, tuple):
        return layers[index]
    for run in layers.stacks if isinstance(layers, Runs) else (layers,):
        count = run.input_norm.shape[0]
        if index < count:
            return jax.tree.map(lambda x, i=index: x[i], run)
        index -= count
    raise IndexError("the model has fewer layers")


def forward(
    params: TargetParams,
    config: TransformerConfig,
    tokens: Int[Array, "N"],
    positions: Int[Array, "N"],
    rows: Rows,
    cache: KVCache,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "N T D"], Float[Array, "N D"], tuple]:
    """Run the rows in flight against the cache, which stays as it is.

    Returns the features tapped after decoder layers `taps` (0-based, before any final norm; -1 is the embedding output), the hidden state
    after the final norm, and the rows' new keys and values, per layer as the cache stores layers (`kv_cache.commit` writes them).
    """
    check_taps(taps, config.num_layers)
    x = params.embed[tokens]
    features = {-1: x}
    run = functools.partial(_layer, config=config, positions=positions, turned=rotation(config, positions), rows=rows, table=cache.table)
    if isinstance(params.layers, tuple):
        once = functools.partial(_traced_once, **run.keywords)
        new_kv = []
        for index, layer in enumerate(params.layers):
            k_cache, v_cache = cache.layer(index)
            x, kv = once(layer, x, k_cache, v_cache)
            new_kv.append(kv)
            features[index] = x
        new_k, new_v = tuple(k for k, _ in new_kv), tuple(v for _, v in new_kv)
        tapped = jnp.stack([features[tap] for tap in taps], axis=1) if taps else jnp.zeros((x.shape[0], 0, x.shape[1]), x.dtype)
    else:
        x, tapped, (new_k, new_v) = _scan(run, params.layers, x, cache, taps)
    return tapped, rms_norm(x, params.final_norm, config.rms_norm_eps), (new_k, new_v)


def logits(params: TargetParams, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """Vocabulary logits in float32 of hidden states after the final norm."""
    return jnp.einsum("...d,vd->...v", hidden, head_rows(params), preferred_element_type=jnp.float32)


def head_rows(params: TargetParams) -> Float[Array, "V D"]:
    """The LM head, one row a token."""
    return params.embed if params.lm_head is None else params.lm_head


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError when a tapped layer id does not exist."""
    for tap in taps:
        if not -1 <= tap < num_layers:
            last = num_layers - 1
            raise ValueError(f"layer id {tap} does not exist in a target of {num_layers} layers; ids run from -1 (embedding) to {last}")


def _layer(layer, x, k_cache, v_cache, index=None, *, config, positions, turned, rows, table):
    def see(q, k, v):
        return attend(
            q, k, v, k_cache, v_cache, table, rows, positions, index, scale=config.attention_scale, window=config.sliding_window
        )

    return decoder_layer(layer, config, x, turned, see)


# Layers that are alike are traced once, not once each; the compiler sees the same program. Of a whole step's tracing this is two thirds.
_traced_once = jax.jit(_layer, static_argnames=("config",))


def _scan(run, layers, x, cache, taps):
    ids = jnp.asarray(taps, jnp.int32)
    embedded = jnp.broadcast_to((ids == -1)[:, None, None], (len(taps), *x.shape))
    tapped = jnp.where(embedded, x[None], jnp.zeros((), x.dtype))

    def step(complete, first, carry, per_layer):
        x, tapped = carry
        index, layer = per_layer
        layer = complete(layer, index - first)
        # Indexed here, not passed as scanned inputs: a run's part of the cache would be a copy. Pages are indexed by the kernel.
        if cache.table is None:
            one = lambda part: jax.lax.dynamic_index_in_dim(part, index, keepdims=False, allow_negative_indices=False)  # noqa: E731
            x, kv = run(layer, x, one(cache.k), one(cache.v))
        else:
            x, kv = run(layer, x, cache.k, cache.v, index)
        tapped = jnp.where((ids == index)[:, None, None], x[None], tapped)
        return (x, tapped), kv

    first, new_kv = 0, []
    for stacked in layers.stacks if isinstance(layers, Runs) else (layers,):
        count = stacked.input_norm.shape[0]
        sliced, complete = moe.aside(stacked)
        numbers = jnp.arange(first, first + count, dtype=jnp.int32)
        (x, tapped), kv = jax.lax.scan(functools.partial(step, complete, first), (x, tapped), (numbers, sliced))
        new_kv.append(kv)
        first += count
    joined = new_kv[0] if len(new_kv) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *new_kv)
    return x, jnp.swapaxes(tapped, 0, 1), joined
