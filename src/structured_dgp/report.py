"""What can be said and drawn of a fitted estimator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from structured_dgp import metrics, plots
from structured_dgp.estimators import DeepGPClassifier, DeepGPEstimator, DeepGPRegressor, noise_deviation
from structured_dgp.exceptions import InputError, StructuredDGPWarning
from structured_dgp.model_files import coupling_name
from structured_dgp.posterior import Posterior
from structured_dgp.problems import Problem


def model_facts(estimator: DeepGPEstimator) -> dict[str, Any]:
    """What a fitted estimator is, as plain values."""
    model = estimator.model_
    facts: dict[str, Any] = {
        "estimator": type(estimator).__name__,
        "inputs": estimator.feature_names(),
        "targets": estimator.target_names_,
        "widths": list(model.widths),
        "inducing points": model.posterior.n_inducing,
        "likelihood": type(model.likelihood).__name__,
        "precision": model.precision,
        "steps": estimator.n_steps_,
        "elbo": estimator.elbo_,
    }
    if isinstance(model.posterior, Posterior):
        facts["coupling"] = coupling_name(model.posterior.coupling)
        facts["parameters of the posterior"] = model.posterior.n_parameters
    if isinstance(estimator, DeepGPClassifier):
        facts["classes"] = estimator.classes_.tolist()
    noise = noise_deviation(estimator)
    if noise is not None:
        facts["noise (standard deviation)"] = noise
    return facts


def holdout_scores(estimator: DeepGPEstimator, problem: Problem) -> dict[str, Any]:
    """How an estimator does on rows that it was not trained on; by name for several targets, whose units differ."""
    if isinstance(estimator, DeepGPRegressor):
        prediction = estimator.predict_dist(problem.x)
        if estimator.is_flat_:
            return metrics.scores(prediction, problem.y)
        names = estimator.target_names_ or [f"y{p}" for p in range(problem.y.shape[1])]
        scores = {name: metrics.scores(prediction.column(p), problem.y[:, p]) for p, name in enumerate(names)}
        return {"targets": scores}
    assert isinstance(estimator, DeepGPClassifier)
    log_p = estimator.log_density(problem.x, problem.y)
    accuracy = float(np.mean(estimator.predict(problem.x) == problem.y))
    return {"log_likelihood": float(log_p.mean()), "accuracy": accuracy}


def write_pictures(estimator: DeepGPEstimator, folder: Path, judged: Problem | None = None) -> list[Path]:
    """Pictures of a fitted estimator, and of its predictions for ``judged``; returns their paths.

    A picture that there cannot be for this model is a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in pictures(estimator, judged).items():
        try:
            figure = draw()
        except InputError as error:
            warnings.warn(f"there is no picture {name!r}: {error}", StructuredDGPWarning, stacklevel=2)
            continue
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def pictures(estimator: DeepGPEstimator, judged: Problem | None = None) -> dict[str, Callable[[], Figure]]:
    """The pictures that make sense for an estimator, by name."""
    model = estimator.model_
    drawn: dict[str, Callable[[], Figure]] = {
        "history": lambda: _figure(plots.plot_history(estimator.history_)),
        "inputs": lambda: _figure(plots.plot_lengthscales(model, names=estimator.feature_names())),
        "covariance": lambda: _figure(plots.plot_covariance(model)),
    }
    if judged is not None and isinstance(estimator, DeepGPClassifier):
        probabilities, classes = estimator.predict_proba(judged.x), estimator.classes_
        right = classes[probabilities.argmax(axis=1)] == judged.y
        drawn["calibration"] = lambda: _figure(plots.plot_reliability(probabilities.max(axis=1), right))
    if judged is None or not isinstance(estimator, DeepGPRegressor):
        return drawn
    prediction = estimator.predict_dist(judged.x)
    targets = judged.y.reshape(prediction.shape)
    drawn["calibration"] = lambda: _figure(plots.plot_calibration(prediction, targets))
    drawn["pit"] = lambda: _figure(plots.plot_pit(prediction, targets))
    drawn["error"] = lambda: _figure(
        plots.plot_error_by_variance(prediction.var.reshape(-1), (prediction.mean - targets).reshape(-1))
    )
    if judged.x.num_columns == 1 and prediction.shape == targets.shape and targets.ndim == 1:
        x = judged.x[0].to_numpy()

        def bands() -> Figure:
            grid = np.linspace(x.min(), x.max(), 300)[:, None]
            axes = plots.plot_prediction(grid, estimator.predict_dist(_like(judged, grid)), data=(x, targets))
            axes.set(xlabel=judged.x.column_names[0], ylabel=(estimator.target_names_ or ["y"])[0])
            return _figure(axes)

        drawn["prediction"] = bands
        drawn["layers"] = lambda: _figure(
            plots.plot_hidden_layers(estimator, _like(judged, np.linspace(x.min(), x.max(), 200)[:, None]))[0]
        )
    return drawn


def _like(problem: Problem, values: np.ndarray) -> Any:
    """A table with the column names of a problem."""
    import pyarrow as pa

    return pa.table({name: values[:, index] for index, name in enumerate(problem.x.column_names)})


def _figure(axes: Any) -> Figure:
    return axes.figure
