"""A toy target, a drafter for it, and what a caller of `generate` asks for."""

import dataclasses

import numpy as np

from angelspec_jax.decoding.generate import generate
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.decoding.step import Plan, Weights

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]
NEW = 24
OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "all": {"temperature": [0.0, 0.7, 1.0, 1.4], "top_k": [0, 8, 0, 20], "top_p": [1.0, 0.9, 0.5, 1.0], "min_p": [0.0, 0.01, 0.0, 0.05]},
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """A toy target, what it says alone, and the same with drafts."""

    plain: Plan
    speculative: Plan
    weights: Weights

    def alone(self, prompts=PROMPTS, new=NEW, options=None, seed=7, **plan) -> list[list[int]]:
        plan = dataclasses.replace(self.plain, **plan)
        sampling = make_sampling(len(prompts), seed=seed, **(options or {}))
        return generate(plan, Weights(self.weights.target), prompts, new, sampling=sampling, capacity=64).texts()

    def drafted(self, prompts=PROMPTS, new=NEW, options=None, seed=7, policy=None, **plan):
        plan = dataclasses.replace(self.speculative, **plan)
        sampling = make_sampling(len(prompts), seed=seed, **(options or {}))
        return generate(plan, self.weights, prompts, new, sampling=sampling, policy=policy, capacity=64)


def depths(parents: np.ndarray) -> np.ndarray:
    depth = np.zeros(len(parents), int)
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
    return depth


def last_siblings(parents: np.ndarray) -> np.ndarray:
    return np.array([parent not in parents[node + 1 :] for node, parent in enumerate(parents)])
