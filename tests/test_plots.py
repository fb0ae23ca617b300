"""Pictures show what they are given."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest

from structured_dgp.plots import plot_history
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
