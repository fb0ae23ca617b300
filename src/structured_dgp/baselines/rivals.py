"""What people would use instead of a Gaussian process, with the same prediction object: trees from scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Real
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.utils.validation import check_is_fitted, validate_data

from structured_dgp.estimators import DistributionMixin
from structured_dgp.families import Normal
from structured_dgp.prediction import Mixture

N_QUANTILES = 19
NARROWEST = 1e-3
"""A component of a predicted distribution is never narrower than this part of the targets' standard deviation."""


def narrowest(y: Real[np.ndarray, " n"]) -> float:
    """The smallest standard deviation that targets like these allow for.

    Targets that are whole numbers, or come in other steps, may be hit exactly, and a density can then be as large as it
    likes: it is not narrower than the rounding, whose standard deviation is that of a uniform distribution over a step.
    """
    steps = np.diff(np.unique(y))
    rounding = float(np.median(steps)) / np.sqrt(12.0) if len(steps) else 0.0
    return max(NARROWEST * (float(np.std(y)) or 1.0), rounding)


def from_quantiles(quantiles: Float[np.ndarray, "n K"], narrowest: float) -> Mixture:
    """A smooth distribution with these quantiles at the levels (k - ½)/K: a normal component at each.

    A component's standard deviation is half the distance between the quantiles on both sides of it, and that of the
    outermost ones the distance to their only neighbour.
    """
    ordered = np.sort(quantiles, axis=1)
    gaps = np.diff(ordered, axis=1)
    first, last = gaps[:, :1], gaps[:, -1:]
    widths = np.concatenate([first, 0.5 * (gaps[:, 1:] + gaps[:, :-1]), last], axis=1)
    return Mixture(Normal(ordered.T.copy(), np.maximum(widths.T, narrowest) ** 2))


def _levels(n_quantiles: int) -> Float[np.ndarray, " K"]:
    return (np.arange(n_quantiles) + 0.5) / n_quantiles


class _Trees(DistributionMixin, RegressorMixin, BaseEstimator):
    """What both regressors are told."""

    def __init__(
        self,
        n_quantiles: int = N_QUANTILES,
        options: dict[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_quantiles = n_quantiles
        self.options = options
        self.random_state = random_state


class QuantileBoostingRegressor(_Trees):
    """scikit-learn's histogram gradient boosting, one model for each of a set of quantiles.

    Args:
        n_quantiles: how many.
        options: of :class:`sklearn.ensemble.HistGradientBoostingRegressor`, by name.
        random_state: seed.
    """

    def fit(self, X: Any, y: Any) -> QuantileBoostingRegressor:
        """Train on X (n, D) and y (n,)."""
        x, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        self.narrowest_ = narrowest(y)
        self.models_ = [
            HistGradientBoostingRegressor(
                loss="quantile", quantile=float(level), random_state=self.random_state, **(self.options or {})
            ).fit(x, y)
            for level in _levels(self.n_quantiles)
        ]
        return self

    def predict_dist(self, X: Any) -> Mixture:
        """The distribution of y at each row."""
        check_is_fitted(self, "models_")
        x = validate_data(self, X, reset=False, dtype=np.float64)
        quantiles = np.stack([model.predict(x) for model in self.models_], axis=1)
        return from_quantiles(quantiles, self.narrowest_)


class ForestRegressor(_Trees):
    """scikit-learn's random forest, with the spread of its out-of-bag residuals around each prediction.

    Args:
        n_quantiles: of the residuals, which shape the predicted distribution.
        options: of :class:`sklearn.ensemble.RandomForestRegressor`, by name.
        random_state: seed.
    """

    def fit(self, X: Any, y: Any) -> ForestRegressor:
        """Train on X (n, D) and y (n,)."""
        x, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        options = {"n_estimators": 300, "min_samples_leaf": 2, **(self.options or {})}
        self.forest_ = RandomForestRegressor(oob_score=True, random_state=self.random_state, **options).fit(x, y)
        self.residuals_ = np.quantile(y - self.forest_.oob_prediction_, _levels(self.n_quantiles))
        self.narrowest_ = narrowest(y)
        return self

    def predict_dist(self, X: Any) -> Mixture:
        """The distribution of y at each row."""
        check_is_fitted(self, "forest_")
        x = validate_data(self, X, reset=False, dtype=np.float64)
        return from_quantiles(self.forest_.predict(x)[:, None] + self.residuals_, self.narrowest_)
