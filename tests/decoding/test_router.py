"""Several drafters over one target: each request by its own, switched in the middle, and picked by what the prompt looks like."""

import jax
import numpy as np
import pytest

from angelspec_jax.decoding.engine import Engine, Settings
from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.router import Router, classify
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.drafter.several import SeveralConfig
from angelspec_jax.evaluation import prompts

pytest_plugins = ["toy_model"]

WAIT = 300


@pytest.fixture(scope="module")
def helpers(toy_target, toy_drafter):
    """Drafters that tap different layers, draft different numbers of tokens, with candidates and without."""
    options = {"family": "dflash", "mask_token": 258, "block_size": 3, "num_layers": 1, "taps": 1}
    other = create_drafter(toy_target, jax.random.key(2), name="dflash", **options)
    return {"dfly": toy_drafter, "dflash": other, "lookup": load_drafter("lookup:2", toy_target)}


@pytest.fixture(scope="module")
def engine(toy_target, helpers):
    router = Router({"code": "dfly", "chat": "dflash"}, default="lookup")
    with Engine(toy_target, helpers, Settings(slots=2, capacity=96, prefill_chunk=8), router=router) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(toy_target):
    def say(prompt, new, **sampling):
        plan = Plan(toy_target.config, stop_ids=tuple(toy_target.eos_ids))
        options = make_sampling(1, **sampling)
        return generate(plan, Weights(toy_target.params), [prompt], new, sampling=options, capacity=96).texts()[0]

    return say


def test_several_drafters_are_one_with_the_union_of_their_taps(helpers):
    config = SeveralConfig(tuple(helper.config for helper in helpers.values()))
    assert set(config.taps) == {tap for helper in helpers.values() for tap in helper.config.taps}
    assert config.num_drafts == 3
    assert config.family == "dfly+dflash+lookup"


def test_every_drafter_and_none_say_the_same_in_one_batch(engine, plain):
    random = np.random.default_rng(0)
    asked = [random.integers(0, 250, 9).tolist() for _ in range(4)]
    names = ["dfly", "dflash", "lookup", None]
    options = [{"temperature": 0.8 * (i % 2), "seed": i} for i in range(4)]
    streams = [engine.submit(p, max_new_tokens=16, drafter=n, **o) for p, n, o in zip(asked, names, options, strict=True)]
    for prompt, given, stream in zip(asked, options, streams, strict=True):
        assert [token for delta in stream for token in delta.tokens] == plain(prompt, 16, **given)
    assert streams[3].result().tau == 1.0


def test_switching_inside_a_request_is_exact(engine, plain):
    stream = engine.submit([5, 6, 7], max_new_tokens=60, drafter="dfly", temperature=0.9, seed=4)
    said = []
    for index, delta in enumerate(stream):
        said += delta.tokens
        stream.use(["lookup", "dflash", None, "dfly"][index % 4])
    assert said == plain([5, 6, 7], 60, temperature=0.9, seed=4)
    with pytest.raises(ValueError, match="no drafter named 'mtp'; there are dfly, dflash, lookup"):
        stream.use("mtp")
    with pytest.raises(ValueError, match="no drafter named"):
        engine.submit([1], max_new_tokens=2, drafter="mtp")


def test_the_prompt_picks_the_drafter(engine):
    seen = []
    begin = engine._begin
    engine._begin = lambda request: (seen.append(request.choice[0]), begin(request))[1]
    asked = ["Write a Python function that adds two lists.", "How are you?", "How many apples are 3 + 4 apples?"]
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "def f(x):"}]
    for prompt in [*asked, conversation]:
        engine.submit(prompt, max_new_tokens=1).result(WAIT)
    assert [engine.drafters[i] for i in seen] == ["dfly", "dflash", "lookup", "dfly"]


def test_the_classifier_knows_the_domains():
    right = total = 0
    for domain in prompts.DOMAINS:
        for prompt in prompts.builtin(domain, 12):
            right, total = right + (classify(prompt) == domain), total + 1
    assert right / total >= 0.8


def test_routes_to_nowhere_are_refused(toy_target, helpers):
    with pytest.raises(ValueError, match="domains code, maths, chat, not law"):
        Router({"law": "dfly"})
    with pytest.raises(ValueError, match="no drafter named 'mtp'"):
        Engine(toy_target, helpers, Settings(capacity=96), router=Router({"code": "mtp"}))
