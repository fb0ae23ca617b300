"""The deep Gaussian process: layers, a posterior over their inducing outputs, and a likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structured_dgp.couplings import Coupling
from structured_dgp.exceptions import CholeskyError, CouplingError, InputError, NumericalError
from structured_dgp.likelihoods import Likelihood
from structured_dgp.linalg import JITTER, jittered_factors
from structured_dgp.noise import low_discrepancy_noise
from structured_dgp.parameters import cast
from structured_dgp.posterior import AbstractPosterior, Posterior
from structured_dgp.precision import Precision, as_precision, wide_scope
from structured_dgp.prediction import Mixture
from structured_dgp.propagation import (
    Layer,
    Outputs,
    PreparedLayer,
    functions_given,
    layer_function,
    prepare,
    propagate,
    propagate_given,
    whiteners,
)
from structured_dgp.tiles import split_rows, tile_sum, to_tiles
from structured_dgp.validation import as_matrix, is_traced

DRAWS = 128  # hidden-noise draws of a prediction; a power of two suits the low-discrepancy noise
PREDICTION_TILE = 4096  # points times draws in one compiled tile of a prediction
PREDICTION_ROWS = 8192  # points handed to the compiled prediction at a time


class DeepGP(eqx.Module):
    """A deep Gaussian process with a structured variational posterior; immutable, and a JAX pytree.

    Its methods keep float64 arrays in float64 whatever JAX is configured to do. To differentiate through them, or to
    compute with its arrays, do the same: ``with jax.enable_x64(True): jax.grad(...)(model)``.

    Args:
        layers: the prior, input side first; the last layer is the output.
        posterior: over the whitened inducing outputs of all layers.
        likelihood: of the targets given the output layer.
        jitter: added to the diagonal of every kernel matrix; default: 1e-6, and more in a lower precision.
        precision: ``"float64"``, ``"float32"``, or ``"mixed"`` (kernel factorisations in float64).
    """

    layers: tuple[Layer, ...]
    posterior: AbstractPosterior
    likelihood: Likelihood
    jitter: float = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    @wide_scope
    def __init__(
        self,
        layers: Sequence[Layer],
        posterior: AbstractPosterior,
        likelihood: Likelihood,
        jitter: float | None = None,
        precision: str = "float64",
    ) -> None:
        self.precision = as_precision(precision)
        jitter = JITTER[self.precision] if jitter is None else jitter
        if not (np.isfinite(jitter) and jitter >= 0):
            raise InputError(f"jitter must be a finite number that is not negative; got {jitter}.")
        _check_fit(tuple(layers), posterior)
        _check_likelihood(likelihood, posterior.widths[-1])
        dtype = jnp.float64 if precision == "float64" else jnp.float32
        self.layers = cast(tuple(layers), dtype)
        self.posterior = cast(posterior, dtype)
        self.likelihood = cast(likelihood, dtype)
        self.jitter = float(jitter)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.posterior.widths

    @property
    def n_targets(self) -> int:
        """How many columns y has."""
        return self.likelihood.n_targets(self.widths[-1])

    @property
    def n_hidden(self) -> int:
        """How many latent GPs are not in the output layer: the last axis of ``eps``."""
        return sum(self.widths[:-1])

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.layers[0].inducing.dtype

    def with_coupling(self, coupling: str | Coupling) -> DeepGP:
        """The same distribution in a coupling that contains the present one: a warm start, as in MF -> STAR -> FC."""
        if not isinstance(self.posterior, Posterior):
            raise CouplingError(f"a {type(self.posterior).__name__} cannot be converted: it is not one of a coupling.")
        return eqx.tree_at(lambda model: model.posterior, self, self.posterior.to(coupling))

    @wide_scope
    def propagate(self, x: Any, eps: Any) -> Outputs:
        """Theorem 1: hidden samples and the conditional moments of the outputs for noise ``eps`` (R, n, T_hidden)."""
        x = self._inputs(x)
        eps = self._noise(eps, x.shape[0])
        return self._checked(_propagate(self, x, eps), x)

    @wide_scope
    def kl(self) -> Float[Array, ""]:
        """KL[q || prior] of the inducing outputs."""
        return self._checked(_kl(self))

    @wide_scope
    def elbo(
        self,
        x: Any,
        y: Any,
        *,
        eps: Any = None,
        key: PRNGKeyArray | None = None,
        n_samples: int = 5,
        n_data: int | None = None,
    ) -> Float[Array, ""]:
        """The evidence lower bound, estimated from a minibatch.

        Args:
            x: inputs (n, D).
            y: targets (n, P); (n,) for a single output.
            eps: standard normal noise (R, n, T_hidden). Give this or ``key``; one layer needs neither.
            key: draws the noise of ``n_samples`` samples.
            n_samples: R, only used with ``key``.
            n_data: number of rows of the full data set that the minibatch stands for; default: n.
        """
        x, y = self._inputs(x), self._targets(y)
        if y.shape[0] != x.shape[0]:
            raise InputError(f"x has {x.shape[0]} rows, but y has {y.shape[0]}.")
        if eps is None:
            eps = self._draw_noise(key, n_samples, x.shape[0])
        eps = self._noise(eps, x.shape[0])
        scale = (x.shape[0] if n_data is None else n_data) / x.shape[0]
        return self._checked(_elbo(self, x, y, eps, jnp.asarray(scale, self.dtype)), x)

    @wide_scope
    def predict(self, x: Any, n_draws: int = DRAWS, seed: int = 0) -> Mixture:
        """The distribution of y at new inputs: a mixture over hidden-noise draws.

        The noise is a fixed low-discrepancy set shared by all rows, so a row's prediction does not depend on the
        other rows. Memory does not grow with the number of rows beyond the result itself.
        """
        return self.likelihood.predictive(*self.output_moments(x, n_draws, seed))

    @wide_scope
    def output_moments(
        self, x: Any, n_draws: int = DRAWS, seed: int = 0
    ) -> tuple[Float[np.ndarray, "R n F"], Float[np.ndarray, "R n F F"]]:
        """Mean and covariance of the outputs f of the last layer, for each of the draws behind ``predict``."""
        x = as_matrix(x, "x", self.layers[0].inducing.shape[1])
        eps = self.prediction_noise(n_draws, seed)
        return self._checked(moments_by_rows(lambda rows: _predict(self, jnp.asarray(rows, self.dtype), eps), x))

    @wide_scope
    def prediction_noise(self, n_draws: int = DRAWS, seed: int = 0) -> Float[Array, "R T_hidden"]:
        """The noise that ``predict`` uses for every row; a single draw when there is no hidden layer."""
        if n_draws < 1:
            raise InputError(f"n_draws must be at least 1; got {n_draws}.")
        draws = n_draws if self.n_hidden else 1
        return jnp.asarray(low_discrepancy_noise(draws, self.n_hidden, seed), self.dtype)

    @wide_scope
    def sample_functions(self, x: Any, key: PRNGKeyArray, n_samples: int = 1) -> list[Float[Array, "S n _"]]:
        """Joint draws of every layer's output at all rows of ``x``, one draw of the inducing outputs per sample.

        Unlike ``propagate``, whose rows are marginally right but independent of each other, a sample is one function
        evaluated at all rows. Exact; costs one n x n factorisation per layer and sample.

        Returns:
            For each layer, what it hands on: (S, n, T_l); the last entry are draws of the outputs f.
        """
        return self._checked(_sample_functions(self, self._inputs(x), key, n_samples), x)

    @wide_scope
    def joint_covariance(self, x: Any, key: PRNGKeyArray, n_samples: int = 128) -> Float[np.ndarray, "n n P"]:
        """Covariance of each output f between all rows of ``x``, estimated with draws of the hidden layers.

        Given the hidden layers as functions, the outputs are Gaussian: their covariances are averaged, and the
        covariance of their means is added. Exact for a single layer.
        """
        x = self._inputs(x)
        mean, within = self._checked(_joint_moments(self, x, key, n_samples if self.n_hidden else 1), x)
        means = np.asarray(mean, np.float64)
        off = means - means.mean(axis=0)
        return np.asarray(within, np.float64) + np.einsum("sip,sjp->ijp", off, off) / len(off)

    @wide_scope
    def inducing_covariance(self) -> Float[np.ndarray, "TM TM"]:
        """Covariance of the inducing outputs f_M themselves (not whitened), as in the paper's figures."""
        M, structure = self.posterior.n_inducing, self.posterior.structure
        C = np.array(self.posterior.factor(), np.float64).reshape(len(structure.gps), M, -1)
        for gp in structure.gps:
            layer = cast(self.layers[gp.layer], jnp.float64)
            (L, _), _ = jittered_factors(layer.kernel.gram(layer.inducing), self.jitter)
            C[gp.index] = np.asarray(L) @ C[gp.index]
        flat = C.reshape(len(structure.gps) * M, -1)
        return flat @ flat.T

    @wide_scope
    def diagnose(self) -> None:
        """Raise an error that names the first layer and quantity that is not finite; return if all is well."""
        for index, layer in enumerate(self.layers):
            for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
                if not np.isfinite(leaf).all():
                    name = jax.tree_util.keystr(path)
                    raise NumericalError(f"layer {index}: parameter {name} is NaN or infinite: lower the step size.")
            K = self._gram(index)
            if not np.isfinite(K).all():
                raise NumericalError(f"layer {index}: its kernel matrix has NaN or infinite entries.")
            (L, _), used = jittered_factors(K, self.jitter)
            if not np.isfinite(L).all():
                raise CholeskyError(
                    f"layer {index}: its kernel matrix is not positive definite even with jitter "
                    f"{float(used):g}. Likely causes: duplicate inducing points, lengthscales far "
                    f"larger than the data, or precision={self.precision!r}; try a larger jitter or "
                    "precision='float64'."
                )
        for part in (self.posterior, self.likelihood):
            for path, leaf in jax.tree_util.tree_leaves_with_path(part):
                if not np.isfinite(leaf).all():
                    name = f"{type(part).__name__}{jax.tree_util.keystr(path)}"
                    raise NumericalError(f"{name} is NaN or infinite: lower the step size.")

    @wide_scope
    def used_jitter(self) -> tuple[float, ...]:
        """What has to be added to the diagonal of each layer's kernel matrix: more than ``jitter`` in hard cases."""
        return tuple(np.asarray(_used_jitter(self)).tolist())

    def _gram(self, index: int) -> Float[Array, "M M"]:
        """The kernel matrix of a layer in the precision in which it is factorised."""
        layer = self.layers[index]
        layer = cast(layer, jnp.float64) if self.precision == "mixed" else layer
        return layer.kernel.gram(layer.inducing)

    def _checked(self, result: Any, *context: Any) -> Any:
        """``result``, after an error has been raised for numbers that are not finite (never inside a trace)."""
        if is_traced(self, result, *context) or all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result)):
            return result
        self.diagnose()
        raise NumericalError(
            "the result is not finite although every parameter is: values overflowed on the way through the layers. "
            "Scale the inputs to unit variance, or use precision='float64'."
        )

    def _inputs(self, x: Any) -> Float[Array, "n D"]:
        checked = x if is_traced(x) else as_matrix(x, "x", self.layers[0].inducing.shape[1])
        return jnp.asarray(checked, self.dtype)

    def _targets(self, y: Any) -> Float[Array, "n P"]:
        y = jnp.reshape(y, (-1, 1)) if np.ndim(y) == 1 and self.n_targets == 1 else y
        if not is_traced(y):
            y = as_matrix(y, "y", self.n_targets)
            self.likelihood.check_targets(y)
        return jnp.asarray(y, self.dtype)

    def _noise(self, eps: Any, n_rows: int) -> Float[Array, "R n T_hidden"]:
        if np.ndim(eps) != 3 or np.shape(eps)[2] != self.n_hidden or np.shape(eps)[0] < 1:
            raise InputError(
                f"eps must have shape (R, n, {self.n_hidden}) for widths {self.widths}; got {np.shape(eps)}."
            )
        if np.shape(eps)[1] != n_rows:
            raise InputError(f"eps has noise for {np.shape(eps)[1]} points, but x has {n_rows} rows.")
        if not is_traced(eps) and not np.isfinite(eps).all():
            raise InputError("eps has NaN or infinite values: draw it from a standard normal distribution.")
        return jnp.asarray(eps, self.dtype)

    def _draw_noise(self, key: PRNGKeyArray | None, n_samples: int, n_rows: int) -> Float[Array, "R n T_hidden"]:
        if self.n_hidden == 0:
            return jnp.zeros((1, n_rows, 0), self.dtype)
        if key is None:
            raise InputError("elbo needs noise: pass eps=... of shape (R, n, T_hidden), or key=jax.random.key(0).")
        if n_samples < 1:
            raise InputError(f"n_samples must be at least 1; got {n_samples}.")
        return jax.random.normal(key, (n_samples, n_rows, self.n_hidden), self.dtype)


