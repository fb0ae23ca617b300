"""Methods to compare with: each by name, and against what is known about it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from checks import run_check
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor, kernels
from sklearn.utils.estimator_checks import parametrize_with_checks

from structured_dgp import RBF, DeepGP, Gaussian, Layer, Posterior
from structured_dgp.baselines import METHODS, ExactGP, ExactGPRegressor, make_method
from structured_dgp.baselines.exact import MAX_ROWS
from structured_dgp.baselines.rivals import from_quantiles
from structured_dgp.exceptions import InputError
from structured_dgp.parameters import Fixed
from structured_dgp.training import train

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 2))
Y = 10.0 + 3.0 * (np.sin(X.sum(1)) + 0.1 * RNG.standard_normal(60))
NEW = RNG.standard_normal((20, 2))
QUICK: dict[str, dict[str, Any]] = {
    "sgp": {"n_inducing": 8, "max_steps": 20},
    **{name: {"n_layers": 2, "width": 2, "n_inducing": 8, "max_steps": 20} for name in ("mf", "star", "fc")},
    **{name: {"n_layers": 2, "width": 2, "n_inducing": 8, "max_steps": 20} for name in ("chain", "fc_sampled")},
    "sghmc": {"width": 2, "n_inducing": 8, "settings": {"burn_in": 50, "n_samples": 5, "thinning": 5}},
    "boosting": {"n_quantiles": 5, "options": {"max_iter": 20}},
    "forest": {"options": {"n_estimators": 30}},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_fits_and_predicts_in_the_units_of_the_data(name: str) -> None:
    seed = {} if name == "exact" else {"random_state": 0}
    estimator = clone(make_method(name, **QUICK.get(name, {}), **seed)).fit(X, Y)
    mean, std = estimator.predict(NEW, return_std=True)
    assert mean.shape == std.shape == (20,)
    assert 5.0 < mean.mean() < 15.0
    assert (std > 0.0).all()
    assert estimator.predict_quantiles(NEW, (0.1, 0.9)).shape == (20, 2)
    assert np.isfinite(estimator.log_density(NEW, np.full(20, 10.0))).all()
    assert isinstance(estimator.score(X, Y), float)
    again = pickle.loads(pickle.dumps(estimator)).predict(NEW, return_std=True)
    np.testing.assert_array_equal(again, (mean, std))


@parametrize_with_checks(
    [
        make_method("boosting", n_quantiles=5, options={"max_iter": 30}),
        make_method("forest", options={"n_estimators": 60}),
    ]
)
def test_trees_pass_scikit_learns_checks(estimator: Any, check: Any) -> None:
    run_check(estimator, check)


def test_an_unknown_method_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match="'sghmc'"):
        make_method("magic")


# --- The exact GP ---------------------------------------------------------------------------------


def test_the_exact_gp_is_scikit_learns() -> None:
    y = (Y - Y.mean()) / Y.std()
    kernel = kernels.ConstantKernel(1.3, "fixed") * kernels.RBF([0.8, 1.5], "fixed") + kernels.WhiteKernel(
        0.05 + 1e-8, "fixed"
    )
    theirs = GaussianProcessRegressor(kernel, alpha=0.0).fit(X, y)
    ours = ExactGP.on(RBF(np.array([0.8, 1.5]), 1.3), Gaussian(0.05), X, y)
    np.testing.assert_allclose(float(ours.log_evidence()), theirs.log_marginal_likelihood_value_, rtol=1e-8)
    mean, std = theirs.predict(NEW, return_std=True)
    prediction = ours.predict(NEW)
    np.testing.assert_allclose(prediction.mean[:, 0], mean, atol=1e-8)
    np.testing.assert_allclose(prediction.std[:, 0], std, atol=1e-6)


def test_fitting_reaches_the_evidence_that_scikit_learn_reaches() -> None:
    y = (Y - Y.mean()) / Y.std()
    kernel = kernels.ConstantKernel(1.0) * kernels.RBF([1.4, 1.4]) + kernels.WhiteKernel(0.1)
    theirs = GaussianProcessRegressor(kernel, alpha=0.0, n_restarts_optimizer=2, random_state=0).fit(X, y)
    ours = ExactGPRegressor().fit(X, Y)
    assert ours.log_evidence_ >= theirs.log_marginal_likelihood_value_ - 1e-2


def test_outputs_with_their_own_noise_are_independent_gps() -> None:
    y = np.stack([Y, -2.0 * Y], axis=1)
    both = ExactGP.on(RBF(1.0), Gaussian(np.array([0.1, 0.3])), X, y)
    alone = [ExactGP.on(RBF(1.0), Gaussian(noise), X, y[:, p]) for p, noise in enumerate((0.1, 0.3))]
    np.testing.assert_allclose(float(both.log_evidence()), sum(float(gp.log_evidence()) for gp in alone), rtol=1e-10)
    for p, gp in enumerate(alone):
        np.testing.assert_allclose(both.predict(NEW).mean[:, p], gp.predict(NEW).mean[:, 0], rtol=1e-8)
        np.testing.assert_allclose(both.predict(NEW).var[:, p], gp.predict(NEW).var[:, 0], rtol=1e-8)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(InputError, match="sparse"):
        ExactGP.on(RBF(1.0), Gaussian(0.1), np.zeros((MAX_ROWS + 1, 1)), np.zeros(MAX_ROWS + 1))


def test_a_sparse_gp_with_its_inducing_inputs_at_the_data_is_exact() -> None:
    """Natural gradients with rate 1 are at the optimum after one step, and there the bound is the evidence."""
    x, y = X[:25], ((Y - Y.mean()) / Y.std())[:25, None]
    kernel, noise = RBF(Fixed(0.7), Fixed(1.0)), Gaussian(Fixed(0.1))
    model = DeepGP([Layer(kernel, x)], Posterior.initial("mf", (1,), 25), noise, jitter=1e-10)
    settings: dict[str, Any] = {"max_steps": 5, "natural_rate": 1.0, "radius": 1e6, "learning_rate": 1e-12}
    trained = train(model, x, y, decay=1.0, **settings).model
    exact = ExactGP.on(kernel, noise, x, y)
    np.testing.assert_allclose(float(trained.elbo(x, y)), float(exact.log_evidence()), rtol=1e-5)
    ours, theirs = trained.predict(NEW), exact.predict(NEW)
    np.testing.assert_allclose(ours.mean, theirs.mean, atol=1e-4)
    np.testing.assert_allclose(ours.var, theirs.var, atol=1e-4)


# --- Trees ----------------------------------------------------------------------------------------


def test_a_distribution_from_quantiles_has_them() -> None:
    from scipy import stats

    levels = (np.arange(19) + 0.5) / 19
    quantiles = np.stack([stats.norm.ppf(levels), 5.0 + 2.0 * stats.norm.ppf(levels)])
    prediction = from_quantiles(quantiles[:, ::-1], 1e-3)  # whatever their order
    np.testing.assert_allclose(prediction.mean, [0.0, 5.0], atol=1e-8)
    for level in (0.1, 0.5, 0.9):
        expected = stats.norm.ppf(level) * np.array([1.0, 2.0]) + np.array([0.0, 5.0])
        np.testing.assert_allclose(prediction.quantile(level), expected, atol=0.12)


@pytest.mark.parametrize("name", ["boosting", "forest"])
def test_trees_follow_the_noise(name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (2000, 1))
    y = np.sign(x[:, 0]) + 0.3 * rng.standard_normal(2000)
    options = {"max_iter": 30, "max_leaf_nodes": 8} if name == "boosting" else {"n_estimators": 100}
    estimator = make_method(name, options=options, random_state=0).fit(x[:1500], y[:1500])
    prediction = estimator.predict_dist(x[1500:])
    lower, upper = prediction.interval(0.8)
    assert 0.68 < np.mean((lower <= y[1500:]) & (y[1500:] <= upper)) < 0.92
    assert np.mean(prediction.log_prob(y[1500:])) > -0.6


@pytest.mark.parametrize("name", ["boosting", "forest"])
def test_whole_numbers_are_not_predicted_more_sharply_than_they_are_rounded(name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (400, 1))
    y = np.round(2.0 * x[:, 0])  # nothing but rounding, so that trees hit every number exactly
    prediction = make_method(name, **QUICK[name]).fit(x, y).predict_dist(x)
    assert np.max(prediction.log_prob(y)) <= np.log(np.sqrt(12.0 / (2.0 * np.pi))) + 1e-9


def test_constant_targets_keep_a_positive_width() -> None:
    for name in ("boosting", "forest"):
        estimator = make_method(name, **QUICK[name]).fit(X, np.ones(60))
        assert (estimator.predict(NEW, return_std=True)[1] > 0.0).all()
