"""Checks at the border: arrays from outside become finite float64 matrices, or an error says what to change."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError

T = TypeVar("T")


def changed(settings: T, values: dict[str, Any]) -> T:
    """A dataclass of settings with these values instead of its own."""
    names = [field.name for field in fields(settings)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise InputError(f"unknown setting {unknown[0]!r}: the settings are {', '.join(names)}.")
    return replace(settings, **values)  # type: ignore[type-var]


def as_count(value: Any, name: str, least: int = 1) -> int:
    """``value`` as a whole number that is large enough."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number; got {value!r}.")
    if value < least:
        raise InputError(f"{name} must be at least {least}; got {value}.")
    return int(value)


def is_traced(*values: Any) -> bool:
    """Whether any value is being traced by JAX, so that its numbers cannot be looked at."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def as_matrix(values: Any, name: str, n_columns: int | None = None) -> Float[np.ndarray, "n D"]:
    """``values`` as a finite matrix with at least one row, and ``n_columns`` columns if that is given."""
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must hold numbers only: {error}.") from error
    if matrix.ndim != 2:
        hint = f"use {name}[:, None] for a single column" if matrix.ndim == 1 else "pass a table of rows and columns"
        raise InputError(f"{name} must have two dimensions (rows, columns), got shape {matrix.shape}: {hint}.")
    if matrix.shape[0] == 0:
        raise InputError(f"{name} has no rows: pass at least one.")
    if matrix.shape[1] == 0:
        raise InputError(f"{name} has no columns: pass at least one.")
    if n_columns is not None and matrix.shape[1] != n_columns:
        raise InputError(f"{name} has {matrix.shape[1]} columns, but the model expects {n_columns}.")
    bad = np.argwhere(~np.isfinite(matrix))
    if len(bad):
        row, column = bad[0]
        raise InputError(
            f"{name} has {len(bad)} values that are NaN or infinite, the first in row {row}, column {column}: "
            "remove or impute those rows first."
        )
    return matrix
