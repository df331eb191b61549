"""Whole speculative generations against a reference loop: the same text, and round by round the same acceptance."""

import dataclasses
import functools
from pathlib import Path

from angelspec_jax import text
from angelspec_jax.decoding.generate import generate, stream
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.target.loading import Target, load_target
from parity.case import Case, find, load, supported


@functools.cache
def target_of(folder: Path) -> Target:
    """The target that lies beside a drafter's case: the one its config fits, by its README where several do."""
    drafter = load(folder).config
    beside = [load(other) for other in find(folder.parent) if other != folder]
    fitting = [
        other
        for other in beside
        if other.kind == "target" and all(other.config.get(key) == drafter.get(key) for key in ("hidden_size", "vocab_size"))
    ]
    if len(fitting) > 1:
        words = (folder / "README.md").read_text() if (folder / "README.md").exists() else ""
        fitting = [other for other in fitting if other.folder.name in words]
    if len(fitting) != 1:
        raise AssertionError(f"{folder}: {len(fitting)} targets beside it have its hidden_size and vocab_size; one should")
    return supported(load_target, fitting[0].folder, need_tokenizer=False)


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


def _compare(case: Case, target: Target, drafter, name: str, start: int) -> None:
    """Text and acceptance of one run; the reference may end in a round that reaches past the limit, or run one more."""
    whole = case.io[f"out.{name}.output_ids"][0].tolist()
    expected = case.io[f"out.{name}.acceptance_lengths"].tolist()
    prompt, new = whole[:start], len(whole) - start
    if new < 1:
        return
    plan, weights = text.prepare(target, drafter)
    plain = text.prepare(target)
    capacity = 64 * -(-(len(whole) + drafter.config.num_drafts + 1) // 64)
    rounds = [len(tokens) for (tokens,) in stream(plan, weights, [prompt], new, capacity=capacity)]
    if len(expected) - len(rounds) not in (0, 1) or not 0 < rounds[-1] <= expected[len(rounds) - 1]:
        raise AssertionError(f"{case.folder}: {name} took {len(rounds)} rounds ending in {rounds[-1:]}, the reference {len(expected)}")
    case.same(f"{name}.acceptance_lengths", rounds[:-1], expected[: len(rounds) - 1])
    for way, run in (("speculative", (plan, weights)), ("plain", plain)):
        said = generate(*run, [prompt], new, capacity=capacity).texts()[0]
        if len(said) != new:
            raise AssertionError(f"{case.folder}: {way} decoding of {name} says {len(said)} tokens, the reference {new}")
        case.same(f"{name}.output_ids {way}", said, whole[start:])
