"""The demonstration: a sparse GP, a mean-field and a structured deep GP, near the training data and away from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from structured_dgp import plots
from structured_dgp.datasets import Table, load_embedded
from structured_dgp.estimators import DeepGPRegressor
from structured_dgp.experiments.splits import Split, extrapolation, interpolation
from structured_dgp.metrics import LEVELS, calibration_curve, scores
from structured_dgp.pages import Page
from structured_dgp.prediction import Mixture

METHODS: dict[str, dict[str, Any]] = {
    "SGP": {"coupling": "mf", "n_layers": 1},
    "MF": {"coupling": "mf"},
    "STAR": {"coupling": "star"},
}
"""Name: what distinguishes the estimator."""
COLORS = {"SGP": "C7", "MF": "C1", "STAR": "C0"}
DATA = "concrete"
UNIT = "MPa"
STEPS = 600
DIRECTIONS = 3
"""Random directions of the extrapolation."""
COLUMNS = {
    "log_likelihood": ("log-likelihood", "{:.2f}", True),
    "rmse": ("RMSE", "{:.2f}", False),
    "crps": ("CRPS", "{:.2f}", False),
    "coverage": ("inside 90 % intervals", "{:.0%}", None),
}
"""Score: its heading, how to write it, and whether larger is better; None: closest to 90 %."""


@dataclass(frozen=True)
class Result:
    """One fit, and how it did on its test rows."""

    method: str
    split: Split
    prediction: Mixture
    log_density: Float[np.ndarray, " m"]
    scores: dict[str, float]
    seconds: float
    estimator: DeepGPRegressor


def fit(table: Table, split: Split, method: str, **options: Any) -> Result:
    """Fit a method and test it."""
    began = time.perf_counter()
    estimator = DeepGPRegressor(**METHODS[method], optimizer="adam", early_stopping=False, random_state=0, **options)
    estimator.fit(table.x[split.train], table.y[split.train, 0])
    seconds = time.perf_counter() - began
    y = table.y[split.test, 0]
    prediction = estimator.predict_dist(table.x[split.test])
    return Result(method, split, prediction, prediction.log_prob(y), scores(prediction, y), seconds, estimator)


def run(folder: Path, n_inducing: int = 64, n_steps: int = STEPS) -> Path:
    """The whole demonstration; returns the path of its page."""
    folder.mkdir(parents=True, exist_ok=True)
    table = load_embedded(DATA)
    tasks = {
        "near": [interpolation(table.x, 0)],
        "away": [extrapolation(table.x, seed) for seed in range(DIRECTIONS)],
    }
    results: dict[str, list[Result]] = {name: [] for name in tasks}
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} fits"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(METHODS) * sum(map(len, tasks.values())))
        for name, splits in tasks.items():
            for method in METHODS:
                for split in splits:
                    progress.update(bar, description=f"{method}, {name}")
                    results[name].append(fit(table, split, method, n_inducing=n_inducing, max_steps=n_steps))
                    progress.advance(bar)
    page = folder / "index.html"
    page.write_text(write_page(table, results, n_inducing, n_steps).render(), encoding="utf-8")
    for name, found in results.items():
        for method in METHODS:
            mean = _mean_scores(found, method)
            text = "   ".join(f"{heading} {form.format(mean[key])}" for key, (heading, form, _) in COLUMNS.items())
            console.print(f"{name}  {method:5s} {text}", highlight=False, soft_wrap=True)
    return page


def _mean_scores(results: list[Result], method: str) -> dict[str, float]:
    own = [result.scores for result in results if result.method == method]
    return {key: float(np.mean([each[key] for each in own])) for key in own[0]}


def _table(page: Page, results: list[Result]) -> None:
    """Mean scores of each method; the best of each column is marked."""
    means = {method: _mean_scores(results, method) for method in METHODS}
    rows, best = [], []
    for method, mean in means.items():
        cells, marks = [method], [False]
        for key, (_, form, larger) in COLUMNS.items():
            column = [other[key] for other in means.values()]
            goal = max(column) if larger else min(column)
            if larger is None:
                goal = min(column, key=lambda value: abs(value - 0.9))
            cells.append(form.format(mean[key]))
            marks.append(mean[key] == goal)
        seconds = [result.seconds for result in results if result.method == method]
        rows.append([*cells, f"{np.mean(seconds):.0f} s"])
        best.append([*marks, False])
    page.table(["", *(heading for heading, _, _ in COLUMNS.values()), "time of a fit"], rows, best)


def win_rates(results: list[Result], method: str, against: str) -> Float[np.ndarray, " splits"]:
    """For each split, the fraction of test rows to which ``method`` gives a larger density."""
    first, second = ([r.log_density for r in results if r.method == name] for name in (method, against))
    return np.array([np.mean(a > b) for a, b in zip(first, second, strict=True)])


def write_page(table: Table, results: dict[str, list[Result]], n_inducing: int, n_steps: int) -> Page:
    """The page, from the results alone: what it says follows the numbers."""
    page = Page("Deep Gaussian processes that know what they do not know")
    page.paragraph(
        "Three models learn the strength of concrete from its recipe and its age: a sparse Gaussian process (SGP), a "
        "deep one with the usual mean-field posterior (MF), which forgets how its layers depend on each other, and a "
        "deep one whose posterior keeps the correlations between layers (STAR). All are trained with Adam, as in the "
        "paper."
    )
    page.heading("Near the training data")
    page.paragraph(
        "Nine tenths of the samples, at random, to learn from; the others to test. Log-likelihood: larger is better, "
        "it rewards being right and being honest about the error. 90 % intervals should hold 90 % of the samples."
    )
    _table(page, results["near"])
    page.heading("Away from the training data")
    page.paragraph(
        "Now the models learn from one half of the space of recipes and are tested on the other half, beyond a cut "
        f"across a random direction. Means over {DIRECTIONS} directions; they differ a lot in how hard they are."
    )
    away = results["away"]
    _table(page, away)
    wins = win_rates(away, "STAR", "MF")
    page.paragraph(
        "Sample by sample: STAR gives the true strength a larger density than MF for "
        f"{', '.join(f'{rate:.0%}' for rate in wins)} of the test samples in the {len(wins)} directions"
        f" ({wins.mean():.0%} on average; 50 % would be a draw)."
    )
    page.picture(
        _calibration_picture(table, away),
        "Left: how many test samples lie inside intervals of each nominal level, all directions together; the "
        "dashed line is right, below it intervals are too narrow. Right: predicted standard deviation over the "
        "distance to the nearest training sample (running median).",
    )
    page.picture(
        _error_picture(table, away),
        "Absolute error against predicted standard deviation. 90 % of the points should lie below the line: points "
        "above it are errors that the model did not expect.",
    )
    page.heading("What the posteriors remember")
    page.paragraph(
        "Covariance of the inducing outputs of all layers. Mean field has blocks on the diagonal only. STAR adds "
        "stripes between hidden layers and an arrow to the output, learnt from the data."
    )
    page.picture(_covariance_picture(results["near"]), "Colours are logarithmic; lines separate the layers.")
    page.footer(
        f"Concrete compressive strength data (Yeh, UCI, CC BY 4.0), {len(table.x)} samples. {n_inducing} inducing "
        f"points for each layer, three layers with five latent GPs in each hidden one, {n_steps} training steps, one "
        "seed. Made by sdgp demo."
    )
    return page


def _calibration_picture(table: Table, results: list[Result]) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for method, color in COLORS.items():
        own = [result for result in results if result.method == method]
        inside = [calibration_curve(r.prediction, table.y[r.split.test, 0])[1] for r in own]
        left.plot(LEVELS, np.mean(inside, axis=0), color=color, label=method)
        distance, spread = [], []
        for result in own:
            x = result.estimator.x_scaling_.to_standard(table.x)
            distance.append(plots.distance_to_data(x[result.split.test], x[result.split.train]))
            spread.append(result.prediction.std)
        right.plot(*plots.running_median(np.concatenate(distance), np.concatenate(spread)), color=color, label=method)
    left.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1)
    left.set(xlabel="nominal level", ylabel="fraction inside", xlim=(0, 1), ylim=(0, 1))
    right.set(xlabel="distance to the training data (standardised)", ylabel=f"predicted standard deviation ({UNIT})")
    for axis in (left, right):
        axis.legend(frameon=False)
    return figure


def _error_picture(table: Table, results: list[Result]) -> Figure:
    figure, axes = plt.subplots(1, len(METHODS), figsize=(10, 3.8), sharex=True, sharey=True, layout="constrained")
    for axis, method in zip(axes, METHODS, strict=True):
        own = [result for result in results if result.method == method]
        std = np.concatenate([result.prediction.std for result in own])
        error = np.concatenate([np.abs(r.prediction.mean - table.y[r.split.test, 0]) for r in own])
        axis.scatter(std, error, s=6, alpha=0.3, linewidths=0, color=COLORS[method])
        axis.axline((0.0, 0.0), slope=1.645, color="black", linewidth=1)
        below = np.mean(error <= 1.645 * std)
        axis.set(title=f"{method}: {below:.0%} below", xlabel=f"predicted standard deviation ({UNIT})")
    axes[0].set_ylabel(f"absolute error ({UNIT})")
    return figure


def _covariance_picture(results: list[Result]) -> Figure:
    deep = [result for result in results if result.estimator.n_layers > 1]
    figure, axes = plt.subplots(1, len(deep), figsize=(10, 4.6), layout="constrained")
    for axis, result in zip(axes, deep, strict=True):
        plots.plot_covariance(result.estimator.model_, axis)
        axis.set_title(result.method)
    return figure
