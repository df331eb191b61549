"""Every loss and weight against the reference table: values within 1e-5, gradients within 1e-4 relative."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax.training import losses

TABLE = load_file(pathlib.Path(__file__).parents[1] / "data" / "losses" / "table_2x3x7x64.safetensors")
STUDENT = jnp.asarray(TABLE["in.student_logits"])
TEACHER = jnp.asarray(TABLE["in.teacher_logits"])
LABELS = jnp.asarray(TABLE["in.labels"].astype(np.int32))
MASK = jnp.asarray(TABLE["in.mask"])
CONFIDENCE = jnp.asarray(TABLE["in.confidence_logits"])


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def check(actual, expected, relative):
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=relative, atol=relative * max(np.abs(expected).max(), 1e-6))


def lk_hybrid(student, teacher, eta):
    return losses.lk_hybrid(losses.forward_kl(student, teacher), losses.acceptance(student, teacher), eta)


PER_POSITION = {
    "ce": lambda s: losses.cross_entropy(s, LABELS),
    "ce_teacher_argmax": lambda s: losses.cross_entropy(s, jnp.argmax(TEACHER, axis=-1).astype(jnp.int32)),
    "soft_ce": lambda s: losses.soft_cross_entropy(s, TEACHER),
    "kl_full": lambda s: losses.forward_kl(s, TEACHER),
    "l1": lambda s: losses.l1_distance(s, TEACHER),
    "tv": lambda s: losses.total_variation(s, TEACHER),
    "kl_topk10_a": lambda s: losses.top_kl(s, TEACHER, 10, renormalize=True),
    "kl_topk64_a": lambda s: losses.top_kl(s, TEACHER, 64, renormalize=True),
    "kl_topk10_b": lambda s: losses.top_kl(s, TEACHER, 10),
    "kl_topk1_b": lambda s: losses.top_kl(s, TEACHER, 1),
    "single_kl_topk8": lambda s: losses.forward_kl(*losses.teacher_top(s, TEACHER, 8)),
    "tv_topk8": lambda s: losses.total_variation(*losses.teacher_top(s, TEACHER, 8)),
    "lk_alpha": lambda s: losses.lk_alpha(losses.acceptance(s, TEACHER)),
    "lk_hybrid_eta1": lambda s: lk_hybrid(s, TEACHER, 1.0),
    "lk_hybrid_eta3": lambda s: lk_hybrid(s, TEACHER, 3.0),
    "lk_hybrid_eta3_topk8": lambda s: lk_hybrid(*losses.teacher_top(s, TEACHER, 8), 3.0),
}
FUSED = {
    "ce": lambda t: t.ce,
    "kl_full": lambda t: t.kl,
    "l1": lambda t: 2.0 * (1.0 - t.alpha),
    "tv": lambda t: 1.0 - t.alpha,
    "lk_alpha": lambda t: losses.lk_alpha(t.alpha),
    "lk_hybrid_eta3": lambda t: losses.lk_hybrid(t.kl, t.alpha, 3.0),
}
WEIGHTS = {
    "decay_g4": lambda c: losses.decay_weights(7, 4.0) * MASK.reshape(-1, 7),
    "decay_g7": lambda c: losses.decay_weights(7, 7.0) * MASK.reshape(-1, 7),
    "dpace_angelspec_a00": lambda c: losses.dpace_weights(c, MASK, 0.0),
    "dpace_angelspec_a03": lambda c: losses.dpace_weights(c, MASK, 0.3),
    "dpace_angelspec_a05": lambda c: losses.dpace_weights(c, MASK, 0.5),
    "dpace_angelspec_a10": lambda c: losses.dpace_weights(c, MASK, 1.0),
    "sf_dpace_a05": lambda c: losses.dpace_weights(c, MASK, 0.5, "masked"),
    "sf_dpace_cumulative_confidence_only_a05": lambda c: losses.dpace_weights(c, MASK, 0.5, "prefix"),
    "sf_dpace_continuation_value_only_a05": lambda c: losses.dpace_weights(c, MASK, 0.5, "suffix"),
}


@pytest.mark.parametrize("name", PER_POSITION)
def test_per_position(name):
    function = PER_POSITION[name]
    check(function(STUDENT), TABLE[f"out.{name}.per_position"], 1e-5)
    mean, gradient = jax.value_and_grad(lambda s: losses.weighted_mean(function(s), MASK))(STUDENT)
    check(mean, TABLE[f"out.{name}.mean"], 1e-5)
    check(gradient, TABLE[f"out.{name}.grad"], 1e-4)


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


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name):
    def loss(student):
        ce = losses.cross_entropy(student, LABELS)
        with jax.numpy_rank_promotion("allow"):
            weights = WEIGHTS[name](jnp.exp(-ce)).reshape(MASK.shape)
        return losses.weighted_mean(ce, weights), weights

    (value, weights), gradient = jax.value_and_grad(loss, has_aux=True)(STUDENT)
    check(weights, TABLE[f"out.w.{name}.weights"], 1e-5)
    check(value, TABLE[f"out.w.{name}.ce_loss"], 1e-5)
    check(gradient, TABLE[f"out.w.{name}.ce_grad"], 1e-4)


def test_end_to_end_tv():
    def loss(student):
        return losses.weighted_mean(*losses.end_to_end_tv(losses.acceptance(student, TEACHER), MASK))

    alpha = losses.acceptance(STUDENT, TEACHER)
    check(alpha, TABLE["out.alpha"], 1e-5)
    value, gradient = jax.value_and_grad(loss)(STUDENT)
    check(value, TABLE["out.e2e_tv.loss"], 1e-5)
    check(gradient, TABLE["out.e2e_tv.grad"], 1e-4)
    lengths, slots = losses.expected_lengths(alpha, MASK)
    check(losses.weighted_mean(lengths, (slots > 0).astype(jnp.float32)), TABLE["out.e2e_tv.accept_length"], 1e-5)


MTP = {
    "direct_tv": lambda s, v: losses.chain_tv(losses.acceptance(s, TEACHER), v),
    "surrogate_tv": lambda s, v: losses.chain_surrogate(losses.total_variation(s, TEACHER), losses.acceptance(s, TEACHER), v),
    "surrogate_lk": lambda s, v: losses.chain_surrogate(lk_hybrid(s, TEACHER, 3.0), losses.acceptance(s, TEACHER), v),
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_chains(name):
    value, gradient = jax.value_and_grad(lambda s: MTP[name](s, MASK))(STUDENT)
    check(value, TABLE[f"out.mtp_e2e_{name}.loss"], 1e-5)
    check(gradient, TABLE[f"out.mtp_e2e_{name}.grad"], 1e-4)


DEEPSPEC = {"default": (0.1, 0.9, 1.0, 4.0), "ce_g7": (1.0, 0.0, 0.0, 7.0), "l1": (0.0, 1.0, 0.0, 4.0), "conf": (0.0, 0.0, 1.0, 4.0)}


@pytest.mark.parametrize("name", DEEPSPEC)
def test_deepspec_sum(name):
    ce_weight, l1_weight, confidence_weight, gamma = DEEPSPEC[name]
    mask = losses.contiguous_mask(MASK)
    np.testing.assert_array_equal(np.asarray(mask), TABLE["out.deepspec.eval_mask"])
    weights = mask * losses.decay_weights(7, gamma)[None, None, :]

    def loss(student, confidence):
        terms = losses.row_terms(student, TEACHER, LABELS)
        row = ce_weight * terms.ce + l1_weight * 2.0 * (1.0 - terms.alpha)
        return losses.weighted_mean(row + confidence_weight * losses.confidence_bce(confidence, terms.alpha), weights)

    value, (gradient, confidence_gradient) = jax.value_and_grad(loss, argnums=(0, 1))(STUDENT, CONFIDENCE)
    check(value, TABLE[f"out.deepspec.{name}.loss"], 1e-5)
    check(gradient, TABLE[f"out.deepspec.{name}.grad"], 1e-4)
    check(confidence_gradient, TABLE[f"out.deepspec.{name}.conf_grad"], 1e-4)


def test_nothing_supervised_is_zero_not_nan():
    nothing = jnp.zeros_like(MASK)
    assert losses.weighted_mean(MASK, nothing) == 0.0
    alpha = losses.acceptance(STUDENT, TEACHER)
    assert losses.weighted_mean(*losses.end_to_end_tv(alpha, nothing)) == 0.0
    assert not losses.dpace_weights(alpha, nothing).any()


def test_unknown_dpace_variant_is_named():
    with pytest.raises(ValueError, match="'best'.*all_slots"):
        losses.dpace_weights(MASK, MASK, 0.5, "best")
