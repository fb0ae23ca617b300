"""Where training starts: mean functions, inducing inputs, and the models built from them."""

from collections.abc import Iterator
from typing import Any

import dense
import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from structured_dgp import Fixed, Gaussian, InputError
from structured_dgp.couplings import Widths
from structured_dgp.exceptions import CouplingError
from structured_dgp.initial import STARTS, Start, initial_inducing, initial_model
from structured_dgp.kernels import RBF, Kernel, Linear, Matern52, Sum, White
from structured_dgp.means import identity, linear_mean, pca, zero_padding
from structured_dgp.model import DeepGP
from structured_dgp.parameters import trainable_mask

Array = NDArray[np.float64]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def data(n: int, n_inputs: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, n_inputs))


def as_rows(matrix: Array) -> set[tuple[float, ...]]:
    return set(map(tuple, np.asarray(matrix).tolist()))


# --- Mean functions -------------------------------------------------------------------------------


def test_identity_and_zero_padding_keep_the_inputs() -> None:
    x = data(4, 3)
    np.testing.assert_array_equal(x @ identity(3), x)
    np.testing.assert_array_equal(x @ zero_padding(3, 5), np.concatenate([x, np.zeros((4, 2))], axis=1))


def test_pca_finds_the_directions_of_largest_second_moment() -> None:
    """Not centred: the mean of the data counts as a direction."""
    x = data(50, 4) * np.array([0.5, 3.0, 1.0, 2.0]) + np.array([20.0, 0.0, 0.0, 0.0])
    W = pca(x, 2)
    moments, vectors = np.linalg.eigh(x.T @ x)
    for column, vector in zip(W.T, vectors.T[::-1], strict=False):
        np.testing.assert_allclose(np.abs(column @ vector), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.sum((x @ W) ** 2, axis=0), moments[::-1][:2], rtol=1e-12)
    assert np.abs(W[0, 0]) > 0.99
    assert np.all(W[np.abs(W).argmax(axis=0), [0, 1]] > 0.0)


def test_pca_does_not_depend_on_signs() -> None:
    x = data(20, 3)
    np.testing.assert_allclose(pca(-x, 2), pca(x, 2), rtol=1e-12)
    np.testing.assert_allclose(pca(x[::-1], 2), pca(x, 2), rtol=1e-10)


def test_pca_of_too_few_rows_is_padded_with_zeros() -> None:
    x = data(2, 5)
    W = pca(x, 4)
    np.testing.assert_allclose(W[:, :2].T @ W[:, :2], np.eye(2), atol=1e-14)
    np.testing.assert_allclose(x @ W @ W.T, x, atol=1e-14)
    np.testing.assert_array_equal(W[:, 2:], np.zeros((5, 2)))


def test_the_mean_function_suits_the_width() -> None:
    x = data(10, 3)
    np.testing.assert_array_equal(linear_mean(x, 3), np.eye(3))
    np.testing.assert_array_equal(linear_mean(x, 5), zero_padding(3, 5))
    np.testing.assert_array_equal(linear_mean(x, 2), pca(x, 2))


# --- Inducing inputs ------------------------------------------------------------------------------


def test_centres_of_clear_clusters_are_found() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.standard_normal((30, 2)) + 100.0 * np.array(place) for place in ([0, 0], [1, 0], [0, 1], [1, 1])]
    Z = initial_inducing(np.concatenate(groups), 4)
    expected = np.array(sorted(group.mean(axis=0).tolist() for group in groups))
    np.testing.assert_allclose(Z[np.lexsort(Z.T[::-1])], expected, rtol=1e-10)


@pytest.mark.parametrize("n_inducing", [7, 8, 100])
def test_few_different_rows_are_taken_as_they_are(n_inducing: int) -> None:
    rows = data(7, 3)
    Z = initial_inducing(np.concatenate([rows, rows[:5], rows[::-1]]), n_inducing)
    assert len(Z) == 7
    assert as_rows(Z) == as_rows(rows)


