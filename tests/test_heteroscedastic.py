"""Noise that depends on the inputs: two outputs for each target."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from structured_dgp import DeepGPRegressor, initial_model
from structured_dgp.exceptions import InputError
from structured_dgp.likelihoods import Bernoulli, Gaussian, Heteroscedastic


def moments(R: int, n: int, P: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of f and g, all of whose entries depend on each other."""
    rng = np.random.default_rng(seed)
    root = 0.5 * rng.standard_normal((R, n, 2 * P, 2 * P))
    return 0.7 * rng.standard_normal((R, n, 2 * P)), root @ np.swapaxes(root, -1, -2) + 0.05 * np.eye(2 * P)


def test_the_expectation_is_that_of_a_quadrature() -> None:
    R, n, P = 2, 3, 2
    mean, cov = moments(R, n, P)
    y, variance = np.random.default_rng(1).standard_normal((n, P)), np.array([0.3, 0.8])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    expected = np.zeros((R, n))
    for r, i, p in np.ndindex(R, n, P):
        pair = [p, P + p]
        L = np.linalg.cholesky(cov[r, i][np.ix_(pair, pair)])
        f = mean[r, i, p] + L[0, 0] * nodes[:, None]
        g = mean[r, i, P + p] + L[1, 0] * nodes[:, None] + L[1, 1] * nodes[None]
        log_p = stats.norm.logpdf(y[i, p], f, np.sqrt(variance[p] * np.exp(g)))
        expected[r, i] += weights @ log_p @ weights
    with jax.enable_x64(True):
        found = Heteroscedastic(variance).expected_log_prob(*map(jnp.asarray, (y, mean, cov)))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_predictions_are_those_of_a_simulation() -> None:
    mean, cov = moments(40, 3, 1, seed=2)
    prediction = Heteroscedastic(0.4).predictive(mean, cov)
    rng = np.random.default_rng(3)
    for row in range(3):
        fg = np.concatenate([rng.multivariate_normal(mean[r, row], cov[r, row], 20_000) for r in range(40)])
        y = fg[:, 0] + np.sqrt(0.4 * np.exp(fg[:, 1])) * rng.standard_normal(len(fg))
        assert prediction.mean[row, 0] == pytest.approx(y.mean(), abs=0.05)
        assert prediction.std[row, 0] == pytest.approx(y.std(), rel=0.05)
        places = np.quantile(y, [0.05, 0.25, 0.5, 0.75, 0.95])
        levels = [float(prediction.cdf(np.full((3, 1), place))[row, 0]) for place in places]
        np.testing.assert_allclose(levels, [0.05, 0.25, 0.5, 0.75, 0.95], atol=0.02)


def test_a_single_draw_has_many_values_of_the_noise() -> None:
    mean, cov = np.zeros((1, 1, 2)), np.diag([0.0, 1.5**2])[None, None]
    prediction = Heteroscedastic(1.0).predictive(mean, cov)
    g = 1.5 * np.random.default_rng(0).standard_normal(400_000)
    for place in (0.5, 2.0, 6.0):
        expected = np.mean(stats.norm.cdf(place / np.exp(0.5 * g)))
        assert float(prediction.cdf(np.array([[place]]))[0, 0]) == pytest.approx(expected, abs=0.005)


def test_noise_that_is_known_is_gaussian() -> None:
    mean, cov = moments(2, 3, 1)
    mean[..., 1], cov[..., 1, :], cov[..., :, 1] = np.log(2.0), 0.0, 0.0
    y = np.ones((3, 1))
    one, other = Heteroscedastic(0.1), Gaussian(0.2)
    with jax.enable_x64(True):
        same = [
            one.expected_log_prob(*map(jnp.asarray, (y, mean, cov))),
            other.expected_log_prob(*map(jnp.asarray, (y, mean[..., :1], cov[..., :1, :1]))),
        ]
    np.testing.assert_allclose(*same, rtol=1e-12)
    np.testing.assert_allclose(
        one.predictive(mean, cov).log_prob(y), other.predictive(mean[..., :1], cov[..., :1, :1]).log_prob(y), rtol=1e-12
    )
    np.testing.assert_allclose(one.noise_variance(mean, cov), 0.2, rtol=1e-6)


