"""Pictures show what they are given."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest

from structured_dgp import DeepGPRegressor, InputError, initial_model
from structured_dgp.families import Normal
from structured_dgp.kernels import Linear
from structured_dgp.metrics import calibration_curve
from structured_dgp.plots import (
    distance_to_data,
    plot_calibration,
    plot_covariance,
    plot_error_by_variance,
    plot_hidden_layers,
    plot_history,
    plot_lengthscales,
    plot_pit,
    plot_prediction,
    plot_reliability,
    plot_variance_by_distance,
    running_median,
)
from structured_dgp.prediction import Mixture
from structured_dgp.training import History, Record

matplotlib.use("Agg")


def history(scores: list[float | None]) -> History:
    elbos = [-1000.0, -20.0, -10.0, -9.0]
    return History(
        [
            Record(10 * k, elbo, elbo + 1.0, 1.0, score, 0.1, 0.1, 1.0, 0.2, (1e-6,), 0, 0, 0.5 * k)
            for k, (elbo, score) in enumerate(zip(elbos, scores, strict=True))
        ]
    )


@pytest.mark.parametrize("against", ["step", "seconds"])
def test_the_history_shows_elbo_and_score(against: str) -> None:
    given = history([-3.0, -2.0, -1.5, -1.6])
    axes = plot_history(given, against=against)
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), given[against])
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), given["elbo"])
    second = next(other for other in axes.figure.axes if other is not axes)
    np.testing.assert_array_equal(second.lines[0].get_ydata(), given["score"])
    assert axes.get_ylim()[1] > -9.0
    matplotlib.pyplot.close(axes.figure)


def test_a_history_without_scores_has_one_axis() -> None:
    axes = plot_history(history([None] * 4))
    assert len(axes.figure.axes) == 1
    assert len(plot_history(History(), axes).lines) == 2
    matplotlib.pyplot.close(axes.figure)


# --- predictions -------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
STD = np.exp(0.5 * RNG.standard_normal(300))
MEAN = RNG.standard_normal(300)
Y = MEAN + STD * RNG.standard_normal(300)
PREDICTION = Mixture(Normal(MEAN[None], STD[None] ** 2))


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    matplotlib.pyplot.close("all")


def test_bands_hold_the_central_quantiles_in_the_order_of_x() -> None:
    x = RNG.uniform(size=300)
    axes = plot_prediction(x, PREDICTION, data=(x, Y))
    order = np.argsort(x)
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), x[order])
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), MEAN[order])
    band = axes.collections[1].get_paths()[0].vertices
    lower = PREDICTION.quantile(0.05)
    assert np.isin(lower, band[:, 1]).all()
    with pytest.raises(InputError, match="one input column and one output"):
        plot_prediction(x, Mixture(Normal(np.zeros((1, 300, 2)), np.ones((1, 300, 2)))))


def test_calibration_and_pit_show_the_metrics() -> None:
    axes = plot_calibration(PREDICTION, Y, label="model")
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), calibration_curve(PREDICTION, Y)[1])
    plot_calibration(PREDICTION, Y + 1.0, axes, label="worse")
    assert len(axes.lines) == 3  # one diagonal for both
    heights = [bar.get_height() for bar in plot_pit(PREDICTION, Y, bins=10).patches]
    assert np.mean(heights) == pytest.approx(1.0)


def test_reliability_shows_the_share_of_right_predictions() -> None:
    probability = np.random.default_rng(0).uniform(0.5, 1.0, 4000)
    right = np.random.default_rng(1).random(4000) < probability
    axes = plot_reliability(probability, right, bins=4)
    (points, *_) = axes.containers[0]
    order = np.argsort(probability).reshape(4, 1000)
    np.testing.assert_allclose(points.get_xdata(), probability[order].mean(axis=1))
    np.testing.assert_allclose(points.get_ydata(), right[order].mean(axis=1))
    np.testing.assert_allclose(points.get_ydata(), points.get_xdata(), atol=0.05)


def test_the_running_median_follows_the_points() -> None:
    place = RNG.uniform(size=500)
    where, median = running_median(place, 3.0 * place)
    assert (np.diff(where) >= 0).all()
    np.testing.assert_allclose(median, 3.0 * where, atol=0.1)  # at both ends, too
    assert plot_variance_by_distance(place, STD[0] + place).get_yscale() == "log"
    axes = plot_error_by_variance(STD**2, Y - MEAN, label="model")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["median of a right prediction", "model"]


@pytest.mark.parametrize(("n", "size"), [(1, 1), (2, 2), (5, 3), (40, 4), (47, 4), (50, 5)])
def test_the_running_median_is_of_whole_windows_only(n: int, size: int) -> None:
    place, values = RNG.permutation(n).astype(float), RNG.standard_normal(n)
    where, median = running_median(place, values)
    windows = np.lib.stride_tricks.sliding_window_view(values[np.argsort(place)], size)
    upper = np.sort(windows)[:, size // 2]  # of an even number, the larger one of the middle
    np.testing.assert_array_equal(median, upper)
    np.testing.assert_array_equal(where, size // 2 + np.arange(len(windows)))


def test_distances_are_those_to_the_nearest_row() -> None:
    a, b = RNG.standard_normal((5, 3)), RNG.standard_normal((7, 3))
    expected = np.linalg.norm(a[:, None] - b[None], axis=2).min(axis=1)
    np.testing.assert_allclose(distance_to_data(a, b), expected)


MODEL = initial_model(RNG.standard_normal((20, 3)), "star", (2, 2, 1), 4)


@pytest.mark.parametrize("what", ["covariance", "precision"])
@pytest.mark.parametrize("whitened", [False, True])
def test_covariances_have_lines_between_the_layers(what: str, whitened: bool) -> None:
    axes = plot_covariance(MODEL, what=what, whitened=whitened)
    shown = np.asarray(axes.images[0].get_array())
    covariance = MODEL.posterior.covariance() if whitened else MODEL.inducing_covariance()
    expected = covariance if what == "covariance" else np.linalg.inv(covariance)
    np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    assert sorted({float(line.get_xdata()[0]) for line in axes.lines[1::2]}) == [7.5, 15.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layer 1", "layer 2", "output"]
    with pytest.raises(InputError, match="covariance"):
        plot_covariance(MODEL, what="variance")


def test_lengthscales_are_bars_with_the_names_of_the_inputs() -> None:
    axes = plot_lengthscales(MODEL, names=["a", "b", "c"])
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, 1.0 / np.asarray(MODEL.layers[0].kernel.lengthscale))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert len(plot_lengthscales(MODEL, layer=2).patches) == 2
    linear = initial_model(np.zeros((2, 1)), "mf", (1,), 2, kernel=Linear(1.0))
    with pytest.raises(InputError, match="no lengthscales"):
        plot_lengthscales(linear)


def test_hidden_layers_have_a_panel_each() -> None:
    x = np.linspace(-1, 1, 12)[:, None]
    model = DeepGPRegressor(n_layers=2, width=2, n_inducing=4, max_steps=2, random_state=0).fit(x, x[:, 0])
    panels = plot_hidden_layers(model, x, n_samples=3)
    assert [len(axes.lines) for axes in panels] == [6, 3]
    drawn = model.sample_layers(x, 3, 0)
    np.testing.assert_allclose(panels[1].lines[0].get_ydata(), drawn[1][0, :, 0])