def test_one_row_is_its_own_inducing_point() -> None:
    x = data(1, 3)
    np.testing.assert_array_equal(initial_inducing(x, 10), x)
    np.testing.assert_array_equal(initial_inducing(np.repeat(x, 5, axis=0), 1), x)


def test_constant_columns_stay_constant() -> None:
    x = data(60, 3)
    x[:, 1] = 0.25
    Z = initial_inducing(x, 10)
    assert Z.shape == (10, 3)
    np.testing.assert_allclose(Z[:, 1], 0.25, rtol=1e-12)
    assert np.all((Z.min(axis=0) >= x.min(axis=0) - 1e-12) & (Z.max(axis=0) <= x.max(axis=0) + 1e-12))


@pytest.mark.parametrize("rounding", [1e-15, 1e-14, 1e-12])
def test_rows_that_differ_by_rounding_fill_the_places_that_are_left(rounding: float) -> None:
    places = data(5, 2)
    x = np.repeat(places, 20, axis=0) + rounding * data(100, 2, seed=1)
    Z = initial_inducing(x, 20)
    assert Z.shape == (20, 2)
    distance = np.abs(Z[:, None] - places).max(axis=2)
    assert distance.min(axis=1).max() < 10 * rounding + 1e-14
    assert distance.min(axis=0).max() < 10 * rounding + 1e-14


def test_only_so_many_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structured_dgp.initial.KMEANS_ROWS", 50)
    x = data(200, 2)
    Z = initial_inducing(x, 50, seed=3)
    assert len(as_rows(Z)) == 50
    assert as_rows(Z) < as_rows(x)
    assert as_rows(initial_inducing(x, 50, seed=4)) != as_rows(Z)


def test_inducing_inputs_depend_on_the_seed_alone() -> None:
    x = data(200, 3)
    np.testing.assert_array_equal(initial_inducing(x, 20, seed=5), initial_inducing(x, 20, seed=5))
    assert as_rows(initial_inducing(x, 20, seed=5)) != as_rows(initial_inducing(x, 20, seed=6))


@pytest.mark.parametrize("n_inducing", [0, -3])
def test_there_is_at_least_one_inducing_point(n_inducing: int) -> None:
    for make in (
        lambda: initial_inducing(data(5, 2), n_inducing),
        lambda: initial_model(data(5, 2), n_inducing=n_inducing),
    ):
        with pytest.raises(InputError, match=f"n_inducing must be at least 1; got {n_inducing}"):
            make()


# --- Models ---------------------------------------------------------------------------------------


def dense_start(x: Array, Z: Array, widths: Widths, start: Start) -> dense.DenseDGP:
    """What `Start` promises, written down independently, for a start without white noise."""
    layers, h = [], x
    for index, width in enumerate(widths):
        n_inputs = h.shape[1]
        W = np.eye(n_inputs, width) if width >= n_inputs else pca(h, width)
        is_output = index == len(widths) - 1
        scale = np.sqrt(n_inputs) if start.lengthscale == "dimension" else start.lengthscale
        layers.append(dense.DenseLayer(Z, None if is_output else W, np.full(n_inputs, scale), 1.0, width))
        h, Z = h @ W, Z @ W
    scales = [start.hidden_scale] * sum(widths[:-1]) + [1.0] * widths[-1]
    M = len(Z)
    return dense.DenseDGP(
        tuple(layers),
        np.zeros((sum(widths), M)),
        np.diag(np.repeat(scales, M)),
        np.full(widths[-1], start.noise),
    )


