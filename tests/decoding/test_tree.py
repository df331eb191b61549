"""Trees against a heap that expands node by node; the text they leave alone; what they cost the compiled step."""

import dataclasses
import heapq
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_bench import NEW, OPTIONS, PROMPTS, Bench

from angelspec_jax.decoding import generate as generation
from angelspec_jax.decoding import tree
from angelspec_jax.decoding.generate import start
from angelspec_jax.decoding.step import Plan, Weights
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.drafter.types import DraftPolicy, Noise, Seen

DEPTH, TOKENS = 4, 5


class Table:
    """A drafter whose conditionals are looked up by the path's last token and depth: `logits` [R, DEPTH, TOKENS + 1, TOKENS]."""

    num_drafts, family = DEPTH, "table"

    @staticmethod
    def start_tree(params, config, shared, seen, state, policy, lanes):
        return params, jnp.broadcast_to(seen.anchor[:, None], (seen.anchor.shape[0], lanes))

    @staticmethod
    def expand(params, config, shared, seen, state, fixed, memory, depth, tokens, origin, policy):
        # The memory is the token before last on each path; a wrong gather would change the scores.
        memory = jnp.take_along_axis(memory, origin, axis=1)
        level = jax.lax.dynamic_index_in_dim(fixed, depth, axis=1, keepdims=False)
        slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        ids = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (*tokens.shape, TOKENS))
        return ids, level[slots, tokens] + 0.3 * level[slots, memory], tokens


def by_heap(table, anchor, nodes):
    """(score, path) of the likeliest nodes, expanding one at a time."""

    def conditional(path):
        before, last = ([anchor, anchor, *path])[-2:]
        raw = table[len(path), last] + np.float32(0.3) * table[len(path), before]
        return raw - np.log(np.exp(raw).sum())

    heap = [(-score, (token,)) for token, score in enumerate(conditional(()))]
    heapq.heapify(heap)
    found = []
    while heap and len(found) < nodes:
        score, path = heapq.heappop(heap)
        found.append((-score, path))
        if len(path) < DEPTH:
            for token, more in enumerate(conditional(path)):
                heapq.heappush(heap, (score - more, (*path, token)))
    return found


def paths(draft, row):
    tokens, parents = np.asarray(draft.tokens[row]), np.asarray(draft.parents[row])
    found = []
    for node, parent in enumerate(parents):
        assert parent < node
        found.append((*found[parent], int(tokens[node])) if parent >= 0 else (int(tokens[node]),))
    return found


@pytest.mark.parametrize("nodes", [1, 7, 40])
def test_a_tree_holds_the_likeliest_nodes(monkeypatch, nodes):
    monkeypatch.setitem(registry.MODULES, Table, Table)
    tables = np.random.default_rng(nodes).normal(0, 1.5, (3, DEPTH, TOKENS + 1, TOKENS)).astype(np.float32)
    anchor = jnp.asarray([5, 0, 3], jnp.int32)
    seen = Seen(anchor, jnp.zeros(3, jnp.int32), anchor[:, None])
    grow = jax.jit(lambda table: tree.grow(table, Table(), None, seen, None, None, DraftPolicy(jnp.float32(0.0)), nodes))
    draft = grow(jnp.asarray(tables))
    for row in range(3):
        expected = by_heap(tables[row], int(anchor[row]), nodes)
        assert set(paths(draft, row)) == {path for _, path in expected}
        np.testing.assert_allclose(np.asarray(draft.survival[row]), np.exp([score for score, _ in expected]), rtol=1e-4)