def _check_fit(layers: tuple[Layer, ...], posterior: AbstractPosterior) -> None:
    """Refuse layers that do not fit each other or the posterior."""
    widths, M = posterior.widths, posterior.n_inducing
    if len(layers) != len(widths):
        raise CouplingError(
            f"the posterior has widths {widths}, so {len(widths)} layers, but {len(layers)} were given: build the "
            "posterior with the widths of these layers."
        )
    n_inputs = layers[0].inducing.shape[-1]
    for index, (layer, width) in enumerate(zip(layers, widths, strict=True)):
        Z = layer.inducing
        if Z.ndim != 2 or Z.shape[0] != M:
            raise InputError(
                f"layer {index}: inducing must have shape ({M}, D), as the posterior has M={M}; got {Z.shape}."
            )
        if not is_traced(Z) and not np.isfinite(Z).all():
            raise InputError(f"layer {index}: the inducing inputs hold NaN or infinity.")
        if Z.shape[1] != n_inputs:
            raise CouplingError(
                f"layer {index}: its inducing inputs have {Z.shape[1]} columns, but the layer before has width "
                f"{n_inputs} in the posterior (widths {widths})."
            )
        if layer.mean is not None and layer.mean.raw.shape != (n_inputs, width):
            raise InputError(
                f"layer {index}: mean must have shape ({n_inputs}, {width}), inputs times width; "
                f"got {layer.mean.raw.shape}. Use None for no mean function."
            )
        try:
            jax.eval_shape(layer.kernel.cross, Z, Z)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"layer {index}: its kernel does not take {n_inputs} inputs: give one lengthscale, or {n_inputs}."
            ) from error
        n_inputs = width


