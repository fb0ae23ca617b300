"""The factor of small matrices against LAPACK's, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from structured_dgp.triangular import factorise, solve_columns

POINTS, SAMPLES = 3, 2


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def gps_first(S):
    """(n, R, i, j) to (j, i, n, R)."""
    return jnp.moveaxis(S, (2, 3), (1, 0))


def matrices(size, seed=0):
    root = np.random.default_rng(seed).standard_normal((POINTS, SAMPLES, size, size))
    return jnp.asarray(root @ np.swapaxes(root, -1, -2) + 0.1 * np.eye(size))


def layer_by_layer(S, widths, floor=1e-12):
    """The factor built from blocks: the rows of one layer after those of the layers before."""
    floor = jnp.full((POINTS, SAMPLES), floor)
    factor = jnp.zeros((0, 0, POINTS, SAMPLES))
    S, start = gps_first(S), 0
    for width in widths:
        own = S[start : start + width, start : start + width]
        earlier = S[:start, start : start + width]
        if start:
            earlier = solve_columns(factor, earlier, tuple(range(j, j + 1) for j in range(start)))
        own = factorise(own - jnp.sum(earlier[:, :, None] * earlier[:, None, :], axis=0), floor)
        below = jnp.zeros((width, start, POINTS, SAMPLES))
        factor = jnp.concatenate([jnp.concatenate([factor, earlier], 1), jnp.concatenate([below, own], 1)])
        start += width
    return factor


@pytest.mark.parametrize("widths", [(1,), (4,), (1, 1), (2, 3), (3, 1, 2), (1, 1, 1, 1)])
def test_factor_and_gradient_match_lapack(widths):
    size = sum(widths)
    S = matrices(size)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(S.shape))

    def symmetric(S):
        return 0.5 * (S + jnp.swapaxes(S, -1, -2))

    def ours(S):
        return jnp.sum(gps_first(weights) * layer_by_layer(symmetric(S), widths))

    def lapack(S):
        return jnp.sum(jnp.tril(weights) * jnp.linalg.cholesky(symmetric(S)))

    np.testing.assert_allclose(layer_by_layer(S, widths), gps_first(jnp.linalg.cholesky(S)), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(jax.grad(ours)(S), jax.grad(lapack)(S), rtol=1e-9, atol=1e-10)


def test_only_one_half_of_the_matrix_is_read():
    S = gps_first(matrices(3))
    upper = jnp.triu(jnp.ones((3, 3)))[..., None, None]
    floor = jnp.full((POINTS, SAMPLES), 1e-12)
    np.testing.assert_array_equal(factorise(S, floor), factorise(jnp.where(upper > 0, S, 7.0), floor))


def test_a_pivot_below_the_floor_is_raised_and_has_no_gradient():
    S = jnp.broadcast_to(jnp.asarray([[1.0, 0.5], [0.5, 0.25 - 1e-3]]), (POINTS, SAMPLES, 2, 2))  # indefinite
    floor = 0.04

    def last_pivot(S):
        return jnp.sum(factorise(gps_first(S), jnp.full((POINTS, SAMPLES), floor))[1, 1])

    np.testing.assert_allclose(last_pivot(S), 0.2 * POINTS * SAMPLES)
    np.testing.assert_array_equal(jax.grad(last_pivot)(S), 0.0)
    healthy = S.at[..., 1, 1].set(1.0)
    assert (jax.grad(last_pivot)(healthy)[..., 1, 1] > 0.0).all()
