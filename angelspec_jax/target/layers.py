"""The decoder layer, shared by the target and every drafter. Weights are stored [in..., out...]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from angelspec_jax.params import Param
from angelspec_jax.target import int8
from angelspec_jax.target.config import Rope, TransformerConfig
from angelspec_jax.target.int8 import Int8, Weight, product
from angelspec_jax.target.moe import MoE, moe_specs, routed


@struct.dataclass
class Layer:
    input_norm: jax.Array  # [D]
    # One product per kv head: its H/G query heads, then its key, then its value. Sharding over G keeps them together.
    qkv: Weight  # [D, G, H/G + 2, E]; a leading 2D where attention reads two states (EAGLE-3)
    o: Weight  # [H, E, D]
    post_attention_norm: jax.Array  # [D]
    gate_up: Weight | None  # [D, 2, F]; beside experts the shared one's, None where none is shared
    down: Weight | None  # [F, D]
    q_norm: jax.Array | None = None  # [E]
    k_norm: jax.Array | None = None  # [E]
    qkv_bias: jax.Array | None = None  # [G, H/G + 2, E]
    moe: MoE | None = None


def layer_specs(config: TransformerConfig, sparse: bool = False, inputs: int | None = None) -> Layer:
    """Declaration of one layer's parameters; a `sparse` layer routes to the experts of `config.moe`.

    `inputs` is the width of what attention reads, by default the model's.
    """
    matrix = Param if config.quantize is None else lambda *args, **options: int8.specs(Param(*args, **options))
    d, h, g, e = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    moe = config.moe if sparse else None
    f = config.intermediate_size if moe is None else moe.shared_size
    per_group = config.queries_per_kv + 2
    norm = Param((d,), (None,), "ones", dtype=jnp.float32)
    head_norm = Param((e,), (None,), "ones", dtype=jnp.float32) if config.qk_norm else None
    return Layer(
        input_norm=norm,
        qkv=matrix((inputs or d, g, per_group, e), ("embed", "kv_heads", None, None)),
        o=matrix((h, e, d), ("heads", None, "embed"), inputs=2),
        post_attention_norm=norm,
        gate_up=matrix((d, 2, f), ("embed", None, "mlp"), order=(1, 0, 2)) if f else None,
        down=matrix((f, d), ("mlp", "embed")) if f else None,
        q_norm=head_norm,
        k_norm=head_norm,
        qkv_bias=Param((g, per_group, e), ("kv_heads", None, None), "zeros") if config.attention_bias else None,
        moe=None if moe is None else moe_specs(moe, d, config.quantize),
    )


def decoder_layer(
    layer: Layer,
    config: TransformerConfig,
    x: Float[Array, "*N D"],
    rotation: "Rotation",
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    normed: Float[Array, "*N inputs"] | None = None,
) -> tuple[Float[Array, "*N D"], tuple[Float[Array, "*N G E"], Float[Array, "*N G E"]]]:
    """Pre-norm attention and SwiGLU. `attend(q, k, v)` decides what a row sees; the rows' own keys and values are returned.

    `normed` is what attention reads, by default x after the layer's input norm.
    """
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps) if normed is None else normed
    q, k, v = project_qkv(layer, config, normed, rotation)
    with jax.named_scope("attention"):
        mixed = attend(q, k, v)
    x = x + merge_heads(mixed, layer.o)
    normed = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
    with jax.named_scope("mlp"):
        return x + feed_forward(layer, config, normed), (k, v)


def project_qkv(layer: Layer, config: TransformerConfig, x: Float[Array, "*N D"], rotation: "Rotation"):
    """Queries [*N, H, E], keys and values [*N, G, E]; q and k carry their norm and rotation."""
    fused = product("...d,dgpe->...gpe", x, layer.qkv)
    if layer.qkv_bias is not None:
        fused = fused + expand(layer.qkv_bias, fused)
    queries = config.queries_per_kv
    q = fused[..., :queries, :].reshape(*x.shape[:-1], config.num_heads, config.head_dim)
    k, v = fused[..., queries, :], fused[..., queries + 1, :]
    return rotate_and_norm(q, layer.q_norm, config, rotation), rotate_and_norm(k, layer.k_norm, config, rotation), v


def project_kv(layer: Layer, config: TransformerConfig, x: Float[Array, "*N D"], rotation: "Rotation"):
    """Keys and values [*N, G, E] of rows that ask nothing: a block drafter's context."""
    queries = config.queries_per_kv
    fused = product("...d,dgpe->...gpe", x, layer.qkv[:, :, queries:])
    if layer.qkv_bias is not None:
        fused = fused + expand(layer.qkv_bias[:, queries:], fused)
    return rotate_and_norm(fused[..., 0, :], layer.k_norm, config, rotation), fused[..., 1, :]


