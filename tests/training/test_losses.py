"""Losses at their edges, and the fused row terms against the reference table (tests/goldens checks every loss and weight against it)."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax.training import losses

TABLE = load_file(pathlib.Path(__file__).parents[1] / "goldens" / "losses" / "table_2x3x7x64" / "io.safetensors")
STUDENT = jnp.asarray(TABLE["in.student_logits"])
TEACHER = jnp.asarray(TABLE["in.teacher_logits"])
LABELS = jnp.asarray(TABLE["in.labels"].astype(np.int32))
MASK = jnp.asarray(TABLE["in.mask"])


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def check(actual, expected, relative):
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=relative, atol=relative * max(np.abs(expected).max(), 1e-6))


FUSED = {
    "ce": lambda t: t.ce,
    "kl_full": lambda t: t.kl,
    "l1": lambda t: 2.0 * (1.0 - t.alpha),
    "tv": lambda t: 1.0 - t.alpha,
    "lk_alpha": lambda t: losses.lk_alpha(t.alpha),
    "lk_hybrid_eta3": lambda t: losses.lk_hybrid(t.kl, t.alpha, 3.0),
}


@pytest.mark.parametrize("name", FUSED)
def test_shared_row_terms(name):
    def value(student):
        return FUSED[name](losses.row_terms(student, TEACHER, LABELS))

    check(value(STUDENT), TABLE[f"out.{name}.per_position"], 1e-5)
    check(jax.grad(lambda s: losses.weighted_mean(value(s), MASK))(STUDENT), TABLE[f"out.{name}.grad"], 1e-4)


def test_row_terms_without_teacher_and_with_labels_outside_the_vocabulary():
    labels = LABELS.at[0, 0, :3].set(-1)
    terms, gradient = losses.row_terms(STUDENT, None, labels), jax.grad(lambda s: losses.row_terms(s, None, labels).ce.sum())(STUDENT)
    assert terms.kl is None and terms.alpha is None
    assert not terms.ce[0, 0, :3].any() and not terms.correct[0, 0, :3].any() and not gradient[0, 0, :3].any()
    check(terms.ce[1], TABLE["out.ce.per_position"][1], 1e-5)
    hits = np.argmax(TABLE["in.student_logits"], -1) == np.asarray(labels)
    np.testing.assert_array_equal(np.asarray(terms.correct), hits.astype(np.float32))


def test_masked_logits_give_finite_terms():
    student, teacher = STUDENT.at[..., 50:].set(-jnp.inf), TEACHER.at[..., 50:].set(-jnp.inf)
    labels = jnp.minimum(LABELS, 49)

    def total(s):
        terms = losses.row_terms(s, teacher, labels)
        return (terms.ce + terms.kl + terms.alpha).sum()

    value, gradient = jax.value_and_grad(total)(student)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("count", [1, 9, 64])
def test_the_teachers_best_tokens_are_those_of_a_sort(count):
    """All terms and their gradient, against logits gathered by `lax.top_k`."""
    outside = jnp.full(LABELS.shape, -1, jnp.int32)

    def total(student, some_student, some_teacher):
        terms = losses.row_terms(some_student(student), some_teacher, outside)
        return jnp.sum(terms.kl + 2.0 * terms.alpha), (terms.kl, terms.alpha)

    values, index = jax.lax.top_k(TEACHER, count)
    gather = lambda student: jnp.take_along_axis(student, index, axis=-1)  # noqa: E731
    (_, sorted_terms), by_sort = jax.value_and_grad(total, has_aux=True)(STUDENT, gather, values)
    mask = lambda student: losses.teacher_top(student, TEACHER, count)[0]  # noqa: E731
    (_, terms), gradient = jax.value_and_grad(total, has_aux=True)(STUDENT, mask, losses.teacher_top(STUDENT, TEACHER, count)[1])
    for ours, theirs in zip((*terms, gradient), (*sorted_terms, by_sort), strict=True):
        check(ours, theirs, 1e-5)


def test_nothing_supervised_is_zero_not_nan():
    nothing = jnp.zeros_like(MASK)
    assert losses.weighted_mean(MASK, nothing) == 0.0
    alpha = losses.acceptance(STUDENT, TEACHER)
    assert losses.weighted_mean(*losses.end_to_end_tv(alpha, nothing)) == 0.0
    assert not losses.dpace_weights(alpha, nothing).any()


def test_unknown_dpace_variant_is_named():
    with pytest.raises(ValueError, match="'best'.*all_slots"):
        losses.dpace_weights(MASK, MASK, 0.5, "best")
