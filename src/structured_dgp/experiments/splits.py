"""Which rows to train on and which to test on: interpolating and extrapolating, as in the paper."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from structured_dgp.scaling import Scaling


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to test on."""

    train: Int[np.ndarray, " n"]
    test: Int[np.ndarray, " m"]

    @property
    def digest(self) -> str:
        """A hash of both, so that results can be told apart from those of another split."""
        found = hashlib.sha256()
        for rows in (self.train, self.test):
            found.update(np.ascontiguousarray(rows, "<i8").tobytes() + b"|")
        return found.hexdigest()[:16]


def interpolation(x: Float[np.ndarray, "n D"], seed: int) -> Split:
    """A random tenth of the rows to test on."""
    order = np.random.default_rng(seed).permutation(len(x))
    n_test = max(1, len(order) // 10)
    return Split(np.sort(order[n_test:]), np.sort(order[:n_test]))


def extrapolation(x: Float[np.ndarray, "n D"], seed: int) -> Split:
    """The half of the rows that lies farther along a random direction of the standardised inputs to test on.

    The standardisation here only says where the rows lie; models standardise with their training rows.
    """
    direction = np.random.default_rng(seed).standard_normal(x.shape[1])
    # summed without a BLAS and rounded, so that equal rows tie on every machine
    place = np.sum(Scaling.of(x).to_standard(x) * direction, axis=1).round(9)
    train, test = np.array_split(np.argsort(place, kind="stable"), 2)
    return Split(np.sort(train), np.sort(test))


SPLITS: dict[str, Callable[[Float[np.ndarray, "n D"], int], Split]] = {
    "interpolation": interpolation,
    "extrapolation": extrapolation,
}
"""The two tasks by name."""
