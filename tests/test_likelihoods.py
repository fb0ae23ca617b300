"""Likelihoods against scipy.stats and quadrature; every likelihood passes the same contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numpy.typing import NDArray
from scipy import stats

from structured_dgp.exceptions import InputError
from structured_dgp.likelihoods import (
    Bernoulli,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Softmax,
    StudentT,
    gauss_hermite,
)
from structured_dgp.parameters import Fixed, cast

Array = NDArray[np.float64]
R, N, P = 3, 4, 2


@dataclass(frozen=True)
class Case:
    """A likelihood, and the same thing said with scipy.stats."""

    make: Callable[[], Likelihood]
    law: Callable[[Any, int], Any]  # f, output -> the distribution of y
    targets: Array
    quadrature_error: float  # of E[log p], absolute, for the variances below
    bad: tuple[float, str] | None = None  # a target that cannot be, and what the error says

    def log_prob(self, y: Any, f: Any, output: int) -> Any:
        law = self.law(f, output)
        return law.logpdf(y) if isinstance(law.dist, stats.rv_continuous) else law.logpmf(y)

    def prob(self, y: Any, f: Any, output: int) -> Any:
        return np.exp(self.log_prob(y, f, output))


SCALES = (0.5, 1.2)
REAL = np.array([[0.3, -1.0], [2.5, 0.0], [-0.7, 4.0], [0.0, 0.1]])
CASES: dict[type[Likelihood], Case] = {
    Gaussian: Case(
        make=lambda: Gaussian(variance=np.square(SCALES)),
        law=lambda f, p: stats.norm(f, SCALES[p]),
        targets=REAL,
        quadrature_error=1e-11,
    ),
    StudentT: Case(
        make=lambda: StudentT(scale=np.array(SCALES), df=3.5),
        law=lambda f, p: stats.t(3.5, f, SCALES[p]),
        targets=REAL,
        quadrature_error=2e-3,
    ),
    Bernoulli: Case(
        make=Bernoulli,
        law=lambda f, p: stats.bernoulli(1.0 / (1.0 + np.exp(-f))),
        targets=np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]),
        quadrature_error=1e-6,
        bad=(-1.0, r"0 or 1.*Got -1 in row 2"),
    ),
    Poisson: Case(
        make=Poisson,
        law=lambda f, p: stats.poisson(np.exp(f)),
        targets=np.array([[0.0, 3.0], [1.0, 7.0], [2.0, 0.0], [11.0, 1.0]]),
        quadrature_error=1e-11,
        bad=(2.5, r"counts 0, 1, 2.*Got 2.5 in row 2"),
    ),
}
KINDS = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


def moments(seed: int = 0) -> tuple[Array, Array]:
    """Means (R, n, P) and full covariances (R, n, P, P)."""
    rng = np.random.default_rng(seed)
    factor = 0.6 * rng.normal(size=(R, N, P, P)) + 0.3 * np.eye(P)
    return rng.normal(0.0, 1.0, (R, N, P)), factor @ np.swapaxes(factor, -1, -2)


def integral(function: Callable[[Array], Array], mean: float, var: float) -> float:
    """E[function(f)] over f ~ N(mean, var) on a fine grid."""
    z = np.linspace(-12.0, 12.0, 4001)
    return float(np.sum(function(mean + np.sqrt(var) * z) * stats.norm.pdf(z)) * (z[1] - z[0]))


@eqx.filter_jit
def expected(likelihood: Likelihood, y: jax.Array, mean: jax.Array, cov: jax.Array) -> jax.Array:
    return likelihood.expected_log_prob(y, mean, cov)


@eqx.filter_jit
def gradients(likelihood: Likelihood, y: jax.Array, mean: jax.Array, cov: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With respect to mean and cov."""
    return jax.grad(lambda mean, cov: likelihood.expected_log_prob(y, mean, cov).sum(), argnums=(0, 1))(mean, cov)


