"""The second door: posteriors that are not a partial order, from any rule that returns a mean and a dense factor.

Write an Equinox module whose call returns ``(mean (T, M), factor (T·M, T·M))`` from its own parameters and hand it to
:class:`DensePosterior`. It runs on the fully coupled path, so it is as slow as FC, and right for any covariance. A rule
that knows a faster way to its covariance or log determinant can say so. :class:`Chain` is the worked example.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator

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
    def kl(self) -> Float[Array, ""]:
        mean = self.rule()[0]
        # the covariance is that of the moments, which a compiler makes once
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
    """Markov over layers: a precision that couples only neighbouring layers (Ustyuzhaninov et al., 2019).

    The precision is Bᵀ B with B block lower bidiagonal over layers, and C = B⁻¹ by forward substitution.

    Attributes:
        mean: (T, M).
        diagonal: for each layer, the lower-triangular block B[l, l] of T_l·M rows.
        below: for each layer but the first, the block B[l, l-1].
    """

    mean: Float[Array, "T M"]
    diagonal: tuple[Float[Array, "_ _"], ...]
    below: tuple[Float[Array, "_ _"], ...]

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
            diagonal=tuple(as_array(np.eye(size) / scale) for size, scale in zip(sizes, scales, strict=True)),
            below=tuple(as_array(np.zeros((rows, columns))) for columns, rows in itertools.pairwise(sizes)),
        )

    @wide_scope
    def __call__(self) -> tuple[Float[Array, "T M"], Float[Array, "TM TM"]]:
        rows: list[Array] = []
        for layer, inverse in enumerate(self._inverses()):
            # C[l, k] = -B[l, l]⁻¹ B[l, l-1] C[l-1, k]
            earlier = [-inverse @ (self.below[layer - 1] @ rows[-1])] if layer else []
            rows.append(jnp.concatenate([*earlier, inverse], axis=1))
        total = self.mean.size
        return self.mean, jnp.concatenate([jnp.pad(row, ((0, 0), (0, total - row.shape[1]))) for row in rows])

    @wide_scope
    def covariance(self) -> Float[Array, "TM TM"]:
        """Layer by layer: S[l, k] = W S[l-1, k] for k < l, and S[l, l] = S[l, l-1] Wᵀ + A Aᵀ.

        A = B[l, l]⁻¹, W = -A B[l, l-1].
        """
        first, *others = self._inverses()
        S = gram(first)
        for A, below in zip(others, self.below, strict=True):
            W = -A @ below
            before = W.shape[1]
            row = W @ S[-before:]
            S = jnp.block([[S, row.T], [row, row[:, -before:] @ W.T + gram(A)]])
        return S

    @wide_scope
    def log_determinant(self) -> Float[Array, ""]:
        return -jnp.sum(jnp.log(jnp.abs(jnp.concatenate([jnp.diagonal(block) for block in self.diagonal]))))

    def _inverses(self) -> Iterator[Float[Array, "_ _"]]:
        """The inverse of each diagonal block."""
        for block in self.diagonal:
            yield jax.scipy.linalg.solve_triangular(block, jnp.eye(len(block), dtype=block.dtype), lower=True)
