"""Loss terms of one drafted position, and the weights that combine them. Pure functions in float32.

q = softmax(student) is the drafter's distribution and p = softmax(teacher) the target's, which never receives a gradient. Functions of
logits work on the last axis `V` and return one value per leading index. In functions of blocks the last axis counts the draft index
j = 0..K-1: the first predicted token of the block is 0, whatever the block layout.

Sources: CE with decay, DFlash (arXiv 2602.06036); D-PACE (arXiv 2605.18810); LK losses, end-to-end TV and their weighting, AngelSpec
(arXiv 2607.25852); L1 and confidence, DSpark (arXiv 2607.05147, equations 8 and 12).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.highest import at_least_kth

OUT = -1e30  # the logit of a token that is left out: no probability, and finite, so that 0 x log stays 0
DPACE_VARIANTS = ("all_slots", "masked", "prefix", "suffix")


def cross_entropy(student: Float[Array, "*rows V"], labels: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """-log q(label)."""
    student = student.astype(jnp.float32)
    picked = jnp.take_along_axis(student, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(student, axis=-1) - picked


def soft_cross_entropy(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """-sum_v p log q: the forward KL plus the teacher's entropy (EAGLE-3's loss)."""
    p, _ = _teacher(teacher)
    student = student.astype(jnp.float32)
    return jax.nn.logsumexp(student, axis=-1) - jnp.sum(p * student, axis=-1)


def forward_kl(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """KL(p || q) over the whole vocabulary."""
    p, log_p = _teacher(teacher)
    log_q = jax.nn.log_softmax(student.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)


def l1_distance(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """sum_v |p - q|, which is twice the total variation."""
    p, _ = _teacher(teacher)
    return jnp.sum(jnp.abs(p - jax.nn.softmax(student.astype(jnp.float32), axis=-1)), axis=-1)


def total_variation(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Half of `l1_distance`: the probability that the classic p/q rule refuses the draft."""
    return 0.5 * l1_distance(student, teacher)


def acceptance(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """alpha = sum_v min(p, q) = 1 - total variation: the probability that the classic p/q rule accepts the draft."""
    p, _ = _teacher(teacher)
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(student.astype(jnp.float32), axis=-1)), axis=-1)


