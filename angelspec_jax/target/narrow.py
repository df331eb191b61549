"""Products of bfloat16 arrays whose sums, forward and backward, are float32.

A matrix unit adds in float32 anyway and rounds once at the end. Asking for float32 and rounding here gives the same on a TPU; on a CPU it
decides whether the processor's bfloat16 instructions are used at all, and it keeps the products of the backward pass in bfloat16 where
float32 logits would widen them.
"""

import functools

import jax
import jax.numpy as jnp


def einsum(equation: str, x: jax.Array, weight: jax.Array, preferred_element_type=None) -> jax.Array:
    """`jnp.einsum` of rows and a weight; where both are bfloat16, gradients are products of bfloat16 arrays too.

    `equation` is "...i,io->...o" or "...i,oi->...o": an ellipsis for the axes of the rows, letters for the inputs that are summed over
    and the outputs, of which there may be several.
    """
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return jnp.einsum(equation, x, weight, preferred_element_type=preferred_element_type)
    return _einsum(equation, preferred_element_type or x.dtype, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(equation, dtype, x, weight):
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32).astype(dtype)


def _forward(equation, dtype, x, weight):
    return _einsum(equation, dtype, x, weight), (x, weight)


def _backward(equation, dtype, kept, gradient):
    x, weight = kept
    left, right, out = (part.replace("...", "") for part in equation.replace(" ", "").replace("->", ",").split(","))
    lead = x.ndim - len(left)
    gradient = gradient.astype(x.dtype).reshape(-1, *gradient.shape[lead:])
    to_x = jnp.einsum(f"Z{out},{right}->Z{left}", gradient, weight, preferred_element_type=jnp.float32)
    # As plain matrices: XLA:CPU has no product of these types that leaves several axes on its right.
    x, gradient = x.reshape(gradient.shape[0], -1), gradient.reshape(gradient.shape[0], -1)
    pair = (x, gradient) if right.startswith(left) else (gradient, x)
    to_weight = jnp.einsum("Za,Zb->ab", *pair, preferred_element_type=jnp.float32)
    return to_x.reshape(kept[0].shape).astype(x.dtype), to_weight.reshape(weight.shape).astype(weight.dtype)


_einsum.defvjp(_forward, _backward)
