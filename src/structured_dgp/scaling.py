"""Standardisation: from the units of the data to mean 0 and standard deviation 1, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from structured_dgp.exceptions import InputError, StructuredDGPWarning

CONSTANT = 1e-12  # a column whose values differ by less than this fraction of their size is constant
FAR = 30.0  # standard deviations; a column with at least half of its values farther away is likely to have other units


@dataclass(frozen=True)
class Scaling:
    """Of each column of a table, where it is centred and its standard deviation; 0 for a constant column."""

    centre: Float[np.ndarray, " D"]
    spread: Float[np.ndarray, " D"]

    @classmethod
    def of(cls, table: Float[np.ndarray, "n D"]) -> Scaling:
        """The scaling that standardises ``table``."""
        size = np.maximum(np.abs(table).max(axis=0), np.finfo(np.float64).tiny)
        # divided by its size first, so that squares neither overflow nor vanish
        part = table / size
        constant = np.ptp(part, axis=0) <= CONSTANT
        centre = np.where(constant, table[0], part.mean(axis=0) * size)
        return cls(centre, np.where(constant, 0.0, part.std(axis=0) * size))

    @classmethod
    def none(cls, n_columns: int) -> Scaling:
        """Leaves a table as it is."""
        return cls(np.zeros(n_columns), np.ones(n_columns))

    @property
    def unit(self) -> Float[np.ndarray, " D"]:
        """What a difference of one means in the units of each column; one for a constant column."""
        return np.where(self.spread > 0.0, self.spread, 1.0)

    def to_standard(self, table: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
        """Standardised columns; whatever stands in a constant column becomes 0, as nothing is known about it."""
        return np.where(self.spread > 0.0, (table - self.centre) / self.unit, 0.0)


@dataclass
class Units:
    """Looks at a table piece by piece, and warns once of each column that is so far away that its units must differ."""

    names: Sequence[str]
    n_rows: int = 0
    n_far: np.ndarray = field(default_factory=lambda: np.zeros((), int))
    warned: set[str] = field(default_factory=set)

    def look_at(self, standard: Float[np.ndarray, "n D"]) -> None:
        """Warn if at least half of all rows so far, with these standardised ones, are far from the training data."""
        self.n_rows += len(standard)
        self.n_far = self.n_far + np.count_nonzero(np.abs(standard) >= FAR, axis=0)
        for name, far in zip(self.names, 2 * self.n_far >= self.n_rows, strict=True):
            if far and name not in self.warned:
                self.warned.add(name)
                warnings.warn(
                    f"column {name!r} lies more than {FAR:.0f} standard deviations from its values in training in at "
                    "least half of the rows: are its units the same?",
                    StructuredDGPWarning,
                    stacklevel=4,
                )


def refuse_overflow(scaling: Scaling, name: str) -> None:
    """Raise if a table has numbers so large that standardising them is not possible."""
    if not (np.isfinite(scaling.centre).all() and np.isfinite(scaling.spread).all()):
        raise InputError(f"{name} has values near the largest number there is: change their units.")
