"""Posteriors over inducing outputs against dense NumPy algebra, for every kind of coupling and for the dense door."""

import itertools
from collections.abc import Iterator
from typing import Any

import dense
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from structured_dgp.couplings import Coupling, Order, Structure, Widths, as_coupling
from structured_dgp.dense import Chain, DensePosterior, FactorRule
from structured_dgp.exceptions import CouplingError, InputError
from structured_dgp.posterior import AbstractPosterior, Posterior

Array = NDArray[np.float64]

M, WIDTHS = 3, (2, 2, 1)

CASES: dict[str, tuple[Coupling, Widths]] = {
    **{name: (as_coupling(name), WIDTHS) for name in dense.patterns},
    **{
        f"order {seed}": (Order(dense.random_relation(np.random.default_rng(seed), WIDTHS, 0.4)), WIDTHS)
        for seed in range(2)
    },
    "unequal star": (as_coupling("star"), (1, 3, 2)),
    "one layer": (as_coupling("fc"), (2,)),
}

each_case = pytest.mark.parametrize("case", CASES)
some_cases = pytest.mark.parametrize("case", ["star", "order 0", "unequal star"])


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_parts(structure: Structure, seed: int = 0, signs: bool = True) -> tuple[Array, Array]:
    """A mean and a factor of the structure's pattern; with `signs`, some diagonal entries are negative."""
    rng, n_gps = np.random.default_rng(seed), sum(structure.widths)
    pattern = np.zeros((n_gps, n_gps), dtype=bool)
    pattern[tuple(np.array(structure.blocks).T)] = True
    C = dense.random_factor(rng, pattern, M)
    if signs:
        C = C * rng.choice([-1.0, 1.0], len(C))
        assert np.diag(C).min() < 0.0 < np.diag(C).max()
    return rng.standard_normal((n_gps, M)), C


def gaussian_kl(mean: Array, cov: Array) -> float:
    """KL[N(mean, cov) ‖ N(0, I)] = ½ (tr cov + |mean|² - n - log |cov|)."""
    return float(0.5 * (np.trace(cov) + np.sum(mean**2) - mean.size - np.linalg.slogdet(cov)[1]))


@eqx.filter_jit
def answers(posterior: AbstractPosterior) -> tuple[Any, Any, Any]:
    return posterior.moments(), posterior.kl(), posterior.factor()


