"""Inputs on which other decoders have failed: rows that only pad, ragged numbers of drafts, the last token that fits, sliding windows."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import NEW, OPTIONS, PROMPTS, Bench, knowing

from angelspec_jax.decoding import generate as generation
from angelspec_jax.decoding.generate import generate, start
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import block
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.drafter.types import DraftPolicy, Seen
from angelspec_jax.params import initialize
from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.transformer import forward, logits, target_specs

LENGTHS = (0, 3, 7)


def bench_of(dtype=jnp.float32, **options) -> Bench:
    """A target of 3 layers and a drafter of blocks of 8, which reads what `options` change of the target."""
    config = TransformerConfig(96, 32, 48, 3, 4, 2, 8, **options)
    params = initialize(target_specs(config), jax.random.key(0), dtype)
    target = types.SimpleNamespace(params=params, config=config, chat_template=None, name="toy", fingerprint="0")
    shape = {"num_layers": 2, "block_size": 8, "taps": 2, "mask_token": 95}
    drafter = create_drafter(target, jax.random.key(1), dtype=dtype, family="dflash", **shape)
    weights = Weights(params, drafter.params, drafter.shared)
    return Bench(Plan(config, prefill_chunk=8), Plan(config, drafter.config, prefill_chunk=8), weights)


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


def test_ragged_numbers_of_drafts_commit_what_a_replay_would():
    """No, three and seven drafts verified side by side, some of them wrong: text, caches and the next drafts are those of reading it in."""
    bench, prompts = bench_of(), PROMPTS[:3]
    texts = bench.alone(prompts, new=40)
    bench = knowing(bench, prompts, texts, wrong=[17, 23], lengths=LENGTHS)
    state, policy = start(bench.speculative, bench.weights, prompts, 40, capacity=64)
    state = generation.jitted_prefill(bench.speculative, bench.weights, state)
    for _ in range(4):
        state, emitted = generation.jitted_step(bench.speculative, bench.weights, policy, state)
        assert np.asarray(emitted.report.kept).tolist() == list(LENGTHS)
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
    # What the drafter proposes from a memory that grew round by round is what it proposes from one that was filled at once.
    config, params, shared = bench.speculative.drafter, bench.weights.drafter.block, bench.weights.shared
    anchors = jnp.asarray([text[-1] for text in said], jnp.int32)
    seen = Seen(anchors, state.length - 1, state.tokens)
    draft = jax.jit(lambda memory: block.draft(params, config, shared, seen, memory, None, DraftPolicy(jnp.float32(0.0))))
    grown, filled = draft(state.drafter), draft(replay.drafter)
    np.testing.assert_array_equal(grown.tokens, filled.tokens)
    np.testing.assert_allclose(grown.survival, filled.survival, rtol=1e-4)


@pytest.mark.parametrize("page", [None, 8])
def test_the_last_token_that_fits_leaves_the_neighbour_alone(monkeypatch, page):
    """Prompt and answer fill the capacity exactly while blocks of eight right drafts reach past it."""
    monkeypatch.setattr(kv_cache, "native_page", lambda: page)
    bench, prompts, new = bench_of(), [[5] * 59, [7, 7]], [5, 62]
    texts = bench.alone(prompts, new=new)
    assert [len(text) for text in texts] == new
    full = knowing(bench, prompts, texts).drafted(prompts, new=new)
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


def test_bfloat16_chooses_by_its_own_verification():
    """Two bfloat16 passes over different rows may part at near ties, which are counted: a token is never far from the best."""
    bench = bench_of(jnp.bfloat16)
    found = bench.drafted(PROMPTS[:3])
    texts = np.asarray(found.tokens)
    rows = uniform_rows(jnp.zeros(3, jnp.int32), 64, causal=True)
    positions = jnp.tile(jnp.arange(64, dtype=jnp.int32), 3)

    @jax.jit
    def read(params):
        config = bench.plain.target
        _, hidden, _ = forward(params, config, jnp.asarray(texts.reshape(-1)), positions, rows, kv_cache.create(config, 3, 1, jnp.bfloat16))
        return logits(params, hidden).reshape(3, 64, -1)

    scores, ties, total = np.asarray(read(bench.weights.target), np.float32), 0, 0
    for row, (prompt, text) in enumerate(zip(PROMPTS, found.texts(), strict=False)):
        for place, token in enumerate(text, len(prompt)):
            short = scores[row, place - 1].max() - scores[row, place - 1, token]
            assert short < 2.0**-5 * np.abs(scores[row, place - 1]).max()  # a few roundings of 8 bits
            ties, total = ties + bool(short > 0), total + 1
    assert total == 3 * NEW
    assert ties <= 0.1 * total
    assert np.asarray(found.statistics.verified).sum() > 0


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
