"""Positive parameters are changed by factors: what the inner optimiser does, it does to their logarithms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from structured_dgp.initial import initial_model
from structured_dgp.kernels import RBF
from structured_dgp.parameters import FLOOR, Fixed, Positive
from structured_dgp.training import relative_steps, train
from structured_dgp.training.relative import LARGEST

SIZES = np.array([1e-6, 0.01, 1.0, 30.0, 500.0])


def descend(optimizer: Any, sizes: np.ndarray, free: np.ndarray, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and free parameters after steps down the gradient of a function that mixes all of them."""
    parameters = {"positive": Positive(sizes, "sizes"), "free": jnp.asarray(free)}

    def loss(parameters: Any) -> Any:
        return _loss(jnp.log(parameters["positive"].value - FLOOR), parameters["free"])

    state = optimizer.init(parameters)
    for _ in range(n_steps):
        updates, state = optimizer.update(jax.grad(loss)(parameters), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return np.asarray(parameters["positive"].value), np.asarray(parameters["free"])


def _loss(logarithms: Any, free: Any) -> Any:
    return jnp.sum(jnp.sin(logarithms) * jnp.arange(1.0, 6.0)) + jnp.sum(free**2) * logarithms[2] + jnp.sum(free**3)


@jax.enable_x64(True)
@pytest.mark.parametrize("inner", [optax.sgd(0.05, momentum=0.9), optax.adam(0.1)])
def test_it_is_the_inner_optimiser_in_logarithms(inner: optax.GradientTransformation) -> None:
    free = np.array([0.3, -0.7])
    sizes, others = descend(relative_steps(inner), SIZES, free, 5)
    parameters: Any = (jnp.log(SIZES - FLOOR), jnp.asarray(free))
    state = inner.init(parameters)
    for _ in range(5):
        updates, state = inner.update(jax.grad(lambda p: _loss(*p))(parameters), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    np.testing.assert_allclose(sizes, np.exp(parameters[0]) + FLOOR, rtol=1e-9)
    np.testing.assert_allclose(others, parameters[1], rtol=1e-12)


@jax.enable_x64(True)
def test_no_step_is_larger_than_its_limit() -> None:
    sizes, _ = descend(relative_steps(optax.sgd(1e6)), SIZES, np.zeros(1), 1)
    factors = (sizes - FLOOR) / (SIZES - FLOOR)
    np.testing.assert_allclose(np.abs(np.log(factors)), LARGEST, rtol=1e-6)


def test_it_needs_the_parameters() -> None:
    optimizer = relative_steps(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update({}, optimizer.init({}))


@pytest.mark.parametrize("optimizer", ["natural", "adam"])
def test_training_changes_all_sizes_by_the_same_factor_at_first(optimizer: str) -> None:
    """The first step of Adam is as long as its rate, in whatever it is told to change."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3))
    y = np.sin(x[:, 0])
    scales = np.array([0.3, 3.0, 300.0])

    def kernel(n_inputs: int, is_output: bool) -> RBF:
        return RBF(scales[:n_inputs], Fixed(1.0))

    # with a posterior that has moved from the prior, or the hidden layer would have no gradient
    start = train(initial_model(x, "mf", (2, 1), 5, kernel=kernel), x, y, max_steps=3, learning_rate=1e-9).model
    options: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.1, "surge": None, "rush": 1.0, "max_steps": 1}
    for relative, moved in ((True, np.log), (False, lambda value: value + np.log(-np.expm1(-value)))):
        trained = train(start, x, y, relative=relative, **options).model
        after = np.asarray(trained.layers[0].kernel.lengthscale)
        np.testing.assert_allclose(np.abs(moved(after) - moved(scales)), 0.1, rtol=1e-3)
        np.testing.assert_array_equal(trained.layers[0].kernel.variance, start.layers[0].kernel.variance)
        shift = np.abs(np.asarray(trained.layers[0].inducing - start.layers[0].inducing))
        np.testing.assert_allclose(shift, 0.1, rtol=1e-3)
