"""What 8-bit weights change of a text: counted against the stored model, and nothing where nothing was rounded."""

import dataclasses

import pytest

from angelspec_jax.evaluation import rounding
from angelspec_jax.target.loading import load_target

pytest_plugins = ["toy_model"]
PROMPTS = {"maths": ["one and one"], "chat": ["hello there", "who"]}


@pytest.fixture(scope="module")
def stored(toy_target):
    return rounding.answer(toy_target, PROMPTS, 12)


def test_the_stored_model_does_not_differ_from_itself(stored, toy_target):
    found = rounding.compare(stored, toy_target)
    assert (found.prompts, found.same) == (3, 3)
    assert found.tokens == found.common == found.agreed == sum(map(len, stored.answers)) > 3
    assert "3 of 3 answers are the same, 100.0% of their tokens" in str(found)
    assert rounding.compare(stored, toy_target, [[*said[:-1], 259] for said in stored.answers]).same == 0  # the given answers count


def test_answers_do_not_depend_on_the_batch(stored, toy_target, monkeypatch):
    monkeypatch.setattr(rounding, "TOGETHER", 2)  # the last of three prompts beside one that says nothing
    assert rounding.answer(toy_target, PROMPTS, 12) == stored


def test_a_rounded_model_is_compared_token_by_token(stored, toy_directory):
    found = rounding.compare(stored, load_target(toy_directory, quantize="int8"))
    assert found.agreed / found.tokens > 0.5
    # Another stored text: where the two part is counted from its first token on.
    changed = dataclasses.replace(stored, answers=[[(token + 1) % 250 for token in said] for said in stored.answers])
    found = rounding.compare(changed, load_target(toy_directory))
    assert found.common == found.same == 0


def test_prompts_that_leave_no_room(toy_target):
    with pytest.raises(ValueError, match="no prompt leaves room for 600 new tokens in the context of 512 tokens"):
        rounding.answer(toy_target, PROMPTS, 600)