@pytest.mark.parametrize(
    ("n_inputs", "widths", "start"),
    [
        (3, (2,), "default"),
        (2, (3, 1), "default"),
        (2, (2, 2, 2), Start(lengthscale=0.8, noise=0.3, hidden_scale=0.1)),
        (3, (2, 1, 3, 1), "default"),
    ],
    ids=str,
)
def test_models_of_every_shape_have_the_promised_elbo(n_inputs: int, widths: Widths, start: str | Start) -> None:
    """Narrower than, as wide as and wider than the inputs; one to four layers; one and two outputs."""
    x, y = data(9, n_inputs), data(9, widths[-1], seed=1)
    eps = np.random.default_rng(2).standard_normal((2, 9, sum(widths[:-1])))
    model = initial_model(x, "star", widths, 4, start=start)
    assert model.widths == widths
    Z = np.asarray(model.layers[0].inducing)
    np.testing.assert_array_equal(Z, initial_inducing(x, 4))
    reference = dense_start(x, Z, widths, STARTS[start] if isinstance(start, str) else start)
    for layer, expected in zip(model.layers, reference.layers, strict=True):
        np.testing.assert_allclose(layer.inducing, expected.Z, rtol=1e-14)
    np.testing.assert_allclose(model.elbo(x, y, eps=eps), dense.elbo(reference, x, y, eps, 9), rtol=1e-8)


def layer_kernels(model: DeepGP) -> list[tuple[RBF, White | None]]:
    kernels = [layer.kernel for layer in model.layers]
    return [kernel.parts if isinstance(kernel, Sum) else (kernel, None) for kernel in kernels]


def test_the_papers_start() -> None:
    model = initial_model(data(30, 3), "star", (2, 2, 1), 8, start="paper")
    mask = trainable_mask(model)
    *hidden, (output, no_noise) = layer_kernels(model)
    for rbf, white in hidden:
        assert white is not None
        np.testing.assert_allclose(white.variance, 1e-3, rtol=1e-12)
        np.testing.assert_allclose(rbf.variance, 1.0, rtol=1e-12)
    for rbf, n_inputs in zip([kernel for kernel, _ in layer_kernels(model)], [3, 2, 2], strict=True):
        np.testing.assert_allclose(rbf.lengthscale, np.ones(n_inputs), rtol=1e-12)
    assert no_noise is None
    np.testing.assert_allclose(output.variance, 1.0, rtol=1e-12)
    assert isinstance(model.likelihood, Gaussian)
    np.testing.assert_allclose(model.likelihood.variance, [0.01], rtol=1e-12)
    scales = np.repeat([1e-5] * 4 + [1.0], 8)
    np.testing.assert_array_equal(model.posterior.factor(), np.diag(scales))
    assert not np.any(model.posterior.moments()[0])
    assert model.jitter == 1e-6
    assert model.precision == "float64"
    assert model.layers[-1].mean is None
    np.testing.assert_array_equal(model.layers[0].mean.value, pca(data(30, 3), 2))

    *hidden_masks, (output_mask, _) = layer_kernels(mask)
    for rbf, white in hidden_masks:
        assert (rbf._lengthscale.raw, rbf._variance.raw, white._variance.raw) == (True, False, True)
    assert (output_mask._lengthscale.raw, output_mask._variance.raw) == (True, True)
    assert mask.likelihood._variance.raw is True
    assert [layer.inducing for layer in mask.layers] == [True] * 3
    assert [layer.mean.raw for layer in mask.layers[:-1]] == [False] * 2

    x, y = data(6, 3, seed=1), data(6, 1, seed=2)
    assert np.isfinite(model.elbo(x, y, eps=np.zeros((1, 6, 4))))


def test_the_default_start_trains_everything_but_the_mean_functions() -> None:
    model = initial_model(data(30, 3), "fc", (2, 2, 1), 8)
    assert [kernel.variance.item() for kernel, _ in layer_kernels(model)] == pytest.approx([1.0] * 3, rel=1e-12)
    assert all(white is None for _, white in layer_kernels(model))
    mask = trainable_mask(model)
    untrained = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(mask) if not leaf]
    assert untrained == [".layers[0].mean.raw", ".layers[1].mean.raw"]