def expected64(likelihood: Likelihood, y: Array, mean: Array, cov: Array) -> Array:
    with jax.enable_x64(True):
        return np.asarray(expected(likelihood, jnp.asarray(y), jnp.asarray(mean), jnp.asarray(cov)))


# --- the contract -----------------------------------------------------------------------------------


def test_no_likelihood_is_missing() -> None:
    def final(kind: type[Likelihood]) -> set[type[Likelihood]]:
        below = [other for other in kind.__subclasses__() if other.__module__.startswith("structured_dgp.")]
        return set().union(*map(final, below)) if below else {kind}

    # the outputs of these two depend on each other: test_heteroscedastic.py, test_softmax.py
    assert final(Likelihood) == set(CASES) | {Heteroscedastic, Softmax}


@KINDS
def test_expected_log_prob_is_the_expectation(kind: type[Likelihood]) -> None:
    case, (mean, cov) = CASES[kind], moments()
    got = expected64(case.make(), case.targets, mean, cov)
    assert got.shape == (R, N)
    for r, n in np.ndindex(R, N):
        want = sum(
            integral(lambda f, n=n, p=p: case.log_prob(case.targets[n, p], f, p), mean[r, n, p], cov[r, n, p, p])
            for p in range(P)
        )
        np.testing.assert_allclose(got[r, n], want, rtol=1e-9, atol=case.quadrature_error)


@KINDS
def test_expected_log_prob_without_uncertainty_is_the_log_prob(kind: type[Likelihood]) -> None:
    case, (mean, _) = CASES[kind], moments()
    got = expected64(case.make(), case.targets, mean, np.zeros((R, N, P, P)))
    want = sum(case.log_prob(case.targets[:, p], mean[..., p], p) for p in range(P))
    np.testing.assert_allclose(got, want, rtol=1e-12)


@KINDS
def test_correlations_between_outputs_do_not_matter(kind: type[Likelihood]) -> None:
    case, (mean, cov) = CASES[kind], moments()
    np.testing.assert_array_equal(
        expected64(case.make(), case.targets, mean, cov), expected64(case.make(), case.targets, mean, cov * np.eye(P))
    )


@KINDS
def test_gradients(kind: type[Likelihood]) -> None:
    case, (mean, cov) = CASES[kind], moments()
    with jax.enable_x64(True):
        arrays, static = eqx.partition(case.make(), eqx.is_array)

        def value(arrays: Any, mean: jax.Array, cov: jax.Array) -> jax.Array:
            return eqx.combine(arrays, static).expected_log_prob(jnp.asarray(case.targets), mean, cov).sum()

        check_grads(jax.jit(value), (arrays, jnp.asarray(mean), jnp.asarray(cov)), order=1, modes=["rev"], rtol=1e-6)


@KINDS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("var", [0.0, 1e-30, 1e-12])
def test_gradients_stay_finite_without_uncertainty(kind: type[Likelihood], var: float, dtype: Any) -> None:
    """With g(f) = log p(y | f): dE/dmean = g', dE/dvar = ½ g'', here by central differences."""
    case, (mean, _) = CASES[kind], moments()
    cov = np.broadcast_to(var * np.eye(P), (R, N, P, P))
    with jax.enable_x64(True):
        y, m, c = (jnp.asarray(a, dtype) for a in (case.targets, mean, cov))
        likelihood = cast(case.make(), dtype)
        in_mean, in_cov = gradients(likelihood, y, m, c)
    step, error = 1e-4, 0.03 if dtype is np.float32 else 1e-4
    for p in range(P):
        left, centre, right = (case.log_prob(case.targets[:, p], mean[..., p] + s, p) for s in (-step, 0.0, step))
        np.testing.assert_allclose(in_mean[..., p], (right - left) / (2.0 * step), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            in_cov[..., p, p], (right - 2.0 * centre + left) / (2.0 * step**2), rtol=error, atol=error
        )
    np.testing.assert_array_equal(in_cov[..., 0, 1], 0.0)


