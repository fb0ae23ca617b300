"""Matrix products, and sums of products over rows, in the forms that a CPU does well.

The gradient of A B with respect to B is Aᵀ G. Compilers like to fold that transpose into the product, where it is
two to three times slower than writing the small matrix Aᵀ out first; the barrier below keeps it apart.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def transposed(a: Float[Array, "n m"]) -> Float[Array, "m n"]:
    """aᵀ, written out."""
    return jax.lax.optimization_barrier(a.T)


@jax.custom_vjp
def matmul(a: Float[Array, "n k"], b: Float[Array, "k m"]) -> Float[Array, "n m"]:
    """a b."""
    return a @ b


def _matmul_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = residuals
    return g @ b.T, transposed(a) @ g


matmul.defvjp(lambda a, b: (a @ b, (a, b)), _matmul_backward)


@jax.custom_vjp
def matmul_transposed(a: Float[Array, "n k"], b: Float[Array, "m k"]) -> Float[Array, "n m"]:
    """a bᵀ."""
    return a @ b.T


def _matmul_transposed_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = residuals
    return g @ b, transposed(g) @ a


matmul_transposed.defvjp(lambda a, b: (a @ b.T, (a, b)), _matmul_transposed_backward)


@jax.custom_vjp
def quadratic_forms(A: Float[Array, "n M"], S: Float[Array, "M TM"]) -> Float[Array, "n T"]:
    """A · S_t A for symmetric blocks S_t that stand side by side.

    The gradient with respect to A is 2 g (S A), which the forward pass has already computed.
    """
    return _quadratic_forward(A, S)[0]


def _quadratic_forward(A: Array, S: Array) -> tuple[Array, tuple[Array, Array]]:
    products = (A @ S).reshape(A.shape[0], -1, A.shape[1])
    return jnp.einsum("nm,ntm->nt", A, products), (A, products)


def _quadratic_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    A, products = residuals
    weighted = (g[:, :, None] * A[:, None, :]).reshape(A.shape[0], -1)
    A_gradient = 2.0 * _total([g[:, t, None] * products[:, t] for t in range(g.shape[1])])
    return A_gradient, transposed(A) @ weighted


quadratic_forms.defvjp(_quadratic_forward, _quadratic_backward)


def _total(terms: list[Array]) -> Array:
    """The sum of terms of one shape, written out: the compiler makes one pass over the result of it."""
    return functools.reduce(jnp.add, terms)


@jax.custom_vjp
def inner_products(A: Float[Array, "n R M"], B: Float[Array, "n #R K M"]) -> Float[Array, "n R K"]:
    """A · B_k for every row; B may be the same for all samples R."""
    return _inner_forward(A, B)[0]


def _inner_forward(A: Array, B: Array) -> tuple[Array, tuple[Array, Array]]:
    if B.shape[1] == A.shape[1]:
        return jnp.einsum("nrm,nrkm->nrk", A, B), (A, B)
    return jnp.einsum("nrm,nkm->nrk", A, B[:, 0]), (A, B)


def _inner_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    A, B = residuals
    A_gradient = _total([g[:, :, k, None] * B[:, :, k] for k in range(B.shape[2])])
    if B.shape[1] == A.shape[1]:
        return A_gradient, g[..., None] * A[:, :, None]
    B_gradient = _total([g[:, r, :, None] * A[:, r, None] for r in range(A.shape[1])])
    return A_gradient, B_gradient[:, None]


inner_products.defvjp(_inner_forward, _inner_backward)
