"""Matrix products, and sums of products over rows, in the forms that a CPU does well.

The gradient of A B with respect to B is Aᵀ G. Compilers like to fold that transpose into the product, where it is
two to three times slower than writing the small matrix Aᵀ out first; the barrier below keeps it apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def transposed(a: Float[Array, "*batch n m"]) -> Float[Array, "*batch m n"]:
    """aᵀ, written out."""
    return jax.lax.optimization_barrier(jnp.swapaxes(a, -1, -2))


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
    return g @ b, (transposed(a) @ g).T


matmul_transposed.defvjp(lambda a, b: (a @ b.T, (a, b)), _matmul_transposed_backward)


@jax.custom_vjp
def gram(a: Float[Array, "n k"]) -> Float[Array, "n n"]:
    """a aᵀ, whose gradient (G + Gᵀ) a is one product."""
    return a @ a.T


gram.defvjp(lambda a: (a @ a.T, a), lambda a, g: ((g + g.T) @ a,))


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
    return 2.0 * jnp.einsum("nt,ntm->nm", g, products), transposed(A) @ weighted


quadratic_forms.defvjp(_quadratic_forward, _quadratic_backward)


def inner_products(A: Float[Array, "n R M"], B: Float[Array, "n #R K M"]) -> Float[Array, "n R K"]:
    """A · B_k for every row; B may be the same for all samples R."""
    if B.shape[1] == A.shape[1]:
        return jnp.einsum("nrm,nrkm->nrk", A, B)
    return jnp.einsum("nrm,nkm->nrk", A, B[:, 0])
