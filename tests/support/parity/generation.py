"""Whole speculative generations against a reference loop: the same text, and round by round the same acceptance."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax import text
from angelspec_jax.data.features import target_features
from angelspec_jax.decoding.generate import generate, stream
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.drafter.types import DraftPolicy, Seen
from angelspec_jax.target.loading import Target, load_target
from parity.case import Case, find, load, supported


@functools.cache
def target_of(folder: Path) -> Target:
    """The target that lies beside a drafter's case: the one its config fits, by its README where several do."""
    case = load(folder)
    words = (folder / "README.md").read_text() if (folder / "README.md").exists() else ""
    if (named := re.search(r"Target: (\S+[^\s.])", words)) and (folder / named[1] / "case.json").exists():
        return _load(folder / named[1])
    beside = [load(other) for other in find(folder.parent) if other != folder]
    fitting = [other for other in beside if other.kind == "target" and _fits(other.config, case.config)]
    if len(fitting) != 1:
        raise AssertionError(f"{folder}: {len(fitting)} targets beside it have its hidden_size and vocab_size; one should")
    return _load(fitting[0].folder)


def _fits(target: dict, drafter: dict) -> bool:
    depth = drafter.get("num_target_layers")
    same = all(target.get(key) == drafter.get(key) for key in ("hidden_size", "vocab_size"))
    return same and depth in (None, target.get("num_hidden_layers"))


def _load(folder: Path) -> Target:
    return supported(load_target, folder, need_tokenizer=False, dtype=jnp.float32)


def check_zlab(case: Case) -> None:
    """Rounds of z-lab's loop, whose first token comes with the prefill: here that token is the first anchor."""
    target = target_of(case.folder)
    drafter = supported(load_drafter, case.folder, target)
    for index in range(int(case.params["prompts"])):
        start = case.io[f"in.prompt{index}"].shape[1] + 1
        _compare(case, target, drafter, f"p{index}", start)
        stop = tuple(int(token) for token in case.io.get(f"in.stop_token{index}", ()))
        if stop:
            _compare(case, dataclasses.replace(target, eos_ids=stop), drafter, f"p{index}.stop", start)


def check_deepspec(case: Case) -> None:
    """Runs of DeepSpec's loop, at every confidence threshold: the text, what was drafted in every round, how much of it was verified."""
    target = target_of(case.folder)
    # A checkpoint of EAGLE-3 does not say how long its chains are.
    longest = max(int(case.io[name].max()) for name in case.io if name.endswith(".proposal_lengths"))
    drafter = supported(load_drafter, case.folder, target, **({"num_drafts": longest} if case.params.get("eagle3") else {}))
    for index in range(int(case.params["prompts"])):
        start = case.io[f"in.prompt{index}"].shape[1] + 1
        runs = sorted(name.split(".")[2:-1] for name in case.io if name.startswith(f"out.p{index}.") and name.endswith(".round_start"))
        for (*run,) in runs:
            name = ".".join([f"p{index}", *run])
            threshold = _threshold(case, run[0]) if run else 0.0
            _compare_drafts(case, target, drafter, name, threshold)
            if not threshold:
                _compare(case, target, drafter, name, start)
        stop = tuple(int(token) for token in case.io.get(f"in.stop_token{index}", ()))
        if stop:
            _compare(case, dataclasses.replace(target, eos_ids=stop), drafter, f"p{index}.stop", start)


def _threshold(case: Case, name: str) -> float:
    """The threshold of a run's name, `thr30` for 0.3; the case's own list has the digits that a name has no room for."""
    percent = int(name.removeprefix("thr"))
    return next((value for value in case.params.get("thresholds", []) if int(100 * value + 1e-6) == percent), percent / 100)


def _compare_drafts(case: Case, target: Target, drafter, name: str, threshold: float) -> None:
    """Every round's drafts, and where the first of too little confidence ends them; the text before each round is the reference's."""
    said, starts = case.io[f"out.{name}.output_ids"][0], case.io[f"out.{name}.round_start"].tolist()
    verified, lengths = case.io[f"out.{name}.round_verify_ids"], case.io[f"out.{name}.proposal_lengths"]
    rows = _rows(target, drafter, jnp.asarray(said, jnp.int32))
    for index, start in enumerate(starts):
        if start + drafter.config.num_drafts >= len(said):  # the reference's last rounds are cut by its limit
            break
        tokens, survival = _draft(drafter.params, drafter.config, drafter.shared, rows, jnp.int32(start))
        confidence = np.asarray(survival) / np.concatenate([[1.0], np.asarray(survival)[:-1]])
        low = np.flatnonzero(confidence < threshold)
        length = int(low[0]) if low.size else len(confidence)
        case.same(f"{name} proposal length of round {index}", length, lengths[index])
        case.same(f"{name} drafts of round {index}", tokens[:length], verified[index, 1 : 1 + length])


def _rows(target: Target, drafter, tokens):
    """What the target leaves for the drafter at every position of a text: features, last state, the token and the one after it."""
    taps = drafter.config.taps
    states = jax.jit(target_features, static_argnums=(1, 3, 4))(target.params, target.config, tokens[None], taps, jnp.float32)[0]
    return states[:, :-1], states[:, -1], tokens, jnp.roll(tokens, -1)


@functools.partial(jax.jit, static_argnums=1)
def _draft(params, config, shared, rows, start):
    """The chain after the token at `start`, from everything before it."""
    features, hidden, tokens, following = rows
    module, count = registry.module(config), tokens.shape[0]
    positions, request = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    state = module.create_state(config, 1, count + config.num_drafts)
    state = module.extend(params, config, shared, features, hidden, following, request, positions, positions < start, state)
    seen = Seen(tokens[start][None], start[None], tokens[None])
    found = module.draft(params, config, shared, seen, state, None, DraftPolicy(jnp.float32(0.0), candidates=0))
    return found.tokens[0], found.survival[0]


def _compare(case: Case, target: Target, drafter, name: str, start: int) -> None:
    """Text and acceptance of one run; the reference may end in a round that reaches past the limit, or run one more.

    A run that a stop token ends is decoded round by round alone: another stop is another program.
    """
    whole = case.io[f"out.{name}.output_ids"][0].tolist()
    expected = case.io[f"out.{name}.acceptance_lengths"].tolist()
    prompt, new = whole[:start], len(whole) - start
    if new < 1:
        return
    longest = max(case.io[name].shape[1] for name in case.io if name.endswith(".output_ids"))
    capacity = 64 * -(-(longest + drafter.config.num_drafts + 1) // 64)  # one program for all runs
    plan, weights = text.prepare(target, drafter)
    rounds = [tokens for (tokens,) in stream(plan, weights, [prompt], new, capacity=capacity)]
    counts, said = [len(tokens) for tokens in rounds], [token for tokens in rounds for token in tokens]
    if len(expected) - len(counts) not in (0, 1) or not 0 < counts[-1] <= expected[len(counts) - 1]:
        raise AssertionError(f"{case.folder}: {name} took {len(counts)} rounds ending in {counts[-1:]}, the reference {len(expected)}")
    case.same(f"{name}.acceptance_lengths", counts[:-1], expected[: len(counts) - 1])
    case.same(f"{name}.output_ids", said, whole[start:])
    if name.endswith(".stop"):
        return
    for way, run in (("speculative", (plan, weights)), ("plain", text.prepare(target))):
        case.same(f"{name}.output_ids {way}", generate(*run, [prompt], new, capacity=capacity).texts()[0], whole[start:])