@KINDS
def test_precision_is_kept(kind: type[Likelihood]) -> None:
    case, (mean, cov) = CASES[kind], moments()
    want = expected64(case.make(), case.targets, mean, cov)
    small = [np.asarray(a, np.float32) for a in (case.targets, mean, cov)]
    outside = expected(cast(case.make(), jnp.float32), *map(jnp.asarray, small))
    np.testing.assert_allclose(outside, want, rtol=1e-4)
    with jax.enable_x64(True):
        inside = jax.eval_shape(case.make().expected_log_prob, *small)
        drawn = jax.eval_shape(case.make().sample, jax.random.key(0), small[1])
    assert inside.dtype == outside.dtype == drawn.dtype == jnp.float32


@KINDS
def test_predictive_is_the_average_over_draws_and_uncertainty(kind: type[Likelihood]) -> None:
    case, (mean, cov) = CASES[kind], moments()
    got = np.exp(case.make().predictive(mean, cov).log_prob(case.targets))
    for n, p in np.ndindex(N, P):
        y = case.targets[n, p]
        want = np.mean(
            [integral(lambda f, y=y, p=p: case.prob(y, f, p), mean[r, n, p], cov[r, n, p, p]) for r in range(R)]
        )
        np.testing.assert_allclose(got[n, p], want, rtol=1e-7)


@KINDS
def test_predictive_without_uncertainty_is_the_likelihood(kind: type[Likelihood]) -> None:
    """Also when rounding has made a variance negative."""
    case, (mean, _) = CASES[kind], moments()
    got = case.make().predictive(mean[:1], np.broadcast_to(-1e-12 * np.eye(P), (1, N, P, P))).log_prob(case.targets)
    for p in range(P):
        np.testing.assert_allclose(got[:, p], case.log_prob(case.targets[:, p], mean[0, :, p], p), rtol=1e-8)


@KINDS
def test_predictive_matches_simulation(kind: type[Likelihood]) -> None:
    """f from its normal distribution, y from ``sample``: the empirical CDF is within its 1e-6 error bound."""
    case, (mean, cov) = CASES[kind], moments()
    n = 20_000
    rng = np.random.default_rng(1)
    which = rng.integers(0, R, n)
    f = mean[which, 0, 0] + np.sqrt(cov[which, 0, 0, 0]) * rng.normal(size=n)
    with jax.enable_x64(True):
        y = np.asarray(case.make().sample(jax.random.key(0), jnp.asarray(np.stack([f, f], axis=1))))[:, 0]
    mixture = case.make().predictive(mean, cov)[:1].column(0)
    for level in (0.1, 0.5, 0.9):
        x = mixture.quantile(level)
        assert abs(np.mean(y <= x) - mixture.cdf(x)[0]) < np.sqrt(np.log(2.0 / 1e-6) / (2.0 * n))


@KINDS
def test_samples_given_f_follow_the_law(kind: type[Likelihood]) -> None:
    case, n = CASES[kind], 20_000
    f = np.array([0.4, -0.8])
    with jax.enable_x64(True):
        y = np.asarray(case.make().sample(jax.random.key(2), jnp.broadcast_to(jnp.asarray(f), (n, P))))
        again = np.asarray(case.make().sample(jax.random.key(2), jnp.broadcast_to(jnp.asarray(f), (n, P))))
    np.testing.assert_array_equal(y, again)
    for p in range(P):
        for x in case.law(f[p], p).ppf([0.1, 0.5, 0.9]):
            bound = np.sqrt(np.log(2.0 / 1e-6) / (2.0 * n))
            assert abs(np.mean(y[:, p] <= x) - case.law(f[p], p).cdf(x)) < bound


@KINDS
def test_jensen(kind: type[Likelihood]) -> None:
    """E[log p] ≤ log E[p], with equality only without uncertainty."""
    case, (mean, cov) = CASES[kind], moments()
    mixture = case.make().predictive(mean[:1], cov[:1])
    assert np.all(
        expected64(case.make(), case.targets, mean[:1], cov[:1])[0] < mixture.log_prob(case.targets).sum(axis=1)
    )


