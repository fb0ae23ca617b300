"""The second door: posteriors that are not a partial order, from any rule that returns a mean and a dense factor.

Write an Equinox module whose call returns ``(mean (T, M), factor (T·M, T·M))`` from its own parameters and hand it to
:class:`DensePosterior`. It runs on the fully coupled path, so it is as slow as FC, and right for any covariance. A rule
that knows a faster way to its covariance or log determinant can say so. :class:`Chain` is the worked example.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structured_dgp.couplings import FullyCoupled, Structure, Widths, check_widths
from structured_dgp.exceptions import InputError
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.precision import as_array, wide_scope
from structured_dgp.products import gram


class FactorRule(eqx.Module):
    """Anything that yields a Gaussian over all whitened inducing outputs from its own parameters."""

    @abstractmethod
    def __call__(self) -> tuple[Float[Array, "T M"], Float[Array, "TM TM"]]:
        """The mean and a square factor C of the covariance C Cᵀ."""

    def covariance(self) -> Float[Array, "TM TM"]:
        """C Cᵀ, by another way if there is a faster one."""
        return gram(self()[1])

    def log_determinant(self) -> Float[Array, ""]:
        """log |det C|, likewise."""
        return jnp.linalg.slogdet(self()[1])[1]


class Evaluated(FactorRule):
    """A rule whose covariance and log determinant are known."""

    rule: FactorRule
    known_covariance: Float[Array, "TM TM"]
    known_log_determinant: Float[Array, ""]

    def __call__(self) -> tuple[Float[Array, "T M"], Float[Array, "TM TM"]]:
        return self.rule()

    def covariance(self) -> Float[Array, "TM TM"]:
        return self.known_covariance

    def log_determinant(self) -> Float[Array, ""]:
        return self.known_log_determinant


class DensePosterior(AbstractPosterior):
    """The posterior of a :class:`FactorRule`."""

    rule: FactorRule
    widths: Widths = eqx.field(static=True)

    @wide_scope
    def __init__(self, rule: FactorRule, widths: Iterable[int]) -> None:
        self.rule = rule
        self.widths = check_widths(widths)
        mean, factor = jax.eval_shape(rule)
        n_gps = sum(self.widths)
        if mean.ndim != 2 or mean.shape[0] != n_gps or factor.shape != (mean.size, mean.size):
            raise InputError(
                f"the rule must return a mean of shape ({n_gps}, M) and a factor of shape ({n_gps}·M, {n_gps}·M) for "
                f"widths {self.widths}; got {mean.shape} and {factor.shape}."
            )

    @property
    def structure(self) -> Structure:
        return FullyCoupled().structure(self.widths)

    @property
    @wide_scope
    def n_inducing(self) -> int:
        return int(jax.eval_shape(self.rule)[0].shape[1])

    @wide_scope
    def moments(self) -> tuple[Float[Array, "T M"], tuple[Float[Array, "M _"], ...]]:
        mean, S = self.rule()[0], self.rule.covariance()
        M = mean.shape[1]
        return mean, tuple(S[j * M : (j + 1) * M, j * M :] for j in range(mean.shape[0]))

    @wide_scope
    def evaluated(self) -> DensePosterior:
        """With a known covariance, so that a gradient goes back through the rule once, not for moments and KL each."""
        rule = Evaluated(self.rule, self.rule.covariance(), self.rule.log_determinant())
        return DensePosterior(rule, self.widths)

    @wide_scope
    def kl(self) -> Float[Array, ""]:
        mean = self.rule()[0]
        squares = jnp.sum(mean**2) + jnp.trace(self.rule.covariance())
        return 0.5 * (squares - mean.size) - self.rule.log_determinant()

    @wide_scope
    def factor(self) -> Float[Array, "TM TM"]:
        return self.rule()[1]

    @wide_scope
    def sample(self, key: PRNGKeyArray, n_samples: int) -> Float[Array, "S T M"]:
        mean, C = self.rule()
        noise = jax.random.normal(key, (n_samples, mean.size), mean.dtype)
        return mean + (noise @ C.T).reshape(n_samples, *mean.shape)


class Chain(FactorRule):
    """Markov over layers (Ustyuzhaninov et al., 2019): given the layer before, a layer does not depend on earlier ones.

    q(v_l | v_{l-1}) = N(m_l + W_l (v_{l-1} - m_{l-1}), A_l A_lᵀ). The precision couples neighbouring layers only: it is
    Bᵀ B with B block lower bidiagonal, A_l⁻¹ on the diagonal and -A_l⁻¹ W_l below it. It is A and W that are trained,
    because B is large where A starts small, and a step of Adam would not move it.

    Attributes:
        mean: (T, M).
        factors: for each layer, A_l of T_l·M rows; above the diagonal the numbers are ignored.
        weights: for each layer but the first, W_l.
    """

    mean: Float[Array, "T M"]
    factors: tuple[Float[Array, "_ _"], ...]
    weights: tuple[Float[Array, "_ _"], ...]

    @classmethod
    def initial(
        cls, widths: Iterable[int], n_inducing: int, hidden_scale: float = 1e-5, output_scale: float = 1.0
    ) -> Chain:
        """The same starting point as :meth:`Posterior.initial`: small hidden factors, no coupling yet."""
        widths = check_widths(widths)
        sizes = [width * n_inducing for width in widths]
        scales = [hidden_scale] * (len(sizes) - 1) + [output_scale]
        return cls(
            mean=as_array(np.zeros((sum(widths), n_inducing))),
            factors=tuple(as_array(np.eye(size) * scale) for size, scale in zip(sizes, scales, strict=True)),
            weights=tuple(as_array(np.zeros((rows, columns))) for columns, rows in itertools.pairwise(sizes)),
        )

    @wide_scope
    def __call__(self) -> tuple[Float[Array, "T M"], Float[Array, "TM TM"]]:
        first, *others = map(jnp.tril, self.factors)
        C = first
        for A, W in zip(others, self.weights, strict=True):
            C = _bordered(C, jnp.zeros((len(C), len(A)), C.dtype), W @ C[-W.shape[1] :], A)
        return self.mean, C

    @wide_scope
    def covariance(self) -> Float[Array, "TM TM"]:
        """Layer by layer: S[l, k] = W_l S[l-1, k] for k < l, and S[l, l] = S[l, l-1] W_lᵀ + A_l A_lᵀ."""
        first, *others = map(jnp.tril, self.factors)
        S = gram(first)
        for A, W in zip(others, self.weights, strict=True):
            before = W.shape[1]
            row = W @ S[-before:]
            S = _bordered(S, row.T, row, row[:, -before:] @ W.T + gram(A))
        return S

    @wide_scope
    def log_determinant(self) -> Float[Array, ""]:
        return jnp.sum(jnp.log(jnp.abs(jnp.concatenate([jnp.diagonal(A) for A in self.factors]))))


def _bordered(matrix: Array, right: Array, below: Array, corner: Array) -> Array:
    """A matrix with the rows and columns of one more layer."""
    return jnp.block([[matrix, right], [below, corner]])
