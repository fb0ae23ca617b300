"""Estimators with scikit-learn's contract: ``fit`` and ``predict`` in the units of the data, ``save`` and ``load``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from structured_dgp.couplings import Coupling
from structured_dgp.exceptions import InputError, ModelFileError
from structured_dgp.initial import STARTS, KernelRule, initial_model, kernel_rule
from structured_dgp.kernels import Kernel
from structured_dgp.likelihoods import Bernoulli, Gaussian, Heteroscedastic, Likelihood, Poisson, Softmax, StudentT
from structured_dgp.model import DRAWS, DeepGP
from structured_dgp.precision import wide_scope
from structured_dgp.prediction import Mixture
from structured_dgp.saving import SavedEstimator, all_or_nothing, read_estimator
from structured_dgp.scaling import Scaling, Units, refuse_overflow
from structured_dgp.training import History, Settings, train
from structured_dgp.training.settings import MANY, as_settings
from structured_dgp.validation import as_count

E = TypeVar("E", bound="DeepGPEstimator")

STOPPING_ROWS = 200
"""From this many rows on, a tenth of them can say when to stop."""
MANY_ROWS = 2000
"""From this many rows on, training with the default preset is another one, see ``MANY``."""
JOINT_ROWS = 5000
"""Rows that can be drawn jointly: each draw factorises a matrix of this size for every layer."""
JOINT_DRAWS = 128


def layer_widths(n_layers: int, width: int | Sequence[int], n_outputs: int) -> tuple[int, ...]:
    """The widths of all layers, from one number for the hidden ones or one for each."""
    n_layers = as_count(n_layers, "n_layers")
    if isinstance(width, int | np.integer):
        return (int(width),) * (n_layers - 1) + (n_outputs,)
    if not isinstance(width, Sequence | np.ndarray):
        raise InputError(f"width must be a whole number, or a list of them; got {width!r}.")
    if len(width) != n_layers - 1:
        raise InputError(
            f"width has {len(width)} entries, but with n_layers={n_layers} there are {n_layers - 1} hidden layers: "
            "give one width for each, or one number for all."
        )
    return (*width, n_outputs)


def preset_precision(preset: str) -> str:
    """The precision of a model trained with a preset, unless another one is asked for."""
    return "float64" if preset == "paper" else "mixed"


def fit_seed(random_state: Any, checkpoint: str | Path | None) -> int:
    """The seed of a fit; one that is to be resumed needs the same each time."""
    if checkpoint is not None and random_state is None:
        raise InputError("checkpoint needs a random_state, or the next fit would be another run: set it to 0.")
    return int(check_random_state(random_state).randint(2**31 - 1))


class DistributionMixin:
    """What follows for a regressor from ``predict_dist``."""

    def predict_dist(self, X: Any) -> Mixture:
        """The distribution of y at each row: mean, var, quantile, log_prob, cdf, crps, interval, sample."""
        raise NotImplementedError

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y, and its standard deviation if asked for."""
        prediction = self.predict_dist(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_quantiles(self, X: Any, quantiles: Any = (0.05, 0.5, 0.95)) -> Float[np.ndarray, "..."]:
        """Quantiles of y, one after the other in the last axis: (n, Q), or (n, P, Q) for several targets."""
        return np.moveaxis(self.predict_dist(X).quantile(np.atleast_1d(quantiles)), 0, -1)

    def log_density(self, X: Any, y: Any) -> Float[np.ndarray, "..."]:
        """Log density of y at each row, in its own units; of the shape of y."""
        return self.predict_dist(X).log_prob(np.asarray(y, np.float64))


class DeepGPEstimator(SavedEstimator):
    """What the regressor and the classifier share; see them for the parameters."""

    def __init__(
        self,
        coupling: str | Coupling = "star",
        n_layers: int = 3,
        width: int | Sequence[int] = 5,
        n_inducing: int = 128,
        *,
        kernel: str | Kernel | KernelRule = "rbf",
        likelihood: str | Likelihood = "auto",
        preset: str = "default",
        optimizer: str | None = None,
        precision: str | None = None,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        settings: dict[str, Any] | None = None,
        checkpoint: str | Path | None = None,
        n_draws: int = DRAWS,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.coupling = coupling
        self.n_layers = n_layers
        self.width = width
        self.n_inducing = n_inducing
        self.kernel = kernel
        self.likelihood = likelihood
        self.preset = preset
        self.optimizer = optimizer
        self.precision = precision
        self.max_steps = max_steps
        self.max_seconds = max_seconds
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.settings = settings
        self.checkpoint = checkpoint
        self.n_draws = n_draws
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self) -> None:
        """Refuse parameters of a type that cannot be used; their values are checked where they are."""
        for name in ("n_layers", "n_inducing", "n_draws"):
            as_count(getattr(self, name), name)
        if self.max_steps is not None:
            as_count(self.max_steps, "max_steps", 0)
        kernel_rule(self.kernel, STARTS[self._start])
        for name, kinds, wanted in (
            ("validation_fraction", int | float | np.number, "a number between 0 and 1"),
            ("settings", dict | None, "a dictionary such as {'learning_rate': 0.01}, or None"),
            ("max_seconds", int | float | np.number | None, "a number of seconds, or None"),
            ("checkpoint", str | Path | None, "the name of a folder, or None"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise InputError(f"{name} must be {wanted}; got {value!r}.")

    def _training_settings(self, seed: int, n_rows: int) -> Settings:
        """The preset with all that was changed by name."""
        if self.early_stopping not in (True, False, "auto"):
            raise InputError(f"early_stopping must be True, False or 'auto'; got {self.early_stopping!r}.")
        if not 0.0 < self.validation_fraction < 1.0:
            raise InputError(
                f"validation_fraction must be between 0 and 1; got {self.validation_fraction}. To train on all rows "
                "from the start, set early_stopping=False."
            )
        preset = as_settings(self.preset)
        stopping = preset if preset.holdout else as_settings("default")
        # the paper holds rows out for deep GPs only
        can_stop = preset.holdout > 0.0 and n_rows >= STOPPING_ROWS and (self.n_layers > 1 or self.preset != "paper")
        if can_stop if self.early_stopping == "auto" else self.early_stopping:
            changes = {name: getattr(stopping, name) for name in ("patience", "min_steps", "refit")}
            changes |= {"holdout": self.validation_fraction, "max_steps": max(stopping.max_steps, preset.max_steps)}
        else:
            plain = Settings()
            changes = {name: getattr(plain, name) for name in ("patience", "min_steps", "refit", "holdout")}
            # with a refit, the preset's number of steps is only the end of the search for a better one
            changes["max_steps"] = plain.max_steps if preset.refit else preset.max_steps
        if n_rows >= MANY_ROWS and self.preset == "default":
            changes |= self._with_many_rows(changes["patience"] is not None)
        if self._goes_on:
            changes |= {"min_steps": 0, "rush_steps": 0}
        given = {"optimizer": self.optimizer, "max_steps": self.max_steps, "max_seconds": self.max_seconds}
        changes |= {name: value for name, value in given.items() if value is not None}
        return preset.changed(**{"seed": seed, **changes, **(self.settings or {})})

    def _with_many_rows(self, can_stop: bool) -> dict[str, Any]:
        """What changes with many rows.

        In a run that may be longer than usual, rates fall more slowly, or its end would be wasted; and scores grow when
        the rates have fallen, so patience is longer, too.
        """
        wanted = {"max_steps": self.max_steps, **(self.settings or {})}["max_steps"]
        longer = max(1.0, (wanted or 0) / MANY["max_steps"])
        patience = round(longer * MANY["patience"]) if can_stop else None
        return {**MANY, "decay_steps": round(longer * MANY["decay_steps"]), "patience": patience}

    @property
    def _goes_on(self) -> bool:
        """Whether ``fit`` starts from the fitted model."""
        return self.warm_start and hasattr(self, "model_")

    @property
    def _start(self) -> str:
        return "paper" if self.preset == "paper" else "default"

    @property
    def _precision(self) -> str:
        return preset_precision(self.preset) if self.precision is None else self.precision

    def _makers(self) -> dict[str, Any]:
        made = {name: getattr(self, name) for name in ("n_inducing", "kernel", "likelihood")}
        return {**made, "precision": self._precision}

    def _fit(self, x: np.ndarray, y: np.ndarray, likelihood: Likelihood) -> None:
        """Train on inputs in their own units and on targets as the likelihood wants them."""
        self._check_parameters()
        seed = fit_seed(self.random_state, self.checkpoint)
        goes_on = self._goes_on
        if goes_on:
            model = self._warm_model(x, y)
        else:
            self.x_scaling_ = Scaling.of(x)
            refuse_overflow(self.x_scaling_, "X")
            model = self._initial_model(x, y, likelihood, seed)
        self.training_settings_ = self._training_settings(seed, len(x))
        trained = train(
            model,
            self.x_scaling_.to_standard(x),
            y,
            self.training_settings_,
            checkpoint=self.checkpoint,
            verbose=self.verbose,
        )
        self.model_ = trained.model
        self._made_with = self._makers()
        self.n_steps_ = trained.best_step + (self.n_steps_ if goes_on else 0)
        self.history_ = trained.history
        self.fit_seconds_ = trained.seconds
        self.elbo_ = _final_elbo(trained.history if trained.refit is None else trained.refit)

    def _initial_model(self, x: np.ndarray, y: np.ndarray, likelihood: Likelihood, seed: int) -> DeepGP:
        """Where training starts."""
        return initial_model(
            self.x_scaling_.to_standard(x),
            self.coupling,
            layer_widths(self.n_layers, self.width, likelihood.n_outputs(y.shape[1])),
            self.n_inducing,
            start=self._start,
            kernel=self.kernel,
            likelihood=likelihood,
            precision=self._precision,
            seed=seed,
        )

    def _warm_model(self, x: np.ndarray, y: np.ndarray) -> DeepGP:
        """The fitted model, in a larger coupling if that was asked for."""
        model = self.model_
        widths = layer_widths(self.n_layers, self.width, model.likelihood.n_outputs(y.shape[1]))
        n_inputs = model.layers[0].inducing.shape[1]
        for name, value in self._makers().items():
            if value is not self._made_with[name] and value != self._made_with[name]:
                raise InputError(
                    f"warm_start goes on from the fitted model, which was made with {name}={self._made_with[name]!r}, "
                    f"not {value!r}. Use warm_start=False."
                )
        if model.widths != widths or n_inputs != x.shape[1]:
            raise InputError(
                f"warm_start needs the same layers as before: the model has {n_inputs} inputs and widths "
                f"{model.widths}, but now these would be {x.shape[1]} and {widths}. Use warm_start=False."
            )
        return model.with_coupling(self.coupling)

    def _inputs(self, X: Any) -> Float[np.ndarray, "n D"]:
        """Checked and standardised inputs."""
        check_is_fitted(self, "model_")
        x = validate_data(self, X, reset=False, dtype=np.float64, order="C")
        standard = self.x_scaling_.to_standard(x)
        Units(self.feature_names()).look_at(standard)
        return standard

    @wide_scope
    def sample_layers(self, X: Any, n_samples: int = 1, seed: int = 0) -> list[Float[np.ndarray, "S n _"]]:
        """Joint draws of what every layer hands on, (S, n, T_l), standardised; the last are the outputs."""
        x = self._joint_inputs(X)
        draws = self.model_.sample_functions(x, jax.random.key(seed), as_count(n_samples, "n_samples"))
        return [np.asarray(layer, np.float64) for layer in draws]

    def _joint_inputs(self, X: Any) -> Float[np.ndarray, "n D"]:
        x = self._inputs(X)
        if len(x) > JOINT_ROWS:
            raise InputError(
                f"X has {len(x)} rows, and joint draws are possible for {JOINT_ROWS}: use fewer rows, or "
                "predict_dist(X).sample(n), whose rows are independent of each other."
            )
        return x

    def feature_names(self) -> list[str]:
        """The names of the inputs; x0, x1, ... if they have none."""
        return list(getattr(self, "feature_names_in_", [f"x{index}" for index in range(self.n_features_in_)]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = False
        return tags

    @classmethod
    def load(cls: type[E], path: str | Path) -> E:
        """The estimator in a model file, after everything in it has been checked."""
        estimator = load_estimator(path)
        if not isinstance(estimator, cls):
            raise ModelFileError(
                f"{Path(path).name} holds a {type(estimator).__name__}: load it with {type(estimator).__name__}.load."
            )
        return estimator


class DeepGPRegressor(DistributionMixin, RegressorMixin, DeepGPEstimator):
    """A deep Gaussian process for regression, with one or several targets.

    Inputs and targets are standardised inside; everything that comes out is in the units of the data.

    Args:
        coupling: ``"star"`` (stripes and arrow), ``"mf"`` (mean field), ``"fc"`` (fully coupled), ``"stripes"``,
            ``"arrow"`` or a ``Coupling``.
        n_layers: the output layer included; 1 is a sparse GP.
        width: latent GPs of each hidden layer; one number, or a list of ``n_layers - 1``.
        n_inducing: inducing points of each layer; never more than there are different rows.
        kernel: ``"rbf"``, ``"matern12"``, ``"matern32"``, ``"matern52"``, ``"rational_quadratic"``, a ``Kernel`` for
            all layers, or a rule (n_inputs, is_output) -> Kernel.
        likelihood: ``"auto"`` or ``"gaussian"``, ``"heteroscedastic"`` (noise that depends on the inputs),
            ``"student_t"`` (outliers), ``"poisson"`` (counts), or a ``Likelihood``, which is for standardised targets
            unless they are counts.
        preset: ``"default"`` or ``"paper"``.
        optimizer: ``"natural"`` or ``"adam"``; None for the preset's.
        precision: ``"mixed"``, ``"float64"`` or ``"float32"``; None for the preset's: ``"mixed"``, and ``"float64"``
            for ``preset="paper"``.
        max_steps: training steps at most; None for the preset's.
        max_seconds: training ends after this time; None for no limit.
        early_stopping: hold out ``validation_fraction`` of the rows, find the number of steps at which their score is
            best, and train on all rows for as many (``preset="paper"``: take the model of that step); ``"auto"``: with
            at least 200 rows, as in the paper not for a single layer with ``preset="paper"``.
        validation_fraction: see there.
        settings: other training settings by name, as in ``{"learning_rate": 0.01}``.
        checkpoint: a folder; a fit that was interrupted goes on from what is there.
        n_draws: draws of the hidden layers behind each prediction.
        warm_start: ``fit`` goes on from the fitted model, in a larger coupling if that has changed.
        random_state: seed of inducing inputs, minibatches and noise.
        verbose: 0 for silence, otherwise a progress line.

    Attributes:
        model_: the trained :class:`~structured_dgp.DeepGP`, on standardised data.
        elbo_: evidence lower bound at the end of training, of standardised targets.
        history_: what happened in training.
        training_settings_: the settings of the last fit, defaults included; not in model files.
        n_steps_: how many training steps made the model.
        fit_seconds_: how long the last fit took, with all parts of one that was interrupted; not in model files.
        n_features_in_, feature_names_in_: as in scikit-learn.
    """

    is_flat_: bool
    _own_facts = ("is_flat_",)

    def _check_own(self, own: dict[str, Any]) -> None:
        n_targets = self.model_.n_targets
        if isinstance(self.model_.likelihood, Bernoulli | Softmax):
            raise ValueError("its likelihood is one of classes, not of a regression.")
        if not isinstance(own["is_flat_"], bool) or (own["is_flat_"] and n_targets > 1):
            raise ValueError(f"'is_flat_' is {own['is_flat_']!r} with {n_targets} targets.")
        if self.target_names_ is not None and len(self.target_names_) != n_targets:
            raise ValueError(f"there are {len(self.target_names_)} names for {n_targets} targets.")

    def fit(self, X: Any, y: Any) -> DeepGPRegressor:
        """Train on X (n, D) and y, (n,) or (n, P). If it fails, the estimator is what it was before."""
        with all_or_nothing(self):
            self.target_names_ = _column_names(y)
            x, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64, order="C")
            targets = np.asarray(y, np.float64, order="C").reshape(len(y), -1)
            likelihood = self._regression_likelihood(targets.shape[1])
            if not self._goes_on:
                counts = isinstance(likelihood, Poisson)
                self.y_scaling_ = Scaling.none(targets.shape[1]) if counts else Scaling.of(targets)
                refuse_overflow(self.y_scaling_, "y")
            self.is_flat_ = np.ndim(y) == 1
            self._fit(x, self.y_scaling_.to_standard(targets), likelihood)
        return self

    def _regression_likelihood(self, n_outputs: int) -> Likelihood:
        if isinstance(self.likelihood, Likelihood):
            return self.likelihood
        noise = STARTS[self._start].noise
        if self.likelihood in ("auto", "gaussian"):
            return Gaussian(np.full(n_outputs, noise))
        if self.likelihood == "heteroscedastic":
            return Heteroscedastic(np.full(n_outputs, noise))
        if self.likelihood == "student_t":
            return StudentT(np.full(n_outputs, np.sqrt(noise)))
        if self.likelihood == "poisson":
            return Poisson()
        raise InputError(
            f"unknown likelihood {self.likelihood!r}: use 'gaussian', 'heteroscedastic', 'student_t', 'poisson' or a "
            "Likelihood."
        )

    def predict_dist(self, X: Any) -> Mixture:
        """The distribution of y at each row: mean, var, quantile, log_prob, cdf, crps, interval, sample."""
        x = self._inputs(X)
        mixture = self.model_.predict(x, as_count(self.n_draws, "n_draws"))
        if not isinstance(self.model_.likelihood, Poisson):
            mixture = mixture.rescale(self.y_scaling_.unit, self.y_scaling_.centre)
        return mixture.column(0) if self.is_flat_ else mixture

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The mean of y; with it, if asked for, its standard deviation, or its covariance over all rows.

        Both are those of a new observation, noise included. The covariance has shape (n, n), or (n, n, P) for several
        targets; its correlations are estimated from joint draws of the hidden layers, its diagonal is exact.
        """
        if return_std and return_cov:
            raise InputError("ask for return_std or for return_cov, not for both: the covariance holds the variances.")
        if return_cov:
            prediction = self.predict_dist(X)
            return prediction.mean, self._covariance(X, prediction)
        return super().predict(X, return_std)

    @wide_scope
    def sample_y(
        self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0
    ) -> Float[np.ndarray, "..."]:
        """Joint draws of y over all rows, each one noisy function: (n, S), or (n, P, S) for several targets."""
        x = self._joint_inputs(X)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        key, noise_key = jax.random.split(jax.random.key(seed))
        functions = self.model_.sample_functions(x, key, as_count(n_samples, "n_samples"))[-1]
        y = np.asarray(self.model_.likelihood.sample(noise_key, functions), np.float64)
        y = y * self.y_scaling_.unit + self.y_scaling_.centre
        return y[..., 0].T if self.is_flat_ else np.moveaxis(y, 0, -1)

    @wide_scope
    def _covariance(self, X: Any, prediction: Mixture) -> Float[np.ndarray, "..."]:
        """Correlations from joint draws, variances from the prediction."""
        x = self._joint_inputs(X)
        noise = self.model_.likelihood.noise_variance(*self.model_.output_moments(x, self.n_draws))
        noise = noise * self.y_scaling_.unit**2
        joint = self.model_.joint_covariance(x, jax.random.key(0), JOINT_DRAWS)[..., : noise.shape[1]]
        function = np.sqrt(np.maximum(np.einsum("nnp->np", joint), np.finfo(np.float64).tiny))
        correlation = joint / (function[:, None] * function[None])
        variance = prediction.var.reshape(len(x), -1)
        std = np.sqrt(np.maximum(variance - noise, 0.0))
        covariance = correlation * std[:, None] * std[None]
        rows = np.arange(len(x))
        covariance[rows, rows] = variance
        return covariance[..., 0] if self.is_flat_ else covariance

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


class DeepGPClassifier(ClassifierMixin, DeepGPEstimator):
    """A deep Gaussian process for classification: two classes (Bernoulli), or more (softmax over several outputs).

    The parameters are those of :class:`DeepGPRegressor`; ``likelihood`` is ``"auto"`` or a ``Likelihood`` for 0 and 1,
    or for rows with a one at the class. ``classes_`` are the labels.
    """

    classes_: np.ndarray
    _own_facts = ("classes_",)

    def _check_own(self, own: dict[str, Any]) -> None:
        labels, n_targets = own["classes_"], self.model_.n_targets
        if not isinstance(labels, np.ndarray) or n_targets != (1 if len(labels) == 2 else len(labels)):
            raise ValueError(f"'classes_' are {labels!r}, but the model has {n_targets} targets.")
        if len(labels) < 2 or not np.array_equal(np.unique(labels), labels):
            raise ValueError(f"'classes_' are {labels!r}, not two or more different labels in order.")
        if self.target_names_ is not None and len(self.target_names_) != 1:
            raise ValueError(f"there are {len(self.target_names_)} names for one target.")

    def fit(self, X: Any, y: Any) -> DeepGPClassifier:
        """Train on X (n, D) and labels y (n,). If it fails, the estimator is what it was before."""
        with all_or_nothing(self):
            self.target_names_ = _column_names(y)
            x, y = validate_data(self, X, y, dtype=np.float64, order="C")
            classes, labels = _classes(y)
            if self._goes_on and not np.array_equal(classes, self.classes_):
                raise InputError(f"warm_start needs the same classes as before, {self.classes_}; got {classes}.")
            self.classes_ = classes
            binary = len(classes) == 2
            targets = labels[:, None].astype(np.float64) if binary else np.eye(len(classes))[labels]
            self.y_scaling_ = Scaling.none(targets.shape[1])
            self._fit(x, targets, self._class_likelihood(binary))
        return self

    def _class_likelihood(self, binary: bool) -> Likelihood:
        if isinstance(self.likelihood, Likelihood):
            return self.likelihood
        if self.likelihood != "auto":
            raise InputError(f"unknown likelihood {self.likelihood!r}: use 'auto' or a Likelihood.")
        return Bernoulli() if binary else Softmax()

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """The probability of each class."""
        x = self._inputs(X)
        p = np.array(self.model_.predict(x, as_count(self.n_draws, "n_draws")).mean)
        p = np.concatenate([1.0 - p, p], axis=1) if len(self.classes_) == 2 else p
        return p / p.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n C"]:
        """The logarithm of ``predict_proba``."""
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def log_density(self, X: Any, y: Any) -> Float[np.ndarray, " n"]:
        """Log probability of the true class of each row."""
        probabilities = self.predict_log_proba(X)
        if np.shape(y) != (len(probabilities),):
            raise InputError(f"y has shape {np.shape(y)}, but X has {len(probabilities)} rows.")
        places = {label: place for place, label in enumerate(self.classes_.tolist())}
        unknown = [label for label in np.asarray(y).tolist() if label not in places]
        if unknown:
            raise InputError(f"y has the class {unknown[0]!r}, which was not in the training data.")
        return probabilities[np.arange(len(probabilities)), [places[label] for label in np.asarray(y).tolist()]]


def noise_deviation(estimator: DeepGPEstimator) -> list[float] | None:
    """Standard deviation of Gaussian noise, of each target in its units; None if there is no such thing."""
    likelihood = estimator.model_.likelihood
    if not isinstance(likelihood, Gaussian):
        return None
    deviation = np.sqrt(np.asarray(likelihood.variance, np.float64)) * estimator.y_scaling_.unit
    return [float(value) for value in deviation]


ESTIMATORS: dict[str, type[DeepGPEstimator]] = {
    "DeepGPRegressor": DeepGPRegressor,
    "DeepGPClassifier": DeepGPClassifier,
}
"""The classes that a model file may name."""


def load_estimator(path: str | Path) -> DeepGPEstimator:
    """The estimator in a model file, of whichever kind it is."""
    return read_estimator(path, ESTIMATORS)


def _final_elbo(history: History) -> float:
    """The mean over the last tenth of the records."""
    elbo = history["elbo"]
    return float(elbo[-max(1, len(elbo) // 10) :].mean()) if len(elbo) else float("nan")


def _classes(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different labels, at least two, and the place of each row's label among them."""
    try:
        check_classification_targets(y)
    except ValueError as error:
        raise InputError(str(error)) from error
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise InputError(f"y has only one class, {classes[0]!r}: classification needs at least two.")
    return classes, labels


def _column_names(y: Any) -> list[str] | None:
    """The names of a frame's, a table's or a series' columns."""
    columns = getattr(y, "column_names", getattr(y, "columns", None))  # pyarrow's columns are arrays
    if columns is not None:
        return [str(name) for name in columns]
    name = getattr(y, "name", None)
    return [str(name)] if name is not None else None
