"""Inputs on which other decoders have failed: rows that only pad, ragged numbers of drafts, the last token that fits, sliding windows."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import OPTIONS, PROMPTS, Bench

from angelspec_jax.decoding import generate as generation
from angelspec_jax.decoding.generate import generate, start
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import block
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.params import initialize
from angelspec_jax.target import kv_cache
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import target_specs

LENGTHS = [0, 3, 7]


def bench_of(**options) -> Bench:
    """A target of 3 layers and a drafter of blocks of 8, which reads what `options` change of the target."""
    config = TransformerConfig(96, 32, 48, 3, 4, 2, 8, **options)
    params = initialize(target_specs(config), jax.random.key(0))
    target = types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0")
    drafter = create_drafter(target, jax.random.key(1), family="dflash", num_layers=2, block_size=8, taps=2, mask_token=95)
    weights = Weights(params, drafter.params, drafter.shared)
    return Bench(Plan(config, prefill_chunk=8), Plan(config, drafter.config, prefill_chunk=8), weights)


def known_table(prompts, texts) -> np.ndarray:
    table = np.zeros((len(prompts), 64), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        table[row, : len(prompt) + len(text)] = [*prompt, *text]
    return table


def test_requests_that_only_pad_change_nothing():
    """A fourth request that is over from the start, with options that would flip any logits: the others' bits stay."""
    bench = bench_of()
    options = {"temperature": [0.0, 0.7, 1.0], "top_k": [0, 8, 0], "top_p": [1.0, 0.9, 0.5]}
    strange = {"temperature": 100.0, "top_k": 1, "top_p": 0.0}
    alone = bench.drafted(PROMPTS[:3], options=options)
    padded = bench.drafted(new=[24, 24, 24, 0], options={name: [*values, strange[name]] for name, values in options.items()})
    assert padded.texts() == [*alone.texts(), []]
    for name in ("rounds", "verified", "accepted"):
        np.testing.assert_array_equal(getattr(padded.statistics, name)[:3], getattr(alone.statistics, name))
    assert int(padded.statistics.rounds[3]) == 0


def test_ragged_numbers_of_drafts_commit_what_a_replay_would(knowing, monkeypatch):
    """No, three and seven drafts verified side by side, some of them wrong: text and caches are those of reading the text in."""
    bench, prompts = bench_of(), PROMPTS[:3]
    texts = bench.alone(prompts, new=40)
    knowing(known_table(prompts, texts), wrong=[17, 23])
    drafted = block.draft
    kept = jnp.arange(7, dtype=jnp.int32)[None] < jnp.asarray(LENGTHS, jnp.int32)[:, None]

    def ragged(*arguments):
        made = drafted(*arguments)
        return dataclasses.replace(made, survival=jnp.where(kept, made.survival, 0.0))

    monkeypatch.setattr(block, "draft", ragged)
    state, policy = start(bench.speculative, bench.weights, prompts, 40, capacity=64)
    state = generation.jitted_prefill(bench.speculative, bench.weights, state)
    for _ in range(4):
        state, emitted = generation.jitted_step(bench.speculative, bench.weights, policy, state)
        assert np.asarray(emitted.report.kept).tolist() == LENGTHS
    ends = np.asarray(state.length).tolist()
    said = [np.asarray(state.tokens)[row, :end].tolist() for row, end in enumerate(ends)]
    assert said == [[*prompt, *text][:end] for prompt, text, end in zip(prompts, texts, ends, strict=True)]
    assert ends[0] == len(prompts[0]) + 4
    assert len(prompts[2]) + 4 < ends[2] < len(prompts[2]) + 4 * 8  # some drafts were right and some wrong
    replay, _ = start(bench.speculative, bench.weights, said, 1, capacity=64)
    replay = generation.jitted_prefill(bench.speculative, bench.weights, replay)
    for found, expected in ((state.cache, replay.cache), (state.drafter.cache, replay.drafter.cache)):
        for mine, theirs in zip(jax.tree.leaves((found.k, found.v)), jax.tree.leaves((expected.k, expected.v)), strict=True):
            axis = mine.shape.index(64)
            for row, end in enumerate(ends):
                one, other = (np.moveaxis(np.asarray(x[row]), axis - 1, 0)[: end - 1] for x in (mine, theirs))
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", [None, 8])
def test_the_last_token_that_fits_leaves_the_neighbour_alone(knowing, monkeypatch, page):
    """Prompt and answer fill the capacity exactly while blocks of eight right drafts reach past it."""
    monkeypatch.setattr(kv_cache, "native_page", lambda: page)
    bench, prompts, new = bench_of(), [[5] * 59, [7, 7]], [5, 62]
    texts = bench.alone(prompts, new=new)
    assert [len(text) for text in texts] == new
    knowing(known_table(prompts, texts))
    full = bench.drafted(prompts, new=new)
    assert full.texts() == texts
    assert np.asarray(full.statistics.rounds).tolist() == [1, 8]


@pytest.mark.parametrize("tree", [None, 12])
def test_a_sliding_window_moves_on_inside_a_block(tree):
    """The edge of the window lies in the committed text, elsewhere for every row of a round; 12 + 24 tokens pass it."""
    bench = bench_of(sliding_window=9)
    drafted = bench.drafted(tree=tree, options=OPTIONS["all"])
    assert drafted.texts() == bench.alone(options=OPTIONS["all"])
    assert drafted.texts() != bench_of().alone(options=OPTIONS["all"])
    assert np.asarray(drafted.statistics.accepted).sum() > 0


@pytest.mark.parametrize("tree", [None, 9])
def test_log_probabilities_of_verified_tokens_are_plain_decodings(make_bench, tree):
    bench = make_bench()
    sampling = make_sampling(4, seed=7, repetition=1.2, **OPTIONS["all"])
    plans = dataclasses.replace(bench.plain, logprobs=True), dataclasses.replace(bench.speculative, logprobs=True, tree=tree)
    alone, drafted = (generate(plan, bench.weights, PROMPTS, 24, sampling=sampling, capacity=64) for plan in plans)
    assert drafted.texts() == alone.texts()
    assert np.asarray(drafted.statistics.accepted).sum() > 0
    for mine, theirs in zip(drafted.text_logprobs(), alone.text_logprobs(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert max(theirs) <= 0
