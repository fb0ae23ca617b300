"""The model as a whole: special cases with known answers, gradients, prediction, and bad input."""

from __future__ import annotations

import dense
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from test_propagation import build, model_and_reference

from structured_dgp import (
    RBF,
    CouplingError,
    DeepGP,
    Gaussian,
    InputError,
    Layer,
    NumericalError,
    Posterior,
)
from structured_dgp.couplings import Coupling, FullyCoupled, MeanField, StripesAndArrow
from structured_dgp.initial import initial_model
from structured_dgp.likelihoods import Bernoulli, Likelihood, Poisson, StudentT
from structured_dgp.model import data_term
from structured_dgp.parameters import trainable_mask
from structured_dgp.precision import Precision

WIDTHS = (2, 2, 1)


def small_data(n: int = 12, n_inputs: int = 3, n_outputs: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, n_inputs))
    return x, np.sin(x[:, :1]) + 0.1 * rng.standard_normal((n, n_outputs))


def coupled_model(coupling: str | Coupling = "fc", seed: int = 0) -> DeepGP:
    """A small model with strong couplings."""
    rng = np.random.default_rng(seed)
    name = coupling if isinstance(coupling, str) else "fc"
    reference = dense.random_dgp(rng, 3, WIDTHS, 3, dense.patterns[name](WIDTHS), scale=0.6)
    return build(reference, Posterior.from_dense(coupling, WIDTHS, reference.mean, reference.factor))


# Moments against brute force: inducing outputs drawn, nothing marginalised.


