"""Positive parameters: stored unconstrained, read constrained, trained or held fixed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.exceptions import InputError
from structured_dgp.precision import as_array, wide_scope

FLOOR = 1e-8  # a positive parameter never falls below this value, so its logarithm and inverse stay finite


class Fixed:
    """Marks a value that training must leave alone: ``RBF(lengthscale=1.0, variance=Fixed(1.0))``."""

    def __init__(self, value: ArrayLike) -> None:
        self.value = value


class Positive(eqx.Module):
    """A positive number or vector, stored as the inverse softplus of its distance from ``FLOOR``."""

    raw: Float[Array, "..."]
    trainable: bool = eqx.field(static=True)

    def __init__(self, value: ArrayLike | Fixed, name: str, *, scalar: bool = False) -> None:
        self.trainable = not isinstance(value, Fixed)
        number = np.asarray(value.value if isinstance(value, Fixed) else value, dtype=np.float64)
        if not np.all(np.isfinite(number)) or np.any(number <= FLOOR):
            raise InputError(f"{name} must be finite and larger than {FLOOR:g}; got {number}.")
        if scalar and number.ndim:
            raise InputError(f"{name} must be a single number; got an array of shape {number.shape}.")
        self.raw = as_array(inverse_softplus(number - FLOOR, np))

    @property
    @wide_scope
    def value(self) -> Float[Array, "..."]:
        raw = self.raw if self.trainable else jax.lax.stop_gradient(self.raw)
        return jax.nn.softplus(raw) + FLOOR


def inverse_softplus(a: Any, xp: Any = jnp) -> Any:
    """The number whose softplus is ``a`` > 0, computed by JAX, or by another module such as NumPy."""
    # a + log(1 - exp(-a)), accurate for small and for large a
    return a + xp.log(-xp.expm1(-a))


class Constant(eqx.Module):
    """An array that belongs to the model and is never trained, such as a mean function's matrix."""

    raw: Float[Array, "..."]

    @property
    def value(self) -> Float[Array, "..."]:
        return jax.lax.stop_gradient(self.raw)


def trainable_mask(tree: Any) -> Any:
    """A tree of the same shape that is True at the arrays that training may change."""

    def is_parameter(node: Any) -> bool:
        return isinstance(node, Positive | Constant)

    def mask(node: Any) -> Any:
        if isinstance(node, Positive):
            return eqx.tree_at(lambda p: p.raw, node, node.trainable)
        if isinstance(node, Constant):
            return eqx.tree_at(lambda p: p.raw, node, False)
        return eqx.is_inexact_array(node)

    return jax.tree.map(mask, tree, is_leaf=is_parameter)


def cast(tree: Any, dtype: Any) -> Any:
    """The same tree with every floating-point array in ``dtype``."""
    return jax.tree.map(lambda a: jnp.asarray(a, dtype) if eqx.is_inexact_array(a) else a, tree)
