"""Triangular factors of small matrices, one matrix for each data point and sample.

The matrices are over GPs, and their axes come first: an array (k, i, n, R) holds column k of row i for n points and R
samples, so that all arithmetic runs over long contiguous rows. Loops over k are compiled once, not unrolled, and the
gradients are written by hand for the same reason: the compiled program does not grow with the number of GPs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve_columns(
    c: Float[Array, "K K n R"], s: Float[Array, "K T n R"], blocks: tuple[range, ...]
) -> Float[Array, "K T n R"]:
    """x with Σ_{k≤j} x[k] c[k, j] = s[j]: rows i of a Cholesky factor, left of their own GPs, from covariances s.

    c[k, j] is entry k of row j of the factor of the earlier GPs, zero between different GPs of one of the ``blocks``.
    """
    x = s[:0]
    for block in blocks:
        part = slice(block.start, block.stop)
        known = jnp.sum(x[:, None] * c[: block.start, part, None], axis=0)
        x = jnp.concatenate([x, (s[part] - known) / _diagonal(c, part)])
    return x


def _solve_forward(c: Array, s: Array, blocks: tuple[range, ...]) -> tuple[Array, tuple[Array, Array]]:
    x = solve_columns(c, s, blocks)
    return x, (c, x)


def _solve_backward(blocks: tuple[range, ...], residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """y[j] = (g[j] - Σ_{i>j} y[i] c[j, i]) / c[j, j], from the last column to the first; c̄[k, j] = -y[j] · x[k]."""
    c, x = residuals
    y = g[:0]
    for block in reversed(blocks):
        part = slice(block.start, block.stop)
        known = jnp.sum(y[None] * c[part, block.stop :, None], axis=1)
        y = jnp.concatenate([(g[part] - known) / _diagonal(c, part), y])
    upper = jnp.triu(jnp.ones(c.shape[:2], c.dtype))[..., None, None]
    return -upper * jnp.sum(x[:, None] * y[None, :], axis=2), y


solve_columns.defvjp(_solve_forward, _solve_backward)


def _diagonal(c: Float[Array, "K K n R"], part: slice) -> Float[Array, "k 1 n R"]:
    return jnp.stack([c[j, j] for j in range(part.start, part.stop)])[:, None]


@jax.custom_vjp
def factorise(p: Float[Array, "T T n R"], floor: Float[Array, "n #R"]) -> Float[Array, "T T n R"]:
    """The Cholesky factor d of p, column k of row i at d[k, i]; pivots below ``floor`` are raised to it.

    Only p[k, i] with i ≥ k is used.
    """
    return _factorise_forward(p, floor)[0]


def _factorise_forward(p: Array, floor: Array) -> tuple[Array, tuple[Array, Array]]:
    size = p.shape[0]
    place = jnp.arange(size)[:, None, None]

    def next_column(j: ArrayLike, state: tuple[Array, Array]) -> tuple[Array, Array]:
        d, free = state
        v = p[j] - jnp.sum(d * _row(d, j)[:, None], axis=0)
        pivot = jnp.sqrt(jnp.maximum(v[j], floor))
        column = jnp.where(place > j, v / pivot, jnp.where(place == j, pivot, 0.0))
        return d.at[j].set(column), free.at[j].set((v[j] > floor).astype(p.dtype))

    d, free = jax.lax.fori_loop(0, size, next_column, (jnp.zeros_like(p), jnp.zeros_like(p[0])))
    return d, (d, free)


def _factorise_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    """The steps of the forward pass in reverse; a pivot that was raised has no gradient."""
    d, free = residuals
    size = d.shape[0]
    place = jnp.arange(size)[:, None, None]

    def previous_column(count: ArrayLike, state: tuple[Array, Array]) -> tuple[Array, Array]:
        g, p_gradient = state
        j = size - 1 - count
        pivot, below = d[j, j], jnp.where(place > j, g[j], 0.0)
        pivot_gradient = g[j, j] - jnp.sum(below * d[j], axis=0) / pivot
        v_gradient = below / pivot + jnp.where(place == j, free[j] * pivot_gradient / (2.0 * pivot), 0.0)
        # v = p[j] - Σ_{k<j} d[k] d[k, j]
        row = jnp.where(place < j, _row(d, j), 0.0)
        to_row = jnp.where(place < j, jnp.sum(d * v_gradient, axis=1), 0.0)
        g = g - row[:, None] * v_gradient
        g = g.at[:, j].add(-to_row)
        return g, p_gradient.at[j].set(v_gradient)

    _, p_gradient = jax.lax.fori_loop(0, size, previous_column, (g, jnp.zeros_like(g)))
    return p_gradient, None


factorise.defvjp(_factorise_forward, _factorise_backward)


def _row(c: Float[Array, "K T n R"], j: ArrayLike) -> Float[Array, "K n R"]:
    """Row j of a factor."""
    return jax.lax.dynamic_index_in_dim(c, j, axis=1, keepdims=False)
