"""Which floating-point numbers are used where, without touching JAX's global configuration.

JAX computes in float64 only inside an ``enable_x64`` scope. Every public function of this library opens that
scope itself, so arrays keep the precision their model was built with whatever the caller has configured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.exceptions import InputError

P = ParamSpec("P")
T = TypeVar("T")

Precision = Literal["float64", "float32", "mixed"]
"""``float64`` or ``float32`` for everything; ``mixed``: kernel factorisations in float64, the rest in float32."""

PRECISIONS: tuple[Precision, ...] = ("float64", "float32", "mixed")


def as_precision(name: str) -> Precision:
    """The precision of this name, or an error that lists the names."""
    for precision in PRECISIONS:
        if name == precision:
            return precision
    raise InputError(f"unknown precision {name!r}: use one of {', '.join(map(repr, PRECISIONS))}.")


def wide_scope(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function`` where float64 arrays stay float64."""

    @functools.wraps(function)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return scoped


@wide_scope
def as_array(value: ArrayLike) -> Float[Array, "..."]:
    """``value`` as a float64 JAX array; arrays that already are floating-point JAX arrays keep their type."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return jnp.asarray(value, jnp.float64)