def _check_likelihood(likelihood: Likelihood, n_outputs: int) -> None:
    """Let a likelihood refuse a number of outputs that its parameters do not fit."""
    shapes = [(1, likelihood.n_targets(n_outputs)), (1, 1, n_outputs), (1, 1, n_outputs, n_outputs)]
    jax.eval_shape(likelihood.expected_log_prob, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def _prepared(model: DeepGP) -> tuple[PreparedLayer, ...]:
    return prepare(model.layers, model.posterior, model.jitter, model.precision)


def moments_by_rows(
    function: Callable[[np.ndarray], tuple[Array, Array]], x: Float[np.ndarray, "n D"]
) -> tuple[Float[np.ndarray, "R n P"], Float[np.ndarray, "R n P P"]]:
    """Means (R, n, P) and covariances (R, n, P, P) from a compiled function, a limited number of rows at a time."""
    size = min(PREDICTION_ROWS, 1 << (x.shape[0] - 1).bit_length())  # few different sizes: few compilations
    means: list[np.ndarray] = []
    covs: list[np.ndarray] = []
    for start in range(0, x.shape[0], size):
        rows = x[start : start + size]
        padded = np.concatenate([rows, np.broadcast_to(rows[:1], (size - len(rows), x.shape[1]))])
        for parts, moment in zip((means, covs), function(padded), strict=True):
            parts.append(np.asarray(moment[:, : len(rows)], np.float64))
    return np.concatenate(means, axis=1), np.concatenate(covs, axis=1)


def samples_first(out: Outputs) -> Outputs:
    """The same outputs with the sample axis first."""
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), out)


