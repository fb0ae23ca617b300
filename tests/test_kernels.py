"""Kernels against scikit-learn, against loops over their formulas, and at the points where gradients go wrong."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.gaussian_process.kernels as sk
from numpy.typing import NDArray

from structured_dgp.exceptions import InputError
from structured_dgp.kernels import (
    RBF,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    Sum,
    White,
    own_squared_distance,
    safe_sqrt,
    squared_distance,
)
from structured_dgp.parameters import FLOOR, Fixed, cast, trainable_mask

Array = NDArray[np.float64]

LENGTHSCALE, PERIOD = np.array([0.6, 1.3, 2.0]), np.array([1.1, 2.3, 0.9])

# A kernel of three inputs, and its value for two points as on paper; `same` says that both are one and the same point.
Formula = Callable[[Array, Array, bool], float]


def distance(a: Array, b: Array) -> float:
    return float(np.sqrt(np.sum(((a - b) / LENGTHSCALE) ** 2)))


CASES: dict[str, tuple[Kernel, Formula]] = {
    "rbf": (RBF(LENGTHSCALE, 0.7), lambda a, b, same: 0.7 * np.exp(-(distance(a, b) ** 2) / 2)),
    "matern12": (Matern12(LENGTHSCALE, 0.7), lambda a, b, same: 0.7 * np.exp(-distance(a, b))),
    "matern32": (
        Matern32(LENGTHSCALE, 0.7),
        lambda a, b, same: 0.7 * (1 + np.sqrt(3) * distance(a, b)) * np.exp(-np.sqrt(3) * distance(a, b)),
    ),
    "matern52": (
        Matern52(LENGTHSCALE, 0.7),
        lambda a, b, same: (
            0.7 * (1 + np.sqrt(5) * distance(a, b) + 5 / 3 * distance(a, b) ** 2) * np.exp(-np.sqrt(5) * distance(a, b))
        ),
    ),
    "rational quadratic": (
        RationalQuadratic(LENGTHSCALE, 0.7, 1.7),
        lambda a, b, same: 0.7 * (1 + distance(a, b) ** 2 / (2 * 1.7)) ** -1.7,
    ),
    "periodic": (
        Periodic(LENGTHSCALE, 0.7, PERIOD),
        lambda a, b, same: 0.7 * np.exp(-2 * np.sum((np.sin(np.pi * (a - b) / PERIOD) / LENGTHSCALE) ** 2)),
    ),
    "linear": (Linear(LENGTHSCALE), lambda a, b, same: float(np.sum(LENGTHSCALE * a * b))),
    "white": (White(0.2), lambda a, b, same: 0.2 * same),
    "sum": (
        RBF(0.8, 0.7) + Linear(0.3) + White(0.2),
        lambda a, b, same: 0.7 * np.exp(-np.sum((a - b) ** 2) / 0.8**2 / 2) + 0.3 * a @ b + 0.2 * same,
    ),
    "product": (
        RBF(0.8, 0.7) * (Linear(0.3) + White(0.2)),
        lambda a, b, same: 0.7 * np.exp(-np.sum((a - b) ** 2) / 0.8**2 / 2) * (0.3 * a @ b + 0.2 * same),
    ),
}

each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def points(seed: int, n: int = 6, n_inputs: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal((n, n_inputs))


def evaluate(kernel: Kernel, x: Array, z: Array) -> tuple[Array, Array, Array]:
    cross, gram, diagonal = (
        kernel.cross(jnp.asarray(x), jnp.asarray(z)),
        kernel.gram(jnp.asarray(z)),
        kernel.diagonal(jnp.asarray(z)),
    )
    return np.asarray(cross), np.asarray(gram), np.asarray(diagonal)


class Answers(NamedTuple):
    """What a kernel answers, and the gradients of a weighted sum of it."""

    values: tuple[Any, Any, Any]
    total: Any
    gradients: tuple[Kernel, Any, Any]


def parameters(dtype: type) -> dict[str, Kernel]:
    return cast({case: eqx.filter(kernel, eqx.is_inexact_array) for case, (kernel, _) in CASES.items()}, dtype)


@jax.jit
def ask_all(parameters: dict[str, Kernel], x: jax.Array, z: jax.Array, weights: jax.Array) -> dict[str, Answers]:
    """All kernels at once, as one compilation is much faster than ten."""

    def weighted(case: str, parameters: Kernel, x: jax.Array, z: jax.Array) -> tuple[jax.Array, tuple]:
        kernel = eqx.combine(parameters, CASES[case][0])
        values = kernel.cross(x, z), kernel.gram(z), kernel.diagonal(z)
        return sum(jnp.sum(weight * value) for weight, value in zip(weights, values, strict=True)), values

    def answers(case: str) -> Answers:
        gradient = jax.value_and_grad(functools.partial(weighted, case), argnums=(0, 1, 2), has_aux=True)
        (total, values), gradients = gradient(parameters[case], x, z)
        return Answers(values, total, gradients)

    return {case: answers(case) for case in CASES}


def concrete_kernels() -> set[type[Kernel]]:
    classes: set[type[Kernel]] = set()
    queue = [Kernel]
    while queue:
        found = queue.pop().__subclasses__()
        classes |= set(found)
        queue += found
    return {cls for cls in classes if cls.__module__ == "structured_dgp.kernels" and not inspect.isabstract(cls)}


# --- The contract of every kernel -----------------------------------------------------------------


def test_no_kernel_is_missing() -> None:
    assert {type(kernel) for kernel, _ in CASES.values()} == concrete_kernels()


@each_case
def test_values_follow_the_formula(case: str) -> None:
    kernel, formula = CASES[case]
    x, z = points(0), points(1)
    cross, gram, diagonal = evaluate(kernel, x, z)
    np.testing.assert_allclose(cross, [[formula(a, b, False) for b in z] for a in x], rtol=1e-12, atol=1e-14)
    expected = np.array([[formula(a, b, i == j) for j, b in enumerate(z)] for i, a in enumerate(z)])
    np.testing.assert_allclose(gram, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-14)


@each_case
def test_gram_is_cross_off_the_diagonal(case: str) -> None:
    """Also at duplicate rows: these are different points to ``gram``, as white noise shows."""
    kernel, z = CASES[case][0], points(2)
    z[4] = z[1]
    cross, gram, diagonal = evaluate(kernel, z, z)
    off_diagonal = ~np.eye(len(z), dtype=bool)
    np.testing.assert_array_equal(gram[off_diagonal], cross[off_diagonal])
    np.testing.assert_allclose(gram, gram.T, rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(np.diag(gram), diagonal, rtol=1e-15)
    assert np.linalg.eigvalsh(gram).min() > -1e-7 * diagonal.max()


@each_case
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_gram_is_positive_semi_definite(case: str, scale: float) -> None:
    _, gram, diagonal = evaluate(CASES[case][0], points(3), scale * points(4))
    assert np.linalg.eigvalsh(gram).min() > -1e-13 * diagonal.max()


@each_case
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    rng, step = np.random.default_rng(5), 1e-5
    arguments, weights = (parameters(np.float64), points(6), points(7)), rng.standard_normal((3, 6, 6))
    gradients = ask_all(*arguments, weights)[case].gradients
    for place, argument in enumerate(arguments):
        direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), argument)

        def total_at(size: float, place: int = place, direction: Any = direction) -> float:
            moved = jax.tree.map(lambda a, d: a + size * d, arguments[place], direction)
            return float(ask_all(*arguments[:place], moved, *arguments[place + 1 :], weights)[case].total)

        own_direction = direction[case] if place == 0 else direction
        slopes = jax.tree.map(lambda g, d: np.sum(g * d), gradients[place], own_direction)
        difference = (total_at(step) - total_at(-step)) / (2 * step)
        np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), difference, rtol=1e-7, atol=1e-7)


@each_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_are_finite_at_zero_distance(case: str, dtype: type) -> None:
    """x equal to z, and two equal rows in z: where the distance in a Matern kernel has no derivative."""
    z = points(8)
    z[3] = z[0]
    answers = ask_all(parameters(dtype), dtype(z), dtype(z), np.ones((3, 6, 6), dtype))[case]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(answers))


@pytest.mark.parametrize("cls", [RBF, Matern12, Matern32, Matern52, RationalQuadratic, Periodic])
def test_gradients_vanish_where_a_stationary_kernel_has_its_peak(cls: type[Kernel]) -> None:
    kernel, z = cls(0.8), jnp.asarray(points(9))
    value, gradient = jax.value_and_grad(lambda x: jnp.trace(kernel.cross(x, z)))(z)
    np.testing.assert_allclose(value, 6.0, atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros((6, 3)), atol=1e-6)


@each_case
def test_float32_stays_float32(case: str) -> None:
    narrow, wide = (
        ask_all(parameters(dtype), dtype(points(10)), dtype(points(11)), np.ones((3, 6, 6), dtype))[case]
        for dtype in (np.float32, np.float64)
    )
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@each_case
def test_every_parameter_is_trained(case: str) -> None:
    mask = trainable_mask(CASES[case][0])
    assert jax.tree.leaves(mask)
    assert all(jax.tree.leaves(mask))


# --- scikit-learn ---------------------------------------------------------------------------------

SKLEARN: dict[str, tuple[Kernel, sk.Kernel, int]] = {
    "rbf": (RBF(LENGTHSCALE, 0.7), 0.7 * sk.RBF(LENGTHSCALE), 3),
    "matern12": (Matern12(LENGTHSCALE, 0.7), 0.7 * sk.Matern(LENGTHSCALE, nu=0.5), 3),
    "matern32": (Matern32(LENGTHSCALE, 0.7), 0.7 * sk.Matern(LENGTHSCALE, nu=1.5), 3),
    "matern52": (Matern52(LENGTHSCALE, 0.7), 0.7 * sk.Matern(LENGTHSCALE, nu=2.5), 3),
    "rational quadratic": (RationalQuadratic(0.8, 0.7, 1.7), 0.7 * sk.RationalQuadratic(0.8, 1.7), 3),
    "periodic": (Periodic(0.8, 0.7, 1.3), 0.7 * sk.ExpSineSquared(0.8, 1.3), 1),
    "linear": (Linear(), sk.DotProduct(sigma_0=0.0), 3),
    "white": (White(0.2), sk.WhiteKernel(0.2), 3),
    "sum": (RBF(0.8) + White(0.2), sk.RBF(0.8) + sk.WhiteKernel(0.2), 3),
    "product": (Matern32(0.8) * Linear(), sk.Matern(0.8, nu=1.5) * sk.DotProduct(sigma_0=0.0), 3),
    "both": ((RBF(0.8) + White(0.2)) * Linear(), (sk.RBF(0.8) + sk.WhiteKernel(0.2)) * sk.DotProduct(0.0), 3),
}


@pytest.mark.parametrize("case", SKLEARN)
def test_values_are_those_of_scikit_learn(case: str) -> None:
    kernel, reference, n_inputs = SKLEARN[case]
    x, z = points(12, 6, n_inputs), points(13, 6, n_inputs)
    cross, gram, diagonal = evaluate(kernel, x, z)
    np.testing.assert_allclose(cross, reference(x, z), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gram, reference(z), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(diagonal, reference.diag(z), rtol=1e-14)


# --- Pieces ---------------------------------------------------------------------------------------


def test_squared_distances() -> None:
    x, z = points(14), points(15)
    expected = np.array([[np.sum((a - b) ** 2) for b in z] for a in x])
    np.testing.assert_allclose(squared_distance(jnp.asarray(x), jnp.asarray(z)), expected, rtol=1e-13)
    far = 1e4 + points(16)
    own = np.asarray(own_squared_distance(jnp.asarray(far)))
    assert np.all(np.diag(own) == 0.0)
    assert np.all(np.asarray(squared_distance(jnp.asarray(far), jnp.asarray(far))) >= 0.0)
    np.testing.assert_allclose(own, [[np.sum((a - b) ** 2) for b in far] for a in far], atol=1e-6)


def test_safe_sqrt_is_the_square_root_with_a_derivative_of_zero_at_zero() -> None:
    a = jnp.asarray([0.0, 1e-30, 0.25, 4.0])
    np.testing.assert_allclose(safe_sqrt(a), np.sqrt(a), rtol=1e-15)
    gradient = jax.grad(lambda a: jnp.sum(safe_sqrt(a)))(a)
    np.testing.assert_allclose(gradient, [0.0, 0.5e15, 1.0, 0.25], rtol=1e-14)


def test_one_lengthscale_stands_for_equal_ones() -> None:
    x, z = points(17), points(18)
    for kernel in (RBF, Matern12, Matern32, Matern52, RationalQuadratic, Periodic):
        for one, three in zip(evaluate(kernel(0.8), x, z), evaluate(kernel(np.full(3, 0.8)), x, z), strict=True):
            np.testing.assert_allclose(one, three, rtol=1e-14)


def test_parameters_read_as_given() -> None:
    kernel = RationalQuadratic(LENGTHSCALE, Fixed(0.7), 1e-5)
    np.testing.assert_allclose(kernel.lengthscale, LENGTHSCALE, rtol=1e-14)
    np.testing.assert_allclose(kernel.variance, 0.7, rtol=1e-14)
    np.testing.assert_allclose(kernel.alpha, 1e-5, rtol=1e-14)
    np.testing.assert_allclose(Periodic(period=1e5).period, 1e5, rtol=1e-14)


def test_sums_and_products_keep_their_parts() -> None:
    a, b, c = RBF(0.5), Linear(), White()
    assert isinstance(a + b, Sum)
    assert isinstance(a * b, Product)
    x, z = points(19), points(20)
    three = Sum((a, b, c))
    for values in zip(*(evaluate(kernel, x, z) for kernel in (three, a + b + c, a + (b + c))), strict=True):
        np.testing.assert_allclose(values[1:], [values[0]] * 2, rtol=1e-14, atol=1e-15)


# --- Settings that are refused, and parameters that are held fixed --------------------------------

MAKERS: list[tuple[type[Kernel], str]] = [
    (cls, name)
    for cls in sorted(concrete_kernels() - {Sum, Product}, key=lambda cls: cls.__name__)
    for name in inspect.signature(cls.__init__).parameters
    if name != "self"
]

each_maker = pytest.mark.parametrize(("cls", "name"), MAKERS, ids=[f"{cls.__name__}-{name}" for cls, name in MAKERS])


def test_every_kernel_has_parameters_to_check() -> None:
    assert {cls for cls, _ in MAKERS} == concrete_kernels() - {Sum, Product}


@each_maker
def test_bad_parameters_are_refused(cls: type[Kernel], name: str) -> None:
    for value in (0.0, -1.0, np.nan, np.inf, FLOOR, np.array([1.0, 0.0, 1.0])):
        for given in (value, Fixed(value)):
            with pytest.raises(InputError, match=rf"{name} must be finite and larger than 1e-08; got"):
                cls(**{name: given})


@each_maker
def test_fixed_parameters_are_not_trained(cls: type[Kernel], name: str) -> None:
    free, held = cls(**{name: 0.6}), cls(**{name: Fixed(0.6)})
    x, z = points(21), points(22)
    for free_value, held_value in zip(evaluate(free, x, z), evaluate(held, x, z), strict=True):
        np.testing.assert_array_equal(free_value, held_value)

    def total(kernel: Kernel) -> jax.Array:
        return jnp.sum(kernel.cross(jnp.asarray(x), jnp.asarray(z))) + jnp.sum(kernel.gram(jnp.asarray(z)))

    for kernel, is_free in ((free, True), (held, False)):
        gradient, mask = getattr(eqx.filter_grad(total)(kernel), f"_{name}"), trainable_mask(kernel)
        assert bool(gradient.raw != 0.0) == is_free
        assert getattr(mask, f"_{name}").raw is is_free
        assert sum(map(bool, jax.tree.leaves(mask))) == len(jax.tree.leaves(mask)) - (not is_free)
