"""The dense reference against independent routes to the same numbers: sampling, special cases, and closed forms."""

from dataclasses import replace
from functools import cache

import dense
import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from sklearn.gaussian_process.kernels import RBF

Array = NDArray[np.float64]
X = np.array([[0.2], [-1.0]])


def rng_of(seed: int) -> Generator:
    return np.random.default_rng(seed)


def only_diagonal_blocks(matrix: Array, M: int) -> Array:
    return matrix * np.kron(np.eye(len(matrix) // M), np.ones((M, M)))


def test_the_kernel_is_that_of_scikit_learn() -> None:
    rng = rng_of(0)
    a, b, lengthscale = rng.standard_normal((4, 3)), rng.standard_normal((5, 3)), np.array([0.5, 1.0, 2.0])
    np.testing.assert_allclose(dense.rbf(a, b, lengthscale, 0.7), 0.7 * RBF(lengthscale)(a, b), rtol=1e-13)


# --- Theorem 1 against sampling without any marginalisation ---------------------------------------


def slope_follows_level(seed: int, widths: tuple[int, ...], M: int) -> dense.DenseDGP:
    """A model whose coupling matters: the slope of a GP is correlated with the level of each GP in the layers below.

    Roughly f(h) = a h with cov(a, h) = c > 0, so E[f] = c, where a posterior without the correlation has E[f] = 0.
    """
    dgp = dense.random_dgp(rng_of(seed), 1, widths, M, dense.fully_coupled(widths), scale=0.3)
    L = [np.linalg.cholesky(dense.cov_inducing(layer, dgp.jitter)) for layer in dgp.layers]
    slope = [np.linalg.solve(L_K, layer.Z.sum(axis=1)) for L_K, layer in zip(L, dgp.layers, strict=True)]
    level = [np.linalg.solve(L_K, np.ones(M)) for L_K in L]
    factor, labels = dgp.factor.copy(), dense.gp_labels(widths)
    for i, (layer_i, _) in enumerate(labels):
        for k, (layer_k, _) in enumerate(labels):
            if layer_k < layer_i:
                direction = np.outer(slope[layer_i], level[layer_k])
                dense.block(factor, i, k, M)[...] += 1.5 * direction / np.linalg.norm(direction)
    return replace(dgp, mean=0.3 * dgp.mean, factor=factor)


def moments(hidden: list[Array], mean: Array, cov: Array, centre: Array) -> Array:
    """Per draw, unbiased: first moments and second moments about `centre` of the values of all layers, (R, n, T + T²).

    The outputs enter through their conditional moments; pass cov = 0 for sampled outputs.
    """
    values = np.concatenate([*hidden, mean], axis=-1) - centre
    second = values[..., :, None] * values[..., None, :]
    P = mean.shape[-1]
    second[..., -P:, -P:] += cov
    return np.concatenate([values, second.reshape(*second.shape[:2], -1)], axis=-1)


def z_scores(a: Array, b: Array) -> Array:
    """Difference of two Monte-Carlo averages over the first axis, in standard errors."""
    error = np.sqrt(a.var(axis=0) / len(a) + b.var(axis=0) / len(b))
    return (a.mean(axis=0) - b.mean(axis=0)) / error


@cache
def coupled_dgp(name: str) -> dense.DenseDGP:
    if name == "slope follows level":
        return slope_follows_level(4, (2, 2, 1), 5)
    rng, M = rng_of(7), 3
    if name == "star, two outputs":
        widths = (2, 1, 2)
        has_mean = (True, False, True)
        return dense.random_dgp(rng, 1, widths, M, dense.stripes_and_arrow(widths), scale=1.0, has_mean=has_mean)
    widths = (1, 2, 1)
    dgp = dense.random_dgp(rng, 1, widths, M, dense.random_order(rng, widths, 0.5), scale=1.0)
    return replace(dgp, factor=dense.chain_factor(rng, widths, M)) if name == "chain" else dgp


@cache
def sampled(name: str) -> tuple[Array, list[Array]]:
    return dense.sample_outputs(coupled_dgp(name), X, 100_000, rng_of(1))


def largest_z(name: str, dgp: dense.DenseDGP) -> tuple[float, float]:
    """Largest |z| of the moments of Theorem 1 for `dgp` against samples of the named model.

    First of the outputs alone (mean and total covariance), then of all layers together (products across layers too).
    """
    outputs, hidden = sampled(name)
    P = outputs.shape[-1]
    theorem = dense.propagate(dgp, X, rng_of(2).standard_normal((2500, len(X), sum(dgp.widths[:-1]))))
    centre = np.concatenate([*hidden, outputs], axis=-1).mean(axis=0)
    no_cov = np.zeros((P, P))
    of_outputs = z_scores(
        moments([], theorem.mean, theorem.cov, centre[:, -P:]), moments([], outputs, no_cov, centre[:, -P:])
    )
    of_all = z_scores(moments(*theorem, centre), moments(hidden, outputs, no_cov, centre))
    return float(np.abs(of_outputs).max()), float(np.abs(of_all).max())


@pytest.mark.parametrize("name", ["slope follows level", "star, two outputs", "random order", "chain"])
def test_theorem_1_agrees_with_sampling(name: str) -> None:
    of_outputs, of_all = largest_z(name, coupled_dgp(name))
    assert of_outputs < 5
    assert of_all < 5


@pytest.mark.parametrize("keep_marginals", [False, True])
def test_the_comparison_notices_a_wrong_coupling(keep_marginals: bool) -> None:
    """Without its off-diagonal blocks, or with every GP's own covariance right and only the correlations missing."""
    name = "slope follows level"
    dgp = coupled_dgp(name)
    factor = only_diagonal_blocks(dgp.factor, dgp.n_inducing)
    if keep_marginals:
        factor = np.linalg.cholesky(only_diagonal_blocks(dgp.factor @ dgp.factor.T, dgp.n_inducing))
    of_outputs, of_all = largest_z(name, replace(dgp, factor=factor))
    assert of_outputs > 15
    assert of_all > 30


# --- Theorem 1 against other exact forms ----------------------------------------------------------


@pytest.mark.parametrize("has_mean", [(True, True, False), (False, False, False), (True, False, True)])
def test_mean_field_is_the_paper_s_special_case(has_mean: tuple[bool, ...]) -> None:
    """Per GP: mu~ = K~_nM mu_M, Sigma~ = K_nn - K~_nM (K_MM - S_M) K~_Mn, no word about other GPs."""
    rng, widths, M = rng_of(3), (3, 2, 2), 4
    dgp = dense.random_dgp(rng, 2, widths, M, dense.mean_field(widths), has_mean=has_mean)
    x, eps = rng.standard_normal((3, 2)), rng.standard_normal((2, 3, 5))
    out = dense.propagate(dgp, x, eps)
    inputs = [np.broadcast_to(x, (2, 3, 2)), *out.hidden]

    gp = 0
    for j, (layer, h) in enumerate(zip(dgp.layers, inputs, strict=True)):
        K_MM = dense.cov_inducing(layer, dgp.jitter)
        L_K = np.linalg.cholesky(K_MM)
        for t in range(layer.width):
            C = dense.block(dgp.factor, gp, gp, M)
            mu_M, S_M = L_K @ dgp.mean[gp], L_K @ C @ C.T @ L_K.T
            for r, n in np.ndindex(2, 3):
                Kt_nM = dense.cross_cov(layer, h[r, n][None])[0] @ np.linalg.inv(K_MM)
                shift = 0.0 if layer.W is None else h[r, n] @ layer.W[:, t]
                mean = Kt_nM @ mu_M + shift
                var = layer.variance - Kt_nM @ (K_MM - S_M) @ Kt_nM
                if j == 2:
                    expected_row = np.where(np.arange(layer.width) == t, var, 0.0)
                    np.testing.assert_allclose(out.mean[r, n, t], mean, rtol=1e-8)
                    np.testing.assert_allclose(out.cov[r, n, t], expected_row, rtol=1e-8, atol=1e-10)
                else:
                    handed_on = inputs[j + 1][r, n, t]
                    np.testing.assert_allclose(handed_on, mean + np.sqrt(var) * eps[r, n, gp], rtol=1e-8)
            gp += 1


@pytest.mark.parametrize("name", [*dense.patterns, "random order", "chain"])
def test_layerwise_conditioning_is_one_cholesky_factor(name: str) -> None:
    """In whitened variables, f = mu~ + c eps with c cᵀ = S~ over all GPs: no conditioning and no K_MM⁻¹ anywhere."""
    rng, widths, M = rng_of(4), (3, 3, 2, 2), 6
    order = dense.random_order(rng, widths) if name in ("random order", "chain") else dense.patterns[name](widths)
    dgp = dense.random_dgp(rng, 2, widths, M, order, has_mean=(True, False, True, True))
    if name == "chain":
        dgp = replace(dgp, factor=dense.chain_factor(rng, widths, M))
    T, P = sum(widths), widths[-1]
    x, eps = rng.standard_normal((3, 2)), rng.standard_normal((2, 3, T - P))
    out = dense.propagate(dgp, x, eps)
    S = dgp.factor @ dgp.factor.T

    for r, n in np.ndindex(2, 3):
        inputs = [x[n], *(h[r, n] for h in out.hidden)]
        A, K_nn, shift = np.zeros((T, T * M)), np.zeros(T), np.zeros(T)
        for gp, (layer_index, t) in enumerate(dense.gp_labels(widths)):
            layer, h = dgp.layers[layer_index], inputs[layer_index]
            L_K = np.linalg.cholesky(dense.cov_inducing(layer, dgp.jitter))
            A[gp, gp * M : (gp + 1) * M] = np.linalg.solve(L_K, dense.cross_cov(layer, h[None])[0])
            K_nn[gp] = layer.variance
            shift[gp] = 0.0 if layer.W is None else h @ layer.W[:, t]
        c = np.linalg.cholesky(np.diag(K_nn) - A @ A.T + A @ S @ A.T)
        values = A @ dgp.mean.ravel() + shift + c[:, : T - P] @ eps[r, n]
        np.testing.assert_allclose(np.concatenate([*inputs[1:], out.mean[r, n]]), values, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(out.cov[r, n], c[T - P :, T - P :] @ c[T - P :, T - P :].T, rtol=1e-8, atol=1e-9)


# --- KL and ELBO ----------------------------------------------------------------------------------


def test_kl_is_the_mean_log_ratio() -> None:
    rng, widths, M = rng_of(5), (2, 1), 3
    dgp = dense.random_dgp(rng, 2, widths, M, dense.fully_coupled(widths), scale=0.8)
    mu_M, S_M, prior = dense.unwhiten(dgp)
    q, p = multivariate_normal(mu_M, S_M), multivariate_normal(np.zeros_like(mu_M), prior)
    f_M = mu_M + rng.standard_normal((100_000, len(mu_M))) @ np.linalg.cholesky(S_M).T
    log_ratio = q.logpdf(f_M) - p.logpdf(f_M)
    standard_error = log_ratio.std() / np.sqrt(len(log_ratio))
    assert abs(log_ratio.mean() - dense.kl(dgp)) < 5 * standard_error
    assert dense.kl(dgp) > 100 * standard_error


def test_kl_in_whitened_variables() -> None:
    """½ (|m|² + |C|² - TM) - Σ log |diag C|, and zero for the prior."""
    rng, widths, M = rng_of(6), (2, 2, 1), 5
    dgp = dense.random_dgp(rng, 2, widths, M, dense.fully_coupled(widths))
    m, C = dgp.mean, dgp.factor
    expected = 0.5 * (np.sum(m**2) + np.sum(C**2) - len(C)) - np.sum(np.log(np.diag(C)))
    np.testing.assert_allclose(dense.kl(dgp), expected, rtol=1e-8)
    np.testing.assert_allclose(dense.kl(replace(dgp, mean=0 * m, factor=np.eye(len(C)))), 0.0, atol=1e-8)


def test_expected_log_likelihood_by_quadrature() -> None:
    """Gauss-Hermite with three nodes is exact for the quadratic log density."""
    rng = rng_of(8)
    y, mean, noise = rng.standard_normal((4, 2)), rng.standard_normal((4, 2)), np.array([0.1, 2.0])
    root = rng.standard_normal((4, 2, 2))
    cov = root @ root.transpose(0, 2, 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    expected = np.zeros(4)
    for n, p in np.ndindex(4, 2):
        f = mean[n, p] + np.sqrt(cov[n, p, p]) * nodes
        log_lik = multivariate_normal(y[n, p], noise[p]).logpdf(f)
        expected[n] += weights @ log_lik / weights.sum()
    np.testing.assert_allclose(dense.expected_log_lik(y, mean, cov, noise), expected, rtol=1e-12)


def test_elbo_averages_draws_and_scales_the_batch() -> None:
    rng, widths = rng_of(9), (2, 2, 2)
    dgp = dense.random_dgp(rng, 2, widths, 4, dense.stripes_and_arrow(widths), noise=(0.1, 0.5))
    x, y, eps = rng.standard_normal((3, 2)), rng.standard_normal((3, 2)), rng.standard_normal((2, 3, 4))
    per_draw = [dense.elbo(dgp, x, y, eps[r : r + 1], n_data=3) for r in range(2)]
    np.testing.assert_allclose(dense.elbo(dgp, x, y, eps, n_data=3), np.mean(per_draw), rtol=1e-12)
    data_term = dense.elbo(dgp, x, y, eps, n_data=3) + dense.kl(dgp)
    np.testing.assert_allclose(dense.elbo(dgp, x, y, eps, n_data=12), 4 * data_term - dense.kl(dgp), rtol=1e-12)


# --- One layer ------------------------------------------------------------------------------------


def one_layer(
    rng: Generator, Z: Array, x: Array, y: Array, noise: Array, with_mean: bool, jitter: float
) -> dense.DenseDGP:
    """A one-layer model with the best posterior for its inducing inputs."""
    d_in, P = x.shape[1], y.shape[1]
    W = dense.random_projection(rng, d_in, P) if with_mean else None
    layer = dense.DenseLayer(Z=Z, W=W, lengthscale=np.array([0.8, 1.2]), variance=1.3, width=P)
    return dense.DenseDGP((layer,), *dense.optimal_posterior(layer, x, y, noise, jitter), noise, jitter)


@pytest.mark.parametrize("with_mean", [False, True])
def test_one_layer_is_a_sparse_gp(with_mean: bool) -> None:
    rng = rng_of(10)
    x, y, noise = rng.standard_normal((6, 2)), rng.standard_normal((6, 2)), np.array([0.1, 0.4])
    best = one_layer(rng, rng.standard_normal((4, 2)), x, y, noise, with_mean, 1e-6)
    no_eps = np.empty((1, 6, 0))
    np.testing.assert_allclose(
        dense.elbo(best, x, y, no_eps, n_data=6), dense.collapsed_bound(best.layers[0], x, y, noise), rtol=1e-8
    )
    other = replace(best, mean=rng.standard_normal((2, 4)), factor=dense.random_factor(rng, dense.mean_field((2,)), 4))
    for dgp in (best, other):
        for n_data in (6, 30):
            np.testing.assert_allclose(
                dense.elbo(dgp, x, y, no_eps, n_data), dense.svgp_elbo(dgp, x, y, n_data), rtol=1e-8
            )
    assert dense.elbo(other, x, y, no_eps, n_data=6) < dense.elbo(best, x, y, no_eps, n_data=6)


def test_with_inducing_points_at_the_data_the_bound_is_the_log_evidence() -> None:
    rng = rng_of(11)
    x, y, noise = 2 * rng.standard_normal((7, 2)), rng.standard_normal((7, 2)), np.array([0.1, 0.4])
    log_evidence = dense.exact_gp_log_evidence(np.array([0.8, 1.2]), 1.3, x, y, noise)
    for jitter, rtol in ((0.0, 1e-9), (1e-6, 1e-4)):
        dgp = one_layer(rng, x, x, y, noise, with_mean=False, jitter=jitter)
        np.testing.assert_allclose(dense.elbo(dgp, x, y, np.empty((1, 7, 0)), n_data=7), log_evidence, rtol=rtol)


# --- Couplings and factors ------------------------------------------------------------------------


def test_patterns_written_out() -> None:
    """Widths (2, 1, 1): hidden GPs 0, 1 | 2, output GP 3."""
    expected = {
        "mf": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        "stripes": [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        "arrow": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]],
        "star": [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]],
        "fc": [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    }
    assert expected.keys() == dense.patterns.keys()
    for name, pattern in dense.patterns.items():
        np.testing.assert_array_equal(pattern((2, 1, 1)), np.array(expected[name], dtype=bool), err_msg=name)


@pytest.mark.parametrize("widths", [(1,), (2, 2), (3, 1, 2), (2, 3, 3, 1), (2, 2, 2, 2, 1)])
def test_patterns_are_strict_orders_along_the_flat_index(widths: tuple[int, ...]) -> None:
    candidates = {name: pattern(widths) for name, pattern in dense.patterns.items()}
    candidates |= {f"random {seed}": dense.random_order(rng_of(seed), widths) for seed in range(5)}
    for name, pattern in candidates.items():
        assert not np.any(np.triu(pattern)), name
        np.testing.assert_array_equal(dense.transitive_closure(pattern), pattern, err_msg=name)


def test_transitive_closure_follows_a_chain() -> None:
    chain = np.eye(5, k=-1).astype(bool)
    np.testing.assert_array_equal(dense.transitive_closure(chain), np.tri(5, k=-1).astype(bool))


def test_a_random_factor_has_its_pattern_and_so_does_its_inverse() -> None:
    rng, widths, M = rng_of(12), (2, 3, 1), 3
    pattern = dense.random_order(rng, widths)
    C = dense.random_factor(rng, pattern, M)
    assert np.linalg.cond(C) < 50
    for matrix in (C, np.linalg.inv(C)):
        assert not np.any(np.triu(matrix, 1))
        for i, k in np.ndindex(6, 6):
            if i != k:
                assert np.any(np.abs(dense.block(matrix, i, k, M)) > 1e-12) == pattern[i, k]


def test_a_chain_is_markov_over_layers() -> None:
    widths, M = (2, 1, 3, 1), 3
    C = dense.chain_factor(rng_of(13), widths, M)
    assert np.linalg.cond(C) < 50
    assert not np.any(np.triu(C, 1))
    precision = np.linalg.inv(C @ C.T)
    for i, (layer_i, _) in enumerate(dense.gp_labels(widths)):
        for k, (layer_k, _) in enumerate(dense.gp_labels(widths)):
            largest = np.abs(dense.block(precision, i, k, M)).max()
            assert (largest > 1e-3) if abs(layer_i - layer_k) <= 1 else (largest < 1e-12)