def test_growth_ends_at_what_hardly_survives(monkeypatch):
    monkeypatch.setitem(registry.MODULES, Table, Table)
    table = np.random.default_rng(0).normal(0, 1.5, (1, DEPTH, TOKENS + 1, TOKENS)).astype(np.float32)
    seen = Seen(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    draft = tree.grow(jnp.asarray(table), Table(), None, seen, None, None, DraftPolicy(jnp.float32(1.1)), 63)
    assert (np.asarray(draft.survival) == 0).all()
    whole = tree.grow(jnp.asarray(table), Table(), None, seen, None, None, DraftPolicy(jnp.float32(0.0)), 63)
    depth = [len(path) for path in paths(whole, 0)]
    best = max(s for s, d in zip(np.asarray(whole.survival[0]), depth, strict=True) if d == 2)
    cut = tree.grow(jnp.asarray(table), Table(), None, seen, None, None, DraftPolicy(jnp.float32(best * 1.01)), 63)
    made = [path for path, s in zip(paths(cut, 0), np.asarray(cut.survival[0]), strict=True) if s > 0]
    assert max(map(len, made)) == 2


def drafting_with(bench: Bench, name: str) -> Bench:
    """The same target with an untrained drafter."""
    target = types.SimpleNamespace(params=bench.weights.target, config=bench.plain.target, name="toy")
    drafter = load_drafter(name, target)
    plan = dataclasses.replace(bench.plain, drafter=drafter.config, budgets=())
    return Bench(bench.plain, plan, Weights(target.params, None, drafter.shared))


@pytest.mark.parametrize("kind", ["dflash", "dfly", "early_exit:5:4"])
def test_the_text_stays_the_same_with_any_tree(make_bench, kind):
    bench = make_bench(kind) if ":" not in kind else drafting_with(make_bench(), kind)
    for nodes, budgets in [(9, ()), (12, (0, 4, 12))]:
        drafted = bench.drafted(tree=nodes, options=OPTIONS["all"], budgets=budgets)
        assert drafted.texts() == bench.alone(options=OPTIONS["all"])
        verified, reached, accepted = (np.asarray(getattr(drafted.statistics, x)) for x in ("verified", "reached", "accepted"))
        assert verified.sum() > 0
        assert (accepted <= reached).all()
    if ":" in kind:
        assert accepted.sum() > 0


def test_a_tree_accepts_no_less_than_a_chain(make_bench):
    """Of early exit after all layers but one; at temperature 0 the chain is a path of the tree."""
    bench = drafting_with(make_bench(), "early_exit:5:4")
    chain, grown = bench.drafted(new=40), bench.drafted(new=40, tree=9)
    assert np.asarray(grown.statistics.rounds).sum() < np.asarray(chain.statistics.rounds).sum()


def test_early_exit_sees_each_path_alone(make_bench):
    """Scores of a tree's nodes are those of chains along their paths."""
    bench = drafting_with(make_bench(), "early_exit:3:3")
    plan, weights = bench.speculative, bench.weights
    state, _ = start(plan, weights, PROMPTS, 1, capacity=64)
    state = generation.jitted_prefill(plan, weights, state)
    module, config, policy = registry.module(plan.drafter), plan.drafter, DraftPolicy(jnp.float32(0.0), candidates=3)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    seen = Seen(anchor, state.length - 1, state.tokens, weights.target, state.cache)
    noise = Noise(jnp.zeros(4, jnp.uint32), jnp.zeros(4, jnp.float32))
    draft = jax.jit(lambda: tree.grow(None, config, weights.shared, seen, None, noise, policy, 30))()
    score = jax.jit(module.expand, static_argnums=1)
    for row in (0, 2):
        best = max(range(30), key=lambda node: (len(paths(draft, row)[node]), -node))
        tokens = paths(draft, row)[best]
        assert len(tokens) == 3
        _, memory = module.start_tree(None, config, weights.shared, seen, None, policy, 1)
        survival, last = 1.0, anchor[:, None]
        for depth, token in enumerate(tokens):
            ids, scores, memory = score(
                None, config, weights.shared, seen, None, None, memory, jnp.int32(depth), last, jnp.zeros((4, 1), jnp.int32), policy
            )
            column = int(np.flatnonzero(np.asarray(ids[row, 0]) == token)[0])
            survival *= float(jax.nn.softmax(scores[row, 0])[column])
            last = jnp.full((4, 1), token, jnp.int32)
        np.testing.assert_allclose(float(draft.survival[row, best]), survival, rtol=1e-4)


def test_bad_trees_are_refused(make_bench):
    bench = make_bench()
    for nodes in (0, 64):
        with pytest.raises(ValueError, match="between 1 and 63 nodes"):
            dataclasses.replace(bench.speculative, tree=nodes, budgets=())
    with pytest.raises(ValueError, match="needs a drafter"):
        Plan(bench.plain.target, tree=4)
    with pytest.raises(ValueError, match="makes 5 drafts a round, a budget asks for 6"):
        dataclasses.replace(bench.speculative, tree=5, budgets=(6,))
    with pytest.raises(ValueError, match="rejection rule verifies chains"):
        dataclasses.replace(bench.speculative, tree=5, budgets=(), rule="rejection")


@pytest.mark.parametrize("options", [{"tree": 9}, {"rule": "rejection"}, {"tree": 9, "logprobs": True}])
def test_the_step_of_trees_and_rules_stays_on_the_device(make_bench, options):
    bench = make_bench()
    plan = dataclasses.replace(bench.speculative, budgets=(), **options)
    state, policy = start(plan, bench.weights, PROMPTS, NEW, capacity=64)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.drafter)))
    compiled = generation.jitted_step.lower(plan, bench.weights, policy, state).compile()
    assert not re.search(r"callback|infeed|outfeed|send-done|recv-done", compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= caches
    state = generation.jitted_prefill(plan, bench.weights, state)
    before = generation.jitted_step._cache_size()
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state, _ = generation.jitted_step(plan, bench.weights, policy, state)
    assert generation.jitted_step._cache_size() == before + 1
    assert (np.asarray(state.length) > [len(prompt) for prompt in PROMPTS]).all()
