"""The factorisation of kernel matrices: values, derivatives, and what happens when it fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import dense
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from structured_dgp import RBF, DeepGP, Gaussian, Layer, Posterior
from structured_dgp.exceptions import CholeskyError, NumericalError
from structured_dgp.kernels import Kernel
from structured_dgp.linalg import (
    ESCALATIONS,
    PANEL,
    eliminate,
    jittered_cholesky,
    jittered_factors,
    lower_half,
    whitener,
)
from structured_dgp.precision import Precision

M = 5

Cholesky = Callable[[Array, float], tuple[Array, Array]]

lapack, compiled_whitener, compiled_elimination = jittered_cholesky, jax.jit(whitener), eliminate


@jax.jit
def elimination(K: Array, jitter: float) -> tuple[Array, Array]:
    (L, _), used = jittered_factors(K, jitter)
    return L, used


@pytest.fixture(params=[lapack, elimination], ids=["lapack", "elimination"])
def cholesky(request: pytest.FixtureRequest) -> Cholesky:
    """Both ways to a Cholesky factor with as much jitter as it needs."""
    way: Cholesky = request.param
    return way


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_matrix(seed: int, lowest: float = 0.3) -> NDArray[np.float64]:
    """Symmetric, of mean diagonal near 1, with `lowest` as its smallest eigenvalue."""
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.standard_normal((M, M)))[0]
    return (Q * np.array([lowest, 0.6, 0.8, 1.2, 1.9])) @ Q.T


def plain_whitener(K: Array, jitter: float) -> Array:
    return jnp.linalg.inv(jnp.linalg.cholesky(K + jitter * jnp.eye(M)))


# --- Values and derivatives -----------------------------------------------------------------------


def test_lower_half_splits_a_symmetric_matrix() -> None:
    a = random_matrix(0)
    a = a + a.T
    half = np.asarray(lower_half(jnp.asarray(a)))
    assert not np.any(np.triu(half, 1))
    np.testing.assert_allclose(half + half.T, a, rtol=1e-15)


@pytest.mark.parametrize("jitter", [0.0, 1e-6, 0.1])
def test_the_whitener_is_the_inverse_of_the_cholesky_factor(jitter: float) -> None:
    K = random_matrix(1)
    expected = np.linalg.inv(np.linalg.cholesky(K + jitter * np.eye(M)))
    W = compiled_whitener(jnp.asarray(K), jitter)
    assert not np.any(np.triu(W, 1))
    np.testing.assert_allclose(W, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL + 5])
def test_elimination_gives_the_factor_and_its_inverse(size: int) -> None:
    rng = np.random.default_rng(size)
    root = rng.standard_normal((size, size + 3))
    K = root @ root.T / size + 0.1 * np.eye(size)
    L, W = compiled_elimination(jnp.asarray(K))
    assert not np.any(np.triu(L, 1))
    assert not np.any(np.triu(W, 1))
    np.testing.assert_allclose(L, np.linalg.cholesky(K), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(W, np.linalg.inv(np.linalg.cholesky(K)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("place", [0, PANEL - 1, PANEL + 2])
def test_elimination_of_an_indefinite_matrix_ends_in_nan(place: int) -> None:
    K = np.eye(PANEL + 3)
    K[place, place] = -1.0
    L, W = compiled_elimination(jnp.asarray(K))
    assert np.isnan(L[-1, -1])
    assert np.isnan(W).any()


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_its_derivative_is_that_of_a_plain_factorisation(jitter: float) -> None:
    K, G = jnp.asarray(random_matrix(2)), np.random.default_rng(3).standard_normal((M, M))
    value, gradient = jax.value_and_grad(lambda K: jnp.sum(G * whitener(K, jitter)))(K)
    plain_value, plain_gradient = jax.value_and_grad(lambda K: jnp.sum(G * plain_whitener(K, jitter)))(K)
    np.testing.assert_allclose(value, plain_value, rtol=1e-12)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-11, atol=1e-12)


def test_its_derivatives_are_those_of_finite_differences() -> None:
    """First and second, along one symmetric direction."""
    rng, step = np.random.default_rng(4), 1e-4
    K, G, direction = random_matrix(4), rng.standard_normal((M, M)), random_matrix(5)

    @jax.jit
    def derivatives(size: float) -> tuple[Array, Array, Array]:
        def value(size: Array) -> Array:
            return jnp.sum(G * whitener(K + size * direction, 1e-6))

        slope = jax.grad(value)
        return value(size), slope(size), jax.grad(slope)(size)

    (low, low_slope, _), (_, slope, curvature), (high, high_slope, _) = map(derivatives, (-step, 0.0, step))
    np.testing.assert_allclose(slope, (high - low) / (2 * step), rtol=1e-6)
    np.testing.assert_allclose(curvature, (high_slope - low_slope) / (2 * step), rtol=1e-6)


# --- Escalation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowest", "expected"), [(0.3, 1e-6), (-3e-7, 1e-6), (-3e-6, 1e-5), (-3e-4, 1e-3), (-3e-3, 1e-2)]
)
def test_the_jitter_grows_until_it_is_enough_and_no_further(cholesky: Cholesky, lowest: float, expected: float) -> None:
    K = random_matrix(6, lowest)
    L, used = cholesky(jnp.asarray(K), 1e-6)
    np.testing.assert_allclose(used, expected, rtol=1e-12)
    np.testing.assert_allclose(L @ L.T, K + expected * np.eye(M), rtol=1e-10, atol=1e-12)


def test_the_jitter_grows_with_the_matrix(cholesky: Cholesky) -> None:
    """From the second attempt on: the first adds exactly what was asked for."""
    K = 100.0 * random_matrix(6)
    np.testing.assert_allclose(cholesky(jnp.asarray(K), 1e-6)[1], 1e-6, rtol=1e-12)
    K = 100.0 * random_matrix(6, -3e-4)
    expected = 1e-6 * np.mean(np.diag(K)) * 1e3
    np.testing.assert_allclose(cholesky(jnp.asarray(K), 1e-6)[1], expected, rtol=1e-12)


@pytest.mark.parametrize("jitter", [0.0, 1e-16, 1e-12])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_duplicate_points_are_cured_by_a_small_jitter(cholesky: Cholesky, jitter: float, dtype: type) -> None:
    K = np.ones((M, M), dtype)
    L, used = cholesky(jnp.asarray(K), jitter)
    eps = np.finfo(dtype).eps
    assert L.dtype == used.dtype == dtype
    assert max(jitter, eps) <= used <= max(jitter, eps) * 10**ESCALATIONS
    np.testing.assert_allclose(L @ L.T, K + used * np.eye(M, dtype=dtype), rtol=4 * eps)


def test_only_the_failing_matrix_gets_more_jitter() -> None:
    healthy, failing = random_matrix(7), random_matrix(8, -3e-5)
    L, used = jax.vmap(lambda K: jittered_cholesky(K, 1e-6))(jnp.stack([healthy, failing]))
    np.testing.assert_allclose(used, [1e-6, 1e-4 * max(1.0, np.mean(np.diag(failing)))], rtol=1e-12)
    np.testing.assert_allclose(L[0], np.linalg.cholesky(healthy + 1e-6 * np.eye(M)), rtol=1e-12, atol=1e-14)


def test_the_derivative_after_an_escalation_takes_the_jitter_as_given(cholesky: Cholesky) -> None:
    K, G = random_matrix(9, -3e-4), np.random.default_rng(9).standard_normal((M, M))
    used = float(cholesky(jnp.asarray(K), 1e-6)[1])
    gradient = jax.grad(lambda K: jnp.sum(G * whitener(K, 1e-6)))(jnp.asarray(K))
    expected = jax.grad(lambda K: jnp.sum(G * plain_whitener(K, used)))(jnp.asarray(K))
    np.testing.assert_allclose(gradient, expected, rtol=1e-8)


@pytest.mark.parametrize("place", [(0, 0), (3, 1), (4, 4)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_come_back_as_nan(cholesky: Cholesky, place: tuple[int, int], value: float) -> None:
    K = random_matrix(10)
    K[place] = K[place[::-1]] = value
    L, used = cholesky(jnp.asarray(K), 1e-6)
    assert np.isnan(L[-1, -1])
    if place[0] == place[1]:
        assert used == 1e-6  # the diagonal shows that no jitter will help
    assert np.isnan(compiled_whitener(jnp.asarray(K), 1e-6)).any()


def test_a_hopeless_matrix_comes_back_as_nan_after_the_last_attempt(cholesky: Cholesky) -> None:
    L, used = cholesky(jnp.asarray(random_matrix(11, -0.2)), 1e-6)
    assert np.isnan(L[-1, -1])
    np.testing.assert_allclose(used, 1e-6 * 10.0**ESCALATIONS, rtol=1e-12)


# --- In a model -----------------------------------------------------------------------------------


class Affine(Kernel):
    """x · z + offset: a covariance function only if the offset is not negative."""

    offset: Array

    def cross(self, x: Array, z: Array) -> Array:
        return x @ z.T + self.offset

    def gram(self, z: Array) -> Array:
        return self.cross(z, z)

    def diagonal(self, x: Array) -> Array:
        return jnp.sum(x * x, axis=1) + self.offset


WIDTHS, RNG = (1, 1), np.random.default_rng(12)
REFERENCE = dense.random_dgp(RNG, 2, WIDTHS, M, dense.fully_coupled(WIDTHS))
X, Y, EPS = RNG.standard_normal((4, 2)), RNG.standard_normal((4, 1)), RNG.standard_normal((3, 4, 1))


def model_of(
    reference: dense.DenseDGP = REFERENCE,
    output_kernel: Kernel | None = None,
    jitter: float = 1e-6,
    precision: Precision = "float64",
) -> DeepGP:
    kernels = [RBF(layer.lengthscale, layer.variance) for layer in reference.layers]
    if output_kernel is not None:
        kernels[-1] = output_kernel
    return DeepGP(
        [Layer(kernel, layer.Z, layer.W) for kernel, layer in zip(kernels, reference.layers, strict=True)],
        Posterior.from_dense("fc", WIDTHS, reference.mean, reference.factor),
        Gaussian(reference.noise),
        jitter,
        precision,
    )


def with_duplicates(layer: dense.DenseLayer) -> dense.DenseLayer:
    Z = layer.Z.copy()
    Z[1] = Z[3] = Z[0]
    return replace(layer, Z=Z)


def test_a_healthy_model_has_nothing_to_diagnose() -> None:
    model = model_of()
    model.diagnose()
    np.testing.assert_allclose(model.elbo(X, Y, eps=EPS), dense.elbo(REFERENCE, X, Y, EPS, 4), rtol=1e-9)


def test_duplicate_inducing_points_change_nothing_but_the_conditioning() -> None:
    reference = replace(REFERENCE, layers=tuple(map(with_duplicates, REFERENCE.layers)))
    value = model_of(reference).elbo(X, Y, eps=EPS)
    np.testing.assert_allclose(value, dense.elbo(reference, X, Y, EPS, 4), rtol=1e-6)


@pytest.mark.parametrize(("jitter", "precision"), [(1e-6, "float32"), (0.0, "mixed")])
def test_duplicate_inducing_points_give_a_finite_elbo(jitter: float, precision: Precision) -> None:
    """Only the layer with duplicates gets more jitter: the values stay close to those of a common small jitter."""
    reference = replace(REFERENCE, layers=(REFERENCE.layers[0], with_duplicates(REFERENCE.layers[1])))
    value = model_of(reference, jitter=jitter, precision=precision).elbo(X, Y, eps=EPS)
    np.testing.assert_allclose(value, dense.elbo(reference, X, Y, EPS, 4), rtol=2e-2)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_parameter_that_is_nan_is_named(layer: int) -> None:
    broken = eqx.tree_at(lambda m: m.layers[layer].kernel._lengthscale.raw, model_of(), replace_fn=lambda a: a * np.nan)
    for use in (broken.diagnose, lambda: broken.elbo(X, Y, eps=EPS)):
        with pytest.raises(NumericalError, match=rf"layer {layer}: parameter .*lengthscale.* is NaN") as caught:
            use()
        assert not isinstance(caught.value, CholeskyError)


def test_a_posterior_that_is_nan_is_named() -> None:
    broken = eqx.tree_at(lambda m: m.posterior.mean, model_of(), replace_fn=lambda a: a * np.nan)
    with pytest.raises(NumericalError, match=r"Posterior\.mean is NaN"):
        broken.elbo(X, Y, eps=EPS)


def test_a_kernel_matrix_that_overflows_is_told_apart() -> None:
    model = model_of(output_kernel=Affine(jnp.asarray(1.0)))
    assert np.isfinite(model.elbo(X, Y, eps=EPS))
    broken = eqx.tree_at(lambda m: m.layers[1].inducing, model, replace_fn=lambda a: a * 1e200)
    for use in (broken.diagnose, lambda: broken.elbo(X, Y, eps=EPS)):
        with pytest.raises(NumericalError, match="layer 1: its kernel matrix has NaN or infinite entries") as caught:
            use()
        assert not isinstance(caught.value, CholeskyError)


def test_an_indefinite_kernel_is_told_apart() -> None:
    broken, Z = model_of(output_kernel=Affine(jnp.asarray(-1.0))), REFERENCE.layers[1].Z
    assert np.linalg.eigvalsh(Z @ Z.T - 1.0).min() < -0.1
    for use in (broken.diagnose, lambda: broken.elbo(X, Y, eps=EPS)):
        with pytest.raises(CholeskyError, match="layer 1: its kernel matrix is not positive definite even with"):
            use()


def test_values_that_overflow_on_the_way_are_told_apart() -> None:
    with pytest.raises(NumericalError, match="not finite although every parameter is"):
        model_of(output_kernel=Affine(jnp.asarray(1.0))).elbo(1e200 * X, Y, eps=EPS)
