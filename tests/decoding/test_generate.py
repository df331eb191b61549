"""Speculative text equals plain text, whatever is drafted; endings and bad prompts behave as stated."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import NEW, OPTIONS, PROMPTS, knowing

from angelspec_jax.decoding import generate as generation
from angelspec_jax.decoding.costs import measure as measure_costs
from angelspec_jax.decoding.dcut import PROBE, Policy
from angelspec_jax.decoding.generate import generate, start, stream
from angelspec_jax.decoding.sampling import make_sampling


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["dfly", "dflash"])
def test_a_real_drafter_leaves_the_text_alone(make_bench, family, name):
    bench = make_bench(family)
    alone = bench.alone(options=OPTIONS[name])
    drafted = bench.drafted(options=OPTIONS[name])
    assert drafted.texts() == alone
    assert all(len(text) == NEW for text in alone)
    assert (np.asarray(drafted.statistics.rounds) <= NEW).all()


@pytest.mark.parametrize("name", ["greedy", "temperature", "all"])
def test_drafts_from_perfect_to_useless_leave_the_text_alone(make_bench, name):
    bench = make_bench()
    alone = bench.alone(options=OPTIONS[name])
    for wrong in ((), range(0, 64, 3), range(64)):
        drafted = knowing(bench, PROMPTS, alone, wrong).drafted(options=OPTIONS[name])
        assert drafted.texts() == alone
        rounds = np.asarray(drafted.statistics.rounds)
        if wrong == ():
            assert (rounds == -(-NEW // (bench.speculative.width))).all()
        if len(wrong) == 64:
            assert (rounds == NEW).all()


def test_a_tree_of_drafts_leaves_the_text_alone(make_bench):
    bench = make_bench()
    alone = bench.alone()
    drafted = knowing(bench, PROMPTS, alone, parents=[-1, -1, 1]).drafted()  # a false child, the true one, and the true one's child
    assert drafted.texts() == alone
    assert (np.asarray(drafted.statistics.rounds) == NEW // 3).all()


def test_budgets_and_costs_change_the_work_but_not_the_text(make_bench):
    bench = make_bench()
    alone = bench.alone()
    for costs in ([1.0, 1.0, 1.0], [1.0, 5.0, 9.0], [1.0, 1.1, 1.2], [1.0, 100.0, 100.0]):
        policy = Policy(jnp.asarray(costs, jnp.float32), jnp.float32(0.1), jnp.float32(0.05))
        drafted = bench.drafted(budgets=(0, 1, 3), policy=policy)
        assert drafted.texts() == alone
    assert np.asarray(drafted.statistics.verified).sum() == 0, "no draft pays for a round that costs a hundred"


def test_streaming_and_batching_do_not_change_the_text(make_bench):
    bench = make_bench()
    options = OPTIONS["all"]
    whole = bench.drafted(options=options).texts()
    pieces = [[] for _ in PROMPTS]
    sampling = make_sampling(len(PROMPTS), seed=7, **options)
    for step in stream(bench.speculative, bench.weights, PROMPTS, NEW, sampling=sampling, capacity=64):
        for row, tokens in enumerate(step):
            pieces[row] += tokens
    assert pieces == whole
    one = {name: values[2] for name, values in options.items()}
    assert bench.drafted([PROMPTS[2]], options=one, seed=7 + 2).texts() == [whole[2]]


def test_prefill_chunks_do_not_change_the_text(make_bench):
    bench = make_bench()
    assert bench.drafted(prefill_chunk=1).texts() == bench.drafted(prefill_chunk=64).texts() == bench.alone()


def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(make_bench):
    bench = make_bench()
    alone = bench.alone()
    stop = alone[0][5]
    cut = [text[: text.index(stop) + 1] if stop in text else text for text in alone]
    assert bench.alone(stop_ids=(stop,)) == cut
    assert knowing(bench, PROMPTS, alone).drafted(stop_ids=(stop,)).texts() == cut


@pytest.mark.parametrize("new", [0, 1, 2, 5, [3, 0, 7, 1]])
def test_max_new_tokens_is_exact_even_inside_an_accepted_run(make_bench, new):
    bench = make_bench()
    alone = bench.alone()
    counts = np.broadcast_to(new, (4,))
    assert knowing(bench, PROMPTS, alone).drafted(new=new).texts() == [text[:n] for text, n in zip(alone, counts, strict=True)]


def test_a_request_may_fill_its_capacity_to_the_last_token(make_bench):
    bench = make_bench()
    prompts, new = [[5] * 60, [7, 7], [1], [1]], [4, 62, 0, 0]
    full = bench.drafted(prompts, new=new).texts()
    assert [len(text) for text in full] == new
    assert full == bench.alone(prompts, new=new)
    roomy = generate(bench.speculative, bench.weights, prompts, new, capacity=96).texts()
    assert roomy == full


@pytest.mark.parametrize(
    ("prompts", "new", "sentence"),
    [
        ([], 4, "prompts is empty"),
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 96]], 4, "token id 96, outside the vocabulary of 96"),
        ([[-1]], 4, "token id -1, outside the vocabulary"),
        ([[1] * 60], 5, "over the capacity of 64"),
        ([[1]], -1, "must not be negative"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(make_bench, prompts, new, sentence):
    bench = make_bench()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        start(bench.speculative, bench.weights, prompts, new, capacity=64)


def test_the_models_context_is_a_limit(make_bench):
    bench = make_bench()
    short = dataclasses.replace(bench.plain, target=dataclasses.replace(bench.plain.target, max_positions=16))
    with pytest.raises(ValueError, match="over the model's context of 16"):
        start(short, bench.weights, [[1] * 10], 7)


@pytest.mark.parametrize("option", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -2}])
def test_sampling_options_out_of_range_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make_sampling(1, **option)


def test_no_recompilation_over_prompts_and_lengths(make_bench):
    bench = make_bench()
    bench.drafted()
    compiled = generation._run._cache_size()
    random = np.random.default_rng(0)
    for _ in range(3):
        prompts = [random.integers(0, 90, random.integers(1, 30)).tolist() for _ in PROMPTS]
        bench.drafted(prompts, new=int(random.integers(1, 30)), options=OPTIONS["all"], seed=int(random.integers(100)))
    assert generation._run._cache_size() == compiled


def test_the_step_is_one_program_without_host_traffic_and_with_donated_state(make_bench):
    bench = make_bench()
    state, policy = start(bench.speculative, bench.weights, PROMPTS, NEW, capacity=64)
    compiled = generation.jitted_step.lower(bench.speculative, bench.weights, policy, state).compile()
    text = compiled.as_text()
    assert not re.search(r"callback|infeed|outfeed|send-done|recv-done", text)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.drafter)))
    assert compiled.memory_analysis().alias_size_in_bytes >= caches


def test_costs_are_measured_with_the_step_that_runs(make_bench):
    bench = make_bench()
    plan = dataclasses.replace(bench.speculative, budgets=(0, 1, 3))
    policy = measure_costs(plan, bench.weights, capacity=64, repeats=2)
    assert policy.costs.shape == (3,)
    assert (np.diff(np.asarray(policy.costs)) >= 0).all()
    assert float(policy.costs[0]) > 0
    assert bench.drafted(budgets=(0, 1, 3), policy=policy).texts() == bench.alone()


def test_a_drafter_that_never_helps_is_only_probed(make_bench):
    bench = make_bench()
    alone = bench.alone(new=40, prompts=PROMPTS)
    bench = knowing(bench, PROMPTS, alone, wrong=range(64))
    policy = Policy(jnp.asarray([1.0, 1.5], jnp.float32), jnp.float32(0.5), jnp.float32(0.0))
    drafted = bench.drafted(new=40, budgets=(0, 3), policy=policy)
    assert drafted.texts() == alone
    verified = np.asarray(drafted.statistics.verified)[:, 0]
    assert (verified <= 1 + 40 // PROBE + 1).all()
    assert (verified >= 1).all()