def test_kernels_and_likelihood_of_ones_own() -> None:
    asked: list[tuple[int, bool]] = []

    def kernel(n_inputs: int, is_output: bool) -> Kernel:
        asked.append((n_inputs, is_output))
        return Linear(0.3) if is_output else Matern52(np.full(n_inputs, 0.7), Fixed(2.0))

    likelihood = Gaussian(0.77)
    model = initial_model(data(10, 3), "mf", (4, 2, 1), 5, kernel=kernel, likelihood=likelihood)
    assert asked == [(3, False), (4, False), (2, True)]
    assert [type(layer.kernel) for layer in model.layers] == [Matern52, Matern52, Linear]
    np.testing.assert_allclose(model.likelihood.variance, 0.77, rtol=1e-12)


def test_there_are_no_more_inducing_points_than_different_rows() -> None:
    x = np.repeat(data(4, 2), 3, axis=0)
    model = initial_model(x, "fc", (2, 1))
    assert model.posterior.n_inducing == 4
    assert as_rows(model.layers[0].inducing) == as_rows(x)


def test_the_start_depends_on_the_seed_alone() -> None:
    x = data(100, 3)
    first, second, other = (initial_model(x.tolist(), "star", (2, 1), 10, seed=seed) for seed in (7, 7, 8))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert as_rows(first.layers[0].inducing) != as_rows(other.layers[0].inducing)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float64", np.float64), ("float32", np.float32), ("mixed", np.float32)]
)
def test_parameters_have_the_precision_asked_for(precision: Any, dtype: type) -> None:
    model = initial_model(data(10, 2), "star", (2, 1), 5, precision=precision, jitter=1e-4)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(dtype)}
    assert (model.precision, model.jitter) == (precision, 1e-4)


def holed(value: float) -> Array:
    x = data(5, 2)
    x[3, 1] = x[4, 0] = value
    return x


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.zeros(5)}, InputError, r"x must have two dimensions.*got shape \(5,\): use x\[:, None\]"),
        ({"x": np.zeros((2, 2, 2))}, InputError, r"x must have two dimensions.*got shape \(2, 2, 2\): pass a table"),
        ({"x": np.zeros((0, 2))}, InputError, "x has no rows"),
        ({"x": np.zeros((5, 0))}, InputError, "x has no columns"),
        ({"x": [["a", "b"]]}, InputError, "x must hold numbers only"),
        ({"x": [[1.0, 2.0], [3.0]]}, InputError, "x must hold numbers only"),
        ({"x": holed(np.nan)}, InputError, "x has 2 values that are NaN or infinite, the first in row 3, column 1"),
        ({"x": holed(-np.inf)}, InputError, "x has 2 values that are NaN or infinite, the first in row 3, column 1"),
        ({"widths": ()}, InputError, "widths is empty"),
        ({"widths": (2, 0)}, InputError, "layer 1 has width 0"),
        ({"coupling": "full"}, CouplingError, "unknown coupling 'full': use one of 'mf'"),
        ({"start": "papers"}, InputError, "unknown start 'papers': use one of 'default', 'paper' or a Start"),
        ({"start": Start(lengthscale=0.0)}, InputError, "lengthscale must be finite and larger than"),
        ({"start": Start(hidden_variance=-1.0)}, InputError, "variance must be finite and larger than"),
        ({"start": Start(hidden_noise=np.nan)}, InputError, "variance must be finite and larger than"),
        ({"start": Start(noise=-0.1)}, InputError, "variance must be finite and larger than"),
        ({"jitter": -1e-6}, InputError, "jitter must be a finite number that is not negative; got -1e-06"),
        ({"kernel": lambda n_inputs, is_output: RBF(np.ones(4))}, InputError, "layer 0: its kernel does not take 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_unfit_settings_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        initial_model(**{"x": data(5, 2), "widths": (2, 1), "n_inducing": 3} | changes)
