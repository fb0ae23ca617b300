"""Mixtures against scipy.stats, quadrature, brute-force sums and ``scoringrules``."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import scoringrules
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, optimize, stats

from structured_dgp import families, prediction
from structured_dgp.exceptions import InputError
from structured_dgp.families import Family, normal_nodes
from structured_dgp.prediction import Bernoulli, Mixture, Normal, Poisson, StudentT

Array = NDArray[np.float64]

WEIGHTS = np.array([0.2, 0.5, 0.3])
SHAPE = (3, 2, 2)  # K, n, P
rng = np.random.default_rng(0)
LOC = rng.normal(0.0, 2.0, SHAPE)
SCALE = rng.uniform(0.3, 1.5, SHAPE)
VAR = rng.uniform(0.05, 2.0, SHAPE)
RATE = rng.uniform(0.2, 12.0, SHAPE)
P = rng.uniform(0.05, 0.95, SHAPE)
DF = 3.5

CONTINUOUS: dict[str, Callable[[], Family]] = {
    "normal": lambda: Normal(LOC, VAR),
    "student": lambda: StudentT(DF, LOC, SCALE),
    "student+normal": lambda: StudentT(DF, LOC, SCALE, VAR),
}
DISCRETE: dict[str, Callable[[], Family]] = {
    "bernoulli": lambda: Bernoulli(P),
    "poisson": lambda: Poisson(RATE),
    "poisson+normal": lambda: Poisson(RATE, 0.3 * VAR),
}
FAMILIES = CONTINUOUS | DISCRETE
COUNTS = np.arange(400.0)


def mixture(name: str) -> Mixture:
    return Mixture(FAMILIES[name](), WEIGHTS)


def first_entry(name: str, n: int) -> Mixture:
    """The mixture of the first entry, n times."""
    return mixture(name).column(0)[np.zeros(n, dtype=int)]


def normal_average(function: Callable[[Array], Array], var: float) -> Any:
    """E[function(ε)] over ε ~ N(0, var) on a fine grid, for functions that vary over lengths well above √var/100."""
    z = np.linspace(-12.0, 12.0, 4001)
    return function(np.sqrt(var) * z) @ stats.norm.pdf(z) * (z[1] - z[0])


def component(name: str, index: tuple[int, ...], what: str, y: Any) -> Any:
    """``pdf``, ``pmf`` or ``cdf`` of one component from scipy.stats, averaged on a grid if its centre is uncertain."""
    grid = np.asarray(y)[..., None]
    match name:
        case "normal":
            return getattr(stats.norm, what)(y, LOC[index], np.sqrt(VAR[index]))
        case "student":
            return getattr(stats.t, what)(y, DF, LOC[index], SCALE[index])
        case "student+normal":
            student = getattr(stats.t, what)
            return normal_average(lambda e: student(grid, DF, LOC[index] + e, SCALE[index]), VAR[index])
        case "bernoulli":
            return getattr(stats.bernoulli, what)(y, P[index])
        case "poisson":
            return getattr(stats.poisson, what)(y, RATE[index])
        case "poisson+normal":
            poisson = getattr(stats.poisson, what)
            return normal_average(lambda e: poisson(grid, RATE[index] * np.exp(e)), 0.3 * VAR[index])
    raise AssertionError(f"no reference for {name}")


def average_at(name: str, entry: tuple[int, ...], what: str, y: Any) -> Any:
    """The weighted average over the components of one entry."""
    return sum(w * component(name, (k, *entry), what, y) for k, w in enumerate(WEIGHTS))


def average(name: str, what: str, y: Array) -> Array:
    return np.array([average_at(name, entry, what, y[entry]) for entry in np.ndindex(*y.shape)]).reshape(y.shape)


# --- densities and distribution functions ----------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.3, -7.0])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_density_and_cdf(name: str, offset: float) -> None:
    y = LOC[0] + offset
    np.testing.assert_allclose(mixture(name).log_prob(y), np.log(average(name, "pdf", y)), rtol=0, atol=1e-8)
    np.testing.assert_allclose(mixture(name).cdf(y), average(name, "cdf", y), rtol=0, atol=1e-9)


@pytest.mark.parametrize("y", [np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[3.0, 9.0], [30.0, 2.0]])])
@pytest.mark.parametrize("name", DISCRETE)
def test_probability_and_cdf_of_counts(name: str, y: Array) -> None:
    with np.errstate(divide="ignore"):
        expected = np.log(average(name, "pmf", y))
    np.testing.assert_allclose(mixture(name).log_prob(y), expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(mixture(name).cdf(y), average(name, "cdf", y), rtol=0, atol=1e-8)
    np.testing.assert_allclose(mixture(name).cdf(y + 0.7), average(name, "cdf", y), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_moments_are_those_of_the_density(name: str) -> None:
    u = np.linspace(-25.0, 25.0, 5001)
    y = np.sinh(u)
    one = first_entry(name, len(u))
    density = np.exp(one.log_prob(y)) * np.cosh(u) * (u[1] - u[0])
    np.testing.assert_allclose(density.sum(), 1.0, rtol=1e-8)
    np.testing.assert_allclose(one.mean[0], density @ y, rtol=1e-7)
    np.testing.assert_allclose(one.var[0], density @ (y - density @ y) ** 2, rtol=1e-6)
    np.testing.assert_allclose(one.std**2, one.var)


@pytest.mark.parametrize("name", DISCRETE)
def test_moments_are_those_of_the_counts(name: str) -> None:
    one = first_entry(name, len(COUNTS))
    pmf = np.exp(one.log_prob(COUNTS))
    np.testing.assert_allclose(pmf.sum(), 1.0, rtol=1e-9)
    np.testing.assert_allclose(one.mean[0], pmf @ COUNTS, rtol=1e-7)
    np.testing.assert_allclose(one.var[0], pmf @ COUNTS**2 - (pmf @ COUNTS) ** 2, rtol=1e-6)


@pytest.mark.parametrize("var", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("residual", [0.0, 3.0, 1e3, 1e6])
def test_outliers_keep_the_polynomial_tail(residual: float, var: float) -> None:
    """Far out, t + ε has the density of t; near the centre, that of ε if var is large."""
    got = Mixture(StudentT(4.0, np.zeros((1, 1)), np.ones((1, 1)), np.full((1, 1), var))).log_prob([residual])
    if residual**2 > 1e5 * var:
        np.testing.assert_allclose(got, stats.t.logpdf(residual, 4.0), atol=2e-3)
    elif var == 1e4 and residual < 10.0:
        np.testing.assert_allclose(got, stats.norm.logpdf(residual, scale=100.0), atol=2e-3)
    else:
        std = np.sqrt(var)
        parts = sorted(
            {-9.0 * std, 9.0 * std, *np.clip(residual + np.array([-30.0, -3.0, 0.0, 3.0]), -9 * std, 9 * std)}
        )
        density = sum(
            integrate.quad(
                lambda e: stats.t.pdf(residual - e, 4.0) * stats.norm.pdf(e, scale=std), a, b, epsabs=0.0, epsrel=1e-10
            )[0]
            for a, b in itertools.pairwise(parts)
        )
        np.testing.assert_allclose(got, np.log(density), atol=1e-7)


@pytest.mark.parametrize("rate", [0.5, 30.0, 300.0])
@pytest.mark.parametrize("var", [1e-4, 0.5, 1.0])
def test_counts_of_an_uncertain_rate(rate: float, var: float) -> None:
    """Also where a Poisson law is much narrower than the spread of its rate."""
    uncertain = Mixture(Poisson(np.full((1, 1), rate), np.full((1, 1), var)))
    for y in np.floor(rate * np.exp(np.sqrt(var) * np.array([-2.0, 0.0, 2.5]))):
        pmf = normal_average(lambda e, y=y: stats.poisson.pmf(y, rate * np.exp(e)), var)
        cdf = normal_average(lambda e, y=y: stats.poisson.cdf(y, rate * np.exp(e)), var)
        np.testing.assert_allclose(uncertain.log_prob([y]), np.log(pmf), atol=1e-8)
        np.testing.assert_allclose(uncertain.cdf([y]), cdf, atol=1e-6)


def test_impossible_counts_have_probability_zero() -> None:
    y = np.array([[-1.0, 0.5], [2.5, -0.1]])
    for name in DISCRETE:
        assert np.all(mixture(name).log_prob(y) == -np.inf)
    assert np.all(mixture("bernoulli").log_prob(np.full((2, 2), 2.0)) == -np.inf)
    certain = Mixture(Bernoulli(np.array([[0.0, 1.0]])))
    np.testing.assert_array_equal(certain.log_prob([0.0, 0.0]), [0.0, -np.inf])
    np.testing.assert_array_equal(mixture("poisson").cdf(np.full((2, 2), -0.5)), np.zeros((2, 2)))


@pytest.mark.parametrize("var", [0.0, 0.5])
def test_student_t_with_many_degrees_of_freedom_is_normal(var: float) -> None:
    for df in (1e7, 1e15):
        almost = Mixture(StudentT(df, LOC, SCALE, np.array(var)), WEIGHTS)
        normal = Mixture(Normal(LOC, SCALE**2 + var), WEIGHTS)
        np.testing.assert_allclose(almost.log_prob(LOC[0]), normal.log_prob(LOC[0]), atol=1e-5)
        np.testing.assert_allclose(almost.quantile(0.1), normal.quantile(0.1), atol=1e-5)


def test_far_tails_do_not_underflow() -> None:
    y = np.full((2, 2), 1e3)
    best = stats.norm.logpdf(y, LOC, np.sqrt(VAR)) + np.log(WEIGHTS)[:, None, None]
    got = mixture("normal").log_prob(y)
    assert np.all(got < -1e4)
    np.testing.assert_allclose(got, best.max(axis=0), rtol=1e-6)


def test_nodes_integrate_rough_functions() -> None:
    for roughness in (0.0, 1.0, 20.0):
        z, w = normal_nodes(roughness)
        assert len(z) <= 401
        # E[Φ(a z + b)] = Φ(b/√(1 + a²))
        expected = stats.norm.cdf(0.7 * roughness / np.hypot(1.0, roughness))
        np.testing.assert_allclose(w @ stats.norm.cdf(roughness * (z + 0.7)), expected, atol=1e-9)


# --- quantiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1e-6, 0.025, 0.5, 0.9, 1.0 - 1e-6])
@pytest.mark.parametrize("name", ["normal", "student"])
def test_quantiles_solve_the_cdf(name: str, q: float) -> None:
    got = mixture(name).quantile(q)
    for entry in ((0, 0), (1, 1)):
        root = optimize.brentq(
            lambda x, entry=entry: average_at(name, entry, "cdf", x) - q, -1e5, 1e5, xtol=1e-13, rtol=1e-14
        )
        # a root is known no better than the CDF, whose rounding errors near 1 are divided by its slope
        np.testing.assert_allclose(got[entry], root, rtol=1e-10 if q < 0.99 else 1e-8)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_quantiles_invert_the_cdf(name: str) -> None:
    levels = [0.001, 0.3, 0.5, 0.999]
    values = mixture(name).quantile(levels)
    assert values.shape == (4, 2, 2)
    for level, value in zip(levels, values, strict=True):
        np.testing.assert_allclose(mixture(name).cdf(value), level, rtol=1e-9)
        np.testing.assert_array_equal(mixture(name).quantile(level), value)


def test_quantiles_across_an_empty_gap() -> None:
    """Between two far peaks the density underflows, and Newton's method alone would leave."""
    two = Mixture(Normal(np.array([[-1e4], [1e4]]), np.full((2, 1), 1e-4)), [0.3, 0.7])
    np.testing.assert_allclose(two.quantile(0.15), -1e4, rtol=1e-12)
    np.testing.assert_allclose(two.quantile(0.3 + 0.35), 1e4, rtol=1e-12)
    low, high = two.quantile(0.3 - 1e-9), two.quantile(0.3 + 1e-9)
    np.testing.assert_allclose(low, -1e4 + 0.01 * stats.norm.ppf(1.0 - 1e-9 / 0.3), rtol=1e-10)
    np.testing.assert_allclose(high, 1e4 + 0.01 * stats.norm.ppf(1e-9 / 0.7), rtol=1e-10)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.97])