def check_moments(posterior: AbstractPosterior, mean: Array, cov: Array) -> None:
    """Every answer of the posterior against its mean and covariance."""
    (own_mean, rows), kl, _ = answers(posterior)
    np.testing.assert_allclose(own_mean, mean, rtol=1e-14)
    np.testing.assert_allclose(kl, gaussian_kl(mean, cov), rtol=1e-11)
    np.testing.assert_allclose(posterior.covariance(), cov, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(posterior.precision(), np.linalg.inv(cov), rtol=1e-9, atol=1e-9)
    assert posterior.n_inducing == M
    n_gps = len(mean)
    seen = np.zeros((n_gps, n_gps), dtype=bool)
    for j, (row, partners) in enumerate(zip(rows, posterior.structure.partners, strict=True)):
        for place, i in enumerate(partners):
            seen[i, j] = seen[j, i] = True
            # S[j, i], so that a row vector of features of GP j meets it from the left
            np.testing.assert_allclose(
                row[:, place * M : (place + 1) * M], dense.block(cov, j, i, M), rtol=1e-11, atol=1e-13
            )
        assert row.shape[1] == len(partners) * M
    for j, i in np.argwhere(~seen):
        assert not np.any(dense.block(cov, j, i, M))


# --- Posteriors of a coupling ---------------------------------------------------------------------


@each_case
def test_answers_agree_with_dense_algebra(case: str) -> None:
    coupling, widths = CASES[case]
    mean, C = random_parts(coupling.structure(widths))
    posterior = Posterior.from_dense(coupling, widths, mean, C)
    np.testing.assert_array_equal(answers(posterior)[2], C)
    check_moments(posterior, mean, C @ C.T)


@some_cases
def test_numbers_above_the_diagonal_are_ignored(case: str) -> None:
    coupling, widths = CASES[case]
    structure = coupling.structure(widths)
    mean, C = random_parts(structure)
    posterior = Posterior.from_dense(coupling, widths, mean, C)
    rubbish = np.zeros(posterior.blocks.shape)
    for i in range(sum(widths)):
        rubbish[structure.block_index[i, i]] = np.triu(np.full((M, M), 7.0), 1)
    posterior = eqx.tree_at(lambda p: p.blocks, posterior, replace_fn=lambda blocks: blocks + rubbish)
    np.testing.assert_array_equal(answers(posterior)[2], C)
    check_moments(posterior, mean, C @ C.T)


@some_cases
def test_gradients_agree_with_dense_algebra(case: str) -> None:
    """Of a weighted sum of all moments and the KL divergence, with numbers above the diagonal that do not count."""
    coupling, widths = CASES[case]
    structure = coupling.structure(widths)
    mean, C = random_parts(structure)
    rng = np.random.default_rng(1)
    mean_weights, weights = rng.standard_normal(mean.shape), np.zeros(C.shape)
    for j, partners in enumerate(structure.partners):
        for i in partners:
            dense.block(weights, j, i, M)[...] = rng.standard_normal((M, M))

    def total(posterior: Posterior) -> jax.Array:
        own_mean, rows = posterior.moments()
        pairs = [(j, i) for j, partners in enumerate(structure.partners) for i in partners]
        covariances = jnp.concatenate([row.reshape(M, -1, M).swapaxes(0, 1) for row in rows])
        own_weights = np.stack([dense.block(weights, j, i, M) for j, i in pairs])
        return 1.7 * posterior.kl() + jnp.sum(mean_weights * own_mean) + jnp.sum(own_weights * covariances)

    posterior = Posterior.from_dense(coupling, widths, mean, C)
    above = np.array([np.triu(np.ones((M, M)), 1) * (i == k) for i, k in structure.blocks])
    posterior = eqx.tree_at(lambda p: p.blocks, posterior, replace_fn=lambda blocks: blocks + 7.0 * above)
    gradient = eqx.filter_jit(jax.grad(total))(posterior)
    np.testing.assert_allclose(gradient.mean, 1.7 * mean + mean_weights, rtol=1e-12)
    # d⟨G, C Cᵀ⟩ = ⟨(G + Gᵀ) C, dC⟩ and d KL = ⟨C - C⁻ᵀ, dC⟩, of which the pattern keeps 1 / diag C
    expected = (weights + weights.T) @ C + 1.7 * (C - np.diag(1.0 / np.diag(C)))
    blocks = np.stack([dense.block(expected, i, k, M) for i, k in structure.blocks])
    np.testing.assert_allclose(gradient.blocks, np.where(above, 0.0, blocks), rtol=1e-11, atol=1e-12)


@some_cases
def test_samples_have_the_mean_and_the_covariance(case: str) -> None:
    """Within five standard errors, entry by entry."""
    coupling, widths = CASES[case]
    mean, C = random_parts(coupling.structure(widths), signs=False)
    posterior = Posterior.from_dense(coupling, widths, mean, C)
    check_samples(posterior, mean, C @ C.T)


def check_samples(posterior: AbstractPosterior, mean: Array, cov: Array, n_samples: int = 20_000) -> None:
    draws = np.asarray(eqx.filter_jit(lambda p, key: p.sample(key, n_samples))(posterior, jax.random.key(1)))
    assert draws.shape == (n_samples, *mean.shape)
    flat = (draws - mean).reshape(n_samples, -1)
    var = np.diag(cov)
    assert np.all(np.abs(flat.mean(axis=0)) < 5 * np.sqrt(var / n_samples))
    # var(ab) = var(a) var(b) + cov(a, b)² for jointly Gaussian a, b of mean zero
    error = np.abs(flat.T @ flat / n_samples - cov)
    assert np.all(error < 5 * np.sqrt((np.outer(var, var) + cov**2) / n_samples))


@each_case
def test_the_prior_has_no_distance_from_itself(case: str) -> None:
    prior = Posterior.prior(*CASES[case], M)
    check_moments(prior, np.zeros(prior.mean.shape), np.eye(prior.mean.size))
    assert answers(prior)[1] == 0.0


@each_case
def test_training_starts_at_small_hidden_and_prior_output_factors(case: str) -> None:
    coupling, widths = CASES[case]
    start = Posterior.initial(coupling, widths, M, hidden_scale=1e-2, output_scale=0.5)
    scales = [1e-2] * sum(widths[:-1]) + [0.5] * widths[-1]
    np.testing.assert_array_equal(answers(start)[2], np.diag(np.repeat(scales, M)))
    assert not np.any(start.mean)


def test_parts_are_kept_in_float64_outside_any_scope() -> None:
    mean, C = random_parts(as_coupling("star").structure(WIDTHS))
    with jax.enable_x64(False):
        posterior = Posterior.from_dense("star", WIDTHS, mean, C).to("fc")
        assert posterior.mean.dtype == posterior.blocks.dtype == jnp.float64
        np.testing.assert_allclose(posterior.covariance(), C @ C.T, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(posterior.precision() @ C @ C.T, np.eye(len(C)), atol=1e-9)
        assert Posterior.prior("mf", WIDTHS, M).blocks.dtype == jnp.float64


# --- Conversions ----------------------------------------------------------------------------------


def test_a_larger_coupling_holds_the_same_distribution() -> None:
    mean, C = random_parts(as_coupling("mf").structure(WIDTHS))
    posterior = Posterior.from_dense("mf", WIDTHS, mean, C)
    for larger in ("mf", "stripes", "star", Order(np.tri(5, k=-1).astype(bool)), "fc"):
        posterior = posterior.to(larger)
        assert posterior.coupling == as_coupling(larger)
        np.testing.assert_array_equal(posterior.factor(), C)
        check_moments(posterior, mean, C @ C.T)


@pytest.mark.parametrize(
    ("source", "target"),
    [("fc", "star"), ("star", "mf"), ("stripes", "arrow"), ("arrow", "stripes"), ("arrow", "mf"), ("order 0", "arrow")],
)
def test_a_coupling_that_lacks_blocks_is_refused(source: str, target: str) -> None:
    """Also when the blocks it lacks are zero at present: the conversion does not depend on numbers."""
    with pytest.raises(CouplingError, match=r"does not contain.*at least the same blocks, as in MF -> STAR -> FC"):
        Posterior.prior(CASES[source][0], WIDTHS, M).to(target)


# --- What from_dense refuses ----------------------------------------------------------------------


def changed(matrix: Array, place: tuple[int, int], value: float) -> Array:
    result = matrix.copy()
    result[place] = value
    return result


MEAN, EYE = np.zeros((5, M)), np.eye(15)


@pytest.mark.parametrize(
    ("mean", "factor", "error", "message"),
    [
        (np.zeros((4, M)), EYE, InputError, r"mean must have shape \(5, M\) for widths \(2, 2, 1\); got \(4, 3\)"),
        (np.zeros(5), EYE, InputError, r"mean must have shape \(5, M\).*got \(5,\)"),
        (np.zeros((5, 0)), np.zeros((0, 0)), InputError, r"mean must have shape \(5, M\).*got \(5, 0\)"),
        (MEAN, np.eye(12), InputError, r"factor must have shape \(15, 15\).*got \(12, 12\)"),
        (MEAN, np.zeros((5, M, M)), InputError, r"factor must have shape \(15, 15\).*got \(5, 3, 3\)"),
        (changed(MEAN, (1, 1), np.nan), EYE, InputError, "must be finite"),
        (MEAN, changed(EYE, (1, 1), np.inf), InputError, "must be finite"),
        (MEAN, changed(EYE, (4, 1), 0.1), CouplingError, r"block \(1, 0\).*GP 0 precedes GP 1"),
        (MEAN, changed(EYE, (10, 2), 0.1), CouplingError, r"block \(3, 0\).*GP 0 precedes GP 3"),
        (MEAN, changed(EYE, (2, 8), 0.1), InputError, r"block \(0, 2\)"),
        (MEAN, changed(EYE, (6, 7), 0.1), InputError, "diagonal block of GP 2 is not lower triangular.*cholesky"),
        (MEAN, changed(EYE, (12, 12), 0.0), InputError, "diagonal block of GP 4 has a zero on its diagonal"),
    ],
)
def test_unfit_parts_are_refused(mean: Array, factor: Array, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Posterior.from_dense("star", WIDTHS, mean, factor)


def test_blocks_of_the_coupling_are_not_refused() -> None:
    Posterior.from_dense("star", WIDTHS, MEAN, changed(changed(EYE, (6, 2), 0.1), (14, 3), 0.1))


# --- The dense door -------------------------------------------------------------------------------


class Given(FactorRule):
    """Any mean and factor, as a user's own rule would return them."""

    mean: jax.Array
    root: jax.Array

    def __call__(self) -> tuple[jax.Array, jax.Array]:
        return self.mean, self.root


def test_a_factor_of_any_shape_will_do() -> None:
    """Neither triangular nor of positive determinant."""
    rng = np.random.default_rng(2)
    mean, C = rng.standard_normal((5, M)), rng.standard_normal((15, 15)) / 4 + np.eye(15)[::-1]
    posterior = DensePosterior(Given(jnp.asarray(mean), jnp.asarray(C)), WIDTHS)
    np.testing.assert_array_equal(posterior.factor(), C)
    check_moments(posterior, mean, C @ C.T)
    check_samples(posterior, mean, C @ C.T)
    np.testing.assert_allclose(posterior.kl(), gaussian_kl(mean, C @ C.T), rtol=1e-12)
    check_moments(posterior.evaluated(), mean, C @ C.T)
    np.testing.assert_allclose(posterior.evaluated().kl(), gaussian_kl(mean, C @ C.T), rtol=1e-12)


def test_a_dense_posterior_agrees_with_the_coupling_it_copies() -> None:
    mean, C = random_parts(as_coupling("star").structure(WIDTHS))
    dense_posterior = DensePosterior(Given(jnp.asarray(mean), jnp.asarray(C)), WIDTHS)
    np.testing.assert_allclose(
        answers(dense_posterior)[1], answers(Posterior.from_dense("star", WIDTHS, mean, C))[1], rtol=1e-13
    )


@pytest.mark.parametrize(
    ("mean", "root", "got"),
    [
        ((4, M), (12, 12), r"\(4, 3\) and \(12, 12\)"),
        ((15,), (15, 15), r"\(15,\) and \(15, 15\)"),
        ((5, M), (15, 12), r"\(5, 3\) and \(15, 12\)"),
        ((5, M), (5, M, M), r"\(5, 3\) and \(5, 3, 3\)"),
    ],
)
def test_rules_with_other_shapes_are_refused(mean: tuple[int, ...], root: tuple[int, ...], got: str) -> None:
    with pytest.raises(InputError, match=rf"mean of shape \(5, M\) and a factor of shape \(5·M, 5·M\).*got {got}"):
        DensePosterior(Given(jnp.zeros(mean), jnp.zeros(root)), WIDTHS)


def test_impossible_widths_are_refused() -> None:
    rule = Given(jnp.zeros((5, M)), jnp.eye(15))
    with pytest.raises(InputError, match="layer 1 has width 0"):
        DensePosterior(rule, (5, 0))
    with pytest.raises(InputError, match="layer 0 has width 0"):
        Posterior.prior("fc", (0, 1), M)
    with pytest.raises(CouplingError, match="unknown coupling 'full'"):
        Posterior.prior("full", WIDTHS, M)


# --- The chain ------------------------------------------------------------------------------------


def random_chain(seed: int, widths: Widths) -> tuple[Chain, Array]:
    """A chain, and the bidiagonal factor B of its precision, assembled by hand."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum([width * M for width in widths]).tolist()
    spans = [slice(end - width * M, end) for end, width in zip(ends, widths, strict=True)]
    B = np.zeros((ends[-1], ends[-1]))
    for layer, span in enumerate(spans):
        size = span.stop - span.start
        B[span, span] = dense.random_lower(rng, size, 0.8, (1.1, 2.0))
        if layer:
            B[span, spans[layer - 1]] = rng.standard_normal(B[span, spans[layer - 1]].shape) / np.sqrt(size)
    chain = Chain(
        mean=jnp.asarray(rng.standard_normal((sum(widths), M))),
        factors=tuple(jnp.asarray(np.linalg.inv(B[span, span])) for span in spans),
        weights=tuple(
            jnp.asarray(-np.linalg.solve(B[span, span], B[span, before])) for before, span in itertools.pairwise(spans)
        ),
    )
    return chain, B


@pytest.mark.parametrize("widths", [(2, 1, 1, 1), WIDTHS, (2,)], ids=str)
def test_a_chain_is_the_inverse_of_its_bidiagonal_factor(widths: Widths) -> None:
    chain, B = random_chain(3, widths)
    posterior = DensePosterior(chain, widths)
    np.testing.assert_allclose(posterior.factor(), np.linalg.inv(B), rtol=1e-10, atol=1e-13)
    check_moments(posterior, np.asarray(chain.mean), np.linalg.inv(B.T @ B))
    precision, labels = posterior.precision(), dense.gp_labels(widths)
    for i, k in np.ndindex(len(labels), len(labels)):
        largest = np.abs(dense.block(precision, i, k, M)).max()
        assert (largest > 1e-3) == (abs(labels[i][0] - labels[k][0]) <= 1)
        assert largest > 1e-3 or largest < 1e-10


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_the_gradient_of_a_chain_is_that_of_its_factor(is_evaluated: bool) -> None:
    chain, _ = random_chain(4, (2, 1, 2))
    weights = np.random.default_rng(5).standard_normal((15, 15))

    def by_layers(rule: Chain) -> jax.Array:
        posterior = DensePosterior(rule, (2, 1, 2))
        posterior = posterior.evaluated() if is_evaluated else posterior
        return jnp.sum(weights * posterior.rule.covariance()) + posterior.kl()

    def by_factor(rule: Chain) -> jax.Array:
        mean, C = rule()
        kl = 0.5 * (jnp.sum(mean**2) + jnp.sum(C**2) - mean.size) - jnp.linalg.slogdet(C)[1]
        return jnp.sum(weights * (C @ C.T)) + kl

    (value, gradient), (expected_value, expected) = (
        jax.value_and_grad(answer)(chain) for answer in (by_layers, by_factor)
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_chain_starts_where_a_coupling_does() -> None:
    chain = DensePosterior(Chain.initial(WIDTHS, M, hidden_scale=1e-2, output_scale=0.5), WIDTHS)
    coupled = Posterior.initial("fc", WIDTHS, M, hidden_scale=1e-2, output_scale=0.5)
    np.testing.assert_allclose(chain.factor(), coupled.factor(), rtol=1e-14)
    np.testing.assert_allclose(answers(chain)[1], answers(coupled)[1], rtol=1e-12)
    assert not np.any(chain.rule.mean)
    assert [block.shape for block in chain.rule.weights] == [(6, 6), (3, 6)]
