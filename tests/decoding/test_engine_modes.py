"""Engines that draft trees, know biases, take the rejection rule or estimate survival by margins: a few tiny programs, many requests."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from angelspec_jax.decoding import margins
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.decoding.engine import Engine, Settings
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs


class TwoSlots(Settings):
    """Always two slots: one step to compile."""

    sizes = (2,)


SETTINGS = TwoSlots(slots=2, capacity=48, prefill_chunk=8, bias_slots=2, prefixes=0)
WAIT, REQUESTS, NEW = 300, 6, 20


@pytest.fixture(scope="module")
def target():
    config = TransformerConfig(40, 16, 16, 2, 2, 1, 8)
    params = initialize(target_specs(config), jax.random.key(0))
    names = {"name": "toy", "fingerprint": "0", "chat_template": None, "tokenizer": None, "eos_ids": (7,)}
    return types.SimpleNamespace(params=params, config=config, **names)


@pytest.fixture(scope="module")
def dflash(target):
    return create_drafter(target, jax.random.key(1), family="dflash", num_layers=1, block_size=4, taps=1, mask_token=39)


@pytest.fixture(scope="module")
def asked():
    """Prompts and options: greedy and by seed, with biases, penalties and cuts."""
    random = np.random.default_rng(0)
    prompts = [random.integers(8, 39, random.integers(1, 20)).tolist() for _ in range(REQUESTS)]
    options = [
        {},
        {"bias": {7: -np.inf, 9: 2.0}},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 6, "bias": {9: 3.0}, "top_k": 12},
        {"temperature": 0.9, "seed": 7, "repetition": 1.3, "top_p": 0.9},
        {"repetition": 1.2, "frequency": 0.5, "bias": {11: 1.5}},
    ]
    return list(zip(prompts, options, strict=True))


@pytest.fixture(scope="module")
def plain(target, asked):
    """What plain decoding says to each, stop token included."""
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition": 1.0, "frequency": 0.0, "seed": 0, "bias": {}}
    every = [off | options for _, options in asked]
    sampling = make_sampling(REQUESTS, bias_slots=2, **{name: [options[name] for options in every] for name in off})
    plan = Plan(target.config, stop_ids=target.eos_ids, prefill_chunk=8)
    return generate(plan, Weights(target.params), [prompt for prompt, _ in asked], NEW, sampling=sampling, capacity=48).texts()


def heard(engine, asked) -> list[list[int]]:
    """What each hears when all ask at once."""
    with engine._lock:
        streams = [engine.submit(prompt, max_new_tokens=NEW, **options) for prompt, options in asked]
    return [[token for delta in stream for token in delta.tokens] for stream in streams]


@pytest.fixture
def seen():
    """`seen(engine)`: the list to which its rounds are added."""

    def watch(engine):
        rounds = []
        engine.watch = rounds.append
        return rounds

    return watch


def test_biased_requests_are_not_what_they_would_be_without(plain, asked):
    assert 7 not in plain[1]
    assert 9 in plain[1]


@pytest.mark.parametrize("kind", ["early_exit:1:4", pytest.param("dflash", marks=pytest.mark.slow)])
def test_trees_leave_the_text_alone(target, dflash, asked, plain, seen, kind):
    drafter = dflash if kind == "dflash" else load_drafter(kind, target)
    table = CostTable((0, 3, 7), {2: 1.2}, {2: (1.3, 1.4, 1.9)}, {})
    with Engine(target, drafter, dataclasses.replace(SETTINGS, tree=7), costs=table, budgets=table.budgets) as engine:
        rounds = seen(engine)
        assert heard(engine, asked) == plain
        engine.choose_policy("off")
        assert heard(engine, asked) == plain
    assert any(kept == 7 for round in rounds for kept in round.kept)
    assert any(accepted > 1 for round in rounds for accepted in round.accepted), "a path of two or more"


def test_the_rejection_rule_is_a_function_of_the_seed_while_all_drafts_are_verified(target, dflash, asked, plain, seen):
    """Alone and in a crowd, and again; greedy requests hear plain decoding. With D-cut a crowd decides what is verified: see below."""
    table = CostTable((0, 3), {2: 1.2}, {2: (1.3, 1.5)}, {})
    settings = dataclasses.replace(SETTINGS, rule="rejection")
    with Engine(target, dflash, settings, costs=table, budgets=table.budgets, budget="off") as engine:
        rounds = seen(engine)
        crowd = heard(engine, asked)
        assert heard(engine, asked) == crowd
        assert [heard(engine, [one])[0] for one in asked] == crowd
        greedy = [index for index, (_, options) in enumerate(asked) if "temperature" not in options]
        assert [crowd[index] for index in greedy] == [plain[index] for index in greedy]
        sampled = [index for index in range(REQUESTS) if index not in greedy]
        assert any(crowd[index] != plain[index] for index in sampled), "drafts draw with noise of their own"
        assert any(accepted for round in rounds for accepted in round.accepted)
        engine.choose_policy()  # lagged: what is verified follows from earlier rounds of all
        weighed = heard(engine, asked)
        assert [weighed[index] for index in greedy] == [plain[index] for index in greedy]


def test_margins_are_fitted_while_serving_and_leave_the_text_alone(target, asked, plain, seen, monkeypatch):
    """While it learns every draft is verified; then budgets follow from what it learned, and where rows are dear none is."""
    monkeypatch.setattr(margins, "EVERY", 12)
    monkeypatch.setattr(margins, "ENOUGH", 8)
    jax.clear_caches()  # the fit was traced with the usual numbers by the tests before
    cheap = CostTable((0, 1, 3), {2: 1.0}, {2: (1.0, 1.001, 1.002)}, {})
    settings = dataclasses.replace(SETTINGS, capacity=49)  # programs of its own: these fit sooner
    drafter = load_drafter("early_exit:1:3", target)
    with Engine(target, drafter, settings, costs=cheap, budgets=cheap.budgets, confidence="margin") as engine:
        rounds = seen(engine)
        for _ in range(3):
            assert heard(engine, asked) == plain
        learned, first = jax.device_get(engine._state.memory.margins), [round for round in rounds if round.drafted]
        engine._table = dataclasses.replace(cheap, drafted={2: (1.0, 9.0, 19.0)})
        engine.choose_policy(confidence="margin")
        rounds.clear()
        assert heard(engine, asked) == plain
    assert int(learned.refits) >= margins.LEARNING
    assert learned.offset[0] != margins.create(3).offset[0]
    assert all(kept == 3 for round in first[: 12 * margins.LEARNING - 1] for kept in round.kept)
    late = [(survival[0], accepted > 0) for round in first[-24:] for survival, accepted in zip(round.survival, round.accepted, strict=True)]
    expected, found = np.mean(late, axis=0)
    assert abs(expected - found) < 0.25
    assert all(round.budget == 0 for round in rounds[1:])  # rows of a slot that is free may still hold a draft
