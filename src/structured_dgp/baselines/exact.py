"""The exact Gaussian process, for small data: a yardstick for everything that approximates one."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize

from structured_dgp.exceptions import InputError, NumericalError
from structured_dgp.kernels import Kernel
from structured_dgp.likelihoods import Gaussian
from structured_dgp.parameters import cast, trainable_mask
from structured_dgp.precision import wide_scope
from structured_dgp.prediction import Mixture
from structured_dgp.validation import as_matrix

JITTER = 1e-8
"""Added to the noise."""
MAX_ROWS = 3000
"""More rows than this are refused: each evaluation of the evidence factorises a matrix of this size."""


class ExactGP(eqx.Module):
    """A Gaussian process with Gaussian noise, conditioned on data, in float64; the outputs share the kernel."""

    kernel: Kernel
    likelihood: Gaussian
    x: Float[Array, "n D"]
    y: Float[Array, "n P"]

    @classmethod
    @wide_scope
    def on(cls, kernel: Kernel, likelihood: Gaussian, x: Any, y: Any) -> ExactGP:
        """Condition on inputs (n, D) and targets (n, P) or (n,)."""
        x = as_matrix(x, "x")
        y = as_matrix(np.reshape(y, (-1, 1)) if np.ndim(y) == 1 else y, "y")
        if len(x) != len(y):
            raise InputError(f"x has {len(x)} rows, but y has {len(y)}.")
        if len(x) > MAX_ROWS:
            raise InputError(f"an exact GP takes {MAX_ROWS} rows at most; got {len(x)}. Use a sparse one: n_layers=1.")
        kernel, likelihood = cast((kernel, likelihood), jnp.float64)
        return cls(kernel, likelihood, jnp.asarray(x, jnp.float64), jnp.asarray(y, jnp.float64))

    @wide_scope
    def log_evidence(self) -> Float[Array, ""]:
        """log p(y), summed over the outputs."""
        return _log_evidence(self)

    @wide_scope
    def fitted(self, max_steps: int = 200) -> ExactGP:
        """The same with hyper-parameters that maximise the evidence, by L-BFGS from the present ones."""
        mask = eqx.tree_at(lambda gp: (gp.x, gp.y), trainable_mask(self), (False, False))
        free, fixed = eqx.partition(self, mask)
        leaves, treedef = jax.tree.flatten(free)
        shapes = [leaf.shape for leaf in leaves]
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

        def unpacked(flat: Array) -> ExactGP:
            parts = [part.reshape(shape) for part, shape in zip(jnp.split(flat, cuts), shapes, strict=True)]
            return eqx.combine(jax.tree.unflatten(treedef, parts), fixed)

        @jax.jit
        def loss(flat: Array) -> tuple[Array, Array]:
            return jax.value_and_grad(lambda f: -_log_evidence(unpacked(f)))(flat)

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = (np.asarray(part, np.float64) for part in loss(jnp.asarray(flat)))
            if not (np.isfinite(value) and np.isfinite(gradient).all()):
                return 1e10, np.zeros_like(flat)
            return float(value), gradient

        start = np.concatenate([np.ravel(leaf) for leaf in leaves])
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": max_steps})
        if not found.fun < 1e10:
            raise NumericalError("the evidence is not finite: look for extreme values in the data.")
        return unpacked(jnp.asarray(found.x))

    @wide_scope
    def predict(self, x: Any) -> Mixture:
        """The distribution of y at new inputs: normal."""
        x = jnp.asarray(as_matrix(x, "x", self.x.shape[1]), jnp.float64)
        mean, variance = _moments(self, x)
        cov = np.asarray(variance)[None, :, :, None] * np.eye(mean.shape[1])
        return self.likelihood.predictive(np.asarray(mean)[None], cov)


def _factors(gp: ExactGP) -> Float[Array, "P n n"]:
    """chol(K + σ_p²) for each output."""
    K = gp.kernel.gram(gp.x)
    noise = jnp.broadcast_to(gp.likelihood.variance, (gp.y.shape[1],))
    return jnp.stack([jnp.linalg.cholesky(K + (sigma + JITTER) * jnp.eye(len(K))) for sigma in noise])


@eqx.filter_jit
def _log_evidence(gp: ExactGP) -> Float[Array, ""]:
    total = jnp.zeros((), gp.y.dtype)
    for L, y in zip(_factors(gp), gp.y.T, strict=True):
        white = jax.scipy.linalg.solve_triangular(L, y, lower=True)
        # -½ yᵀ(K + σ²)⁻¹y - ½ log det(K + σ²) - n/2 log 2π
        total += -0.5 * white @ white - jnp.sum(jnp.log(jnp.diag(L))) - 0.5 * len(y) * math.log(2.0 * math.pi)
    return total


@eqx.filter_jit
def _moments(gp: ExactGP, x: Float[Array, "m D"]) -> tuple[Float[Array, "m P"], Float[Array, "m P"]]:
    """Mean and variance of f at new inputs."""
    cross, prior = gp.kernel.cross(gp.x, x), gp.kernel.diagonal(x)
    means, variances = [], []
    for L, y in zip(_factors(gp), gp.y.T, strict=True):
        A, white = (jax.scipy.linalg.solve_triangular(L, b, lower=True) for b in (cross, y))
        means.append(A.T @ white)
        variances.append(jnp.maximum(prior - jnp.sum(A * A, axis=0), 1e-12))
    return jnp.stack(means, axis=1), jnp.stack(variances, axis=1)
