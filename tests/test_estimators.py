"""The estimators keep scikit-learn's contract, and speak in the units of the data."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import jax
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from checks import run_check
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from structured_dgp import DeepGPClassifier, DeepGPRegressor, InputError, StructuredDGPWarning, initial_model
from structured_dgp.baselines import make_method
from structured_dgp.couplings import FullyCoupled, MeanField
from structured_dgp.families import Normal
from structured_dgp.kernels import RBF, Matern52
from structured_dgp.likelihoods import StudentT
from structured_dgp.scaling import Scaling
from structured_dgp.training import PRESETS, train
from structured_dgp.training.settings import MANY

SMALL: dict[str, Any] = {"width": 1, "n_inducing": 8, "max_steps": 60, "random_state": 0, "precision": "float64"}
REGRESSOR = DeepGPRegressor(n_layers=2, **SMALL)
CHECKED = [DeepGPRegressor(n_layers=1, **SMALL), DeepGPClassifier(n_layers=1, **SMALL)]
"""For scikit-learn's hundred checks, with one layer, because each of their many shapes of data is compiled."""


@parametrize_with_checks(CHECKED)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    run_check(estimator, check)


RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 2)) * [1.0, 50.0] + [0.0, 1000.0]
Y = 300.0 + 20.0 * np.sin(2.0 * X[:, 0]) + RNG.standard_normal(60)


@pytest.fixture(scope="module")
def fitted() -> DeepGPRegressor:
    return clone(REGRESSOR).set_params(max_steps=200).fit(X, Y)


@pytest.fixture(scope="module")
def two_targets() -> DeepGPRegressor:
    return clone(REGRESSOR).fit(X, np.column_stack([Y, -0.001 * Y]))


def test_it_is_the_functional_model_on_standardised_data(fitted: DeepGPRegressor) -> None:
    x, y = (X - X.mean(0)) / X.std(0), (Y - Y.mean()) / Y.std()
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    model = initial_model(x, "star", (1, 1), 8, seed=seed)
    settings = PRESETS["default"].changed(max_steps=200, seed=seed, holdout=0.0, patience=None, refit=False)
    trained = train(model, x, y, settings).model
    expected = trained.predict(x[:9])
    found = fitted.predict_dist(X[:9])
    np.testing.assert_allclose(found.mean, expected.mean[:, 0] * Y.std() + Y.mean(), rtol=1e-9)
    np.testing.assert_allclose(found.std, expected.std[:, 0] * Y.std(), rtol=1e-7)
    np.testing.assert_allclose(fitted.log_density(X[:9], Y[:9]), expected.log_prob(y[:9]) - np.log(Y.std()), rtol=1e-7)


def test_it_learns_the_function_in_its_units(fitted: DeepGPRegressor) -> None:
    assert fitted.score(X, Y) > 0.9
    mean, std = fitted.predict(X, return_std=True)
    assert mean.shape == std.shape == (60,)
    assert 0.5 < np.sqrt(np.mean((mean - Y) ** 2)) < 6.0
    quantiles = fitted.predict_quantiles(X, [0.1, 0.5, 0.9])
    assert quantiles.shape == (60, 3)
    assert (np.diff(quantiles, axis=1) > 0).all()
    assert np.isfinite(fitted.elbo_)
    assert fitted.n_steps_ == 200
    assert len(fitted.history_) == 4


def test_the_covariance_has_the_variances_on_its_diagonal_and_is_positive_definite(fitted: DeepGPRegressor) -> None:
    rows = np.concatenate([X[:6], X[:1] + 1e-4])
    mean, cov = fitted.predict(rows, return_cov=True)
    std = fitted.predict(rows, return_std=True)[1]
    np.testing.assert_array_equal(mean, fitted.predict(rows))
    np.testing.assert_allclose(np.diag(cov), std**2, rtol=1e-12)
    np.testing.assert_allclose(cov, cov.T, rtol=1e-12)
    assert np.linalg.eigvalsh(cov).min() > 0
    # two rows at the same place share everything but the noise
    noise = float(np.asarray(fitted.model_.likelihood.variance)[0]) * Y.var()
    np.testing.assert_allclose(cov[0, 6], std[0] ** 2 - noise, rtol=0.05)


