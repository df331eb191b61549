"""Percentile bootstrap over prompts (Efron 1979): how far a pooled rate would move with other prompts of the same kind."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

SAMPLES = 2000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f}-{self.high:.2f}"


def interval(columns: Float[np.ndarray, "C P"], statistic: Callable, *, samples: int = SAMPLES, level: float = LEVEL) -> Interval:
    """Interval of `statistic(sums)`, where `sums[c]` are sums of column c over prompts drawn with replacement, one a sample.

    Everything that was measured on one prompt stays together, so several seeds or drafters on the same prompts are not taken for
    independent. The draws depend on the number of prompts alone.
    """
    prompts = columns.shape[1]
    drawn = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1.0 / prompts), size=samples)  # [samples, P] times drawn
    low, high = np.quantile(statistic(columns @ drawn.T), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
