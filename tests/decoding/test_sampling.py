"""The transform against a plain sort, the choice against its distribution, and noise that is the same wherever it is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax import noise
from angelspec_jax.decoding.sampling import Text, check_bias, choose, log_probability, make_sampling, transform


def expected(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The same cuts by sorting, in float64."""
    scores = np.asarray(logits, np.float64) / temperature
    if top_k:
        scores = np.where(scores >= np.sort(scores)[-min(top_k, len(scores))], scores, -np.inf)
    if top_p < 1:
        p = np.exp(scores - scores.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
        scores = np.where(np.isin(np.arange(len(p)), kept), scores, -np.inf)
    if min_p:
        scores = np.where(scores >= scores.max() + np.log(min_p), scores, -np.inf)
    return scores


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.6, "min_p": 0.05}])
def test_transform_equals_sorting(temperature, cut):
    logits = jax.random.normal(jax.random.key(1), (5, 101)) * 2
    got = np.asarray(transform(logits, make_sampling(5, temperature=temperature, **cut)))
    for row in range(5):
        want = expected(logits[row], temperature, **cut)
        np.testing.assert_array_equal(np.isfinite(got[row]), np.isfinite(want))
        np.testing.assert_allclose(got[row][np.isfinite(want)], want[np.isfinite(want)], rtol=1e-6)


def test_extremes_keep_one_token_and_greedy_rows_stay():
    logits = jax.random.normal(jax.random.key(2), (4, 33))
    options = make_sampling(4, temperature=[1.0, 1.0, 1.0, 0.0], top_k=[1, 0, 0, 1], top_p=[1.0, 0.0, 1.0, 0.1], min_p=[0, 0, 1, 0.9])
    kept = np.isfinite(np.asarray(transform(logits, options)))
    np.testing.assert_array_equal(kept.sum(axis=1), [1, 1, 1, 33])
    picked = choose(logits, options, jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(np.asarray(picked), np.asarray(jnp.argmax(logits, axis=-1)))


def test_the_nucleus_is_taken_after_the_temperature():
    """At temperature 2 the three likeliest of [2, 1, 0, -1] hold 0.898, so all four are kept; at temperature 1 three hold 0.968."""
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]] * 2)
    kept = np.isfinite(np.asarray(transform(logits, make_sampling(2, temperature=[2.0, 1.0], top_p=0.9))))
    np.testing.assert_array_equal(kept.sum(axis=1), [4, 3])


def test_choices_follow_the_distribution():
    """Chi-square over 20,000 draws; with 11 degrees of freedom a correct sampler exceeds 31.3 once in 1,000 runs."""
    logits = jax.random.normal(jax.random.key(3), (1, 12))
    draws = 20_000
    options = make_sampling(draws, temperature=0.8, seed=123)
    picked = np.asarray(choose(jnp.broadcast_to(logits, (draws, 12)), options, jnp.full((draws,), 17, jnp.int32)))
    p = np.asarray(jax.nn.softmax(logits[0] / 0.8), np.float64)
    counts = np.bincount(picked, minlength=12)
    assert ((counts - draws * p) ** 2 / (draws * p)).sum() < 31.3


def test_noise_is_the_same_for_some_tokens_and_for_all():
    seeds, positions = jnp.asarray([1, 2], jnp.uint32), jnp.asarray([5, 6], jnp.int32)
    everything = noise.gumbel_all(seeds, positions, 31)
    ids = jnp.asarray([[30, 0, 7], [1, 1, 29]], jnp.int32)
    np.testing.assert_array_equal(np.asarray(noise.gumbel(seeds, positions, ids)), np.take_along_axis(np.asarray(everything), ids, axis=1))
    other = noise.gumbel_all(seeds, positions + 1, 31)
    assert not np.isclose(everything, other).any()
    assert not np.isclose(everything, noise.gumbel_all(seeds, positions, 31, role=1)).any()
    assert np.isfinite(np.asarray(everything)).all()


def test_a_token_of_zero_probability_is_never_chosen():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0, -jnp.inf]])
    options = make_sampling(4096, temperature=2.0, top_k=3)
    picked = choose(jnp.broadcast_to(logits, (4096, 5)), options, jnp.arange(4096, dtype=jnp.int32))
    assert set(np.asarray(picked).tolist()) == {0, 1, 2}


def test_bias_and_penalties_by_hand():
    """Repetition counts prompt and text, frequency and presence the text alone, and drafts on a row's path are text."""
    logits = jax.random.normal(jax.random.key(4), (3, 9)) * 2
    options = {"repetition": 1.7, "frequency": 0.3, "presence": 0.6, "bias": {4: 1.5, 7: -float("inf")}}
    prompt, said, drafts = [1, 2], [3, 3], [3, 5]
    text = Text(
        tokens=jnp.asarray([[*prompt, *said, 8, 8]], jnp.int32),  # what stands behind the text does not count
        length=jnp.asarray([4], jnp.int32),
        prompt_length=jnp.asarray([2], jnp.int32),
        drafts=jnp.asarray([drafts], jnp.int32),
        request=jnp.zeros(3, jnp.int32),
        ancestors=jnp.asarray([[0b001, 0], [0b011, 0], [0b101, 0]], jnp.uint32),  # the anchor; behind draft 0; behind draft 1, its sibling
    )
    for temperature in (0.0, 0.5):
        found = np.asarray(transform(logits, make_sampling(3, temperature=temperature, **options), text))
        for row, behind in enumerate(([], [3], [5])):
            for token in range(9):
                score = float(logits[row, token]) + options["bias"].get(token, 0.0)
                count = [*said, *behind].count(token)
                if count or token in prompt:
                    score = score / 1.7 if score > 0 else score * 1.7
                score -= 0.3 * count + 0.6 * (count > 0)
                assert found[row, token] == pytest.approx(score / (temperature or 1.0), rel=1e-5, abs=1e-5)


def test_bad_biases_are_named():
    for bias, sentence in (({1: float("nan")}, "bias of token 1"), ([{1: 1.0}], "one for each of the 2 requests")):
        with pytest.raises(ValueError, match=sentence):
            make_sampling(2, bias=bias)
    with pytest.raises(ValueError, match="bias names 2 tokens; at most 1"):
        make_sampling(2, bias={1: 1.0, 2: 1.0}, bias_slots=1)
    with pytest.raises(ValueError, match="token id 9, outside the vocabulary of 9"):
        check_bias({9: 1.0}, 9)


def test_log_probabilities_are_the_models_own():
    logits = jax.random.normal(jax.random.key(5), (4, 11))
    tokens = jnp.asarray([0, 3, 10, 5], jnp.int32)
    expected = np.log(np.asarray(jax.nn.softmax(logits, axis=-1)))[np.arange(4), np.asarray(tokens)]
    np.testing.assert_allclose(np.asarray(log_probability(logits, tokens)), expected, rtol=1e-5)