def test_joint_draws_have_the_predicted_moments(fitted: DeepGPRegressor) -> None:
    rows = X[:4]
    draws = fitted.sample_y(rows, 4000)
    mean, cov = fitted.predict(rows, return_cov=True)
    assert draws.shape == (4, 4000)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=4 * np.sqrt(np.diag(cov).max() / 4000) + 0.05)
    np.testing.assert_allclose(np.cov(draws), cov, atol=0.15 * np.diag(cov).max())
    np.testing.assert_array_equal(fitted.sample_y(rows, 3), fitted.sample_y(rows, 3))
    assert np.abs(fitted.sample_y(rows, 3) - fitted.sample_y(rows, 3, random_state=1)).min() > 0


def test_several_targets_keep_their_columns_and_units(two_targets: DeepGPRegressor) -> None:
    targets = np.column_stack([Y, -0.001 * Y])[:5]
    mean, std = two_targets.predict(X[:5], return_std=True)
    assert (mean[:, 0] > 250).all()
    assert (np.abs(mean[:, 1] + 0.3) < 0.05).all()
    # from the components of the mixture, (K, n, P)
    parts = two_targets.predict_dist(X[:5]).family
    assert isinstance(parts, Normal)
    components = norm(parts.mean, np.sqrt(parts.var))
    np.testing.assert_allclose(mean, parts.mean.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(std**2, parts.var.mean(axis=0) + parts.mean.var(axis=0), rtol=1e-6)
    density = components.pdf(targets).mean(axis=0)
    np.testing.assert_allclose(two_targets.log_density(X[:5], targets), np.log(density), rtol=1e-6)
    quantiles = two_targets.predict_quantiles(X[:5], [0.1, 0.9])
    for place, level in enumerate((0.1, 0.9)):
        np.testing.assert_allclose(components.cdf(quantiles[:, :, place]).mean(axis=0), level, rtol=1e-5)
    covariance = two_targets.predict(X[:5], return_cov=True)[1]
    draws = two_targets.sample_y(X[:5], 4000)
    for p in range(2):
        np.testing.assert_allclose(np.diag(covariance[:, :, p]), std[:, p] ** 2, rtol=1e-9)
        np.testing.assert_allclose(draws[:, p].mean(axis=1), mean[:, p], atol=0.1 * std[:, p].max())
        np.testing.assert_allclose(np.cov(draws[:, p]), covariance[:, :, p], atol=0.15 * std[:, p].max() ** 2)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])
def test_frames_give_the_same_numbers_and_their_names(frame: Any, fitted: DeepGPRegressor) -> None:
    table = frame({"a": X[:, 0], "b": X[:, 1]})
    y = pd.Series(Y, name="price") if frame is pd.DataFrame else pl.Series("price", Y)
    model = clone(fitted).fit(table, y)
    assert list(model.feature_names_in_) == ["a", "b"]
    assert model.target_names_ == ["price"]
    np.testing.assert_array_equal(model.predict(table), fitted.predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame({"b": X[:, 1], "a": X[:, 0]}))


def test_it_works_in_scikit_learns_tools() -> None:
    estimator, scores = DeepGPRegressor(n_layers=1, **SMALL), []
    for rows, held_out in KFold(2).split(X):
        mean = clone(estimator).fit(X[rows], Y[rows]).predict(X[held_out])
        scores.append(1.0 - np.mean((mean - Y[held_out]) ** 2) / Y[held_out].var())
    # scaled inputs make no difference, as they are scaled inside
    pipeline = make_pipeline(StandardScaler(), clone(estimator)).set_output(transform="pandas")
    np.testing.assert_allclose(cross_val_score(pipeline, X, Y, cv=2), scores, rtol=1e-5)
    pipeline.fit(pd.DataFrame(X, columns=["a", "b"]), Y)
    assert list(pipeline[-1].feature_names_in_) == ["a", "b"]
    search = GridSearchCV(estimator, {"max_steps": [0, 60]}, cv=2).fit(X, Y)
    np.testing.assert_allclose(search.cv_results_["mean_test_score"][1], np.mean(scores), rtol=1e-9)
    assert search.best_params_ == {"max_steps": 60}
    np.testing.assert_array_equal(search.predict(X), clone(estimator).fit(X, Y).predict(X))


