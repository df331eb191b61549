"""Products of bfloat16 arrays: float32 sums, and gradients that round nothing else than the arrays themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.target import narrow

EQUATIONS = {
    "...d,df->...f": ((2, 3, 64), (64, 48)),
    "...d,vd->...v": ((2, 3, 64), (48, 64)),
    "...d,dgpe->...gpe": ((5, 64), (64, 3, 4, 2)),
    "...d,dcf->...cf": ((64,), (64, 2, 8)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_values_and_gradients_are_those_of_float32_rounded(equation, dtype):
    """Whole numbers up to 8 are exact in bfloat16, and so are their products and sums in float32: only the end is rounded."""
    shapes, keys = EQUATIONS[equation], jax.random.split(jax.random.key(0), 3)
    x, weight = (jax.random.randint(key, shape, -8, 9).astype(jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False))
    out, back = jax.vjp(lambda x, w: narrow.einsum(equation, x, w, dtype), x, weight)
    gradient = jax.random.randint(keys[2], out.shape, -8, 9).astype(out.dtype)
    wide, wide_back = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), x.astype(jnp.float32), weight.astype(jnp.float32))
    assert out.dtype == (dtype or jnp.bfloat16)
    np.testing.assert_array_equal(out, wide.astype(out.dtype))
    for found, expected in zip(back(gradient), wide_back(gradient.astype(jnp.float32)), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))


def test_gradients_of_float32_logits_are_products_of_bfloat16():
    x, head = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((96, 64), jnp.bfloat16)
    made = jax.make_jaxpr(jax.grad(lambda x, w: narrow.einsum("...d,vd->...v", x, w, jnp.float32).sum(), argnums=(0, 1)))(x, head)
    products = [equation for equation in made.eqns if equation.primitive.name == "dot_general"]
    assert len(products) == 2  # the sum itself needs no logits
    for product in products:
        assert {variable.aval.dtype for variable in product.invars} == {jnp.dtype("bfloat16")}
        assert product.params["preferred_element_type"] == jnp.float32


def test_other_types_are_left_to_jax():
    x, weight = jnp.full((2, 3), 0.1), jnp.full((3, 4), 0.3)
    np.testing.assert_array_equal(narrow.einsum("...d,df->...f", x, weight), jnp.einsum("...d,df->...f", x, weight))