def teacher_top(
    student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"], count: int
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows V"]]:
    """Student and teacher logits with probability for the teacher's `count` best tokens only; tokens that tie with the last of them stay.

    Any loss of these two is the "renormalised in the top-k" form of that loss: `forward_kl` of them is top-k KL variant A. The other
    tokens keep their places with a logit of `OUT`: a threshold is found in a few readings, where picking thousands of tokens out of a
    vocabulary sorts it, and their gradient would be scattered back.
    """
    teacher = jax.lax.stop_gradient(teacher)
    best = at_least_kth(teacher.astype(jnp.float32), count)
    return jnp.where(best, student, jnp.asarray(OUT, student.dtype)), jnp.where(best, teacher, jnp.asarray(OUT, teacher.dtype))


def top_kl(
    student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"], count: int, *, renormalize: bool = False
) -> Float[Array, "*rows"]:
    """KL(p || q) summed over the teacher's `count` best tokens only.

    `renormalize=False` (variant B) keeps both full-vocabulary softmaxes, so mass outside the teacher's best tokens still costs;
    `renormalize=True` (variant A) compares the two distributions renormalised within those tokens.
    """
    if renormalize:
        return forward_kl(*teacher_top(student, teacher, count))
    student, teacher = student.astype(jnp.float32), jax.lax.stop_gradient(teacher.astype(jnp.float32))
    some_student, some_teacher = teacher_top(student, teacher, count)
    log_p = some_teacher - jax.nn.logsumexp(teacher, axis=-1, keepdims=True)
    log_q = some_student - jax.nn.logsumexp(student, axis=-1, keepdims=True)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def lk_alpha(alpha: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """LK loss "alpha": -log of the acceptance probability."""
    return -jnp.log(jnp.maximum(alpha, 1e-30))


def lk_hybrid(kl: Float[Array, "*rows"], alpha: Float[Array, "*rows"], eta: float = 3.0) -> Float[Array, "*rows"]:
    """LK loss "hybrid": lam KL + (1 - lam) TV with lam = exp(-eta alpha), no gradient through lam.

    Far from the teacher it is the KL, whose gradient does not vanish; near it, the total variation that acceptance depends on.
    """
    lam = jnp.exp(-eta * jax.lax.stop_gradient(alpha))
    return lam * kl + (1.0 - lam) * (1.0 - alpha)


def lk_batch(
    kl: Float[Array, "*rows"], alpha: Float[Array, "*rows"], weights: Float[Array, "*rows"], eta: float = 3.0, *, over_all: bool = False
) -> Float[Array, ""]:
    """LK loss with one lam = exp(-eta mean alpha) for the whole batch instead of one for each position.

    The two forms disagree wherever acceptance varies: a position that is already accepted keeps the KL's pull as long as the average is
    poor. `lk_hybrid` is the published loss (AngelSpec); this one is for recipes of SpecForge ("lambda"), whose code differs in two more
    ways. Its KL is the soft cross entropy, which has the same gradient; and it divides the KL's sum by the number of all positions,
    supervised or not (`over_all`), so that the KL counts the less against the TV the fewer positions are supervised. By default both
    are means over the same weights.
    """
    mean_alpha = weighted_mean(alpha, weights)
    lam = jnp.exp(-eta * jax.lax.stop_gradient(mean_alpha))
    mean_kl = jnp.mean(weights * kl) if over_all else weighted_mean(kl, weights)
    return lam * mean_kl + (1.0 - lam) * (1.0 - mean_alpha)


def two_stream_k3(
    student: Float[Array, "*blocks K"],
    teacher: Float[Array, "*blocks K"],
    hits: Bool[Array, "*blocks K"],
    mask: Float[Array, "*blocks K"],
    decay: float = 0.8,
) -> tuple[Float[Array, "*blocks K"], Float[Array, "*blocks K"]]:
    """Half on-policy distillation: (k3 of every proposal, its weight); the loss is their weighted mean (AngelSpec, arXiv 2607.25852).

    `student` and `teacher` are log-probabilities of what the drafter itself proposed, `hits` says whether the teacher would have chosen
    it. k3 = e^d - d - 1 with d = log p - log q is the low-variance estimate of the reverse KL; d is clamped to +-20 and k3 to 10, beyond
    which there is no gradient. The accepted prefix of a block is one stream, with weight 1; what follows the first miss is the other, with
    weight decay^j, j the draft index (AngelSpec's code; its text counts from the miss).
    """
    difference = jnp.clip(jax.lax.stop_gradient(teacher) - student, -20.0, 20.0)
    k3 = jnp.minimum(jnp.exp(difference) - difference - 1.0, 10.0)
    accepted = jnp.cumprod(hits.astype(jnp.float32), axis=-1)
    later = jnp.broadcast_to(decay ** jnp.arange(k3.shape[-1], dtype=jnp.float32), k3.shape)
    return k3, jax.lax.stop_gradient(mask * jnp.where(accepted > 0, 1.0, later))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ce", "correct", "kl", "alpha"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RowTerms:
    """What one row of logits contributes; `kl` and `alpha` are None without a teacher."""

    ce: Float[Array, "*rows"]  # -log q(label), 0 where the label is outside the vocabulary
    correct: Float[Array, "*rows"]  # 1 where the label has the largest logit
    kl: Float[Array, "*rows"] | None  # KL(p || q)
    alpha: Float[Array, "*rows"] | None  # sum min(p, q)


@jax.custom_vjp
def row_terms(student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"] | None, labels: Int[Array, "*rows"]) -> RowTerms:
    """Cross entropy, KL, acceptance and greedy hit of each row with every softmax computed once.

    Its derivative is written out: the backward pass keeps nothing of vocabulary size but the two arrays of logits and makes one
    elementwise pass over them. A label of -1 is outside the (draft) vocabulary: `ce` is 0 and `correct` is 0. Logits in float32.
    """
    return _row_terms_forward(student, teacher, labels)[0]


def _row_terms_forward(student, teacher, labels):
    top = jnp.max(student, axis=-1)
    normalizer = top + jnp.log(jnp.sum(jnp.exp(student - top[..., None]), axis=-1))
    inside = labels >= 0
    picked = jnp.take_along_axis(student, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    ce = jnp.where(inside, normalizer - picked, 0.0)
    correct = (inside & (picked >= top)).astype(jnp.float32)
    if teacher is None:
        return RowTerms(ce, correct, None, None), (student, normalizer, None, None, labels)
    teacher_normalizer = jax.nn.logsumexp(teacher, axis=-1)
    log_q = student - normalizer[..., None]
    log_p = teacher - teacher_normalizer[..., None]
    p = jnp.exp(log_p)
    alpha = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    kl = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
    return RowTerms(ce, correct, kl, alpha), (student, normalizer, teacher, teacher_normalizer, labels)


def _row_terms_backward(residuals, cotangent: RowTerms):
    # With z the student's logits and one cotangent per row and term:
    #   d ce / dz = q - onehot(label);   d kl / dz = q - p;   d alpha / dz = q (1[q<p] - sum q 1[q<p])
    student, normalizer, teacher, teacher_normalizer, labels = residuals
    q = jnp.exp(student - normalizer[..., None])
    vocabulary = jax.lax.broadcasted_iota(labels.dtype, student.shape, student.ndim - 1)
    ce_bar = jnp.where(labels >= 0, cotangent.ce, 0.0)[..., None]
    at_label = jnp.where(vocabulary == labels[..., None], ce_bar, 0.0)
    if teacher is None or cotangent.kl is None or cotangent.alpha is None:
        return q * ce_bar - at_label, None, None
    p = jnp.exp(teacher - teacher_normalizer[..., None])
    kl_bar, alpha_bar = cotangent.kl[..., None], cotangent.alpha[..., None]
    short = jnp.where(q < p, q, 0.0)
    shared = ce_bar + kl_bar - alpha_bar * jnp.sum(short, axis=-1, keepdims=True)
    return q * shared + alpha_bar * short - kl_bar * p - at_label, None, None


row_terms.defvjp(_row_terms_forward, _row_terms_backward)


def decay_weights(count: int, gamma: float) -> Float[Array, "K"]:
    """exp(-j / gamma) for draft index j = 0..count-1 (DFlash; gamma 7 for blocks of 16, 4 for blocks of 7 or 8)."""
    return jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)


def dpace_weights(
    label_probability: Float[Array, "*blocks K"],
    mask: Float[Array, "*blocks K"],
    alpha: float = 0.5,
    variant: str = "all_slots",
) -> Float[Array, "*blocks K"]:
    """D-PACE position weights, times the mask, without gradient.

    With c_j = (1 - alpha) q(label_j) + alpha, the weight of draft j is sum_{i >= j} prod_{l <= i} c_l: how much of the block's expected
    length hangs on it. "all_slots" (AngelSpec) takes sums and products over every slot and masks only the result. "masked" (SpecForge)
    lets masked slots neither multiply nor add: use it where blocks may run over the end of a sequence, whose labels mean nothing.
    "prefix" keeps only prod_{l <= j} c_l and "suffix" divides the full weight by it; both treat masked slots as "masked" does.
    """
    if variant not in DPACE_VARIANTS:
        raise ValueError(f"D-PACE variant {variant!r} does not exist; choose one of {', '.join(DPACE_VARIANTS)}")
    mask = jax.lax.stop_gradient(mask)
    smoothed = (1.0 - alpha) * jax.lax.stop_gradient(label_probability) + alpha
    counted = jnp.ones_like(mask) if variant == "all_slots" else (mask > 0).astype(jnp.float32)
    prefix = jnp.cumprod(jnp.where(counted > 0, smoothed, 1.0), axis=-1)
    if variant == "prefix":
        return prefix * mask
    total = jnp.flip(jnp.cumsum(jnp.flip(prefix * counted, axis=-1), axis=-1), axis=-1)
    if variant == "suffix":
        total = jnp.where(prefix > 0, total / jnp.where(prefix > 0, prefix, 1.0), 0.0)
    return total * mask


def weighted_mean(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, ""]:
    """sum(w v) / sum(w), and 0 when all weights are 0."""
    return jnp.sum(weights * values) / nonzero(jnp.sum(weights))


def nonzero(total: Float[Array, ""]) -> Float[Array, ""]:
    """A denominator: `total`, or 1 where it is 0."""
    return jnp.where(total > 0, total, 1.0)


def expected_lengths(
    alpha: Float[Array, "*blocks K"], mask: Float[Array, "*blocks K"]
) -> tuple[Float[Array, "*blocks"], Float[Array, "*blocks"]]:
    """Expected number of accepted drafts of each block, sum_j prod_{i <= j} alpha_i over its valid slots, and their count.

    Masked slots are transparent: they neither end the chain nor count.
    """
    survival = jnp.cumprod(jnp.where(mask > 0, alpha, 1.0), axis=-1)
    return jnp.sum(jnp.where(mask > 0, survival, 0.0), axis=-1), jnp.sum((mask > 0).astype(jnp.float32), axis=-1)


def end_to_end_tv(
    alpha: Float[Array, "*blocks K"], mask: Float[Array, "*blocks K"]
) -> tuple[Float[Array, "*blocks"], Float[Array, "*blocks"]]:
    """1 - (expected accepted drafts) / (valid slots) of each block, and 1 for each block with a valid slot (else both are 0).

    The loss is the mean over valid blocks: `weighted_mean(*end_to_end_tv(alpha, mask))`. The divisor is the number of valid slots, as in
    AngelSpec's code (its text says the block size).
    """
    lengths, slots = expected_lengths(alpha, mask)
    valid = (slots > 0).astype(jnp.float32)
    return valid * (1.0 - lengths / jnp.maximum(slots, 1.0)), valid


def contiguous_mask(mask: Float[Array, "*blocks K"]) -> Float[Array, "*blocks K"]:
    """The unbroken prefix of each block's mask (DeepSpec supervises nothing after a hole)."""
    return jnp.cumprod(mask, axis=-1)


def confidence_bce(confidence_logits: Float[Array, "*rows"], alpha: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Binary cross entropy of a confidence logit against the acceptance probability (clamped to [0, 1], no gradient through it)."""
    target = jnp.clip(jax.lax.stop_gradient(alpha), 0.0, 1.0)
    logits = confidence_logits.astype(jnp.float32)
    return jax.nn.softplus(logits) - target * logits


def chain_tv(alpha: Float[Array, "*chains K"], valid: Float[Array, "*chains K"]) -> Float[Array, ""]:
    """End-to-end TV of MTP (direct form): 1 - (1/K) sum_j prod_{i <= j} alpha_i, averaged over the chains valid at all K steps."""
    whole = jnp.prod(valid, axis=-1)
    return weighted_mean(1.0 - jnp.mean(jnp.cumprod(alpha, axis=-1), axis=-1), whole)


def chain_surrogate(
    losses: Float[Array, "*chains K"], alpha: Float[Array, "*chains K"], valid: Float[Array, "*chains K"]
) -> Float[Array, ""]:
    """End-to-end MTP loss (surrogate form): sum_m W_m losses_m with detached W_m = (1/K) prod_{i<m} alpha_i * S_m.

    S_m = 1 + alpha_{m+1} S_{m+1} is what follows step m once it is accepted, so with `losses` = 1 - alpha the gradient is that of
    `chain_tv`; any other single-step loss may take its place.
    """
    return weighted_mean(jnp.sum(surrogate_weights(alpha) * losses, axis=-1), jnp.prod(valid, axis=-1))


def surrogate_weights(alpha: Float[Array, "*chains K"]) -> Float[Array, "*chains K"]:
    """W_m of `chain_surrogate`, without gradient."""
    alpha = jax.lax.stop_gradient(alpha)
    steps = alpha.shape[-1]
    survival = jnp.cumprod(alpha, axis=-1)
    before = jnp.concatenate([jnp.ones_like(alpha[..., :1]), survival[..., :-1]], axis=-1)
    after = [jnp.ones_like(alpha[..., 0])]
    for m in range(steps - 1, 0, -1):
        after.append(1.0 + alpha[..., m] * after[-1])
    return before * jnp.stack(after[::-1], axis=-1) / steps


def _teacher(logits: Float[Array, "*rows V"]) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows V"]]:
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(logits.astype(jnp.float32)), axis=-1)
    return jnp.exp(log_p), log_p
