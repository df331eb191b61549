"""The lookup drafter against a search written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.drafter import lookup
from angelspec_jax.drafter.types import DraftPolicy, Seen
from angelspec_jax.drafter.untrained import EarlyExitConfig, LookupConfig, is_name, named
from angelspec_jax.target.config import TransformerConfig

CONFIG = LookupConfig(target_num_layers=6, num_drafts=5, acceptance=(0.0, 0.2, 0.5, 0.8))
draft = jax.jit(lookup.draft, static_argnums=1)


def by_hand(text: list[int], config: LookupConfig) -> tuple[int, list[int]]:
    """Length of the longest match that ends before the last token, and what follows its latest occurrence, going round at the end."""
    best, place = 0, None
    for end in range(len(text) - 1):
        length = 0
        while length < min(config.longest_match, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length >= best and length > 0:
            best, place = length, end
    if place is None:
        return 0, []
    guess = list(text)
    for _ in range(config.num_drafts):
        guess.append(guess[place + 1 + len(guess) - len(text)])
    return best, guess[len(text) :]


def propose(texts: list[list[int]], min_survival=0.0):
    width = max(map(len, texts)) + 3
    tokens = np.full((len(texts), width), 1, np.int32)  # 1 is a real token: what stands behind a text must not be matched
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    last = np.array([len(text) - 1 for text in texts], np.int32)
    seen = Seen(jnp.asarray([text[-1] for text in texts], jnp.int32), jnp.asarray(last), jnp.asarray(tokens))
    return draft(None, CONFIG, None, seen, None, None, DraftPolicy(jnp.float32(min_survival)))


def test_random_texts_of_ragged_lengths():
    random = np.random.default_rng(0)
    texts = [random.integers(0, 4, random.integers(1, 40)).tolist() for _ in range(64)]
    found = propose(texts)
    lengths = []
    for row, text in enumerate(texts):
        length, guess = by_hand(text, CONFIG)
        lengths.append(length)
        if length == 0:
            assert (np.asarray(found.survival[row]) == 0).all()
            continue
        assert np.asarray(found.tokens[row]).tolist() == guess, text
        conditional = [CONFIG.acceptance[min(length + k, 3)] for k in range(5)]
        np.testing.assert_allclose(np.asarray(found.survival[row]), np.cumprod(conditional), rtol=1e-6)
    assert set(lengths) == {0, 1, 2, 3}


def test_text_that_repeats_itself_goes_on_with_its_period():
    (tokens,) = np.asarray(propose([[7, 5, 6, 5, 6]]).tokens)
    assert tokens.tolist() == [5, 6, 5, 6, 5]


def test_unlikely_drafts_are_not_made():
    survival = np.asarray(propose([[5, 6, 5]], min_survival=0.15).survival[0])
    np.testing.assert_allclose(survival, [0.2, 0.0, 0.0, 0.0, 0.0])


def test_names():
    target = TransformerConfig(96, 32, 48, 6, 4, 2, 8)
    assert named("lookup", target) == LookupConfig(6)
    assert named("lookup:3", target) == LookupConfig(6, 3)
    assert named("early_exit:2", target) == EarlyExitConfig(target, 2)
    assert named("early_exit:2:7", target) == EarlyExitConfig(target, 2, 7)
    assert not is_name("./lookup")
    assert not is_name("some/early_exit")
    for wrong in ("lookup:a", "lookup:1:2", "early_exit", "early_exit:2:3:4"):
        with pytest.raises(ValueError, match="is not understood; write lookup"):
            named(wrong, target)
    for wrong, sentence in (("lookup:0", "between 1 and 63"), ("lookup:64", "between 1 and 63"), ("early_exit:6", "between 1 and 5")):
        with pytest.raises(ValueError, match=sentence):
            named(wrong, target)
