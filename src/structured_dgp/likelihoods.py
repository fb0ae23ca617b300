"""Likelihoods: how targets y arise from the outputs f of the last layer.

A likelihood answers two questions about f ~ N(mean, cov): the expected log density of y, for training, and the
distribution of y, for prediction. But for ``Heteroscedastic`` and ``Softmax``, each output is on its own given f, so
that only the diagonal of ``cov`` matters.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betaln, gammaln
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from numpy.typing import NDArray
from scipy.special import expit, ndtri

from structured_dgp import families
from structured_dgp.exceptions import InputError
from structured_dgp.families import normal_nodes
from structured_dgp.noise import low_discrepancy_noise
from structured_dgp.parameters import Fixed, Positive
from structured_dgp.precision import wide_scope
from structured_dgp.prediction import Mixture, row_chunks
from structured_dgp.triangular import factorise

NOISES = 32
"""At least as many values of a noise that varies make up its predictions."""
POINTS = 20  # of the Gauss-Hermite rule, where an expectation has no closed form

Means = Float[Array, "R n P"]
Covariances = Float[Array, "R n P P"]
Points = Float[Array, "Q R n P"]


class Likelihood(eqx.Module):
    """The distribution of targets y (n, P) given function values f, of the same shape if not said otherwise."""

    def n_outputs(self, n_targets: int) -> int:
        """How many outputs the last layer needs for this many targets."""
        return n_targets

    def n_targets(self, n_outputs: int) -> int:
        """For how many targets the last layer has enough outputs."""
        return n_outputs

    @abstractmethod
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        """E[log p(y | f)] over f ~ N(mean, cov), summed over the outputs."""

    @abstractmethod
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        """The distribution of y when f is one of R equally likely N(mean, cov)."""

    @abstractmethod
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        """Targets drawn given f."""

    def log_score(self, prediction: Mixture, y: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n _"]:
        """Log density of the targets under a prediction, of each target or of all of a row together."""
        return prediction.log_prob(y)

    def noise_variance(
        self, mean: Float[np.ndarray, "R n F"], cov: Float[np.ndarray, "R n F F"]
    ) -> Float[np.ndarray, "n P"]:
        """The part of the variance of y that its rows do not share: that of y given f, on average."""
        raise InputError(f"{type(self).__name__} has no noise that is added to f: it has no covariance over rows.")

    @abstractmethod
    def check_targets(self, y: np.ndarray) -> None:
        """Raise an ``InputError`` if y, shape (n, P), cannot be data of this likelihood."""


def gauss_hermite(
    function: Callable[[Points], Points], mean: Means, var: Float[Array, "R n P"], n_points: int
) -> Float[Array, "R n P"]:
    """E[function(f)] over f ~ N(mean, var), each entry on its own."""
    points, weights = np.polynomial.hermite_e.hermegauss(n_points)
    z, w = jnp.asarray(points, mean.dtype), jnp.asarray(weights / weights.sum(), mean.dtype)
    # The variance added is invisible in the value and keeps the derivative with respect to var at var = 0.
    std = jnp.sqrt(jnp.where(var >= 0.0, var, 0.0) + float(np.finfo(mean.dtype).eps) ** 1.5)
    # Σ_q w_q g(μ + σ z_q)
    return jnp.tensordot(w, function(mean + jnp.multiply.outer(z, std)), axes=1)


@final
class Gaussian(Likelihood):
    """y = f + N(0, variance): one noise variance, or one for each output."""

    _variance: Positive

    def __init__(self, variance: ArrayLike | Fixed = 0.01) -> None:
        self._variance = Positive(variance, "variance")

    @property
    def variance(self) -> Float[Array, "..."]:
        return self._variance.value

    @wide_scope
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        var, noise = _diagonal(cov), _like(self.variance, mean)
        # -½ (log 2πσ² + ((y - μ)² + v)/σ²)
        return -0.5 * jnp.sum(jnp.log(2.0 * math.pi * noise) + ((y - mean) ** 2 + var) / noise, axis=-1)

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        noise = np.asarray(_like(self.variance, mean))
        return Mixture(families.Normal(mean, _variances(cov) + noise))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        return f + jnp.sqrt(_like(self.variance, f)) * jax.random.normal(key, f.shape, f.dtype)

    @wide_scope
    def noise_variance(
        self, mean: Float[np.ndarray, "R n F"], cov: Float[np.ndarray, "R n F F"]
    ) -> Float[np.ndarray, "n P"]:
        return np.broadcast_to(np.asarray(self.variance, np.float64), mean.shape[1:])

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y, self._variance)


@final
class Heteroscedastic(Likelihood):
    """y = f + N(0, variance · exp(g)): noise that depends on the inputs. The outputs are all f and then all g.

    ``variance`` is one number, or one for each target.
    """

    _variance: Positive

    def __init__(self, variance: ArrayLike | Fixed = 0.01) -> None:
        self._variance = Positive(variance, "variance")

    @property
    def variance(self) -> Float[Array, "..."]:
        """The noise variance where g is zero."""
        return self._variance.value

    def n_outputs(self, n_targets: int) -> int:
        return 2 * n_targets

    def n_targets(self, n_outputs: int) -> int:
        if n_outputs % 2:
            raise InputError(
                f"the last layer has {n_outputs} outputs, but this likelihood needs two for each target: one for its "
                "mean, one for its noise."
            )
        return n_outputs // 2

    @wide_scope
    def expected_log_prob(
        self, y: Float[Array, "n P"], mean: Float[Array, "R n F"], cov: Float[Array, "R n F F"]
    ) -> Float[Array, "R n"]:
        P = self.n_targets(mean.shape[-1])
        var, both = _diagonal(cov), jnp.diagonal(cov[..., :P, P:], axis1=-2, axis2=-1)
        noise = _like(self.variance, mean[..., :P])
        # E[(y - f)² exp(-g)] = exp(-μ_g + v_g/2) ((y - μ_f + v_fg)² + v_f): exp(-g) tilts f by -v_fg
        squared = (y - mean[..., :P] + both) ** 2 + var[..., :P]
        tilted = jnp.exp(-mean[..., P:] + 0.5 * var[..., P:]) * squared / noise
        return -0.5 * jnp.sum(jnp.log(2.0 * math.pi * noise) + mean[..., P:] + tilted, axis=-1)

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n F"], cov: Float[np.ndarray, "R n F F"]) -> Mixture:
        """Given g, y is normal: the components are split by values of g, evenly spread over its distribution."""
        P, R = self.n_targets(mean.shape[-1]), mean.shape[0]
        noise = np.asarray(_like(self.variance, mean[..., :P]), np.float64)
        splits = -(-NOISES // R)
        z = _spread(splits * R)[:, None, None]
        mean, cov = np.repeat(mean, splits, axis=0), np.repeat(cov, splits, axis=0)
        var, both = _variances(cov), np.diagonal(cov[..., :P, P:], axis1=-2, axis2=-1)
        std = np.sqrt(var[..., P:])
        slope = np.divide(both, std, out=np.zeros_like(std), where=std > 0.0)
        spread = np.maximum(var[..., :P] - slope**2, 0.0) + noise * np.exp(mean[..., P:] + std * z)
        return Mixture(families.Normal(mean[..., :P] + slope * z, spread))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch F"]) -> Float[Array, "*batch P"]:
        P = self.n_targets(f.shape[-1])
        std = jnp.sqrt(_like(self.variance, f[..., :P]) * jnp.exp(f[..., P:]))
        return f[..., :P] + std * jax.random.normal(key, std.shape, f.dtype)

    @wide_scope
    def noise_variance(
        self, mean: Float[np.ndarray, "R n F"], cov: Float[np.ndarray, "R n F F"]
    ) -> Float[np.ndarray, "n P"]:
        P = self.n_targets(mean.shape[-1])
        log = np.asarray(mean, np.float64)[..., P:] + 0.5 * _variances(cov)[..., P:]
        return np.asarray(self.variance, np.float64) * np.exp(log).mean(axis=0)

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y, self._variance)


@final
class StudentT(Likelihood):
    """y = f + scale · t with t of ``df`` degrees of freedom: noise with outliers. One scale, or one for each output.

    Expected log densities by a Gauss-Hermite rule of ``n_points`` points.
    """

    _scale: Positive
    _df: Positive
    n_points: int = eqx.field(static=True)

    def __init__(self, scale: ArrayLike | Fixed = 0.1, df: ArrayLike | Fixed = 4.0, n_points: int = POINTS) -> None:
        self._scale = Positive(scale, "scale")
        self._df = Positive(df, "df")
        if self._df.raw.ndim:
            raise InputError(f"df must be one number for all outputs; got shape {self._df.raw.shape}.")
        self.n_points = _checked_points(n_points)

    @property
    def scale(self) -> Float[Array, "..."]:
        return self._scale.value

    @property
    def df(self) -> Float[Array, ""]:
        return self._df.value

    @wide_scope
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        scale, nu = _like(self.scale, mean), _like(self.df, mean)

        def tail(f: Points) -> Points:
            return jnp.log1p(((y - f) / scale) ** 2 / nu)

        # -log B(ν/2, ½) - ½ log ν - log s - (ν+1)/2 E[log(1 + ((y - f)/s)²/ν)]
        constant = -betaln(0.5 * nu, 0.5) - 0.5 * jnp.log(nu) - jnp.log(scale)
        expected = gauss_hermite(tail, mean, _diagonal(cov), self.n_points)
        return jnp.sum(constant - (0.5 * nu + 0.5) * expected, axis=-1)

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        scale = np.asarray(_like(self.scale, mean))
        return Mixture(families.StudentT(float(self.df), mean, scale, _variances(cov)))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        return f + _like(self.scale, f) * jax.random.t(key, _like(self.df, f), f.shape, f.dtype)

    @wide_scope
    def noise_variance(
        self, mean: Float[np.ndarray, "R n F"], cov: Float[np.ndarray, "R n F F"]
    ) -> Float[np.ndarray, "n P"]:
        df = float(self.df)
        if df <= 2.0:
            raise InputError(f"Student-t noise with {df:.3g} degrees of freedom has no variance.")
        return np.broadcast_to(np.asarray(self.scale, np.float64) ** 2 * df / (df - 2.0), mean.shape[1:])

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y, self._scale)


@final
class Bernoulli(Likelihood):
    """y is 1 with probability 1/(1 + exp(-f)), the logit link, otherwise 0: two classes.

    Expected log probabilities by a Gauss-Hermite rule of ``n_points`` points.
    """

    n_points: int = eqx.field(static=True)

    def __init__(self, n_points: int = POINTS) -> None:
        self.n_points = _checked_points(n_points)

    @wide_scope
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        # y μ - E[log(1 + exp f)]
        expected = gauss_hermite(jax.nn.softplus, mean, _diagonal(cov), self.n_points)
        return jnp.sum(y * mean - expected, axis=-1)

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        std = np.sqrt(_variances(cov))
        p = np.zeros((1, *mean.shape[1:]))
        for rows in row_chunks(mean.shape[1], mean.shape[0] * mean.shape[2]):
            z, w = normal_nodes(float(std[:, rows].max(initial=0.0)))
            for point, weight in zip(z, w, strict=True):
                p[0, rows] += weight * expit(mean[:, rows] + std[:, rows] * point).mean(axis=0)
        return Mixture(families.Bernoulli(np.clip(p, 0.0, 1.0)))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        return jax.random.bernoulli(key, jax.nn.sigmoid(f)).astype(f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y)
        if not np.isin(y, (0, 1)).all():
            raise InputError(
                "Bernoulli targets must be 0 or 1; encode two classes as (y == 'yes').astype(float), "
                f"and use Gaussian() for real numbers. Got {_example(y, np.isin(y, (0, 1)))}."
            )


@final
class Softmax(Likelihood):
    """y is one of P classes, written as a row of zeros with a one at its class, with probabilities exp(f) / Σ exp(f).

    Expectations over f, whose P entries depend on each other, by a fixed set of at least ``n_points`` points.
    """

    n_points: int = eqx.field(static=True)

    def __init__(self, n_points: int = 2 * POINTS) -> None:
        self.n_points = _checked_points(n_points)

    def _functions(self, mean: Means, cov: Covariances) -> Float[Array, "Q R n P"]:
        """Values of f at the points of the rule."""
        z = jnp.asarray(_normal_points(self.n_points, mean.shape[-1]), mean.dtype)
        # factorise has the axes (column, row, n, R)
        turned = jnp.transpose(cov, (2, 3, 1, 0))
        floor = 1e-6 * jnp.max(jnp.diagonal(cov, axis1=-2, axis2=-1), axis=-1).T + float(np.finfo(mean.dtype).tiny)
        return mean + jnp.einsum("kinr,qk->qrni", factorise(turned, floor), z)

    @wide_scope
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        # y · μ - E[log Σ exp f]
        expected = jnp.mean(jax.nn.logsumexp(self._functions(mean, cov), axis=-1), axis=0)
        return jnp.sum(y * mean, axis=-1) - expected

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        """Of each entry of y: one with the probability of its class."""
        p = np.empty((1, *mean.shape[1:]))
        for rows in row_chunks(mean.shape[1], self.n_points * mean.shape[0] * mean.shape[2]):
            functions = self._functions(jnp.asarray(mean[:, rows]), jnp.asarray(cov[:, rows]))
            p[0, rows] = np.asarray(jax.nn.softmax(functions, axis=-1), np.float64).mean(axis=(0, 1))
        return Mixture(families.Bernoulli(np.clip(p, 0.0, 1.0)))

    def log_score(self, prediction: Mixture, y: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n _"]:
        """Log probability of the class of each row; the entries of a row are not independent of each other."""
        p = np.sum(prediction.mean * y, axis=1, keepdims=True)
        return np.log(np.maximum(p, np.finfo(np.float64).tiny))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        return jax.nn.one_hot(jax.random.categorical(key, f, axis=-1), f.shape[-1], dtype=f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y)
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise InputError(
                "Softmax targets must be rows of zeros with a single one at the class of each row: "
                "np.eye(n_classes)[labels]."
            )


@final
class Poisson(Likelihood):
    """y is a count with exp(f) events expected."""

    @wide_scope
    def expected_log_prob(self, y: Float[Array, "n P"], mean: Means, cov: Covariances) -> Float[Array, "R n"]:
        # y μ - exp(μ + v/2) - log y!
        return jnp.sum(y * mean - jnp.exp(mean + 0.5 * _diagonal(cov)) - gammaln(y + 1.0), axis=-1)

    @wide_scope
    def predictive(self, mean: Float[np.ndarray, "R n P"], cov: Float[np.ndarray, "R n P P"]) -> Mixture:
        with np.errstate(over="ignore", under="ignore"):
            rate = np.maximum(np.exp(mean), families.TINY)
        return Mixture(families.Poisson(rate, _variances(cov)))

    @wide_scope
    def sample(self, key: PRNGKeyArray, f: Float[Array, "*batch P"]) -> Float[Array, "*batch P"]:
        return jax.random.poisson(key, jnp.exp(f)).astype(f.dtype)

    def check_targets(self, y: np.ndarray) -> None:
        _check_table(y)
        counts = (y >= 0) & (y == np.floor(y))
        if not counts.all():
            raise InputError(
                "Poisson targets must be counts 0, 1, 2, ...; use Gaussian() for real numbers. "
                f"Got {_example(y, counts)}."
            )


@functools.lru_cache(maxsize=32)
def _normal_points(n_points: int, n_dimensions: int) -> Float[np.ndarray, "Q D"]:
    """Points whose means of functions of degree up to three are those of a standard normal distribution.

    A low-discrepancy set, as large as the dimensions need, and its reflection, with second moments made exact.
    """
    size = 1 << math.ceil(math.log2(max(n_points, 4 * n_dimensions) / 2))
    half = low_discrepancy_noise(size, n_dimensions, seed=0)
    variances, axes = np.linalg.eigh(half.T @ half / size)
    half = half @ (axes / np.sqrt(variances)) @ axes.T
    return np.concatenate([half, -half])


@functools.lru_cache(maxsize=32)
def _spread(size: int) -> Float[np.ndarray, " size"]:
    """Equally likely values of a standard normal variable, in an order that has nothing to do with their size."""
    z = ndtri((np.arange(size) + 0.5) / size)
    z = z / np.sqrt(np.mean(z**2)) if size > 1 else z
    return np.random.default_rng(0).permutation(z)


def _diagonal(cov: Covariances) -> Float[Array, "R n P"]:
    variances: Float[Array, "R n P"] = jnp.diagonal(cov, axis1=-2, axis2=-1)
    return variances


def _variances(cov: Float[np.ndarray, "R n P P"]) -> Float[NDArray[np.float64], "R n P"]:
    """The diagonal of ``cov``, without what rounding made negative."""
    variances: NDArray[np.float64] = np.maximum(np.diagonal(cov, axis1=-2, axis2=-1), 0.0)
    return variances


def _like(parameter: Float[Array, "..."], values: Array | np.ndarray) -> Float[Array, "..."]:
    """``parameter`` in the precision of ``values``, after a check that it is one number or one for each output."""
    _check_outputs(parameter.shape, values.shape[-1])
    return parameter.astype(values.dtype)


def _check_outputs(shape: tuple[int, ...], n_outputs: int) -> None:
    if shape not in ((), (n_outputs,)):
        raise InputError(
            f"the likelihood has a parameter of shape {shape}, but there are {n_outputs} outputs: "
            "give one number, or one for each output."
        )


def _check_table(y: np.ndarray, *parameters: Positive) -> None:
    if y.ndim != 2:
        raise InputError(f"y must have shape (n, P); got {y.shape}. Write y[:, None] for a single output.")
    if not np.isfinite(y).all():
        raise InputError("y has NaN or infinite values: leave those rows out.")
    for parameter in parameters:
        _check_outputs(parameter.raw.shape, y.shape[1])


def _example(y: np.ndarray, allowed: np.ndarray) -> str:
    return f"{y[~allowed][0]:g} in row {np.argwhere(~allowed)[0, 0]}"


def _checked_points(n_points: int) -> int:
    if n_points < 1:
        raise InputError(f"n_points must be at least 1; got {n_points}.")
    return n_points
