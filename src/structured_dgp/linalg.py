"""Numerical policy: the one place where jitter is added and kernel matrices are factorised.

A kernel matrix K is used only through its *whitener* W = L⁻¹, where L Lᵀ = K + jitter·I. Features at new inputs are
then one matrix product, A = K_xz Wᵀ, and the derivative of W needs no derivative of a Cholesky routine:

    dW = -Φ(W dK Wᵀ) W,        Φ = lower triangle with the diagonal halved.

If a factorisation fails, the jitter of that matrix alone is multiplied by ten until it succeeds, up to
``ESCALATIONS`` times. Compiled code cannot raise: a failure beyond that comes back as NaN, and the public functions
of the model turn it into a :class:`~structured_dgp.exceptions.CholeskyError` that names the layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float

JITTER = 1e-6
"""Default jitter on the diagonal of every kernel matrix."""

ESCALATIONS = 4
"""How often the jitter of a failing matrix is multiplied by ten: from 1e-6 up to 1e-2."""


def lower_half(a: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """Φ(a): the lower triangle with the diagonal halved, so that Φ(a) + Φ(a)ᵀ = a for symmetric a."""
    return jnp.tril(a) - 0.5 * jnp.eye(a.shape[-1], dtype=a.dtype) * a


def jittered_cholesky(K: Float[Array, "M M"], jitter: ArrayLike) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """Lower Cholesky factor of K + jitter·I and the jitter that was needed; NaN where even the largest one fails.

    The first attempt adds exactly ``jitter``; later ones scale it with the mean of the diagonal of K.
    """
    scale = jnp.maximum(jnp.mean(jnp.diagonal(K)), 1.0)
    smallest = jnp.maximum(jitter, np.finfo(K.dtype).eps)  # a smaller one, such as 0, would not grow
    eye = jnp.eye(K.shape[0], dtype=K.dtype)

    def attempt(amount: Float[Array, ""]) -> Float[Array, "M M"]:
        return jnp.linalg.cholesky(K + amount * eye, symmetrize_input=False)

    def failed(state: tuple[Array, Array, Array]) -> Array:
        L, _, tries = state
        # A NaN in K cannot be cured by jitter.
        return ~jnp.isfinite(L[-1, -1]) & (tries < ESCALATIONS) & jnp.isfinite(scale)

    def escalate(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        _, _, tries = state
        amount = scale * jnp.asarray(smallest * 10.0 ** (tries + 1), K.dtype)
        return attempt(amount), amount, tries + 1

    first = jnp.asarray(jitter, K.dtype)
    L, used, _ = jax.lax.while_loop(failed, escalate, (attempt(first), first, jnp.asarray(0)))
    # Some LAPACKs factorise an infinite diagonal without complaint.
    return jnp.where(jnp.isfinite(scale), L, jnp.nan), used


@jax.custom_vjp
def whitener(K: Float[Array, "M M"], jitter: ArrayLike) -> Float[Array, "M M"]:
    """W = L⁻¹ with L Lᵀ = K + jitter·I (lower triangular)."""
    L, _ = jittered_cholesky(K, jitter)
    return solve_triangular(L, jnp.eye(K.shape[0], dtype=K.dtype), lower=True)


def _whitener_forward(K: Array, jitter: ArrayLike) -> tuple[Array, Array]:
    W = whitener(K, jitter)
    return W, W


def _whitener_backward(W: Array, gradient: Array) -> tuple[Array, None]:
    # ⟨G, -Φ(W dK Wᵀ) W⟩ = ⟨-Wᵀ Φ(G Wᵀ) W, dK⟩
    K_gradient = -W.T @ lower_half(gradient @ W.T) @ W
    return 0.5 * (K_gradient + K_gradient.T), None


whitener.defvjp(_whitener_forward, _whitener_backward)
