"""Sequential temperature scaling undoes a known distortion, and the measures of calibration are right where they can be worked out."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from angelspec_jax import cli
from angelspec_jax.drafter import layouts
from angelspec_jax.evaluation import calibration
from angelspec_jax.evaluation.calibration import Observations

pytest_plugins = ["toy_model"]


def distorted(rounds=60_000, temperatures=(0.5, 2.0, 1.0), seed=0) -> Observations:
    """Rounds whose true confidence is the sigmoid of z, told as that of z times the temperature."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.8, 1.5, (rounds, len(temperatures)))
    true = 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(random.uniform(size=true.shape) < true, axis=1).sum(axis=1)
    told = 1 / (1 + np.exp(-logits * np.asarray(temperatures)))
    return Observations(told, accepted)


def test_temperatures_undo_what_distorted_the_confidence():
    observed = distorted()
    found = calibration.fit(observed)
    np.testing.assert_allclose(found, (0.5, 2.0, 1.0), rtol=0.12)
    before, after = calibration.quality(observed), calibration.quality(distorted(seed=1), found)
    assert max(before.ece[:2]) > 0.05
    assert max(after.ece) < 0.01
    assert all(b < a for a, b in zip(before.brier[:2], after.brier[:2], strict=True))
    assert after.rounds == 60_000


def test_order_within_a_position_is_kept():
    observed = distorted(2000)
    first = calibration.scale(observed.confidence)[:, 0], calibration.scale(observed.confidence, (3.0, 1.0, 1.0))[:, 0]
    np.testing.assert_array_equal(np.argsort(first[0], kind="stable"), np.argsort(first[1], kind="stable"))


def test_measures_on_cases_worked_out_by_hand():
    estimate, outcome = np.array([0.9, 0.9, 0.1, 0.1]), np.array([True, False, False, False])
    assert calibration.expected_calibration_error(estimate, outcome) == pytest.approx((0.4 * 2 + 0.1 * 2) / 4)
    assert calibration.area_under_roc(estimate, outcome) == pytest.approx((1 + 1 + 0.5) / 3)
    assert calibration.area_under_roc(estimate, np.ones(4, bool)) is None
    means, shares, counts = calibration.reliability(estimate, outcome)
    np.testing.assert_allclose((means, shares, counts), [(0.1, 0.9), (0.0, 0.5), (2, 2)])
    quality = calibration.quality(Observations(np.array([[1.0, 0.5], [1.0, 0.5]]), np.array([2, 1])))
    assert quality.brier == pytest.approx((0.0, 0.25))
    with pytest.raises(ValueError, match="no round to calibrate on"):
        calibration.fit(Observations(np.zeros((0, 2)), np.zeros(0, int)))


def test_command_stores_temperatures_with_the_drafter(toy_directory, drafter_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for domain in ("a", "b"):
        lines = [json.dumps({"prompt": f"{domain} {i}"}) + "\n" for i in range(4)]
        (tmp_path / f"{domain}.jsonl").write_text("".join(lines))
    command = ["calibrate", "a.jsonl", "b.jsonl", "--target", str(toy_directory), "--drafter", str(drafter_directory), "-n", "12"]
    ended = CliRunner().invoke(cli.app, [*command, "--save", "calibrated", "--output", "found.json", "--plot", "found.png"])
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["domains"]) == {"a", "b"}
    assert len(found["temperatures"]) == 3
    stored = layouts.read(tmp_path / "calibrated").config.confidence_temperatures
    np.testing.assert_allclose(stored, found["temperatures"], rtol=1e-5)
    assert (tmp_path / "found.png").stat().st_size > 1000
    again = CliRunner().invoke(cli.app, [*command, "--save", "calibrated"])
    assert again.exit_code == 2 and "calibrated exists" in again.output