def test_a_constant_column_changes_nothing_whatever_it_holds_later() -> None:
    estimator = clone(REGRESSOR).set_params(kernel=RBF(1.0))  # by default, lengthscales start from √D
    x = np.column_stack([X, np.sin(X[:, 1])])
    plain = clone(estimator).fit(x, Y)
    more = np.column_stack([x, np.full(60, 288.15)])
    model = clone(estimator).fit(more, Y)
    later = more.copy()
    later[:, 3] = 1e6
    np.testing.assert_array_equal(model.predict(more), model.predict(later))
    np.testing.assert_allclose(model.predict(more), plain.predict(x), rtol=1e-6)
    np.testing.assert_allclose(model.predict(more, return_std=True)[1], plain.predict(x, return_std=True)[1], rtol=1e-5)


@pytest.mark.parametrize("case", ["constant target", "three rows", "one row", "all columns constant", "duplicates"])
def test_odd_data_gives_an_answer(case: str) -> None:
    x, y = {
        "constant target": (X, np.full(60, 7.0)),
        "three rows": (X[:3], Y[:3]),
        "one row": (X[:1], Y[:1]),
        "all columns constant": (np.ones((10, 2)), Y[:10]),
        "duplicates": (np.repeat(X[:5], 8, axis=0), np.repeat(Y[:5], 8)),
    }[case]
    mean, std = clone(REGRESSOR).fit(x, y).predict(x, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
    assert np.abs(mean - y).max() <= 3 * max(np.ptp(y), 1.0)
    if case == "constant target":
        np.testing.assert_allclose(mean, 7.0, atol=0.2)


def test_huge_and_tiny_units_do_not_matter(fitted: DeepGPRegressor) -> None:
    model = clone(fitted).fit(X * [1e150, 1e-150], Y * 1e-100)
    np.testing.assert_allclose(model.predict(X * [1e150, 1e-150]) * 1e100, fitted.predict(X), rtol=1e-4)


def test_a_column_in_other_units_is_named(fitted: DeepGPRegressor) -> None:
    with pytest.warns(StructuredDGPWarning, match="column 'x1' lies more than 30 standard deviations"):
        fitted.predict(X * [1.0, 100.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.predict(X + np.array([0.0, 20.0]))
        fitted.predict(X + np.outer(np.arange(60) < 20, [0.0, 1e5]))  # outliers are not units


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_skewed_column_shifted_by_a_hundred_standard_deviations_is_named(sign: float) -> None:
    skewed = np.column_stack([np.exp(2.0 * X[:, 0]), X[:, 0]])
    model = DeepGPRegressor(n_layers=1, **{**SMALL, "max_steps": 0}).fit(skewed, Y)
    with pytest.warns(StructuredDGPWarning, match="column 'x0' lies more than") as found:
        model.predict(skewed + np.array([sign * 100.0 * skewed[:, 0].std(), 0.0]))
    assert len(found) == 1


def test_missing_values_are_refused(fitted: DeepGPRegressor) -> None:
    with pytest.raises(ValueError, match="NaN"):
        fitted.predict(np.where(X > 1000, np.nan, X))
    with pytest.raises(ValueError, match="NaN"):
        clone(REGRESSOR).fit(X, np.where(Y > 300, np.nan, Y))


def test_warm_start_goes_on_and_widens_the_coupling() -> None:
    model = clone(REGRESSOR).set_params(coupling="mf", warm_start=True, max_steps=30).fit(X, Y)
    first, elbo = model.model_, model.elbo_
    model.set_params(coupling="fc").fit(X, Y)
    assert isinstance(first.posterior.coupling, MeanField)
    assert isinstance(model.model_.posterior.coupling, FullyCoupled)
    assert model.elbo_ > elbo
    assert model.n_steps_ == 60
    with pytest.raises(InputError, match="same layers as before"):
        model.fit(X[:, :1], Y)
    np.testing.assert_array_equal(model.predict(X), pickle.loads(pickle.dumps(model)).predict(X))  # still usable


@pytest.mark.parametrize(
    "change", [{"n_inducing": 5}, {"kernel": "matern32"}, {"likelihood": "student_t"}, {"precision": "mixed"}]
)
def test_a_warm_start_refuses_what_it_cannot_change(change: dict[str, Any], fitted: DeepGPRegressor) -> None:
    model = pickle.loads(pickle.dumps(fitted)).set_params(warm_start=True, **change)
    with pytest.raises(InputError, match=f"made with {next(iter(change))}="):
        model.fit(X, Y)


@pytest.mark.parametrize("estimator", [REGRESSOR, make_method("exact")])
def test_a_fit_that_fails_leaves_the_fitted_model_alone(estimator: Any, monkeypatch: Any) -> None:
    model = clone(estimator).fit(X, Y)
    expected = model.predict(X)

    def stop(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    module = "structured_dgp.baselines.exact.ExactGP.fitted" if estimator is not REGRESSOR else None
    monkeypatch.setattr(module or "structured_dgp.estimators.train", stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(pd.DataFrame(X[:, :1] * 1e6, columns=["a"]), 1e6 * Y)
    np.testing.assert_array_equal(model.predict(X), expected)
    assert not hasattr(model, "feature_names_in_")
    assert model.n_features_in_ == 2


def test_the_parameters_reach_the_model() -> None:
    model = DeepGPRegressor(
        "fc",
        3,
        [2, 1],
        5,
        kernel="matern52",
        likelihood="student_t",
        optimizer="adam",
        precision="float64",
        max_steps=3,
        random_state=1,
        settings={"learning_rate": 0.5},
    ).fit(X, Y)
    assert model.model_.widths == (2, 1, 1)
    assert model.model_.posterior.n_inducing == 5
    assert isinstance(model.model_.layers[0].kernel, Matern52)
    assert isinstance(model.model_.likelihood, StudentT)
    assert model.history_.records[-1].natural_rate is None
    assert model.history_.records[-1].learning_rate == pytest.approx(0.5, rel=1e-3)
    # a Student-t distribution is not rescaled as a normal one is: check its density at its centre
    np.testing.assert_allclose(
        model.log_density(X[:3], Y[:3]),
        model.model_.predict(model.x_scaling_.to_standard(X[:3])).log_prob((Y[:3] - Y.mean()) / Y.std())
        - np.log(Y.std()),
        rtol=1e-6,
    )


def test_counts_are_not_scaled() -> None:
    counts = RNG.poisson(np.exp(1.0 + 0.5 * np.sin(X[:, 0]))).astype(float)
    model = clone(REGRESSOR).set_params(likelihood="poisson").fit(X, counts)
    assert abs(model.predict(X).mean() - counts.mean()) < 1.0
    assert np.isfinite(model.log_density(X, counts)).all()
    with pytest.raises(InputError, match="counts"):
        clone(model).fit(X, counts + 0.5)


def test_early_stopping_ends_a_run() -> None:
    noise = RNG.standard_normal(60)
    model = clone(REGRESSOR).set_params(
        early_stopping=True,
        max_steps=5000,
        settings={"score_every": 5, "min_steps": 0, "patience": 2, "learning_rate": 0.1},
    )
    assert model.fit(X, noise).n_steps_ < 5000


@pytest.mark.parametrize(
    ("options", "n_rows", "expected"),
    [
        ({}, 200, (1500, 0.1, True)),
        ({}, 199, (800, 0.0, False)),
        ({"early_stopping": False}, 1000, (800, 0.0, False)),
        ({"early_stopping": True, "validation_fraction": 0.3}, 50, (1500, 0.3, True)),
        ({"preset": "paper"}, 1000, (20_000, 0.1, False)),
        ({"preset": "paper", "n_layers": 1}, 1000, (20_000, 0.0, False)),
        ({"preset": "paper", "early_stopping": False}, 1000, (20_000, 0.0, False)),
        ({"preset": "paper", "early_stopping": True}, 50, (20_000, 0.1, False)),
        ({"max_steps": 7}, 1000, (7, 0.1, True)),
    ],
)
def test_how_long_to_train_is_found_out_where_there_are_rows_for_it(
    options: dict[str, Any], n_rows: int, expected: tuple[int, float, bool]
) -> None:
    settings = DeepGPRegressor(**options)._training_settings(0, n_rows)
    assert (settings.max_steps, settings.holdout, settings.refit) == expected
    assert (settings.patience is not None) == (settings.holdout > 0.0)
    assert settings.min_steps == (0 if not settings.holdout else 5000 if "preset" in options else 700)


def test_the_preset_paper_has_the_papers_precision_and_jitter() -> None:
    options = {**SMALL, "n_layers": 1, "max_steps": 2, "precision": None}
    found = [DeepGPRegressor(**options, preset=preset).fit(X, Y).model_ for preset in ("default", "paper")]
    assert [model.precision for model in found] == ["mixed", "float64"]
    assert [model.jitter for model in found] == [1e-5, 1e-6]
    model = DeepGPRegressor(**options | {"precision": "mixed"}, preset="paper").fit(X, Y).model_
    assert model.precision == "mixed"


def test_a_warm_start_refuses_a_preset_with_another_precision() -> None:
    model = DeepGPRegressor(**SMALL | {"n_layers": 1, "max_steps": 2, "precision": None}, warm_start=True).fit(X, Y)
    with pytest.raises(InputError, match="made with precision='mixed', not 'float64'"):
        model.set_params(preset="paper").fit(X, Y)


def test_many_rows_are_trained_in_another_way(fitted: DeepGPRegressor) -> None:
    model = DeepGPRegressor(warm_start=True)
    few, many = (model._training_settings(0, rows) for rows in (1999, 2000))
    assert (few.rush_steps, few.decay, few.relative, few.max_steps) == (0, 0.98, False, 1500)
    assert few.changed(**MANY) == many
    assert DeepGPRegressor(preset="paper")._training_settings(0, 2000).decay == 0.98
    changed = DeepGPRegressor(max_steps=9, settings={"rush_steps": 7})._training_settings(0, 2000)
    assert (changed.rush_steps, changed.max_steps, changed.decay_steps) == (7, 9, many.decay_steps)
    for stopping, patience in ((True, 60), (False, None)):
        longer = DeepGPRegressor(max_steps=12_000, early_stopping=stopping)._training_settings(0, 2000)
        assert longer.rates()[0](12_000) == pytest.approx(many.rates()[0](4000))
        assert (longer.max_steps, longer.patience) == (12_000, patience)
    by_name = DeepGPRegressor(settings={"max_steps": 12_000})._training_settings(0, 2000)
    assert by_name == DeepGPRegressor(max_steps=12_000)._training_settings(0, 2000)
    assert DeepGPRegressor(max_steps=12_000)._training_settings(0, 1999).patience == few.patience
    model.model_ = fitted.model_  # which should not rush, because it is trained already
    assert model._training_settings(0, 2000) == many.changed(rush_steps=0, min_steps=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"coupling": "all"}, "unknown coupling 'all'"),
        ({"n_layers": 0}, "n_layers must be at least 1"),
        ({"width": [2, 2]}, "1 hidden layers"),
        ({"n_inducing": 0}, "n_inducing must be at least 1"),
        ({"n_layers": "3"}, "n_layers must be a whole number; got '3'"),
        ({"n_layers": 2.0}, "n_layers must be a whole number; got 2.0"),
        ({"n_layers": True}, "n_layers must be a whole number; got True"),
        ({"n_inducing": None}, "n_inducing must be a whole number; got None"),
        ({"n_inducing": 4.5}, "n_inducing must be a whole number; got 4.5"),
        ({"n_draws": "a"}, "n_draws must be a whole number; got 'a'"),
        ({"max_steps": 2.5}, "max_steps must be a whole number; got 2.5"),
        ({"max_steps": -1}, "max_steps must be at least 0; got -1"),
        ({"max_seconds": "1"}, "max_seconds must be a number of seconds, or None; got '1'"),
        ({"kernel": None}, "unknown kernel None: use one of 'rbf'"),
        ({"kernel": Matern52}, "unknown kernel .*Matern52.*, a Kernel such as"),
        ({"settings": "abc"}, "settings must be a dictionary .* got 'abc'"),
        ({"validation_fraction": None}, "validation_fraction must be a number between 0 and 1; got None"),
        ({"checkpoint": 3}, "checkpoint must be the name of a folder, or None; got 3"),
        ({"kernel": "cubic"}, "unknown kernel 'cubic'"),
        ({"likelihood": "cauchy"}, "unknown likelihood 'cauchy'"),
        ({"preset": "best"}, "unknown preset 'best'"),
        ({"precision": "float16"}, "unknown precision 'float16'"),
        ({"early_stopping": "never"}, "early_stopping must be True, False or 'auto'"),
        ({"settings": {"rate": 1}}, "unknown setting 'rate'"),
        ({"early_stopping": True, "validation_fraction": 1.0}, "validation_fraction must be between 0 and 1"),
        ({"validation_fraction": 0.0}, "set early_stopping=False"),
        ({"checkpoint": "folder", "random_state": None}, "checkpoint needs a random_state"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clone(REGRESSOR).set_params(**wrong).fit(X, Y)


def test_questions_that_cannot_be_answered(fitted: DeepGPRegressor) -> None:
    with pytest.raises(InputError, match="not for both"):
        fitted.predict(X, return_std=True, return_cov=True)
    with pytest.raises(InputError, match="joint draws are possible"):
        fitted.sample_y(np.zeros((5001, 2)))
    for n_samples in (0, -1):
        for draw in (fitted.sample_y, fitted.sample_layers):
            with pytest.raises(InputError, match="n_samples must be at least 1"):
                draw(X, n_samples)
    for n_draws in (0, 2.5, "a", None):
        with pytest.raises(InputError, match="n_draws must be"):
            pickle.loads(pickle.dumps(fitted)).set_params(n_draws=n_draws).predict(X)
    for ask in (DeepGPRegressor().predict, DeepGPRegressor().sample_layers, DeepGPRegressor().sample_y):
        with pytest.raises(NotFittedError):
            ask(X)


def test_pickle_and_joblib_keep_every_bit(fitted: DeepGPRegressor, tmp_path: Any) -> None:
    joblib.dump(fitted, tmp_path / "model")
    for copy in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / "model")):
        assert copy.model_.dtype == np.float64
        np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))


def test_pickle_keeps_the_precision_of_parts_that_are_parameters() -> None:
    with jax.enable_x64(True):
        kernel = Matern52(np.array([0.1, 0.2]))
    copy = pickle.loads(pickle.dumps(DeepGPRegressor(kernel=kernel)))
    assert copy.kernel.lengthscale.dtype == np.float64
    np.testing.assert_array_equal(copy.kernel.lengthscale, kernel.lengthscale)


# --- classification ----------------------------------------------------------------------------------


def test_two_and_three_classes_are_learnt() -> None:
    labels = np.array(["low", "middle", "high"])[np.digitize(X[:, 0], [-0.5, 0.5])]
    for y in (labels, labels == "high"):
        model = DeepGPClassifier(n_layers=2, **{**SMALL, "max_steps": 150}).fit(X, y)
        p = model.predict_proba(X)
        assert p.shape == (60, len(model.classes_))
        np.testing.assert_allclose(p.sum(axis=1), 1.0, rtol=1e-12)
        assert model.score(X, y) > 0.9
        picked = p[np.arange(60), np.searchsorted(model.classes_, y)]
        np.testing.assert_allclose(model.log_density(X, y), np.log(picked), rtol=1e-9)
        assert (model.predict(X) == model.classes_[p.argmax(axis=1)]).all()
    with pytest.raises(InputError, match="only one class"):
        DeepGPClassifier(**SMALL).fit(X, np.zeros(60))


# --- scaling -----------------------------------------------------------------------------------------


def test_scaling_is_mean_and_standard_deviation() -> None:
    scaling = Scaling.of(X)
    np.testing.assert_allclose(scaling.centre, X.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(scaling.spread, X.std(axis=0), rtol=1e-12)
    standard = scaling.to_standard(X)
    np.testing.assert_allclose(standard.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(standard.std(axis=0), 1.0, rtol=1e-12)


def test_a_linear_function_needs_no_help_from_the_outside() -> None:
    """Sanity of the whole way: as good as least squares where that is right."""
    y = 3.0 * X[:, 0] - 0.01 * X[:, 1] + 0.1 * RNG.standard_normal(60)
    model = DeepGPRegressor(n_layers=1, **{**SMALL, "max_steps": 300}).fit(X, y)
    best = LinearRegression().fit(X, y)
    error, least = (np.sqrt(np.mean((m.predict(X) - y) ** 2)) for m in (model, best))
    assert error < 2.0 * least
