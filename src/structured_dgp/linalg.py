"""Numerical policy: the one place where jitter is added and kernel matrices are factorised.

A kernel matrix K is used only through its *whitener* W = L⁻¹, where L Lᵀ = K + jitter·I. Features at new inputs are
then one matrix product, A = K_xz Wᵀ, and the derivative of W needs no derivative of a Cholesky routine:

    dW = -Φ(W dK Wᵀ) W,        Φ = lower triangle with the diagonal halved.

If a factorisation fails, the jitter of that matrix alone is multiplied by ten until it succeeds, up to
``ESCALATIONS`` times. Compiled code cannot raise: a failure beyond that comes back as NaN, and the public functions
of the model turn it into a :class:`~structured_dgp.exceptions.CholeskyError` that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.precision import Precision

JITTER: dict[Precision, float] = {"float64": 1e-6, "mixed": 1e-5, "float32": 1e-4}
"""Default jitter on the diagonal of every kernel matrix: features lose jitter^(-1/2) in accuracy."""

ESCALATIONS = 4
"""How often the jitter of a failing matrix is multiplied by ten: in float64, from 1e-6 up to 1e-2."""

PANEL = 32
"""How many rows ``eliminate`` works on before it updates the rest."""


def lower_half(a: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """Φ(a): the lower triangle with the diagonal halved, so that Φ(a) + Φ(a)ᵀ = a for symmetric a."""
    return jnp.tril(a) - 0.5 * jnp.eye(a.shape[-1], dtype=a.dtype) * a


@jax.jit
def jittered_cholesky(K: Float[Array, "M M"], jitter: ArrayLike) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """Lower Cholesky factor of K + jitter·I and the jitter that was needed; NaN where even the largest one fails.

    The first attempt adds exactly ``jitter``; later ones scale it with the mean of the diagonal of K.
    """
    (L,), used = _with_enough_jitter(lambda K: (jnp.linalg.cholesky(K, symmetrize_input=False),), K, jitter)
    return L, used


@jax.jit
def jittered_factors(
    K: Float[Array, "M M"], jitter: ArrayLike
) -> tuple[tuple[Float[Array, "M M"], Float[Array, "M M"]], Float[Array, ""]]:
    """The same for (L, L⁻¹), by ``eliminate``."""
    return _with_enough_jitter(eliminate, K, jitter)


_Factors = TypeVar("_Factors", bound=tuple[Array, ...])


def _with_enough_jitter(
    factorise: Callable[[Float[Array, "M M"]], _Factors], K: Float[Array, "M M"], jitter: ArrayLike
) -> tuple[_Factors, Float[Array, ""]]:
    """``factorise(K + jitter·I)``, again with ten times the jitter while the last entry of the first factor is NaN."""
    scale = jnp.maximum(jnp.trace(K) / K.shape[0], 1.0)
    smallest = jnp.maximum(jitter, np.finfo(K.dtype).eps)  # a smaller one, such as 0, would not grow
    eye = jnp.eye(K.shape[0], dtype=K.dtype)
    hopeless = ~jnp.isfinite(scale)  # a NaN in K cannot be cured by jitter

    def unfinished(state: tuple[_Factors, Array, Array]) -> Array:
        factors, _, tries = state
        failed = ~jnp.isfinite(factors[0][-1, -1])
        return (tries == 0) | (failed & (tries <= ESCALATIONS) & ~hopeless)

    def attempt(state: tuple[_Factors, Array, Array]) -> tuple[_Factors, Array, Array]:
        _, _, tries = state
        amount = jnp.where(tries == 0, jitter, scale * smallest * 10.0**tries).astype(K.dtype)
        return factorise(K + amount * eye), amount, tries + 1

    nothing = jax.tree.map(lambda part: jnp.full(part.shape, jnp.nan, part.dtype), jax.eval_shape(factorise, K))
    start = (nothing, jnp.zeros((), K.dtype), jnp.asarray(0))
    factors, used, _ = jax.lax.while_loop(unfinished, attempt, start)
    # Some LAPACKs factorise an infinite diagonal without complaint.
    return jax.tree.map(lambda part: jnp.where(hopeless, jnp.nan, part), factors), used


@jax.jit
def eliminate(K: Float[Array, "M M"]) -> tuple[Float[Array, "M M"], Float[Array, "M M"]]:
    """(L, L⁻¹) with L Lᵀ = K, by Gaussian elimination of [K | I] into [Lᵀ | L⁻¹]; NaN if K is not positive definite.

    This is for the inner loop of training, where calling LAPACK costs far more than its arithmetic: after each call
    the threads of its BLAS wait for more in a busy loop, on the cores that the compiled program needs.
    """
    size = K.shape[0]
    panel = min(PANEL, size)
    padded = size + -size % panel
    grid = jnp.eye(padded, 2 * padded, dtype=K.dtype) + jnp.eye(padded, 2 * padded, padded, dtype=K.dtype)
    grid = grid.at[:size, :size].set(K)
    row = jnp.arange(padded)[:, None]

    def next_panel(index: Array, grid: Float[Array, "N _"]) -> Float[Array, "N _"]:
        first = index * panel
        rows = jax.lax.dynamic_slice_in_dim(grid, first, panel, axis=0)
        columns = jax.lax.dynamic_slice_in_dim(grid, first, panel, axis=1)
        inverse = _eliminate_panel(jax.lax.dynamic_slice_in_dim(rows, first, panel, axis=1))
        rows = inverse @ rows
        below = jnp.where(row >= first + panel, columns @ inverse.T, 0.0)
        return jax.lax.dynamic_update_slice_in_dim(grid - below @ rows, rows, first, axis=0)

    grid = jax.lax.fori_loop(0, padded // panel, next_panel, grid)
    return jnp.triu(grid[:size, :size]).T, jnp.tril(grid[:size, padded : padded + size])


def _eliminate_panel(K: Float[Array, "P P"]) -> Float[Array, "P P"]:
    """L⁻¹ of a small matrix, one row after the other."""
    size = K.shape[0]
    row = jnp.arange(size)[:, None]

    def next_row(j: Array, grid: Float[Array, "P _"]) -> Float[Array, "P _"]:
        root = jnp.sqrt(grid[j, j])
        pivot = grid[j] / root
        below = jnp.where(row > j, grid[:, j][:, None] / root, 0.0)
        return (grid - below * pivot).at[j].set(pivot)

    return jax.lax.fori_loop(0, size, next_row, jnp.concatenate([K, jnp.eye(size, dtype=K.dtype)], axis=1))[:, size:]


@jax.custom_vjp
def whitener(K: Float[Array, "M M"], jitter: ArrayLike) -> Float[Array, "M M"]:
    """W = L⁻¹ with L Lᵀ = K + jitter·I (lower triangular)."""
    (_, W), _ = jittered_factors(K, jitter)
    return W


def _whitener_forward(K: Array, jitter: ArrayLike) -> tuple[Array, Array]:
    W = whitener(K, jitter)
    return W, W


def _whitener_backward(W: Array, gradient: Array) -> tuple[Array, None]:
    # ⟨G, -Φ(W dK Wᵀ) W⟩ = ⟨-Wᵀ Φ(G Wᵀ) W, dK⟩
    K_gradient = -W.T @ lower_half(gradient @ W.T) @ W
    return 0.5 * (K_gradient + K_gradient.T), None


whitener.defvjp(_whitener_forward, _whitener_backward)
