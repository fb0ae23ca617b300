"""Metrics against their definitions, and against distributions whose scores are known."""

from __future__ import annotations

import numpy as np
import pytest
import scoringrules
from scipy import stats

from structured_dgp import metrics
from structured_dgp.exceptions import InputError
from structured_dgp.families import Normal, Poisson
from structured_dgp.prediction import Mixture

RNG = np.random.default_rng(0)
MEAN, STD = RNG.standard_normal(4000), np.exp(0.3 * RNG.standard_normal(4000))
RIGHT = Mixture(Normal(MEAN[None], STD[None] ** 2))
Y = MEAN + STD * RNG.standard_normal(4000)


def test_scores_are_their_definitions() -> None:
    found = metrics.scores(RIGHT, Y, level=0.8)
    z = stats.norm.ppf(0.9)
    assert found["log_likelihood"] == pytest.approx(stats.norm.logpdf(Y, MEAN, STD).mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((Y - MEAN) ** 2)))
    assert found["crps"] == pytest.approx(np.mean(scoringrules.crps_normal(Y, MEAN, STD)))
    assert found["coverage"] == pytest.approx(np.mean(np.abs(Y - MEAN) <= z * STD))
    assert found["width"] == pytest.approx(2 * z * STD.mean())


def test_the_right_distribution_is_calibrated_and_a_narrow_one_is_not() -> None:
    assert metrics.calibration_error(RIGHT, Y) < 0.02
    narrow = Mixture(Normal(MEAN[None], STD[None] ** 2 / 9))
    nominal, observed = metrics.calibration_curve(narrow, Y)
    expected = [2 * stats.norm.cdf(stats.norm.ppf(0.5 + q / 2) / 3) - 1 for q in nominal]
    np.testing.assert_allclose(observed, expected, atol=0.03)
    assert metrics.calibration_error(narrow, Y) > 0.2
    assert stats.kstest(metrics.pit(RIGHT, Y), "uniform").pvalue > 0.01
    assert stats.kstest(metrics.pit(narrow, Y), "uniform").pvalue < 1e-6


def test_counts_have_a_uniform_pit_too() -> None:
    rate = np.exp(RNG.standard_normal(4000))
    counts = RNG.poisson(rate).astype(float)
    assert stats.kstest(metrics.pit(Mixture(Poisson(rate[None])), counts), "uniform").pvalue > 0.01


def test_one_column_and_no_column_are_the_same() -> None:
    column = Mixture(Normal(MEAN[None, :, None], STD[None, :, None] ** 2))
    assert metrics.scores(column, Y) == pytest.approx(metrics.scores(RIGHT, Y))
    assert metrics.scores(column, Y[:, None]) == pytest.approx(metrics.scores(RIGHT, Y))


def test_targets_of_another_shape_are_refused() -> None:
    prediction = Mixture(Normal(np.zeros((1, 5)), np.ones((1, 5))))
    for wrong in (np.zeros((5, 1)), np.zeros(1), np.zeros(4)):
        for score in (metrics.rmse, metrics.coverage, metrics.pit, metrics.log_likelihood):
            with pytest.raises(InputError, match="y has shape"):
                score(prediction, wrong)
