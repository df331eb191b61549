"""How far a drafter's confidence can be believed, and temperatures that make it believable.

Before a round is verified, every draft has an estimate that it and all drafts before it survive: the product of one confidence per
position. Sequential temperature scaling (DSpark, arXiv 2607.05147, section 3.2.1) divides the logit of the confidence at position k by a
temperature t_k, chosen from left to right, the earlier ones fixed, so that the expected calibration error (ECE) of the product is least. It
works for any confidence, trained head or the drafter's own probability, keeps the order of drafts within a position, and changes no text:
only which drafts are worth verifying. Temperatures are fitted on some prompts and judged on others.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from angelspec_jax.answers import encode
from angelspec_jax.decoding.generate import jitted_prefill, jitted_step, start
from angelspec_jax.decoding.sampling import make_sampling
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.evaluation.plots import COLOURS
from angelspec_jax.target.loading import Target
from angelspec_jax.text import prepare

BINS = 20  # of equal width, as DeepSpec measures
GRID = np.geomspace(0.1, 10.0, 201)  # the paper names no grid
SMALLEST = 1e-7


@dataclasses.dataclass(frozen=True)
class Observations:
    """Rounds of one domain: what was estimated, and what came true."""

    confidence: Float[np.ndarray, "N K"]  # of each draft, given that those before it survive
    accepted: Int[np.ndarray, "N"]  # drafts that survived

    @property
    def survived(self) -> Bool[np.ndarray, "N K"]:
        """Whether the drafts up to each position all survived."""
        return self.accepted[:, None] > np.arange(self.confidence.shape[1])[None]


@dataclasses.dataclass(frozen=True)
class Quality:
    """Of the estimate that a prefix survives, by position: 0 is perfect for `ece` and `brier`, 1 for `auroc` (None: one outcome only)."""

    ece: tuple[float, ...]
    auroc: tuple[float | None, ...]
    brier: tuple[float, ...]
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def scale(confidence: Float[np.ndarray, "N K"], temperatures: Sequence[float] = ()) -> Float[np.ndarray, "N K"]:
    """Estimated survival of every prefix, with the logits of the confidence divided by the temperatures (none: as it is)."""
    if not len(temperatures):
        return np.cumprod(confidence, axis=1)
    return np.cumprod(_sigmoid(_logit(confidence) / np.asarray(temperatures, np.float64)[None]), axis=1)


def fit(observed: Observations) -> tuple[float, ...]:
    """Temperatures of sequential temperature scaling, one per draft position; among equally good ones the closest to 1.

    Raises ValueError without a round to learn from.
    """
    if not len(observed.accepted):
        raise ValueError("there is no round to calibrate on; give more prompts or more tokens")
    logits, survived = _logit(observed.confidence), observed.survived
    before, found = np.ones(len(logits)), []
    by_distance = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    for k in range(logits.shape[1]):
        estimates = before[None] * _sigmoid(logits[None, :, k] / by_distance[:, None])
        errors = [expected_calibration_error(estimate, survived[:, k]) for estimate in estimates]
        best = int(np.argmin(errors))
        found.append(float(by_distance[best]))
        before = estimates[best]
    return tuple(found)


def quality(observed: Observations, temperatures: Sequence[float] = ()) -> Quality:
    """How good the estimates are, with and without temperatures."""
    estimates, survived = scale(observed.confidence, temperatures), observed.survived
    columns = list(zip(estimates.T, survived.T, strict=True))
    return Quality(
        ece=tuple(expected_calibration_error(e, s) for e, s in columns),
        auroc=tuple(area_under_roc(e, s) for e, s in columns),
        brier=tuple(float(np.mean((e - s) ** 2)) for e, s in columns),
        rounds=len(observed.accepted),
    )


def expected_calibration_error(estimate: Float[np.ndarray, "N"], outcome: Bool[np.ndarray, "N"]) -> float:
    """Mean distance between estimate and frequency over bins of equal width, weighted by how many rounds fall into each."""
    totals, estimates, outcomes = _bins(estimate, outcome)
    return float(np.sum(np.abs(estimates - outcomes)) / max(totals.sum(), 1))


def area_under_roc(estimate: Float[np.ndarray, "N"], outcome: Bool[np.ndarray, "N"]) -> float | None:
    """Probability that a round that survived had the higher estimate than one that did not; ties count half."""
    positive, negative = int(outcome.sum()), int((~outcome).sum())
    if not positive or not negative:
        return None
    _, inverse, counts = np.unique(estimate, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[outcome].sum() - positive * (positive + 1) / 2) / (positive * negative))


def reliability(estimate: Float[np.ndarray, "N"], outcome: Bool[np.ndarray, "N"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean estimate, observed frequency, rounds) of every bin that holds a round."""
    totals, estimates, outcomes = _bins(estimate, outcome)
    some = totals > 0
    return estimates[some] / totals[some], outcomes[some] / totals[some], totals[some]


