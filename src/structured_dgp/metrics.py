"""How good a prediction is: one number from a ``Mixture`` and the targets, in the units of the targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError
from structured_dgp.families import Discrete
from structured_dgp.prediction import Mixture

LEVELS = np.linspace(0.05, 0.95, 19)
"""Of the central intervals in a calibration curve."""


def log_likelihood(prediction: Mixture, y: Any) -> float:
    """Mean log density of the targets; larger is better."""
    return float(np.mean(prediction.log_prob(y)))


def rmse(prediction: Mixture, y: Any) -> float:
    """Root of the mean squared error of the predicted means."""
    return float(np.sqrt(np.mean((prediction.mean - _like(prediction, y)) ** 2)))


def crps(prediction: Mixture, y: Any) -> float:
    """Mean continuous ranked probability score; smaller is better."""
    return float(np.mean(prediction.crps(y)))


def coverage(prediction: Mixture, y: Any, level: float = 0.9) -> float:
    """Fraction of targets inside the central interval that should hold ``level`` of them."""
    lower, upper = prediction.interval(level)
    targets = _like(prediction, y)
    return float(np.mean((lower <= targets) & (targets <= upper)))


def width(prediction: Mixture, level: float = 0.9) -> float:
    """Mean width of the central interval."""
    lower, upper = prediction.interval(level)
    return float(np.mean(upper - lower))


def pit(prediction: Mixture, y: Any, random_state: int | np.random.Generator | None = 0) -> Float[np.ndarray, "..."]:
    """The predicted probability of a value up to the target: uniform between 0 and 1 if predictions are right.

    For counts, a random point between the probabilities of less, and of at most, the target.
    """
    targets = _like(prediction, y)
    upper = prediction.cdf(targets)
    if not isinstance(prediction.family, Discrete):
        return upper
    lower = prediction.cdf(targets - 1.0)
    return lower + (upper - lower) * np.random.default_rng(random_state).random(upper.shape)


def calibration_curve(
    prediction: Mixture, y: Any, levels: Float[np.ndarray, " Q"] = LEVELS
) -> tuple[Float[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
    """Nominal levels of central intervals, and the fraction of targets inside each."""
    distance = np.abs(2.0 * pit(prediction, y) - 1.0).reshape(-1)
    return levels, np.mean(distance[:, None] <= levels, axis=0)


def calibration_error(prediction: Mixture, y: Any) -> float:
    """Mean difference between the nominal levels and the fractions of a calibration curve."""
    nominal, observed = calibration_curve(prediction, y)
    return float(np.mean(np.abs(observed - nominal)))


def scores(prediction: Mixture, y: Any, level: float = 0.9) -> dict[str, float]:
    """All of them, by name."""
    return {
        "log_likelihood": log_likelihood(prediction, y),
        "rmse": rmse(prediction, y),
        "crps": crps(prediction, y),
        "coverage": coverage(prediction, y, level),
        "width": width(prediction, level),
        "calibration_error": calibration_error(prediction, y),
    }


def _like(prediction: Mixture, y: Any) -> Float[np.ndarray, "..."]:
    """The targets in the shape of the prediction; (n,) does for (n, 1)."""
    targets = np.asarray(y, np.float64)
    if prediction.shape == (*targets.shape, 1):
        targets = targets[:, None]
    if targets.shape != prediction.shape:
        raise InputError(f"y has shape {targets.shape}, but the predictions have shape {prediction.shape}.")
    return targets
