"""Bugs that other implementations of speculative decoding had in public, and the tests here that would catch each of them.

What cannot happen here: short-convolution states that cannot be trimmed (no such layers; nothing is rolled back, a cache is written once),
and vocabularies padded to a multiple of the devices (an axis that does not divide stays whole).
"""

import ast
from pathlib import Path

import pytest

CAUGHT = {
    "a token of zero probability is accepted (sglang issue 35771, vllm-ascend issue 13730)": (
        "decoding/test_acceptance.py::test_a_token_of_no_probability_is_never_accepted",
        "decoding/test_sampling.py::test_a_token_of_zero_probability_is_never_chosen",
    ),
    "plain and speculative paths filter in different orders (tpu-inference 0.32.0, rejection_sampler.py)": (
        "decoding/test_sampling.py::test_the_nucleus_is_taken_after_the_temperature",
        "exactness/test_distribution.py::test_the_rejection_rule_has_the_distribution",
    ),
    "noise of the draft is used again (vllm pull requests 54282 and 47386)": (
        "decoding/test_acceptance.py::test_draft_judge_residual_and_bonus_share_no_noise",
        "exactness/test_distribution.py::test_what_fell_behind_a_rejected_draft_decides_nothing_later",
    ),
    "an argmax draft is judged as if it had been drawn (ds4 pull request 482, mlx-swift-lm pull request 459)": (
        "decoding/test_acceptance.py::test_the_rejection_rule_keeps_the_distribution",
        "exactness/test_distribution.py::test_the_rejection_rule_has_the_distribution",
    ),
    "a cache length is read after it grew (JetSpec, draft_head.py)": (
        "decoding/test_hard_inputs.py::test_ragged_numbers_of_drafts_commit_what_a_replay_would",
        "drafter/test_autoregressive.py::test_drafts_follow_from_committed_text_alone",
    ),
    "a checkpoint of another convention loads silently (Domino-Tree README, SpecForge issue 455 and pull request 800)": (
        "drafter/test_layouts.py::test_open_decisions_are_refused_until_answered",
        "drafter/test_layouts.py::test_files_that_do_not_fit_get_a_sentence",
        "drafter/test_autoregressive.py::test_open_decisions_are_refused_and_named",
    ),
    "rows that only pad change results (tpu-inference pull request 2860, sglang pull request 37472)": (
        "decoding/test_hard_inputs.py::test_requests_that_only_pad_change_nothing",
        "decoding/test_hard_inputs.py::test_ragged_numbers_of_drafts_commit_what_a_replay_would",
    ),
    "a sliding window and a block of drafts (vllm pull request 54374)": (
        "decoding/test_hard_inputs.py::test_a_sliding_window_moves_on_inside_a_block",
        "drafter/test_layouts.py::test_files_that_do_not_fit_get_a_sentence",  # a drafter with a window of its own is refused
    ),
    "the end of the context (sglang issue 33579, TensorRT-LLM pull request 16280)": (
        "decoding/test_hard_inputs.py::test_the_last_token_that_fits_leaves_the_neighbour_alone",
    ),
    "requests that verify different numbers of drafts, in any dtype (sglang pull request 31047, ds4 issue 913)": (
        "decoding/test_hard_inputs.py::test_ragged_numbers_of_drafts_commit_what_a_replay_would",
        "decoding/test_hard_inputs.py::test_bfloat16_chooses_by_its_own_verification",
    ),
}


@pytest.mark.parametrize("bug", CAUGHT)
def test_every_bug_has_a_test(bug):
    for place in CAUGHT[bug]:
        file, name = place.split("::")
        tree = ast.parse((Path(__file__).parents[1] / file).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{place} is gone"
