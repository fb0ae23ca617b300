"""The baselines as estimators with scikit-learn's contract, and every method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from structured_dgp.baselines.exact import ExactGP
from structured_dgp.baselines.rivals import ForestRegressor, QuantileBoostingRegressor
from structured_dgp.baselines.sghmc import SghmcSettings, sample
from structured_dgp.estimators import DeepGPRegressor, DistributionMixin, fit_seed, layer_widths
from structured_dgp.exceptions import InputError
from structured_dgp.initial import STARTS, KernelRule, initial_model, kernel_rule
from structured_dgp.kernels import Kernel
from structured_dgp.likelihoods import Gaussian
from structured_dgp.model import DRAWS
from structured_dgp.prediction import Mixture
from structured_dgp.saving import PortableEstimator, all_or_nothing
from structured_dgp.scaling import Scaling, refuse_overflow
from structured_dgp.validation import changed


class _StandardisedRegressor(DistributionMixin, RegressorMixin, PortableEstimator):
    """A regressor whose model sees standardised inputs and targets."""

    model_: Any

    def fit(self, X: Any, y: Any) -> Any:
        """Train on X (n, D) and y, (n,) or (n, P). If it fails, the estimator is what it was before."""
        with all_or_nothing(self):
            x, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64, order="C")
            targets = np.asarray(y, np.float64, order="C").reshape(len(y), -1)
            self.x_scaling_, self.y_scaling_ = Scaling.of(x), Scaling.of(targets)
            refuse_overflow(self.x_scaling_, "X")
            refuse_overflow(self.y_scaling_, "y")
            self.is_flat_ = np.ndim(y) == 1
            self._fit(self.x_scaling_.to_standard(x), self.y_scaling_.to_standard(targets))
        return self

    def _fit(self, x: np.ndarray, y: np.ndarray) -> None:
        raise NotImplementedError

    def _predict(self, x: np.ndarray) -> Mixture:
        raise NotImplementedError

    def predict_dist(self, X: Any) -> Mixture:
        """The distribution of y at each row."""
        check_is_fitted(self, "model_")
        x = self.x_scaling_.to_standard(validate_data(self, X, reset=False, dtype=np.float64, order="C"))
        mixture = self._predict(x).rescale(self.y_scaling_.unit, self.y_scaling_.centre)
        return mixture.column(0) if self.is_flat_ else mixture

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


class ExactGPRegressor(_StandardisedRegressor):
    """The exact GP with hyper-parameters that maximise the evidence; at most 3,000 rows.

    Args:
        kernel: as in :class:`~structured_dgp.DeepGPRegressor`.
        max_steps: of L-BFGS.
    """

    def __init__(self, kernel: str | Kernel | KernelRule = "rbf", max_steps: int = 200) -> None:
        self.kernel = kernel
        self.max_steps = max_steps

    def _fit(self, x: np.ndarray, y: np.ndarray) -> None:
        start = STARTS["default"]
        kernel = kernel_rule(self.kernel, start)(x.shape[1], True)
        likelihood = Gaussian(np.full(y.shape[1], 0.1))
        self.model_ = ExactGP.on(kernel, likelihood, x, y).fitted(self.max_steps)
        self.log_evidence_ = float(self.model_.log_evidence())

    def _predict(self, x: np.ndarray) -> Mixture:
        return self.model_.predict(x)


class SGHMCRegressor(_StandardisedRegressor):
    """A deep GP whose inducing outputs are sampled (Havasi et al., 2018); see ``baselines.sghmc``.

    Args:
        n_layers, width, n_inducing, kernel, precision, n_draws: as in :class:`~structured_dgp.DeepGPRegressor`.
        start: initial hyper-parameters, ``"default"`` or ``"paper"``.
        settings: of :class:`~structured_dgp.baselines.SghmcSettings`, by name.
        checkpoint: a folder; a fit that was interrupted goes on from what is there.
        random_state: seed of inducing inputs, minibatches and noise.
        verbose: 0 for silence, otherwise a progress line.

    Attributes:
        model_: the :class:`~structured_dgp.baselines.SampledDeepGP`, on standardised data.
        chains_: the kept samples of the whitened inducing outputs, (chains, samples, GPs, M).
        fit_seconds_: how long sampling took, with all parts of a fit that was interrupted.
    """

    def __init__(
        self,
        n_layers: int = 2,
        width: int | Sequence[int] = 5,
        n_inducing: int = 128,
        *,
        kernel: str | Kernel | KernelRule = "rbf",
        precision: str = "mixed",
        start: str = "default",
        settings: dict[str, Any] | None = None,
        checkpoint: str | Path | None = None,
        n_draws: int = DRAWS,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.n_layers = n_layers
        self.width = width
        self.n_inducing = n_inducing
        self.kernel = kernel
        self.precision = precision
        self.start = start
        self.settings = settings
        self.checkpoint = checkpoint
        self.n_draws = n_draws
        self.random_state = random_state
        self.verbose = verbose

    def _fit(self, x: np.ndarray, y: np.ndarray) -> None:
        seed = fit_seed(self.random_state, self.checkpoint)
        widths = layer_widths(self.n_layers, self.width, y.shape[1])
        model = initial_model(
            x,
            "mf",
            widths,
            self.n_inducing,
            start=self.start,
            kernel=self.kernel,
            precision=self.precision,
            seed=seed,
        )
        settings = changed(SghmcSettings(), {"seed": seed, **(self.settings or {})})
        sampled = sample(model, x, y, settings, checkpoint=self.checkpoint, verbose=self.verbose)
        self.model_, self.chains_, self.energy_ = sampled.model, sampled.chains, sampled.energy
        self.fit_seconds_ = sampled.seconds

    def _predict(self, x: np.ndarray) -> Mixture:
        return self.model_.predict(x, self.n_draws)


SAMPLED = {"inducing": "sampled", "n_samples": 5, "learning_rate": 0.005, "score_every": 200}
"""For sampled inducing outputs: with natural gradients or a larger rate, the noise wins. Steps are faster than with
analytic marginalisation, so that four times as many take no longer."""
METHODS: dict[str, Callable[..., Any]] = {
    "exact": ExactGPRegressor,
    "sgp": lambda **options: DeepGPRegressor("mf", **{**options, "n_layers": 1}),
    "mf": lambda **options: DeepGPRegressor("mf", **options),
    "star": lambda **options: DeepGPRegressor("star", **options),
    "fc": lambda **options: DeepGPRegressor("fc", **options),
    "chain": lambda settings=None, **options: DeepGPRegressor(
        "chain", settings={"learning_rate": 0.005, **(settings or {})}, **options
    ),
    "fc_sampled": lambda settings=None, **options: DeepGPRegressor(
        "fc", settings={**SAMPLED, **(settings or {})}, **{"optimizer": "adam", "max_steps": 6000, **options}
    ),
    "sghmc": SGHMCRegressor,
    "boosting": QuantileBoostingRegressor,
    "forest": ForestRegressor,
}
"""What makes the estimator of a method, from its options."""


def make_method(name: str, **options: Any) -> Any:
    """An estimator by the name of its method, with ``fit``, ``predict`` and ``predict_dist``."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}: use one of {', '.join(map(repr, METHODS))}.")
    return METHODS[name](**options)
