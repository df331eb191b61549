"""Whole speculative generations against z-lab's reference loop: the same text, round by round the same acceptance."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax import text
from angelspec_jax.decoding.generate import generate, stream
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.target.loading import load_target

CASES = Path(__file__).parents[1] / "goldens" / "e2e"


@pytest.fixture(scope="module")
def target():
    return load_target(CASES / "target_qwen3", need_tokenizer=False)


@pytest.mark.parametrize("name", ["zlab_dflash_trained", "zlab_dflash_random"])
def test_rounds_are_those_of_the_reference(target, name):
    drafter = load_drafter(CASES / name, target)
    plan, weights = text.prepare(target, drafter)
    plain = text.prepare(target)
    io = load_file(CASES / name / "io.safetensors")
    for index in (0, 1):
        whole = io[f"out.p{index}.output_ids"][0].tolist()
        # The reference draws its first token with the prefill; here that token is the first anchor.
        start = io[f"in.prompt{index}"].shape[1] + 1
        expected = io[f"out.p{index}.acceptance_lengths"].tolist()
        prompt, new = whole[:start], len(whole) - start
        rounds = [len(tokens) for (tokens,) in stream(plan, weights, [prompt], new, capacity=128)]
        assert rounds[:-1] == expected[: len(rounds) - 1]
        assert 0 < rounds[-1] <= expected[len(rounds) - 1]
        assert len(expected) - len(rounds) in (0, 1)  # the reference may run one round past the limit
        for run in ((plan, weights), plain):
            assert generate(*run, [prompt], new, capacity=128).texts()[0] == whole[start:]
        assert np.mean(expected) > (2.0 if "trained" in name else 0.9)
