"""The demonstration: mean-field and structured posteriors where the test data lies away from the training data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float

from structured_dgp.datasets import load_embedded
from structured_dgp.initial import initial_model
from structured_dgp.prediction import Mixture
from structured_dgp.training import train

METHODS: dict[str, tuple[str, tuple[int, ...]]] = {
    "SGP": ("mf", (1,)),
    "MF": ("mf", (5, 5, 1)),
    "STAR": ("star", (5, 5, 1)),
}
"""Name: coupling and widths."""


@dataclass(frozen=True)
class Problem:
    """Standardised training and test data; ``unit`` is the standard deviation of the target in its own units."""

    x: Float[np.ndarray, "n D"]
    y: Float[np.ndarray, "n 1"]
    x_test: Float[np.ndarray, "m D"]
    y_test: Float[np.ndarray, "m 1"]
    unit: float


@dataclass(frozen=True)
class Score:
    """How a method did on the test data, in the target's own units."""

    method: str
    log_likelihood: float
    rmse: float
    coverage: float
    seconds: float
    prediction: Mixture


def extrapolation_problem(name: str, seed: int) -> Problem:
    """Half of an embedded data set to train on, the other half, along a random direction, to test on."""
    table = load_embedded(name)
    direction = np.random.default_rng(seed).standard_normal(table.x.shape[1])
    order = np.argsort(((table.x - table.x.mean(0)) / table.x.std(0)) @ direction, kind="stable")
    train, test = np.array_split(order, 2)
    x_mean, x_std = table.x[train].mean(0), table.x[train].std(0)
    x_std[x_std == 0.0] = 1.0
    y_mean, y_std = table.y[train].mean(), table.y[train].std()
    x, y = (table.x - x_mean) / x_std, (table.y - y_mean) / y_std
    return Problem(x[train], y[train], x[test], y[test], float(y_std))


def compare(problem: Problem, n_inducing: int, n_steps: int, report: Callable[[str], None]) -> list[Score]:
    """Every method on one problem."""
    scores = []
    for method, (coupling, widths) in METHODS.items():
        start = time.perf_counter()
        model = initial_model(problem.x, coupling, widths, n_inducing, precision="mixed")
        trained = train(model, problem.x, problem.y, max_steps=n_steps, n_samples=3, batch_size=len(problem.x))
        prediction = trained.model.predict(problem.x_test)
        low, high = prediction.interval(0.9)
        inside = (low <= problem.y_test) & (problem.y_test <= high)
        score = Score(
            method=method,
            log_likelihood=float(np.mean(prediction.log_prob(problem.y_test))) - float(np.log(problem.unit)),
            rmse=float(np.sqrt(np.mean((prediction.mean - problem.y_test) ** 2))) * problem.unit,
            coverage=float(inside.mean()),
            seconds=time.perf_counter() - start,
            prediction=prediction,
        )
        report(
            f"{method:5s} test log-likelihood {score.log_likelihood:7.3f}   RMSE {score.rmse:6.2f}   "
            f"90 % intervals hold {100 * score.coverage:3.0f} %   {score.seconds:4.0f} s"
        )
        scores.append(score)
    return scores


def draw(problem: Problem, scores: list[Score], path: Path) -> None:
    """Error against predicted standard deviation: points above the line are worse than the model believes."""
    figure, axes = plt.subplots(
        1, len(scores), figsize=(4 * len(scores), 4), sharex=True, sharey=True, layout="constrained"
    )
    for axis, score in zip(axes, scores, strict=True):
        deviation = score.prediction.std[:, 0] * problem.unit
        error = np.abs(score.prediction.mean - problem.y_test)[:, 0] * problem.unit
        axis.scatter(deviation, error, s=6, alpha=0.4, linewidths=0)
        axis.axline((0.0, 0.0), slope=1.645, color="black", linewidth=1, label="90 % of the points should lie below")
        axis.set_title(f"{score.method}: {100 * score.coverage:.0f} % below, log-likelihood {score.log_likelihood:.2f}")
        axis.set_xlabel("predicted standard deviation (MPa)")
    axes[0].set_ylabel("absolute error (MPa)")
    axes[0].legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(folder: Path, n_inducing: int = 32, n_steps: int = 500, report: Callable[[str], None] = print) -> Path:
    """The whole demonstration; returns the path of its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    problem = extrapolation_problem("concrete", seed=0)
    scores = compare(problem, n_inducing, n_steps, report)
    picture = folder / "extrapolation.png"
    draw(problem, scores, picture)
    return picture