@eqx.filter_jit
def _kl(model: DeepGP) -> Float[Array, ""]:
    return model.posterior.kl()


@eqx.filter_jit
def _used_jitter(model: DeepGP) -> Float[Array, " L"]:
    K = jnp.stack([model._gram(index) for index in range(len(model.layers))])
    return jax.lax.map(lambda K: jittered_factors(K, model.jitter)[1], K)


@eqx.filter_jit
def _propagate(model: DeepGP, x: Float[Array, "n D"], eps: Float[Array, "R n T_hidden"]) -> Outputs:
    return samples_first(propagate(_prepared(model), model.posterior.structure, x, jnp.swapaxes(eps, 0, 1)))


@eqx.filter_jit
def _elbo(
    model: DeepGP,
    x: Float[Array, "n D"],
    y: Float[Array, "n P"],
    eps: Float[Array, "R n T_hidden"],
    scale: Float[Array, ""],
) -> Float[Array, ""]:
    return scale * data_term(model, x, y, eps) - model.posterior.kl()


def data_term(
    model: DeepGP, x: Float[Array, "n D"], y: Float[Array, "n P"], eps: Float[Array, "R n T_hidden"]
) -> Float[Array, ""]:
    """Σ_n mean_r E[log p(y_n | f_n)], tile by tile."""
    n_samples, n_rows = eps.shape[:2]
    tiles, rows = split_rows(n_rows, n_samples)
    structure = model.posterior.structure

    def tile_value(shared: tuple[tuple[PreparedLayer, ...], Likelihood], tile: tuple[Array, ...]) -> Float[Array, ""]:
        prepared, likelihood = shared
        x, y, eps, weight = tile
        out = samples_first(propagate(prepared, structure, x, eps))
        return jnp.sum(likelihood.expected_log_prob(y, out.mean, out.cov) * weight) / n_samples

    weight = jnp.ones(n_rows, x.dtype)
    if tiles * rows > n_rows:
        weight = jnp.concatenate([weight, jnp.zeros(tiles * rows - n_rows, x.dtype)])
    parts = (x, y, jnp.swapaxes(eps, 0, 1), weight)
    return tile_sum(
        tile_value, (_prepared(model), model.likelihood), tuple(to_tiles(part, tiles, rows) for part in parts)
    )