def test_samples_given_f_have_the_noise_of_their_place() -> None:
    f = jnp.asarray(np.broadcast_to([1.0, -2.0, np.log(4.0), 0.0], (200_000, 4)))
    y = np.asarray(Heteroscedastic(0.25).sample(jax.random.key(0), f))
    np.testing.assert_allclose(y.mean(axis=0), [1.0, -2.0], atol=0.01)
    np.testing.assert_allclose(y.std(axis=0), [1.0, 0.5], rtol=0.01)


def test_what_does_not_fit_is_refused() -> None:
    x = np.random.default_rng(0).standard_normal((10, 1))
    with pytest.raises(InputError, match="two for each target"):
        initial_model(x, "mf", (1,), 4, likelihood=Heteroscedastic())
    model = initial_model(x, "mf", (2,), 4, likelihood=Heteroscedastic())
    assert model.n_targets == 1
    with pytest.raises(InputError, match="y has 2 columns"):
        model.elbo(x, np.zeros((10, 2)))
    with pytest.raises(InputError, match="no covariance over rows"):
        Bernoulli().noise_variance(*moments(1, 1, 1))


@pytest.fixture(scope="module")
def fitted() -> DeepGPRegressor:
    options = {"n_layers": 2, "width": 1, "n_inducing": 12, "max_steps": 300, "random_state": 0}
    return DeepGPRegressor(likelihood="heteroscedastic", early_stopping=False, **options).fit(*growing_noise(240))


def growing_noise(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, (n, 1))
    return x, 10.0 * (np.sin(x[:, 0]) + noise(x[:, 0]) * rng.standard_normal(n))


def noise(x: np.ndarray) -> np.ndarray:
    return 0.05 * np.exp(0.7 * (x + 2.0))


def test_the_noise_is_learnt_in_the_units_of_the_data(fitted: DeepGPRegressor) -> None:
    grid = np.array([[-1.8], [0.0], [1.8]])
    np.testing.assert_allclose(fitted.predict(grid, return_std=True)[1], 10.0 * noise(grid[:, 0]), rtol=0.4)
    x, y = growing_noise(300, seed=1)
    truth = stats.norm.logpdf(y, 10.0 * np.sin(x[:, 0]), 10.0 * noise(x[:, 0])).mean()
    assert fitted.log_density(x, y).mean() > truth - 0.1


def test_covariances_and_draws_know_of_it(fitted: DeepGPRegressor) -> None:
    rows = np.array([[-1.5], [1.5], [1.5001]])
    mean, cov = fitted.predict(rows, return_cov=True)
    std = fitted.predict(rows, return_std=True)[1]
    np.testing.assert_allclose(np.diag(cov), std**2, rtol=1e-12)
    assert cov[1, 2] < 0.3 * cov[1, 1]  # almost all is noise, which neighbours do not share
    draws = fitted.sample_y(rows, 4000)
    assert draws.shape == (3, 4000)
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.1)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=4.0 * std.max() / np.sqrt(4000))


def test_it_is_saved_and_has_several_targets(fitted: DeepGPRegressor, tmp_path: Path) -> None:
    x, y = growing_noise(240)
    fitted.save(tmp_path / "m.sdgp")
    np.testing.assert_array_equal(DeepGPRegressor.load(tmp_path / "m.sdgp").predict(x[:5]), fitted.predict(x[:5]))
    options = {"n_layers": 1, "n_inducing": 5, "max_steps": 5, "random_state": 0}
    two = DeepGPRegressor(likelihood="heteroscedastic", **options).fit(x[:50], np.column_stack([y, -y])[:50])
    assert two.model_.widths == (4,)
    assert two.predict(x[:3]).shape == two.log_density(x[:3], np.column_stack([y, -y])[:3]).shape == (3, 2)
    assert two.predict(x[:3], return_cov=True)[1].shape == (3, 3, 2)