@KINDS
def test_targets_are_checked(kind: type[Likelihood]) -> None:
    case = CASES[kind]
    case.make().check_targets(case.targets)
    case.make().check_targets(case.targets.astype(int))
    with pytest.raises(InputError, match=r"y\[:, None\]"):
        case.make().check_targets(case.targets[:, 0])
    spoilt = case.targets.copy()
    spoilt[2, 1] = np.nan
    with pytest.raises(InputError, match="NaN"):
        case.make().check_targets(spoilt)
    if case.bad:
        spoilt[2, 1], message = case.bad
        with pytest.raises(InputError, match=message):
            case.make().check_targets(spoilt)


# --- each on its own --------------------------------------------------------------------------------


def test_gaussian_in_words() -> None:
    """log N(y | μ, s²) - v/(2s²), in scipy's words."""
    mean, cov = moments()
    want = stats.norm.logpdf(REAL, mean, 0.1).sum(-1) - np.trace(cov, axis1=-2, axis2=-1) / (2.0 * 0.01)
    np.testing.assert_allclose(expected64(Gaussian(variance=0.01), REAL, mean, cov), want, rtol=1e-12)


def test_gaussian_predictive_adds_the_noise() -> None:
    mean, cov = moments()
    noise = np.array([0.2, 0.7])
    mixture = Gaussian(variance=noise).predictive(mean, cov)
    np.testing.assert_allclose(mixture.mean_components, mean)
    np.testing.assert_allclose(mixture.var_components, np.diagonal(cov, axis1=-2, axis2=-1) + noise, rtol=1e-12)
    np.testing.assert_allclose(mixture.mean, mean.mean(0))
    np.testing.assert_allclose(mixture.var, mixture.var_components.mean(0) + mean.var(0), rtol=1e-12)


def test_gaussian_is_one_pass_over_the_points() -> None:
    """No loop, no matrix product, no call to a library: the compiled code is a few fused elementwise operations."""
    mean, cov = moments()
    with jax.enable_x64(True):
        arguments = (Gaussian(0.1), jnp.asarray(REAL), jnp.asarray(mean), jnp.asarray(cov))
        compiled = jax.jit(lambda g, y, m, c: g.expected_log_prob(y, m, c)).lower(*arguments).compile().as_text()
    assert "fusion" in compiled
    for operation in (" while(", " dot(", "custom-call", " scatter("):
        assert operation not in compiled


def test_student_t_with_many_degrees_of_freedom_is_gaussian() -> None:
    mean, cov = moments()
    student, gaussian = StudentT(scale=0.8, df=1e7), Gaussian(variance=0.64)
    np.testing.assert_allclose(expected64(student, REAL, mean, cov), expected64(gaussian, REAL, mean, cov), rtol=1e-5)
    np.testing.assert_allclose(
        student.predictive(mean, cov).log_prob(REAL), gaussian.predictive(mean, cov).log_prob(REAL), rtol=1e-5
    )


def test_student_t_predictive_is_smooth_where_the_noise_is_small() -> None:
    """Far from the data, var ≫ scale²: the prediction is then nearly normal, not a comb of narrow peaks."""
    y = np.linspace(-2.0, 2.0, 41)
    mixture = StudentT(scale=0.01, df=4.0).predictive(np.zeros((1, 41, 1)), np.ones((1, 41, 1, 1)))
    np.testing.assert_allclose(mixture.log_prob(y), stats.norm.logpdf(y), atol=1e-3)