def sampled_data_term(
    model: DeepGP, x: Float[Array, "n D"], y: Float[Array, "n P"], key: PRNGKeyArray, n_samples: int
) -> Float[Array, ""]:
    """The same as ``data_term`` in expectation, with R draws of the inducing outputs that all points share."""
    v_key, eps_key = jax.random.split(key)
    v = model.posterior.sample(v_key, n_samples)
    eps = jax.random.normal(eps_key, (n_samples, x.shape[0], model.n_hidden), x.dtype)
    whitening = whiteners(model.layers, model.jitter, model.precision)
    out = propagate_given(model.layers, whitening, model.posterior.structure, x, v, eps)
    return jnp.sum(model.likelihood.expected_log_prob(y, out.mean, out.cov)) / n_samples


@eqx.filter_jit
def _predict(
    model: DeepGP, x: Float[Array, "n D"], eps: Float[Array, "R T_hidden"]
) -> tuple[Float[Array, "R n P"], Float[Array, "R n P P"]]:
    prepared, structure = _prepared(model), model.posterior.structure

    def one(tile: Float[Array, "rows D"]) -> tuple[Array, Array]:
        out = propagate(prepared, structure, tile, jnp.broadcast_to(eps, (len(tile), *eps.shape)))
        return out.mean, out.cov

    return moments_in_tiles(one, x, len(eps))