def moment_distance(model: DeepGP, reference: dense.DenseDGP, n_samples: int) -> float:
    """Largest distance of output mean and variance from brute-force sampling, in Monte-Carlo standard errors."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 3))
    eps = rng.standard_normal((n_samples, 2, model.n_hidden))
    out = model.propagate(x, eps)
    y_draws = np.asarray(out.mean)[..., 0] + np.sqrt(np.asarray(out.cov)[..., 0, 0]) * rng.standard_normal(
        eps.shape[:2]
    )
    brute = dense.sample_outputs(reference, x, n_samples, rng)[0][..., 0]
    worst = 0.0
    for power in (1, 2):
        ours, theirs = (y_draws - brute.mean(0)) ** power, (brute - brute.mean(0)) ** power
        error = np.sqrt((ours.var(0) + theirs.var(0)) / n_samples)
        worst = max(worst, float(np.max(np.abs(ours.mean(0) - theirs.mean(0)) / error)))
    return worst


def test_moments_agree_with_sampled_inducing_outputs_and_a_wrong_coupling_does_not() -> None:
    rng = np.random.default_rng(1)
    reference = dense.random_dgp(rng, 3, WIDTHS, 3, dense.fully_coupled(WIDTHS), scale=0.9)
    right = build(reference, Posterior.from_dense("fc", WIDTHS, reference.mean, reference.factor))
    assert moment_distance(right, reference, 200_000) < 5.0

    # The same marginal covariance of every GP, with the correlations between GPs dropped.
    S, M = reference.factor @ reference.factor.T, reference.n_inducing
    factor = np.zeros_like(S)
    for i in range(sum(WIDTHS)):
        span = slice(i * M, (i + 1) * M)
        factor[span, span] = np.linalg.cholesky(S[span, span])
    wrong = build(reference, Posterior.from_dense("mf", WIDTHS, reference.mean, factor))
    assert moment_distance(wrong, reference, 200_000) > 10.0


def test_function_draws_have_the_marginals_of_propagate() -> None:
    model = coupled_model("fc", seed=4)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 3))
    n = 40_000
    draws = model.sample_functions(x, jax.random.key(0), n)
    out = model.propagate(x, rng.standard_normal((n, 2, model.n_hidden)))
    f = np.asarray(out.mean)[..., 0] + np.sqrt(np.asarray(out.cov)[..., 0, 0]) * rng.standard_normal((n, 2))
    pairs = [*zip(draws[:-1], out.hidden, strict=True), (np.asarray(draws[-1])[..., 0], f)]
    for ours, theirs in pairs:
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        error = np.sqrt((ours.var(0) + theirs.var(0)) / n)
        assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error)
        np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.03)


def test_function_draws_are_smooth_over_rows() -> None:
    """Neighbouring rows share the draw of the inducing outputs: one function, not independent noise."""
    model = coupled_model("star", seed=6)
    x = np.zeros((2, 3))
    x[1, 0] = 1e-3
    draws = np.asarray(model.sample_functions(x, jax.random.key(1), 500)[-1])[..., 0]
    assert draws.std(0).min() > 0.1
    # Jitter of 1e-6 per layer is all that may separate them.
    assert np.abs(draws[:, 0] - draws[:, 1]).max() < 0.05


def test_the_joint_covariance_is_that_of_function_draws() -> None:
    model = coupled_model("fc", seed=4)
    x = np.random.default_rng(5).standard_normal((4, 3))
    n = 40_000
    draws = np.asarray(model.sample_functions(x, jax.random.key(0), n)[-1])[..., 0]
    expected = np.cov(draws.T)
    found = model.joint_covariance(x, jax.random.key(1), n)
    assert found.shape == (4, 4, 1)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((found[..., 0] - expected) / scale).max() < 0.04
    assert np.abs(expected / scale - np.eye(4)).max() > 0.1  # so that there is something to find


def test_the_joint_covariance_of_one_layer_is_exact() -> None:
    rng = np.random.default_rng(0)
    Z, x = rng.standard_normal((5, 2)), rng.standard_normal((4, 2))
    factor = np.tril(rng.standard_normal((10, 10)))
    factor[:5, 5:] = 0.0
    posterior = Posterior.from_dense("fc", (2,), rng.standard_normal((2, 5)), factor)
    model = DeepGP([Layer(RBF(1.0), Z)], posterior, Gaussian(0.1))
    k = lambda a, b: np.exp(-0.5 * np.square(a[:, None] - b[None]).sum(-1))  # noqa: E731
    A = np.linalg.solve(np.linalg.cholesky(k(Z, Z) + model.jitter * np.eye(5)), k(Z, x)).T
    found = model.joint_covariance(x, jax.random.key(0))
    for output in range(2):
        rows = factor[5 * output : 5 * output + 5]
        expected = k(x, x) - A @ A.T + A @ rows @ rows.T @ A.T
        np.testing.assert_allclose(found[..., output], expected, rtol=1e-6, atol=1e-8)


# Nesting.


def test_fully_coupled_without_other_blocks_is_star_and_star_without_couplings_is_mean_field() -> None:
    x, y = small_data()
    for smaller, larger in ((StripesAndArrow(), FullyCoupled()), (MeanField(), StripesAndArrow())):
        model = coupled_model({"StripesAndArrow": "star", "MeanField": "mf"}[type(smaller).__name__])
        wide = DeepGP(model.layers, model.posterior.to(larger), model.likelihood)
        eps = np.random.default_rng(2).standard_normal((2, len(x), model.n_hidden))
        a, b = model.propagate(x, eps), wide.propagate(x, eps)
        for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(model.elbo(x, y, eps=eps), wide.elbo(x, y, eps=eps), rtol=1e-12)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_one_layer_is_the_sparse_variational_gp(n_outputs: int) -> None:
    rng = np.random.default_rng(0)
    x, y = small_data(n_outputs=n_outputs)
    reference = dense.random_dgp(rng, 3, (n_outputs,), 4, dense.mean_field((n_outputs,)), noise=[0.1, 0.3][:n_outputs])
    model = build(reference, Posterior.from_dense("mf", (n_outputs,), reference.mean, reference.factor))
    np.testing.assert_allclose(model.elbo(x, y, n_data=50), dense.svgp_elbo(reference, x, y, 50), rtol=1e-10)


def test_inducing_points_at_the_data_give_the_exact_gp() -> None:
    x, y = small_data()
    lengthscale, variance, noise = np.full(3, 1.5), 1.2, np.array([0.2])
    layer = dense.DenseLayer(x, None, lengthscale, variance, 1)
    evidence = dense.exact_gp_log_evidence(lengthscale, variance, x, y, noise)

    def elbo(mean: np.ndarray, factor: np.ndarray) -> float:
        posterior = Posterior.from_dense("mf", (1,), mean, factor)
        model = DeepGP([Layer(RBF(lengthscale, variance), x)], posterior, Gaussian(noise), jitter=1e-12)
        return float(model.elbo(x, y))

    mean, factor = dense.optimal_posterior(layer, x, y, noise, 1e-12)
    np.testing.assert_allclose(elbo(mean, factor), evidence, rtol=1e-8)
    rng = np.random.default_rng(0)
    for size in (0.01, 0.3):
        shifted = mean + size * rng.standard_normal(mean.shape)
        widened = factor @ (np.eye(len(factor)) + size * np.tril(rng.standard_normal(factor.shape)))
        assert elbo(shifted, factor) < evidence
        assert elbo(mean, widened) < evidence


def test_kl_is_zero_at_the_prior() -> None:
    x, _ = small_data()
    model = initial_model(x, "fc", WIDTHS, 4)
    prior = eqx.tree_at(lambda m: m.posterior, model, Posterior.prior("fc", WIDTHS, 4))
    np.testing.assert_allclose(prior.kl(), 0.0, atol=1e-12)


def test_minibatches_average_to_the_full_elbo() -> None:
    model = coupled_model("star")
    x, y = small_data(12)
    eps = np.random.default_rng(0).standard_normal((2, 12, model.n_hidden))
    full = model.elbo(x, y, eps=eps)
    parts = [model.elbo(x[i : i + 4], y[i : i + 4], eps=eps[:, i : i + 4], n_data=12) for i in (0, 4, 8)]
    np.testing.assert_allclose(np.mean(parts), full, rtol=1e-12)


def test_tiles_do_not_change_value_or_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = coupled_model("star")
    x, y = small_data(11)
    eps = np.random.default_rng(0).standard_normal((3, 11, model.n_hidden))
    results = []
    for tiling in ((1, 11), (3, 4)):
        monkeypatch.setattr("structured_dgp.model.split_rows", lambda n, r, tiling=tiling: tiling)
        with jax.enable_x64(True):
            arguments = tuple(map(jnp.asarray, (x, y, eps)))

            def value(model: DeepGP, x: jax.Array, y: jax.Array, eps: jax.Array) -> jax.Array:
                return data_term(model, x, y, eps)

            results.append(eqx.filter_jit(eqx.filter_value_and_grad(value))(model, *arguments))
            results.append(jax.jit(jax.grad(value, argnums=(1, 2, 3)))(model, *arguments))
    for ours, theirs in zip(jax.tree.leaves(results[:2]), jax.tree.leaves(results[2:]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


# Gradients.


@pytest.mark.parametrize("coupling", ["mf", "star", "fc"])
def test_gradients_match_finite_differences(coupling: str) -> None:
    model = coupled_model(coupling)
    x, y = small_data(4)
    eps = np.random.default_rng(0).standard_normal((2, 4, model.n_hidden))
    with jax.enable_x64(True):
        parameters, rest = eqx.partition(model, trainable_mask(model))
        leaves, tree = jax.tree.flatten(parameters)

        def term(*leaves: jax.Array) -> jax.Array:
            return eqx.combine(jax.tree.unflatten(tree, leaves), rest).elbo(jnp.asarray(x), jnp.asarray(y), eps=eps)

        check_grads(term, leaves, order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("coupling", ["mf", "stripes", "arrow", "star", "fc"])
@pytest.mark.parametrize("start", ["default", "paper"])
def test_every_parameter_gets_a_gradient_and_nothing_else_does(coupling: str, start: str) -> None:
    x, y = small_data(8)
    model = initial_model(x, coupling, WIDTHS, 4, start=start)
    rng = np.random.default_rng(0)
    # Away from the start, where a zero mean or a zero block is a stationary point of nothing but the prior.
    noise = 0.1 * rng.standard_normal(model.posterior.blocks.shape)
    with jax.enable_x64(True):
        model = eqx.tree_at(
            lambda m: (m.posterior.mean, m.posterior.blocks),
            model,
            (model.posterior.mean + 0.3, model.posterior.factor_blocks() + noise),
        )
        gradient = eqx.filter_grad(lambda m: m.elbo(x, y, key=jax.random.key(0)))(model)
    mask = trainable_mask(model)
    for path, trainable in jax.tree_util.tree_leaves_with_path(mask):
        leaf = dict(jax.tree_util.tree_leaves_with_path(gradient))[path]
        name = jax.tree_util.keystr(path)
        if "blocks" in name:
            upper = np.triu(np.ones(leaf.shape[1:], bool), 1)
            diagonal = np.array([i == k for i, k in model.posterior.structure.blocks])
            free = ~(diagonal[:, None, None] & upper)
            assert np.all(np.asarray(leaf)[free] != 0.0), name
            assert np.all(np.asarray(leaf)[~free] == 0.0), name
        else:
            assert np.all((np.asarray(leaf) != 0.0) == trainable), name


# Prediction.


def test_prediction_is_the_mixture_over_the_noise_draws() -> None:
    model = coupled_model("star")
    x, y = small_data(5)
    n_draws = 16
    noise = np.asarray(model.prediction_noise(n_draws))
    out = model.propagate(x, np.broadcast_to(noise[:, None], (n_draws, 5, noise.shape[1])))
    variance = np.asarray(out.cov)[..., 0, 0] + np.asarray(model.likelihood.variance)[0]
    densities = np.exp(-0.5 * (y[:, 0] - np.asarray(out.mean)[..., 0]) ** 2 / variance) / np.sqrt(2 * np.pi * variance)
    mixture = model.predict(x, n_draws=n_draws)
    np.testing.assert_allclose(mixture.log_prob(y[:, 0]), np.log(densities.mean(0)), rtol=1e-10)
    np.testing.assert_allclose(mixture.mean[:, 0], np.asarray(out.mean)[..., 0].mean(0), rtol=1e-10)


def test_prediction_does_not_depend_on_row_order_or_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    model = coupled_model("star")
    x, _ = small_data(13)
    order = np.random.default_rng(0).permutation(13)
    whole = model.predict(x)
    np.testing.assert_array_equal(whole.mean, model.predict(x).mean)
    np.testing.assert_allclose(model.predict(x[order]).mean, whole.mean[order], rtol=1e-12)
    monkeypatch.setattr("structured_dgp.model.PREDICTION_ROWS", 4)
    np.testing.assert_allclose(model.predict(x).mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(model.predict(x).var, whole.var, rtol=1e-12)


def test_noise_of_a_prediction_is_even() -> None:
    noise = np.asarray(coupled_model("star").prediction_noise(256))
    assert np.abs(noise.mean(0)).max() < 0.02
    np.testing.assert_allclose(noise.std(0), 1.0, atol=0.05)


@pytest.mark.parametrize("likelihood", [StudentT(0.3, 4.0), Bernoulli(), Poisson()])
def test_other_likelihoods_train_and_predict(likelihood: Likelihood) -> None:
    x, y = small_data(10)
    y = (y > 0).astype(float) if not isinstance(likelihood, StudentT) else y
    model = initial_model(x, "star", WIDTHS, 4, likelihood=likelihood)
    with jax.enable_x64(True):
        value, gradient = eqx.filter_value_and_grad(lambda m: m.elbo(x, y, key=jax.random.key(0)))(model)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.isfinite(model.predict(x).log_prob(y)).all()


# Precision.


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_lower_precision_is_close_and_configuration_is_untouched(precision: Precision) -> None:
    x, y = small_data(20)
    wide = initial_model(x, "star", WIDTHS, 6)
    narrow = DeepGP(wide.layers, wide.posterior, wide.likelihood, precision=precision)
    eps = np.random.default_rng(0).standard_normal((2, 20, wide.n_hidden))
    value = narrow.elbo(x, y, eps=eps)
    assert value.dtype == jnp.float32
    assert narrow.propagate(x, eps).mean.dtype == jnp.float32
    np.testing.assert_allclose(value, wide.elbo(x, y, eps=eps), rtol=1e-3)
    assert wide.elbo(x, y, eps=eps).dtype == np.float64
    assert not jax.config.jax_enable_x64


# Bad input: a typed error that says what is wrong and what to write instead.


@pytest.fixture(scope="module")
def model() -> DeepGP:
    return initial_model(small_data()[0], "star", WIDTHS, 4)


def with_value(x: np.ndarray, value: float) -> np.ndarray:
    changed = x.copy()
    changed[1, 2] = value
    return changed


X = small_data()[0]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (with_value(X, np.nan), "row 1, column 2"),
        (with_value(X, np.inf), "NaN or infinite"),
        (X[0], "x must have two dimensions"),
        (X[:, :2], "has 2 columns, but the model expects 3"),
        (X[:0], "has no rows"),
        ([["a", "b", "c"]], "must hold numbers only"),
    ],
)
def test_bad_inputs_are_refused(model: DeepGP, x: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.predict(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": np.full((12, 1), np.nan), "key": jax.random.key(0)}, "y has 12 values that are NaN"),
        ({"y": np.zeros((11, 1)), "key": jax.random.key(0)}, "x has 12 rows, but y has 11"),
        ({"y": np.zeros((12, 2)), "key": jax.random.key(0)}, "y has 2 columns, but the model expects 1"),
        ({"y": np.zeros(12)}, "pass eps=... of shape"),
        ({"y": np.zeros(12), "key": jax.random.key(0), "n_samples": 0}, "n_samples must be at least 1"),
        ({"y": np.zeros(12), "eps": np.zeros((5, 12, 3))}, r"eps must have shape \(R, n, 4\)"),
        ({"y": np.zeros(12), "eps": np.zeros((5, 7, 4))}, "noise for 7 points, but x has 12"),
        ({"y": np.zeros(12), "eps": np.full((5, 12, 4), np.nan)}, "eps has NaN"),
    ],
)
def test_bad_elbo_arguments_are_refused(model: DeepGP, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.elbo(X, **arguments)  # type: ignore[arg-type]


def test_layers_that_do_not_fit_are_refused() -> None:
    Z = np.zeros((4, 3))
    first, second = Layer(RBF(), Z, np.eye(3, 2)), Layer(RBF(), np.zeros((4, 2)))
    fitting = Posterior.initial("star", (2, 1), 4)
    DeepGP([first, second], fitting, Gaussian(0.1))
    with pytest.raises(CouplingError, match=r"widths \(2, 1\), so 2 layers, but 1 were given"):
        DeepGP([first], fitting, Gaussian(0.1))
    with pytest.raises(CouplingError, match="layer 1: its inducing inputs have 2 columns"):
        DeepGP([Layer(RBF(), Z), second], Posterior.initial("star", (3, 1), 4), Gaussian(0.1))
    with pytest.raises(InputError, match=r"layer 0: mean must have shape \(3, 2\)"):
        DeepGP([Layer(RBF(), Z, np.eye(3)), second], fitting, Gaussian(0.1))
    with pytest.raises(InputError, match=r"layer 0: inducing must have shape \(5, D\)"):
        DeepGP([first, second], Posterior.initial("star", (2, 1), 5), Gaussian(0.1))
    with pytest.raises(InputError, match="layer 0: the inducing inputs hold NaN"):
        DeepGP([Layer(RBF(), Z * np.nan, np.eye(3, 2)), second], fitting, Gaussian(0.1))
    with pytest.raises(InputError, match="layer 0: its kernel does not take 3 inputs"):
        DeepGP([Layer(RBF(np.ones(2)), Z, np.eye(3, 2)), second], fitting, Gaussian(0.1))
    with pytest.raises(InputError, match="unknown precision 'float16'"):
        DeepGP([first, second], fitting, Gaussian(0.1), precision="float16")
    with pytest.raises(InputError, match="jitter must be"):
        DeepGP([first, second], fitting, Gaussian(0.1), jitter=-1.0)


def test_a_nan_parameter_is_named(model: DeepGP) -> None:
    broken = eqx.tree_at(
        lambda m: m.layers[1].kernel._lengthscale.raw, model, replace_fn=lambda a: jnp.full(a.shape, jnp.nan)
    )
    with pytest.raises(NumericalError, match=r"layer 1: parameter .*lengthscale.* is NaN"):
        broken.elbo(X, np.zeros(12), key=jax.random.key(0))


def test_reference_helpers_cover_what_they_claim() -> None:
    """The shared builder must not hand out the same model for different kinds."""
    chain, fc = model_and_reference("chain", WIDTHS, 0)[0], model_and_reference("fc", WIDTHS, 0)[0]
    assert not np.allclose(chain.posterior.covariance(), fc.posterior.covariance())