def pool(parts: Iterable[Observations]) -> Observations:
    parts = list(parts)
    return Observations(np.concatenate([p.confidence for p in parts]), np.concatenate([p.accepted for p in parts]))


def collect(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    **switches,
) -> Observations:
    """Decode prompts one by one with every draft verified and note what the drafter expected.

    Temperatures that the drafter already has are left aside. Rounds that end an answer are not counted: what lies beyond the end was
    never decided. Raises ValueError for prompts that do not fit the model's context.
    """
    plan, weights = prepare(target, without_temperatures(drafter))
    encoded = [encode(target, prompt, **switches) for prompt in prompts]
    longest = max((len(tokens) for tokens in encoded), default=0) + max_new_tokens
    capacity = -(-longest // 64) * 64
    survival: list[np.ndarray] = []
    accepted: list[int] = []
    for number, tokens in enumerate(encoded):
        sampling = make_sampling(1, temperature=temperature, seed=seed + number)
        state, policy = start(plan, weights, [tokens], max_new_tokens, sampling=sampling, capacity=capacity)
        state = jitted_prefill(plan, weights, state)
        while True:
            state, emitted = jitted_step(plan, weights, policy, state)
            report = jax.device_get(emitted.report)
            if bool(report.finished[0]):
                break
            survival.append(np.asarray(report.survival[0], np.float64))
            accepted.append(int(report.accepted[0]))
    shape = (len(accepted), drafter.config.num_drafts)
    products = np.asarray(survival, np.float64).reshape(shape)
    earlier = np.concatenate([np.ones((shape[0], 1)), products[:, :-1]], axis=1)
    confidence = np.where(earlier > 0, products / np.where(earlier > 0, earlier, 1.0), 0.0)
    return Observations(np.clip(confidence, 0.0, 1.0), np.asarray(accepted, np.int64))


def without_temperatures(drafter: Drafter) -> Drafter:
    if not getattr(drafter.config, "confidence_temperatures", ()):
        return drafter
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, confidence_temperatures=()))


def with_temperatures(drafter: Drafter, temperatures: Sequence[float]) -> Drafter:
    """The drafter with its confidence calibrated. Raises ValueError for kinds that cannot keep temperatures."""
    if not hasattr(drafter.config, "confidence_temperatures"):
        raise ValueError(f"drafters of the family {drafter.config.family} keep no temperatures; the report was made, nothing was written")
    config = dataclasses.replace(drafter.config, confidence_temperatures=tuple(round(float(t), 6) for t in temperatures))
    return dataclasses.replace(drafter, config=config)


def figure(title: str, domains: Mapping[str, Observations], temperatures: Sequence[float]) -> Figure:
    """Reliability of every domain before and after, all positions pooled: a calibrated confidence lies on the diagonal."""
    drawn = Figure(figsize=(4.0 * max(len(domains), 1), 4.0), layout="constrained")
    drawn.suptitle(title, fontsize=11)
    for place, (domain, observed) in enumerate(domains.items(), 1):
        axes = drawn.add_subplot(1, len(domains), place)
        axes.spines[["top", "right"]].set_visible(False)
        axes.plot([0, 1], [0, 1], color="#c3c7cc", linewidth=1)
        for label, values, colour in (("before", (), COLOURS[1]), ("after", temperatures, COLOURS[0])):
            estimates, frequencies, counts = reliability(scale(observed.confidence, values).ravel(), observed.survived.ravel())
            error = float(np.mean(quality(observed, values).ece))
            axes.plot(estimates, frequencies, color=colour, linewidth=1, label=f"{label}, ECE {100 * error:.1f} %")
            axes.scatter(estimates, frequencies, s=4 + 60 * counts / counts.max(), color=colour)
        axes.set(xlim=(0, 1), ylim=(0, 1), title=domain, xlabel="estimated survival")
        if place == 1:
            axes.set_ylabel("observed survival")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return drawn


def _bins(estimate: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, sum of estimates and sum of outcomes of each bin."""
    place = np.clip((estimate * BINS).astype(np.int64), 0, BINS - 1)
    weights = (None, estimate, outcome.astype(np.float64))
    totals, estimates, outcomes = (np.bincount(place, weights=w, minlength=BINS) for w in weights)
    return totals, estimates, outcomes


def _logit(probability: np.ndarray) -> np.ndarray:
    inside = np.clip(np.asarray(probability, np.float64), SMALLEST, 1 - SMALLEST)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-values))