def moments_in_tiles(
    function: Callable[[Array], tuple[Array, Array]], x: Float[Array, "n D"], n_draws: int
) -> tuple[Float[Array, "R n P"], Float[Array, "R n P P"]]:
    """Means and covariances, draws first, of a function that returns them points first, tile by tile."""
    tiles, rows = split_rows(x.shape[0], n_draws, PREDICTION_TILE)
    mean, cov = jax.lax.map(function, to_tiles(x, tiles, rows))
    mean, cov = (a.reshape(tiles * rows, *a.shape[2:])[: x.shape[0]] for a in (mean, cov))
    return jnp.swapaxes(mean, 0, 1), jnp.swapaxes(cov, 0, 1)


@eqx.filter_jit
def _sample_functions(
    model: DeepGP, x: Float[Array, "n D"], key: PRNGKeyArray, n_samples: int
) -> list[Float[Array, "S n _"]]:
    posterior_key, layers_key = jax.random.split(key)
    v = model.posterior.sample(posterior_key, n_samples)
    whitening = whiteners(model.layers, model.jitter, model.precision)
    return functions_given(model.layers, whitening, model.posterior.structure, x, v, layers_key, model.jitter)


@eqx.filter_jit
def _joint_moments(
    model: DeepGP, x: Float[Array, "n D"], key: PRNGKeyArray, n_samples: int
) -> tuple[Float[Array, "S n P"], Float[Array, "n n P"]]:
    """Means of the outputs given S draws of the hidden layers, and the mean of their conditional covariances."""
    prepared, structure = _prepared(model), model.posterior.structure
    M, hidden = model.posterior.n_inducing, structure.layers[-1].start
    mean, _ = model.posterior.moments()
    C = model.posterior.factor()
    lower, output = C[: hidden * M, : hidden * M], C[hidden * M :].reshape(-1, M, C.shape[1])
    own = output[:, :, hidden * M :]
    *below, last = prepared

    def one(total: Float[Array, "n n P"], key: PRNGKeyArray) -> tuple[Array, Array]:
        inducing_key, *layer_keys = jax.random.split(key, 1 + len(prepared))
        z = jax.random.normal(inducing_key, (hidden * M,), x.dtype)
        v = mean[:hidden] + (lower @ z).reshape(hidden, M)
        h = x
        for layer, gps, layer_key in zip(below, structure.layers, layer_keys, strict=False):
            noise = jax.random.normal(layer_key, (x.shape[0], len(gps)), x.dtype)
            h = layer_function(layer.layer, layer.whitener, v[gps.start : gps.stop], h, noise, model.jitter)
        A = last.layer.kernel.cross(h, last.layer.inducing) @ last.whitener.T
        f = A @ (mean[hidden:] + output[:, :, : hidden * M] @ z).T
        f = f if last.layer.mean is None else f + h @ last.layer.mean.value
        # K_xx - A Aᵀ + A S Aᵀ, with S = C Cᵀ of the output's own columns
        own_features = jnp.einsum("nm,pmk->pnk", A, own)
        prior = last.layer.kernel.gram(h) - A @ A.T
        within = prior[..., None] + jnp.einsum("pik,pjk->ijp", own_features, own_features)
        return total + within / n_samples, f

    start = jnp.zeros((x.shape[0], x.shape[0], len(structure.layers[-1])), x.dtype)
    within, means = jax.lax.scan(one, start, jax.random.split(key, n_samples))
    return means, within