@pytest.mark.parametrize("name", DISCRETE)
def test_quantiles_of_counts_are_the_smallest_that_reach_q(name: str, q: float) -> None:
    got = mixture(name).quantile(q)
    np.testing.assert_array_equal(got, np.floor(got))
    assert np.all(average(name, "cdf", got) >= q)
    assert np.all(average(name, "cdf", got - 1.0) < q)


def test_intervals_are_central() -> None:
    lower, upper = mixture("normal").interval(0.8)
    np.testing.assert_allclose(mixture("normal").cdf(lower), 0.1, rtol=1e-9)
    np.testing.assert_allclose(mixture("normal").cdf(upper), 0.9, rtol=1e-9)


# --- CRPS -------------------------------------------------------------------------------------------


def test_crps_of_normals() -> None:
    y = LOC[1] + 0.4
    weights = np.broadcast_to(WEIGHTS[:, None, None], SHAPE)
    expected = scoringrules.crps_mixnorm(y, LOC, np.sqrt(VAR), weights, m_axis=0)
    np.testing.assert_allclose(mixture("normal").crps(y), expected, rtol=1e-12)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_crps_of_many_normals_by_the_integral(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    K = 400
    mean, var = spread * rng.normal(size=(K, 3)), rng.uniform(0.5, 3.0, (K, 3))
    y = np.array([0.0, -2.0, 5.0])
    expected = scoringrules.crps_mixnorm(y, mean, np.sqrt(var), m_axis=0)
    with monkeypatch.context() as patch:
        patch.delattr(prediction, "_pairwise_spread")
        np.testing.assert_allclose(Mixture(Normal(mean, var)).crps(y), expected, rtol=1e-8)


@pytest.mark.parametrize("df", [1.3, 4.0, 60.0])
def test_crps_of_one_student(df: float) -> None:
    y = LOC[1] + 0.4
    expected = scoringrules.crps_t(y, df, LOC[0], SCALE[0])
    np.testing.assert_allclose(Mixture(StudentT(df, LOC[:1], SCALE[:1])).crps(y), expected, rtol=1e-7)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_crps_is_the_integral_of_squared_differences(name: str) -> None:
    y = 0.8
    points, w = np.polynomial.legendre.leggauss(20)
    u = (np.arange(0.0, 20.0, 0.5)[:, None] + 0.25 * (points + 1.0)).ravel()
    dx = np.tile(0.25 * w, 40) * np.cosh(u)
    one = first_entry(name, len(u))
    # ∫ F² left of y and ∫ (1 - F)² right of it
    expected = dx @ one.cdf(y - np.sinh(u)) ** 2 + dx @ (1.0 - one.cdf(y + np.sinh(u))) ** 2
    np.testing.assert_allclose(one[:1].crps([y]), expected, rtol=1e-7)


@cache
def summed_cdf(name: str) -> Array:
    return average_at(name, (0, 0), "cdf", COUNTS)


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("y", [0.0, 1.0, 40.0])
def test_crps_of_counts_is_a_sum(name: str, y: float) -> None:
    F = summed_cdf(name)
    np.testing.assert_allclose(first_entry(name, 1).crps([y]), np.sum((F - (y <= COUNTS)) ** 2), rtol=1e-7)


@pytest.mark.parametrize("rate", [3.0, 900.0, 2e4])
def test_crps_of_one_poisson(rate: float) -> None:
    y = np.floor(np.array([0.5, 1.0, 1.1]) * rate)
    counts = np.arange(3.0 * rate + 50.0)
    expected = [np.sum((stats.poisson.cdf(counts, rate) - (counts >= target)) ** 2) for target in y]
    np.testing.assert_allclose(Mixture(Poisson(np.full((1, 3), rate))).crps(y), expected, rtol=1e-9)
    if rate < 100.0:
        np.testing.assert_allclose(expected, scoringrules.crps_poisson(y, rate), rtol=1e-9)


def test_crps_of_narrow_students_is_that_of_points() -> None:
    """Also the limit of a normal mixture: Σ w |x - y| - ½ Σ w w' |x - x'|."""
    points = np.array([-1.0, 0.2, 1.5])
    expected = WEIGHTS @ np.abs(points - 0.4) - 0.5 * WEIGHTS @ np.abs(points[:, None] - points) @ WEIGHTS
    narrow = np.full((3, 1), 1e-6)
    np.testing.assert_allclose(
        Mixture(StudentT(4.0, points[:, None], narrow), WEIGHTS).crps([0.4]), expected, rtol=1e-3
    )
    np.testing.assert_allclose(Mixture(Normal(points[:, None], narrow**2), WEIGHTS).crps([0.4]), expected, rtol=1e-5)


def test_crps_needs_a_mean() -> None:
    with pytest.raises(InputError, match="df > 1"):
        Mixture(StudentT(1.0, LOC, SCALE)).crps(LOC[0])


# --- properties -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    level=st.floats(0.01, 0.99),
    name=st.sampled_from(["normal", "student", "bernoulli", "poisson"]),
)
def test_a_component_may_be_split_in_two(seed: int, level: float, name: str) -> None:
    """Writing a component twice with half its weight changes nothing."""
    random = np.random.default_rng(seed)
    whole = Mixture(FAMILIES[name](), random.dirichlet(np.ones(3)))
    doubled = {key: np.concatenate([array, array[:1]]) for key, array in whole.family.arrays().items()}
    fixed = {"df": DF} if name == "student" else {}
    split = Mixture(
        type(whole.family)(**fixed, **doubled), [0.5 * whole.weights[0], *whole.weights[1:], 0.5 * whole.weights[0]]
    )
    y = random.integers(0, 2, (2, 2)).astype(float)
    np.testing.assert_allclose(split.var, whole.var, rtol=1e-12)
    np.testing.assert_allclose(split.cdf(y), whole.cdf(y), rtol=1e-12)
    np.testing.assert_allclose(split.log_prob(y), whole.log_prob(y), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(split.crps(y), whole.crps(y), rtol=1e-8)
    np.testing.assert_allclose(split.quantile(level), whole.quantile(level), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("scale", [2.5, -0.1, np.array([0.5, 30.0])])
def test_rescaling_changes_units_only(name: str, scale: float | Array) -> None:
    before, shift, y = mixture(name), np.array([5.0, -3.0]), LOC[0] + 0.3
    after = before.rescale(scale, shift)
    np.testing.assert_allclose(after.mean, scale * before.mean + shift)
    np.testing.assert_allclose(after.std, np.abs(scale) * before.std)
    np.testing.assert_allclose(
        after.log_prob(scale * y + shift), before.log_prob(y) - np.log(np.abs(scale) * np.ones(2))
    )
    if name != "student+normal":
        np.testing.assert_allclose(after.crps(scale * y + shift), np.abs(scale) * before.crps(y), rtol=1e-7)
    level = np.where(np.asarray(scale) * np.ones(2) > 0, 0.2, 0.8)
    for p in range(2):
        expected = (scale * before.quantile(level[p]) + shift)[:, p]
        np.testing.assert_allclose(after.quantile(0.2)[:, p], expected, rtol=1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_follow_the_distribution(name: str) -> None:
    n = 20_000
    draws = mixture(name).sample(n, random_state=1)
    assert draws.shape == (n, 2, 2)
    # Dvoretzky-Kiefer-Wolfowitz: sup |F_n - F| exceeds this with probability 1e-6
    bound = np.sqrt(np.log(2.0 / 1e-6) / (2.0 * n))
    for level in (0.05, 0.3, 0.5, 0.7, 0.95):
        x = mixture(name).quantile(level)
        assert np.all(np.abs((draws <= x).mean(axis=0) - mixture(name).cdf(x)) < bound)
    assert abs(np.corrcoef(draws[:, 0, 0], draws[:, 1, 0])[0, 1]) < 5.0 / np.sqrt(n)


def test_samples_are_reproducible() -> None:
    first = mixture("normal").sample(4, random_state=3)
    np.testing.assert_array_equal(first, mixture("normal").sample(4, random_state=np.random.default_rng(3)))
    assert np.all(first != mixture("normal").sample(4, random_state=4))


# --- rows, shapes, memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_columns(name: str) -> None:
    whole, y = mixture(name), np.array([[0.0, 1.0], [1.0, 0.0]])
    expected = whole.log_prob(y)
    assert len(whole) == 2
    for rows in (slice(1, None), 1, -1, [1, 0], np.array([False, True])):
        kept = np.atleast_1d(np.arange(2)[rows])
        np.testing.assert_allclose(whole[rows].log_prob(y[kept]), expected[kept], rtol=1e-9)
    np.testing.assert_allclose(whole.column(1).log_prob(y[:, 1]), expected[:, 1], rtol=1e-9)
    rejoined = Mixture.concatenate([whole[:1], whole[1:]])
    assert rejoined.shape == whole.shape
    np.testing.assert_allclose(rejoined.log_prob(y), expected, rtol=1e-9)


def test_components_are_at_hand() -> None:
    whole = mixture("student+normal")
    assert whole.n_components == 3
    np.testing.assert_array_equal(whole.mean_components, LOC)
    np.testing.assert_allclose(whole.var_components, DF / (DF - 2.0) * SCALE**2 + VAR, rtol=1e-14)


def test_a_single_output_takes_and_returns_vectors() -> None:
    single = Mixture(Normal(LOC[:, :, :1], VAR[:, :, :1]), WEIGHTS)
    y = np.array([0.1, 0.2])
    for answer in (single.log_prob, single.cdf, single.crps):
        assert answer(y).shape == (2,)
        np.testing.assert_array_equal(answer(y), answer(y[:, None])[:, 0])
        np.testing.assert_array_equal(answer(list(y)), answer(y))


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_do_not_depend_on_the_size_of_the_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    y = np.array([[0.0, 1.0], [1.0, 0.0]])

    def answers() -> list[Array]:
        whole = mixture(name)
        return [whole.mean, whole.var, whole.cdf(y), whole.log_prob(y), whole.crps(y), whole.quantile(0.3)]

    expected = answers()
    monkeypatch.setattr(prediction, "CHUNK", 1)
    for got, value in zip(answers(), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-7)


def test_memory_stays_bounded() -> None:
    """K n numbers would take 80 MB in one temporary array alone."""
    K, n = 1000, 10_000
    big = Mixture(Normal(np.linspace(-1.0, 1.0, K)[:, None] * np.ones((1, n)), np.ones((1, 1))))
    y = np.zeros(n)
    tracemalloc.start()
    big.log_prob(y)
    big[:500].quantile(0.9)
    big[:500].crps(y[:500])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_single_precision_components_are_kept_and_answers_are_double() -> None:
    small = Normal(LOC.astype(np.float32), VAR.astype(np.float32))
    assert small.mean.dtype == np.float32
    got = Mixture(small, WEIGHTS).log_prob(LOC[0])
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, mixture("normal").log_prob(LOC[0]), rtol=1e-5)


def test_nothing_can_be_changed() -> None:
    whole = mixture("normal")
    with pytest.raises(AttributeError):
        whole.weights = WEIGHTS  # type: ignore[misc]
    for array in (whole.weights, whole.mean, whole.var, whole.mean_components, whole[[0]].mean_components):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0.0
    assert LOC.flags.writeable


def test_it_prints_what_it_is() -> None:
    assert repr(mixture("student")) == "Mixture of 3 StudentT components, shape (2, 2)"


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.log_prob(np.zeros(2)), r"y has shape \(2,\), but the predictions have shape \(2, 2\)"),
        (lambda m: m.cdf(0.0), r"y has shape \(\)"),
        (lambda m: m.crps(np.zeros((3, 2))), r"y has shape \(3, 2\)"),
        (lambda m: m.log_prob(np.full((2, 2), np.nan)), "NaN or infinite"),
        (lambda m: m.quantile(1.0), "between 0 and 1"),
        (lambda m: m.quantile([[0.5]]), "one probability or a list"),
        (lambda m: m.quantile(np.nan), "between 0 and 1"),
        (lambda m: m.interval(95.0), "such as 0.95"),
        (lambda m: m.rescale(0.0, 1.0), "scale not 0"),
        (lambda m: m.rescale(np.ones(3), 1.0), r"shape \(2,\)"),
        (lambda m: m.sample(0), "n must be at least 1"),
        (lambda m: m[0, 1], "column"),
        (lambda m: m.column(2), "no column 2"),
        (lambda m: Mixture.concatenate([]), "at least one"),
        (lambda m: Mixture.concatenate([m, mixture("student")]), "same family"),
        (lambda m: Mixture.concatenate([m, Mixture(m.family)]), "same family, weights"),
        (lambda m: mixture("poisson").rescale(2.0, 0.0), "Poisson counts have no units"),
        (lambda m: Mixture(m.family, [0.5, 0.5]), "weights must be 3 non-negative numbers"),
        (lambda m: Mixture(m.family, [0.5, 0.7, -0.2]), "non-negative"),
        (lambda m: Mixture(m.family, [0.5, 0.5, 0.5]), "sum to one"),
        (lambda m: Normal(LOC, -VAR), "var of Normal must lie in"),
        (lambda m: Normal(np.full((1, 1), np.nan), np.ones((1, 1))), "mean of Normal .* not be NaN"),
        (lambda m: Normal(np.zeros(3), np.ones(3)), r"\(K, n, P\) or \(K, n\)"),
        (lambda m: StudentT(0.0, LOC, SCALE), "df of StudentT"),
        (lambda m: Bernoulli(P + 1.0), r"p of Bernoulli must lie in \[0, 1\]"),
        (lambda m: Poisson(np.full((1, 1), np.inf)), "rate of Poisson"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable[[Mixture], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(mixture("normal"))


def test_different_degrees_of_freedom_do_not_concatenate() -> None:
    with pytest.raises(InputError, match="same family"):
        Mixture.concatenate([Mixture(StudentT(3.0, LOC, SCALE)), Mixture(StudentT(4.0, LOC, SCALE))])


def test_every_family_is_tested() -> None:
    def final(kind: type[Family]) -> set[type[Family]]:
        below = kind.__subclasses__()
        return set().union(*map(final, below)) if below else {kind}

    assert final(families.Family) == {type(build()) for build in FAMILIES.values()}
