"""Sampling the inducing outputs: the right distribution where it is known, diagnostics, and runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from structured_dgp import DeepGP, Gaussian
from structured_dgp.baselines import (
    SampledDeepGP,
    SGHMCRegressor,
    SghmcSettings,
    effective_sample_size,
    normality,
    plot_normality,
    sample,
    split_rhat,
)
from structured_dgp.exceptions import CheckpointError, InputError, NumericalError
from structured_dgp.initial import initial_model
from structured_dgp.likelihoods import Poisson
from structured_dgp.model import data_term, sampled_data_term
from structured_dgp.parameters import Fixed

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (40, 1))
Y = np.sin(2 * X) + 0.2 * RNG.standard_normal((40, 1))
QUICK: dict[str, Any] = {"burn_in": 60, "n_samples": 6, "thinning": 5, "window": 10}


def whitened_features(model: DeepGP, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A = K_xz L⁻ᵀ of the first layer, and k(x, x) - |A|², in NumPy."""
    layer = model.layers[0]
    ell, s2 = np.asarray(layer.kernel.lengthscale), float(layer.kernel.variance)
    Z = np.asarray(layer.inducing)

    def k(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return s2 * np.exp(-0.5 * (((a[:, None] - b[None]) / ell) ** 2).sum(-1))

    L = np.linalg.cholesky(k(Z, Z) + model.jitter * np.eye(len(Z)))
    A = np.linalg.solve(L, k(Z, x)).T
    return A, s2 - (A**2).sum(1)


# --- The distribution -----------------------------------------------------------------------------


def test_a_conjugate_model_has_its_exact_posterior() -> None:
    """One layer: the posterior of v is N(P⁻¹ Aᵀ D⁻¹ y, P⁻¹), P = I + Aᵀ D⁻¹ A, D = diag(k - |A|² + σ²)."""
    model = initial_model(X, "mf", (1,), 5, likelihood=Gaussian(Fixed(0.2)))
    settings = SghmcSettings(
        step_size=0.1, friction=0.1, burn_in=2000, hyper_rate=0.0, n_samples=3000, thinning=10, n_chains=4
    )
    found = sample(model, X, Y, settings)
    A, conditional = whitened_features(model, X)
    D = conditional + 0.2
    precision = np.eye(5) + (A.T / D) @ A
    covariance = np.linalg.inv(precision)
    mean = covariance @ (A.T / D) @ Y[:, 0]
    draws = found.chains[:, :, 0]
    effective = effective_sample_size(draws)
    assert (split_rhat(draws) < 1.02).all()
    assert (effective > 400).all()
    error = np.sqrt(np.diag(covariance) / effective)
    off = np.abs(draws.mean((0, 1)) - mean)
    assert (off < 3.0 * error).all(), off / error
    np.testing.assert_allclose(draws.var((0, 1)), np.diag(covariance), rtol=0.1)


def test_predictions_mix_the_conditionals_of_all_draws() -> None:
    model = initial_model(X, "mf", (1,), 5, likelihood=Gaussian(0.1))
    v = np.random.default_rng(1).standard_normal((7, 1, 5))
    with jax.enable_x64(True):
        sampled = SampledDeepGP.of(model, jnp.asarray(v))
    new = np.linspace(-3, 3, 11)[:, None]
    A, conditional = whitened_features(model, new)
    prediction = sampled.predict(new)
    assert prediction.n_components == 7
    np.testing.assert_allclose(prediction.mean_components[..., 0], v[:, 0] @ A.T, atol=1e-8)
    np.testing.assert_allclose(prediction.var_components[..., 0], np.tile(conditional + 0.1, (7, 1)), atol=1e-8)


def test_every_draw_meets_all_of_the_hidden_noise() -> None:
    """The components of a draw have the moments of that draw alone, predicted with much noise."""
    model = initial_model(X, "mf", (2, 1), 5, likelihood=Gaussian(0.1))
    v = np.random.default_rng(1).standard_normal((4, 3, 5))
    with jax.enable_x64(True):
        together = SampledDeepGP.of(model, jnp.asarray(v)).predict(X[:6], n_draws=4 * 512).mean_components[..., 0]
        for place, draws in enumerate(together.reshape(4, 512, 6)):
            alone = SampledDeepGP.of(model, jnp.asarray(v[place][None])).predict(X[:6], n_draws=4096)
            expected = alone.mean_components[..., 0]
            np.testing.assert_allclose(draws.mean(0), expected.mean(0), atol=0.02)
            np.testing.assert_allclose(draws.std(0), expected.std(0), rtol=0.05, atol=1e-3)


def test_hidden_noise_is_drawn_anew_for_each_component() -> None:
    model = initial_model(X, "mf", (2, 1), 5)
    with jax.enable_x64(True):
        sampled = SampledDeepGP.of(model, jnp.zeros((3, 3, 5)))
    prediction = sampled.predict(X, n_draws=10)
    assert prediction.n_components == 12
    draws = sampled.sample_functions(X[:9], jax.random.key(0), 4)
    assert [part.shape for part in draws] == [(4, 9, 2), (4, 9, 1)]


def test_sampled_inducing_outputs_have_the_same_bound_on_average() -> None:
    """And a variance that is larger, because a draw is shared by all rows."""
    model = initial_model(X, "fc", (2, 1), 5)
    with jax.enable_x64(True):
        noisy = jax.tree.map(lambda a: a + 0.1 * np.random.default_rng(3).standard_normal(a.shape), model.posterior)
        model = DeepGP(model.layers, noisy, model.likelihood)
        x, y = jnp.asarray(X), jnp.asarray(Y)
        keys = jax.random.split(jax.random.key(0), 20_000)

        def analytic(key: Any) -> Any:
            return data_term(model, x, y, jax.random.normal(key, (1, len(x), 2), x.dtype))

        def sampled(key: Any) -> Any:
            return sampled_data_term(model, x, y, key, 1)

        ours, theirs = (np.asarray(jax.jit(lambda k, f=f: jax.lax.map(f, k))(keys)) for f in (analytic, sampled))
    error = np.sqrt((ours.var() + theirs.var()) / len(keys))
    assert abs(ours.mean() - theirs.mean()) < 4 * error
    assert theirs.var() > 2 * ours.var()


# --- The run --------------------------------------------------------------------------------------


def test_a_run_learns_hyper_parameters_and_predicts() -> None:
    model = initial_model(X, "mf", (2, 1), 8, precision="mixed")
    found = sample(model, X, Y, SghmcSettings(burn_in=1500, n_samples=20, thinning=5, n_chains=2))
    assert found.chains.shape == (2, 20, 3, 8)
    assert found.energy[-1] < found.energy[0]
    noise = [np.asarray(part.likelihood.variance).item() for part in (model, found.model)]
    assert noise[0] != noise[1]
    prediction = found.model.predict(X)
    assert np.mean(prediction.log_prob(Y)) > np.mean(stats.norm.logpdf(Y, Y.mean(), Y.std()))


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_an_interrupted_run_goes_on_bit_for_bit(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its last checkpoint, which Ctrl-C writes, too."""
    from structured_dgp.baselines import sghmc

    model, settings = initial_model(X, "mf", (2, 1), 5), SghmcSettings(**QUICK)
    whole = sample(model, X, Y, settings)
    original, calls = sghmc._advance, []

    def stopping(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(sghmc, "_advance", stopping)
    with pytest.raises(KeyboardInterrupt):
        sample(model, X, Y, settings, checkpoint=tmp_path, checkpoint_seconds=seconds)
    resumed = sample(model, X, Y, settings, checkpoint=tmp_path)
    np.testing.assert_array_equal(resumed.chains, whole.chains)
    np.testing.assert_array_equal(resumed.energy, whole.energy)
    assert len(calls) < 12  # not from the start
    with pytest.raises(CheckpointError, match="another run"):
        sample(model, X, Y + 1.0, settings, checkpoint=tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"step_size": 0.0}, {"friction": 2.0}, {"burn_in": 0}, {"n_chains": 0}, {"hyper_rate": -1.0}]
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SghmcSettings(**wrong)


def test_an_unknown_setting_of_the_estimator_is_refused() -> None:
    with pytest.raises(InputError, match="unknown setting 'thin': the settings are step_size"):
        SGHMCRegressor(settings={"thin": 3}).fit(X, Y[:, 0])


def test_other_likelihoods_are_refused() -> None:
    model = initial_model(X, "mf", (1,), 5, likelihood=Poisson())
    with pytest.raises(InputError, match="Gaussian"):
        sample(model, X, np.ones_like(Y), SghmcSettings(**QUICK))


def test_a_chain_that_diverges_is_an_error() -> None:
    model = initial_model(X, "mf", (1,), 5)
    with pytest.raises(NumericalError, match="step_size"):
        sample(model, X, Y, SghmcSettings(step_size=1e150, **QUICK))


# --- Diagnostics ----------------------------------------------------------------------------------


def test_independent_draws_count_in_full() -> None:
    draws = np.random.default_rng(0).standard_normal((4, 1000, 50))
    assert 3000 < np.median(effective_sample_size(draws)) < 5000
    assert (split_rhat(draws) < 1.02).all()


def test_an_autoregression_has_its_known_effective_size() -> None:
    """ρ = 0.9: n (1 - ρ) / (1 + ρ) = n / 19."""
    rng, rho = np.random.default_rng(0), 0.9
    chain = np.zeros((4, 5000, 20))
    for t in range(1, 5000):
        chain[:, t] = rho * chain[:, t - 1] + np.sqrt(1 - rho**2) * rng.standard_normal((4, 20))
    assert np.median(effective_sample_size(chain)) == pytest.approx(20_000 / 19, rel=0.15)


def test_chains_that_disagree_and_chains_that_drift_are_seen() -> None:
    draws = np.random.default_rng(0).standard_normal((2, 500, 1))
    apart = draws + np.array([0.0, 3.0])[:, None, None]
    drifting = draws + np.linspace(0, 5, 500)[None, :, None]
    assert split_rhat(apart)[0] > 1.5
    assert split_rhat(drifting)[0] > 1.5
    assert effective_sample_size(apart)[0] < 20
    assert split_rhat(np.ones((2, 10, 1)))[0] == 1.0
    assert split_rhat(np.array([0.0, 5.0])[:, None, None] * np.ones((2, 10, 1)))[0] == np.inf


def test_normality_finds_what_is_not_normal() -> None:
    rng = np.random.default_rng(0)
    normal, skewed = rng.standard_normal((500, 1, 30)), rng.exponential(size=(500, 1, 1))
    p = normality(np.concatenate([normal, skewed], axis=2))
    assert p.shape == (1, 31)
    assert p[0, -1] < 1e-10
    assert (p[0, :-1] > 0.05 / 31).all()
    left, right = plot_normality(np.concatenate([normal, skewed], axis=2))
    assert "1 below" in str(left.get_legend().get_texts()[0].get_text())
    assert "p =" in right.get_title()
    with pytest.raises(InputError, match="20 samples"):
        normality(normal[:5])
