"""The softmax likelihood against Monte Carlo, against Bernoulli for two classes, and under the solver's gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.special import log_softmax, softmax

from structured_dgp.exceptions import InputError
from structured_dgp.likelihoods import Bernoulli, Softmax

R, N, C = 2, 3, 4


def moments(n_classes: int = C) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((R, N, n_classes))
    factor = 0.5 * rng.standard_normal((R, N, n_classes, n_classes))
    return mean, factor @ np.swapaxes(factor, -1, -2) + 0.05 * np.eye(n_classes)


def draws(mean: np.ndarray, cov: np.ndarray, n_draws: int = 200_000) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal((n_draws, mean.shape[-1]))
    return mean[..., None, :] + np.einsum("rnij,qj->rnqi", np.linalg.cholesky(cov), noise)


def test_expected_log_prob_is_the_monte_carlo_mean() -> None:
    mean, cov = moments()
    labels = np.array([0, 2, 3])
    expected = log_softmax(draws(mean, cov), axis=-1)[:, np.arange(N), :, labels].mean(axis=-1).T
    with jax.enable_x64(True):
        found = Softmax(n_points=256).expected_log_prob(jnp.eye(C)[labels], jnp.asarray(mean), jnp.asarray(cov))
        few = Softmax().expected_log_prob(jnp.eye(C)[labels], jnp.asarray(mean), jnp.asarray(cov))
    np.testing.assert_allclose(found, expected, atol=6e-3)
    np.testing.assert_allclose(few, expected, atol=0.02)


def test_predicted_probabilities_are_the_monte_carlo_mean() -> None:
    mean, cov = moments()
    expected = softmax(draws(mean, cov), axis=-1).mean(axis=(0, 2))
    found = Softmax(n_points=256).predictive(mean, cov).mean
    np.testing.assert_allclose(found, expected, atol=2e-3)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-6)


def test_two_classes_are_bernoulli_of_the_difference() -> None:
    mean, cov = moments(2)
    difference = (mean[..., 1] - mean[..., 0])[..., None]
    variance = (cov[..., 0, 0] + cov[..., 1, 1] - 2 * cov[..., 0, 1])[..., None, None]
    y = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    with jax.enable_x64(True):
        found = Softmax(n_points=512).expected_log_prob(jnp.asarray(y), jnp.asarray(mean), jnp.asarray(cov))
        expected = Bernoulli().expected_log_prob(jnp.asarray(y[:, 1:]), jnp.asarray(difference), jnp.asarray(variance))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    p = Softmax(n_points=512).predictive(mean, cov).mean[:, 1:]
    np.testing.assert_allclose(p, Bernoulli().predictive(difference, variance).mean, atol=1e-3)


def test_gradients_agree_with_differences_and_stay_finite_without_variance() -> None:
    mean, cov = moments()
    y = np.eye(C)[np.array([0, 2, 3])]

    def value(mean: jax.Array, cov: jax.Array) -> jax.Array:
        return jnp.sum(
            Softmax(8).expected_log_prob(jnp.asarray(y), jnp.asarray(mean), 0.5 * (cov + jnp.swapaxes(cov, -1, -2)))
        )

    with jax.enable_x64(True):
        check_grads(value, (jnp.asarray(mean), jnp.asarray(cov)), order=1, modes=["rev"])
        gradients = jax.grad(value, argnums=(0, 1))(jnp.asarray(mean), jnp.zeros_like(cov))
        assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)


def test_the_score_of_a_row_is_the_log_probability_of_its_class() -> None:
    mean, cov = np.random.default_rng(5).standard_normal((2, 7, 3)), np.broadcast_to(0.1 * np.eye(3), (2, 7, 3, 3))
    labels = np.array([0, 1, 2, 2, 1, 0, 0])
    prediction = Softmax().predictive(mean, cov)
    found = Softmax().log_score(prediction, np.eye(3)[labels])
    np.testing.assert_allclose(found[:, 0], np.log(prediction.mean[np.arange(7), labels]), rtol=1e-12)
    np.testing.assert_allclose(prediction.mean.sum(axis=1), 1.0, rtol=1e-6)


def test_samples_are_classes_in_the_right_proportions() -> None:
    f = jnp.broadcast_to(jnp.asarray([0.0, 1.0, -1.0]), (20_000, 3))
    y = np.asarray(Softmax().sample(jax.random.key(0), f))
    assert (y.sum(axis=1) == 1.0).all()
    np.testing.assert_allclose(y.mean(axis=0), softmax([0.0, 1.0, -1.0]), atol=0.015)


@pytest.mark.parametrize("y", [[[1.0, 1.0]], [[0.0, 0.0]], [[0.5, 0.5]], [[2.0, -1.0]]])
def test_rows_without_exactly_one_class_are_refused(y: list[list[float]]) -> None:
    with pytest.raises(InputError, match="a single one"):
        Softmax().check_targets(np.array(y))
