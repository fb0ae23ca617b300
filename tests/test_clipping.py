"""Gradients that are much longer than usual are shortened, others are left alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from structured_dgp.training import Settings, clip_surges
from structured_dgp.training.clipping import MEMORY


def clipped(norms: list[float], factor: float = 1.5) -> list[float]:
    """The norms of gradients of these norms after clipping."""
    transformation = clip_surges(factor)
    state = transformation.init(None)
    found = []
    for norm in norms:
        gradient = {"a": jnp.full(2, norm / 2), "b": jnp.full((2, 1), norm / 2)}
        shortened, state = transformation.update(gradient, state)
        np.testing.assert_allclose(shortened["a"][0], shortened["b"][0, 0])  # the direction stays
        found.append(float(optax.tree.norm(shortened)))
    return found


def test_usual_gradients_pass() -> None:
    norms = [1.0, 1.2, 0.5, 0.01, 1.3, 0.0]
    np.testing.assert_allclose(clipped(norms), norms, rtol=1e-6)


def test_a_surge_is_shortened_to_a_multiple_of_the_root_mean_square() -> None:
    found = clipped([1.0, 2.0, 1000.0, 1.0])
    mean_square = 1.0
    np.testing.assert_allclose(found[1], 1.5, rtol=1e-6)
    mean_square = MEMORY * mean_square + (1 - MEMORY) * 1.5**2
    np.testing.assert_allclose(found[2], 1.5 * np.sqrt(mean_square), rtol=1e-6)
    np.testing.assert_allclose(found[3], 1.0, rtol=1e-6)


def test_gradients_that_stay_long_are_usual_after_a_while() -> None:
    found = clipped([1.0] + [10.0] * 200)
    assert found[1] < 1.6
    np.testing.assert_allclose(found[-1], 10.0, rtol=1e-6)


def test_a_run_of_zeros_does_no_harm() -> None:
    assert clipped([0.0, 0.0, 3.0, 3.0]) == [0.0, 0.0, 3.0, 3.0]


@pytest.mark.parametrize("wrong", [{"surge": 1.0}, {"surge": -2.0}, {"memory": 1.0}, {"memory": 0.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)