@pytest.mark.parametrize("std", [0.1, 3.0, 30.0])
def test_bernoulli_predictive_is_one_component(std: float) -> None:
    mean = np.array([0.5, -2.0])[:, None, None]
    mixture = Bernoulli().predictive(mean, np.full((2, 1, 1, 1), std**2))
    assert mixture.n_components == 1
    z = np.linspace(-12.0, 12.0, 200_001)
    p = stats.norm.pdf(z) @ (1.0 / (1.0 + np.exp(-(mean[:, 0] + std * z)))).T * (z[1] - z[0])
    np.testing.assert_allclose(mixture.mean[0, 0], p.mean(), atol=1e-8)


def test_extreme_rates() -> None:
    quiet = Poisson().predictive(np.full((1, 1, 1), -800.0), np.zeros((1, 1, 1, 1)))
    np.testing.assert_allclose(quiet.log_prob([[0.0]]), 0.0, atol=1e-12)
    with pytest.raises(InputError, match="rate of Poisson must lie in"):
        Poisson().predictive(np.full((1, 1, 1), 800.0), np.zeros((1, 1, 1, 1)))


@pytest.mark.parametrize("n_points", [1, 4, 7, 20])
def test_gauss_hermite_is_exact_for_polynomials(n_points: int) -> None:
    """An n-point rule integrates polynomials of degree 2n - 1."""
    degree = 2 * n_points - 1
    coefficients = np.random.default_rng(0).normal(size=degree + 1) / np.cumprod(np.maximum(np.arange(degree + 1), 1.0))
    mean, var = np.full((1, 1, 1), 0.4), np.full((1, 1, 1), 1.7)
    with jax.enable_x64(True):
        got = gauss_hermite(lambda f: jnp.polyval(coefficients, f), jnp.asarray(mean), jnp.asarray(var), n_points)
    powers = [float(stats.norm(0.4, np.sqrt(1.7)).moment(k)) if k else 1.0 for k in range(degree, -1, -1)]
    np.testing.assert_allclose(got, np.full((1, 1, 1), coefficients @ powers), rtol=1e-9)


def test_fixed_parameters_are_not_trained() -> None:
    mean, cov = moments()
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a) for a in (REAL, mean, cov)]

        def of_parameters(likelihood: Likelihood) -> list[float]:
            value = eqx.filter_grad(lambda likelihood: expected(likelihood, *arguments).sum())(likelihood)
            return [float(leaf) for leaf in jax.tree.leaves(eqx.filter(value, eqx.is_array))]

        assert of_parameters(Gaussian(variance=Fixed(0.5))) == [0.0]
        assert of_parameters(Gaussian(variance=0.5)) != [0.0]
        scale, df = of_parameters(StudentT(scale=0.5, df=Fixed(4.0)))
        assert scale != 0.0
        assert df == 0.0


def test_parameters_are_read_back() -> None:
    with jax.enable_x64(True):
        np.testing.assert_allclose(Gaussian(variance=0.01).variance, 0.01, rtol=1e-12)
        np.testing.assert_allclose(Gaussian(variance=np.array([0.01, 4.0])).variance, [0.01, 4.0], rtol=1e-12)
        np.testing.assert_allclose(StudentT(scale=0.3, df=5.0).scale, 0.3, rtol=1e-12)
        np.testing.assert_allclose(StudentT(scale=0.3, df=5.0).df, 5.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Gaussian(variance=0.0), "variance must be finite and larger"),
        (lambda: StudentT(df=np.array([1.0, 2.0])), "df must be one number"),
        (lambda: Bernoulli(n_points=0), "n_points must be at least 1"),
        (lambda: Gaussian(variance=np.ones(3)).check_targets(REAL), r"shape \(3,\), but there are 2 outputs"),
        (lambda: StudentT(scale=np.ones(3)).check_targets(REAL), r"shape \(3,\), but there are 2 outputs"),
        (
            lambda: expected64(Gaussian(variance=np.ones(3)), REAL[:, :1], np.zeros((1, 4, 1)), np.zeros((1, 4, 1, 1))),
            "1 outputs",
        ),
        (lambda: Gaussian(variance=np.ones(3)).predictive(*moments()), "one for each output"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
