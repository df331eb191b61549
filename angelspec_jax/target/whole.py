"""One causal pass over whole sequences whose tokens lie over the mesh's sequence axis: features of texts that are long for one device.

Nothing is cached and nothing is packed into rows: arrays keep their axes [B, S, ...], so that each stays spread over the devices.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from angelspec_jax import mesh as meshes
from angelspec_jax.target import kernels, moe
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.layers import decoder_layer, rms_norm, rotation
from angelspec_jax.target.transformer import Runs, TargetParams, check_taps


def forward(
    params: TargetParams, config: TransformerConfig, tokens: Int[Array, "B S"], taps: tuple[int, ...] = ()
) -> tuple[Float[Array, "B S T D"], Float[Array, "B S D"]]:
    """Features tapped after decoder layers `taps` and the hidden state after the final norm, as `transformer.forward` has them.

    Traced under `jax.set_mesh` of a mesh with a sequence axis that divides S into parts of a multiple of 8 tokens.
    """
    check_taps(taps, config.num_layers)
    x = along_sequence(params.embed[along_sequence(tokens)])
    positions = along_sequence(jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape))
    turned = rotation(config, positions)

    def see(q, k, v):
        return kernels.causal_attention(q, k, v, scale=config.attention_scale, window=config.sliding_window)

    def run(x, layer):
        return along_sequence(decoder_layer(layer, config, x, turned, see)[0])

    ids = jnp.asarray(taps, jnp.int32)
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype)

    def keep(tapped, index, x):
        return jnp.where((ids == index)[:, None, None, None], x[None], tapped)

    tapped, first = keep(tapped, -1, x), 0
    layers = params.layers
    for stacked in layers if isinstance(layers, tuple) else layers.stacks if isinstance(layers, Runs) else (layers,):
        if isinstance(layers, tuple):
            x = run(x, stacked)
            tapped, first = keep(tapped, first, x), first + 1
            continue

        sliced, complete = moe.aside(stacked)

        def step(carry, part, complete=complete, first=first):
            x = run(carry[0], complete(part[1], part[0] - first))
            return (x, keep(carry[1], part[0], x)), None

        count = stacked.input_norm.shape[0]
        (x, tapped), _ = jax.lax.scan(step, (x, tapped), (jnp.arange(first, first + count, dtype=jnp.int32), sliced))
        first += count
    return jnp.moveaxis(tapped, 0, 2), rms_norm(x, params.final_norm, config.rms_norm_eps)


def along_sequence(x: Array) -> Array:
    """[B, S, ...] with its sequences over the batch axes and its tokens over the sequence axis of the mesh; as it is without one."""
    if meshes.sequence_parts() == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    batch = meshes.partition(mesh, ("batch",), x.shape[:1])[0]  # pyright: ignore[reportArgumentType]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(batch, meshes.SEQUENCE))
