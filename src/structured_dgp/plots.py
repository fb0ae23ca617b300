"""Pictures. Every function draws on axes that it is given, or on new ones, and returns them."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.ticker import PercentFormatter
from scipy.ndimage import median_filter

from structured_dgp.estimators import DeepGPEstimator
from structured_dgp.exceptions import InputError
from structured_dgp.kernels import lengthscale_of
from structured_dgp.metrics import calibration_curve, pit
from structured_dgp.model import DeepGP
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.prediction import Mixture
from structured_dgp.training.history import History

BANDS = {0.5: 0.34, 0.9: 0.18}
"""Levels of the bands around a prediction, and how opaque they are."""
MEDIAN_OF_SQUARE = 0.4549
"""The median of the square of a standard normal value."""


def _axes(axes: Axes | None) -> Axes:
    return plt.subplots(layout="constrained")[1] if axes is None else axes


def plot_history(history: History, axes: Axes | None = None, *, against: str = "step") -> Axes:
    """The ELBO over steps, or ``against="seconds"``, and the hold-out score on a second axis if there is one.

    The lower end of the axis leaves out the first steps, in which the ELBO is far from where it will be.
    """
    axes = _axes(axes)
    place, elbo = history[against], history["elbo"]
    axes.plot(place, elbo, color="C0", label="ELBO")
    axes.set(xlabel="step" if against == "step" else against, ylabel="ELBO")
    if len(elbo):
        low, high = np.quantile(elbo, 0.2), np.max(elbo)
        margin = 0.05 * max(high - low, 1e-6 * max(abs(high), 1.0))
        axes.set_ylim(low - margin, high + margin)
    if history.scored:
        second = axes.twinx()
        second.plot(place, history["score"], color="C1", label="hold-out log-likelihood")
        second.set_ylabel("hold-out log-likelihood")
        lines = [*axes.get_lines(), *second.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")
    return axes


def plot_prediction(
    x: Any, prediction: Mixture, axes: Axes | None = None, *, data: tuple[Any, Any] | None = None, color: str = "C0"
) -> Axes:
    """A prediction over a single input: its mean, bands that hold 50 % and 90 %, and the ``data`` (x, y)."""
    axes = _axes(axes)
    place = np.asarray(x, np.float64).reshape(-1)
    if place.shape != prediction.shape[:1] or (len(prediction.shape) == 2 and prediction.shape[1] > 1):
        raise InputError(
            "plot_prediction needs one input column and one output: use mixture.column(p) for one of many."
        )
    order = np.argsort(place, kind="stable")
    for level, alpha in BANDS.items():
        lower, upper = (end.reshape(-1)[order] for end in prediction.interval(level))
        label = f"{100 * level:.0f} %"
        axes.fill_between(place[order], lower, upper, color=color, alpha=alpha, linewidth=0, label=label)
    axes.plot(place[order], prediction.mean.reshape(-1)[order], color=color, label="mean")
    if data is not None:
        axes.plot(np.ravel(data[0]), np.ravel(data[1]), "k.", markersize=4, alpha=0.6, label="data")
    axes.legend(frameon=False)
    return axes


def plot_calibration(prediction: Mixture, y: Any, axes: Axes | None = None, *, label: str = "", **line: Any) -> Axes:
    """The fraction of targets inside central intervals against their nominal level; the diagonal is right."""
    axes = _axes(axes)
    nominal, observed = calibration_curve(prediction, y)
    if not axes.get_lines():
        axes.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--", label="right")
    axes.plot(nominal, observed, label=label or "observed", **line)
    axes.set(xlabel="nominal level of the central interval", ylabel="targets inside", xlim=(0, 1), ylim=(0, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False)
    return axes


def plot_pit(prediction: Mixture, y: Any, axes: Axes | None = None, *, bins: int = 20) -> Axes:
    """Histogram of where the targets lie in their predicted distributions; flat is right, a bowl is too narrow."""
    axes = _axes(axes)
    axes.hist(pit(prediction, y).reshape(-1), bins=bins, range=(0, 1), density=True, color="C0", alpha=0.8)
    axes.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
    axes.set(xlabel="predicted probability of a value up to the target", ylabel="density", xlim=(0, 1))
    return axes


def plot_reliability(
    probability: Float[np.ndarray, " n"], right: Bool[np.ndarray, " n"], axes: Axes | None = None, *, bins: int = 10
) -> Axes:
    """How often the predicted class is the right one, against its probability, in bins of equally many rows."""
    axes = _axes(axes)
    order = np.array_split(np.argsort(probability, kind="stable"), min(bins, len(probability)))
    places = np.array([probability[rows].mean() for rows in order])
    shares = np.array([right[rows].mean() for rows in order])
    errors = np.array([np.sqrt(share * (1.0 - share) / len(rows)) for share, rows in zip(shares, order, strict=True)])
    lowest = min(places.min(), shares.min(), 0.5)
    axes.plot([lowest, 1.0], [lowest, 1.0], color="0.6", linewidth=1)
    axes.errorbar(places, shares, errors, marker="o", linestyle="none", color="C0", capsize=2)
    axes.set(xlabel="probability of the predicted class", ylabel="fraction that is right")
    return axes


def distance_to_data(x: Float[np.ndarray, "n D"], training: Float[np.ndarray, "m D"]) -> Float[np.ndarray, " n"]:
    """Distance of each row to the nearest training row."""
    from sklearn.neighbors import NearestNeighbors

    return NearestNeighbors(n_neighbors=1).fit(training).kneighbors(x)[0][:, 0]


def running_median(
    place: Float[np.ndarray, " n"], values: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Values in the order of their places, each replaced by the median of a tenth of all around it.

    Half of a tenth at either end has not enough neighbours, and is left out.
    """
    order = np.argsort(place, kind="stable")
    size = min(len(values), max(3, len(values) // 10))
    whole = slice(size // 2, len(values) - size + size // 2 + 1)
    return place[order][whole], median_filter(values[order], size=size, mode="nearest")[whole]


def plot_variance_by_distance(
    distance: Float[np.ndarray, " n"],
    variance: Float[np.ndarray, " n"],
    axes: Axes | None = None,
    *,
    label: str = "",
    color: str = "C0",
) -> Axes:
    """Predicted variance against the distance from the training data: points, and a running median."""
    axes = _axes(axes)
    axes.scatter(distance, variance, s=5, alpha=0.25, linewidths=0, color=color)
    axes.plot(*running_median(distance, variance), color=color, label=label or None)
    axes.set(xlabel="distance to the nearest training row", ylabel="predicted variance", yscale="log")
    if label:
        axes.legend(frameon=False)
    return axes


def plot_error_by_variance(
    variance: Float[np.ndarray, " n"],
    error: Float[np.ndarray, " n"],
    axes: Axes | None = None,
    *,
    label: str = "",
    color: str = "C0",
) -> Axes:
    """Squared error against predicted variance, and a running median; the dashed line is where it should be."""
    axes = _axes(axes)
    squared = np.maximum(np.asarray(error) ** 2, 1e-300)
    if not axes.get_lines():
        ends = np.array([variance.min(), variance.max()])
        axes.plot(
            ends,
            MEDIAN_OF_SQUARE * ends,
            color="0.4",
            linestyle="--",
            linewidth=1,
            label="median of a right prediction",
        )
    axes.scatter(variance, squared, s=5, alpha=0.25, linewidths=0, color=color)
    axes.plot(*running_median(variance, squared), color=color, label=label or "median")
    axes.set(xlabel="predicted variance", ylabel="squared error", xscale="log", yscale="log")
    axes.set_ylim(bottom=float(np.quantile(squared, 0.02)))
    axes.legend(frameon=False)
    return axes


def plot_covariance(
    model: DeepGP, axes: Axes | None = None, *, what: str = "covariance", whitened: bool = False
) -> Axes:
    """The ``"covariance"`` or ``"precision"`` of all inducing outputs, with lines between the layers.

    Of the inducing outputs themselves, as in the paper's figures, or ``whitened``. Colours are logarithmic.
    """
    axes = _axes(axes)
    if what not in ("covariance", "precision"):
        raise InputError(f"what must be 'covariance' or 'precision'; got {what!r}.")
    matrix = _inducing_matrix(model, what, whitened)
    top = float(np.quantile(np.abs(matrix), 0.999)) or 1.0
    image = axes.imshow(matrix, cmap="RdBu_r", norm=SymLogNorm(1e-3 * top, vmin=-top, vmax=top), interpolation="none")
    _layer_lines(axes, model.posterior)
    # powers of ten, but for those so close to zero that their names would lie on its name
    powers = 10.0 ** np.arange(np.ceil(np.log10(4e-3 * top)), np.floor(np.log10(top)) + 1)
    axes.figure.colorbar(image, ax=axes, shrink=0.8, ticks=[*-powers[::-1], 0.0, *powers])
    axes.set_title(what)
    return axes


def _inducing_matrix(model: DeepGP, what: str, whitened: bool) -> Float[np.ndarray, "TM TM"]:
    if whitened:
        return model.posterior.covariance() if what == "covariance" else model.posterior.precision()
    covariance = model.inducing_covariance()
    if what == "covariance":
        return covariance
    scale = np.sqrt(np.diag(covariance))
    # scaled to ones on the diagonal before it is inverted, because the layers differ by orders of magnitude
    inverse = np.linalg.pinv(covariance / np.outer(scale, scale), hermitian=True)
    return inverse / np.outer(scale, scale)


def _layer_lines(axes: Axes, posterior: AbstractPosterior) -> None:
    M, layers = posterior.n_inducing, posterior.structure.layers
    for layer in layers[:-1]:
        for line in (axes.axhline, axes.axvline):
            line(layer.stop * M - 0.5, color="black", linewidth=0.8)
    centres = [0.5 * (layer.start + layer.stop) * M - 0.5 for layer in layers]
    names = [f"layer {index}" for index in range(1, len(layers))] + ["output"]
    axes.set_xticks(centres, names)
    axes.set_yticks(centres, names, rotation=90, va="center")


def plot_lengthscales(
    model: DeepGP, axes: Axes | None = None, *, names: list[str] | None = None, layer: int = 0
) -> Axes:
    """One bar for each input of a layer: 1 / lengthscale, that is, how fast the functions change along it."""
    lengthscale = np.asarray(lengthscale_of(model.layers[layer].kernel), np.float64)
    axes = _axes(axes)
    n_inputs = model.layers[layer].inducing.shape[1]
    values = np.broadcast_to(1.0 / lengthscale, (n_inputs,))
    default = [f"x{index}" for index in range(n_inputs)] if layer == 0 else [f"GP {i}" for i in range(n_inputs)]
    axes.barh(names or default, values, color="C0")
    axes.invert_yaxis()
    axes.set(xlabel="1 / lengthscale (standardised inputs)", title=f"layer {layer + 1}")
    return axes


def plot_hidden_layers(
    estimator: DeepGPEstimator, x: Any, axes: Any = None, *, n_samples: int = 5, seed: int = 0
) -> list[Axes]:
    """Joint draws of every layer over a single input, one panel for each layer; in standardised units.

    ``x`` are values of the input, or a table with its name.
    """
    place = np.asarray(x, np.float64).reshape(-1)
    layers = estimator.sample_layers(place[:, None] if isinstance(x, np.ndarray | list) else x, n_samples, seed)
    if axes is None:
        axes = plt.subplots(1, len(layers), figsize=(4 * len(layers), 3.2), layout="constrained", squeeze=False)[1][0]
    order = np.argsort(place, kind="stable")
    for index, (axis, functions) in enumerate(zip(axes, layers, strict=True)):
        for gp in range(functions.shape[2]):
            axis.plot(place[order], functions[:, order, gp].T, color=f"C{gp}", alpha=0.5, linewidth=1)
        axis.set(title="output" if index == len(layers) - 1 else f"layer {index + 1}", xlabel="input")
    return list(axes)