def rotate_and_norm(x, weight, config: TransformerConfig, rotation: "Rotation"):
    """Head norm (when there is one) before or after the rotation, as the architecture has it."""
    if config.qk_norm == "before_rope":
        x = rms_norm(x, weight, config.rms_norm_eps)
    x = rotate(x, rotation)
    if config.qk_norm == "after_rope":
        x = rms_norm(x, weight, config.rms_norm_eps)
    return x


def feed_forward(layer: Layer, config: TransformerConfig, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """One SwiGLU, or the routed experts and the one they share."""
    if layer.moe is None:
        assert layer.gate_up is not None and layer.down is not None
        return swiglu(x, layer.gate_up, layer.down)
    assert config.moe is not None, "a layer with experts needs their configuration"
    out = routed(layer.moe, config.moe, x)
    if layer.gate_up is not None and layer.down is not None:
        out = out + swiglu(x, layer.gate_up, layer.down).astype(jnp.float32)
    return out.astype(x.dtype)


def swiglu(x: Float[Array, "*N D"], gate_up: Float[Array, "D 2 F"] | Int8, down: Float[Array, "F out"] | Int8) -> Float[Array, "*N out"]:
    fused = product("...d,dcf->...cf", x, gate_up)
    return product("...f,fd->...d", jax.nn.silu(fused[..., 0, :]) * fused[..., 1, :], down)


def rms_norm(x: Float[Array, "*N D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*N D"]:
    """Root-mean-square norm over the last axis; statistics and scale in float32, result in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * expand(weight.astype(jnp.float32), wide)).astype(x.dtype)


@struct.dataclass
class Rotation:
    """Cosine and sine of every row's rotary angles, made once per pass."""

    cos: Float[Array, "*N half"]
    sin: Float[Array, "*N half"]


def rotation(config: TransformerConfig, positions: Int[Array, "*N"]) -> Rotation:
    """Rotary angles of rows at these positions, in float32."""
    frequency = rope_frequencies(config.rope, config.head_dim)
    angle = positions.astype(jnp.float32)[..., None] * expand(frequency, positions[..., None])
    # The barrier keeps XLA from recomputing sines inside every layer's fusions.
    return Rotation(*jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle))))


def rotate(x: Float[Array, "*N heads E"], rotation: Rotation) -> Float[Array, "*N heads E"]:
    """Rotary embedding, halves rotated against each other (Hugging Face convention)."""
    half = x.shape[-1] // 2
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def merge_heads(mixed: Float[Array, "*N H E"], o: Float[Array, "H E D"] | Int8) -> Float[Array, "*N D"]:
    """The output projection, as one product over the flattened heads (XLA transposes the weights of a two-axis contraction on CPU)."""
    heads, size, width = o.shape
    flat = mixed.reshape(*mixed.shape[:-2], heads * size)
    return product("...f,fd->...d", flat, o.reshape(heads * size, width))


def rope_frequencies(rope: Rope, size: int) -> Float[Array, "half"]:
    """Inverse wavelengths; `llama3` stretches the low frequencies and blends the middle band."""
    theta = rope.theta * rope.factor ** (size / (size - 2)) if rope.scaling == "ntk" else rope.theta
    frequency = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling != "llama3":
        return frequency
    wavelength = 2 * jnp.pi / frequency
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)  # 0: stretched by `factor`, 1: kept
    return (1 - blend) * frequency / rope.factor + blend * frequency


def expand(x: jax.Array, like: jax.Array) -> jax.Array:
    """Leading axes of length one, up to the rank of `like` (rank promotion is an error in our tests)."""
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
