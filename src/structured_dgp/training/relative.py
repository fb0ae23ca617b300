"""Change positive parameters by factors instead of by amounts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from structured_dgp.parameters import Positive, inverse_softplus

LARGEST = 1.0
"""No step changes the logarithm of a parameter by more than this."""


def relative_steps(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An Optax transformation: ``inner`` sees the logarithm of every ``Positive`` instead of what is stored of it.

    Stored is r = softplus⁻¹(θ), which is as good as log θ for small θ, but as θ itself for large ones. A lengthscale
    that has to grow from 3 to 300, because its input does not matter, is then hundreds of steps of fixed size away; in
    its logarithm it is a few dozen. Other parameters are left to ``inner`` as they are.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("relative_steps needs the parameters: optimiser.update(gradient, state, parameters).")
        steps, state = inner.update(_each_positive(_of_logarithm, updates, params), state, params)
        return _each_positive(_of_stored, steps, params), state

    return optax.GradientTransformation(inner.init, update)


def _each_positive(function: Any, updates: Any, params: Any) -> Any:
    """``updates`` with those of positive parameters replaced by ``function(update, parameter)``."""

    def one(update: Any, parameter: Any) -> Any:
        return jax.tree.map(function, update, parameter) if isinstance(update, Positive) else update

    return jax.tree.map(one, updates, params, is_leaf=lambda node: isinstance(node, Positive))


def _of_logarithm(gradient: Float[Array, "..."], r: Float[Array, "..."]) -> Float[Array, "..."]:
    """∂/∂u of a function whose ∂/∂r is given, u = log softplus(r)."""
    # ∂r/∂u = softplus(r) / sigmoid(r)
    return gradient * jax.nn.softplus(r) / jax.nn.sigmoid(r)


def _of_stored(step: Float[Array, "..."], r: Float[Array, "..."]) -> Float[Array, "..."]:
    """The change of r that changes u = log softplus(r) by ``step``."""
    return inverse_softplus(jax.nn.softplus(r) * jnp.exp(jnp.clip(step, -LARGEST, LARGEST))) - r
