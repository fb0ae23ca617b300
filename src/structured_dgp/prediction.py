"""Predictive distributions: for each entry of y a mixture of K simple distributions, from NumPy to NumPy.

``Mixture`` averages what the families in ``families`` answer. It works through the rows in pieces, so its temporary
arrays stay small whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, final

import numpy as np
from jaxtyping import ArrayLike, Float
from numpy.typing import NDArray

from structured_dgp.exceptions import InputError
from structured_dgp.families import (
    Bernoulli,
    Continuous,
    Discrete,
    Family,
    FloatArray,
    Normal,
    Poisson,
    StudentT,
    mean_absolute,
)

__all__ = ["Bernoulli", "Family", "Mixture", "Normal", "Poisson", "StudentT"]

CHUNK = 2**18  # numbers in one temporary array (2 MB)
FINE, COARSE, MOST = 0.5, 0.08, 2000  # the integral in the CRPS: step in widths of the narrowest component; limits
RARE = 1e-6  # probability of each tail of the counts whose share in the CRPS takes its closed form

Weights = Float[NDArray[np.float64], " K"]
Numbers = ArrayLike | Sequence[Any]


def row_chunks(n_rows: int, row_size: int) -> Iterator[slice]:
    """Slices that cover all rows, with about ``CHUNK`` numbers in each."""
    step = max(1, CHUNK // max(1, row_size))
    return (slice(start, start + step) for start in range(0, n_rows, step))


@final
@dataclass(frozen=True, eq=False, init=False, repr=False)
class Mixture:
    """For each entry of y, shape (n, P) or (n,), a mixture of the K distributions of a family; immutable.

    Entries are independent of each other here: draws of whole functions come from the model, not from a mixture.
    Methods that take y want its shape to be that of the mixture; (n,) does for (n, 1), and is what they then return.

    Args:
        family: the component distributions; its arrays are not copied.
        weights: one for each component, summing to one; equal if None.
    """

    family: Family
    weights: Weights

    def __init__(self, family: Family, weights: Numbers | None = None) -> None:
        K = family.shape[0]
        given = np.full(K, 1.0 / K) if weights is None else np.array(weights, dtype=np.float64)
        if given.shape != (K,) or not np.all(given >= 0.0) or not np.isclose(given.sum(), 1.0, rtol=1e-6):
            raise InputError(f"weights must be {K} non-negative numbers that sum to one, one for each component.")
        given /= given.sum()
        given.flags.writeable = False
        object.__setattr__(self, "family", family)
        object.__setattr__(self, "weights", given)

    def __repr__(self) -> str:
        return f"Mixture of {self.n_components} {type(self.family).__name__} components, shape {self.shape}"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Mixture:
        """Some rows: a slice, integers, or a mask. A single integer keeps the row axis."""
        if isinstance(rows, tuple):
            raise InputError("index rows only, as in mixture[:10]; use mixture.column(p) for one output.")
        kept = rows if isinstance(rows, slice) else np.atleast_1d(np.arange(len(self))[rows])
        return Mixture(self.family[kept], self.weights)

    def column(self, p: int) -> Mixture:
        """Output ``p`` alone: a mixture of shape (n,)."""
        if len(self.shape) != 2 or not -self.shape[1] <= p < self.shape[1]:
            raise InputError(f"there is no column {p} in a mixture of shape {self.shape}.")
        return Mixture(self.family[:, p], self.weights)

    @staticmethod
    def concatenate(mixtures: Sequence[Mixture]) -> Mixture:
        """Mixtures of the same kind and weights, one below the other."""
        if not mixtures:
            raise InputError("concatenate needs at least one mixture.")
        first, *others = mixtures
        shared = [each.name for each in fields(first.family) if each.name not in first.family.limits]
        for other in others:
            if (
                type(other.family) is not type(first.family)
                or not np.array_equal(other.weights, first.weights)
                or other.shape[1:] != first.shape[1:]
                or any(getattr(other.family, name) != getattr(first.family, name) for name in shared)
            ):
                raise InputError(
                    "only mixtures with the same family, weights and outputs can be concatenated; "
                    f"got {first!r} and {other!r}."
                )
        columns = {
            name: np.concatenate([getattr(mixture.family, name) for mixture in mixtures], axis=1)
            for name in first.family.limits
        }
        return Mixture(replace(first.family, **columns), first.weights)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, P) or (n,)."""
        return self.family.shape[1:]

    @property
    def n_components(self) -> int:
        return self.family.shape[0]

    @property
    def mean_components(self) -> FloatArray:
        """Mean of each component, (K, n, P)."""
        return self.family.moments()[0]

    @property
    def var_components(self) -> FloatArray:
        """Variance of each component, (K, n, P)."""
        return self.family.moments()[1]

    @cached_property
    def mean(self) -> FloatArray:
        return _frozen(self._by_rows(lambda part: _mix(self.weights, part.moments()[0])))

    @cached_property
    def var(self) -> FloatArray:
        """Variance: within the components, and of their means."""

        def total(part: Family, centre: FloatArray) -> FloatArray:
            mean, var = part.moments()
            # Σ w_k (σ_k² + (μ_k - μ)²)
            return _mix(self.weights, var + (mean - centre) ** 2)

        return _frozen(self._by_rows(total, self.mean))

    @property
    def std(self) -> FloatArray:
        return np.sqrt(self.var)

    def cdf(self, y: Numbers) -> FloatArray:
        """P(value ≤ y)."""
        return self._at(y, lambda part, y: _cdf(part, self.weights, y))

    def log_prob(self, y: Numbers) -> FloatArray:
        """Log density of y, or log probability of a count; -inf for what cannot happen, such as half a count."""
        return self._at(y, lambda part, y: _log_prob(part, self.weights, y))

    def crps(self, y: Numbers) -> FloatArray:
        """Continuous ranked probability score of y, in the units of y: ∫ (F(x) - [x ≥ y])² dx; smaller is better.

        Normal: the closed form, or where K is large an integral with relative error below 1e-8. Student-t: such an
        integral, below 1e-7, or 1e-3 if some component is a thousand times narrower than the mixture. Counts: a sum
        over all likely counts, exact to about 1e-9.
        """

        def score(part: Family, y: FloatArray) -> FloatArray:
            # E|x - y| - ½ E|x - x'|
            return _mix(self.weights, part.distance(y)) - _half_spread(part, self.weights)

        return self._at(y, score)

    def quantile(self, q: Numbers) -> FloatArray:
        """The values below which y falls with probability q: shape (n, P), or (Q, n, P) for Q probabilities."""
        levels = np.asarray(q, dtype=np.float64)
        if levels.ndim > 1 or not np.all((levels > 0.0) & (levels < 1.0)):
            raise InputError(f"q must be one probability or a list of them, each between 0 and 1; got {levels}.")
        values = [
            self._by_rows(lambda part, level=level: _quantile(part, self.weights, level)) for level in levels.flat
        ]
        return np.reshape(values, levels.shape + self.shape)

    def interval(self, level: float = 0.95) -> tuple[FloatArray, FloatArray]:
        """Lower and upper end of the central interval that holds y with probability ``level``."""
        if not 0.0 < level < 1.0:
            raise InputError(f"level must be between 0 and 1, such as 0.95; got {level}.")
        lower, upper = self.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        return lower, upper

    def sample(self, n: int, random_state: int | np.random.Generator | None = None) -> FloatArray:
        """``n`` independent values of each entry: (n, *shape)."""
        if n < 1:
            raise InputError(f"n must be at least 1; got {n}.")
        rng = np.random.default_rng(random_state)
        edges = np.cumsum(self.weights)[:-1]
        values = np.empty((n, *self.shape))
        for rows in self._chunks(max(n, self.n_components)):
            part = self.family[rows]
            which = np.searchsorted(edges, rng.random((n, *part.shape[1:])), side="right")
            values[:, rows] = part.pick(which).sample(rng)
        return values

    def rescale(self, scale: Numbers, shift: Numbers) -> Mixture:
        """The mixture of scale · y + shift, as from standardised to original units; one number each, or P."""
        factor, offset = np.asarray(scale, dtype=np.float64), np.asarray(shift, dtype=np.float64)
        outputs = self.shape[1:]
        if any(a.shape not in ((), outputs) or not np.isfinite(a).all() for a in (factor, offset)) or not factor.all():
            raise InputError(f"scale and shift must be finite, one number or shape {outputs}, and scale not 0.")
        return Mixture(self.family.rescale(factor, offset), self.weights)

    def _chunks(self, size: int) -> Iterator[slice]:
        return row_chunks(len(self), size * int(np.prod(self.shape[1:])))

    def _by_rows(self, answer: Callable[..., FloatArray], *arrays: FloatArray) -> FloatArray:
        values = np.empty(self.shape)
        for rows in self._chunks(self.n_components):
            values[rows] = answer(self.family[rows], *(array[rows] for array in arrays))
        return values

    def _at(self, y: Numbers, answer: Callable[[Family, FloatArray], FloatArray]) -> FloatArray:
        targets = np.asarray(y, dtype=np.float64)
        flat = targets.ndim == 1 and self.shape == (*targets.shape, 1)
        if not flat and targets.shape != self.shape:
            raise InputError(f"y has shape {targets.shape}, but the predictions have shape {self.shape}.")
        if not np.isfinite(targets).all():
            raise InputError(
                "y has NaN or infinite values: leave those rows out, as in mixture[rows].log_prob(y[rows])."
            )
        values = self._by_rows(answer, targets[:, None] if flat else targets)
        return values[:, 0] if flat else values


def _frozen(array: FloatArray) -> FloatArray:
    array.flags.writeable = False
    return array


def _mix(weights: Weights, values: FloatArray) -> FloatArray:
    """Σ_k w_k values_k."""
    return np.tensordot(weights, values, axes=1)


def _cdf(family: Family, weights: Weights, y: FloatArray) -> FloatArray:
    return _mix(weights, family.cdf(y))


def _log_prob(family: Family, weights: Weights, y: FloatArray) -> FloatArray:
    values = family.log_prob(y)
    top = values.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        # log Σ w_k p_k = top + log Σ w_k exp(log p_k - top)
        return top + np.log(_mix(weights, np.exp(values - top)))


def _quantile(family: Family, weights: Weights, q: float) -> FloatArray:
    """The solution of F(x) = q; for counts the smallest x with F(x) ≥ q."""
    lows, highs = family.bracket(q)
    low: FloatArray = lows.min(axis=0)
    high: FloatArray = highs.max(axis=0)
    if isinstance(family, Discrete):
        while np.any(high - low > 1.0):
            middle = np.floor(0.5 * (low + high))
            below = _cdf(family, weights, middle) < q
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return high
    tolerance = 1e-12 * np.maximum(np.abs(low), np.abs(high))
    x = np.clip(_mix(weights, 0.5 * (lows + highs)), low, high)
    last, done = np.full(x.shape, np.inf), np.zeros(x.shape, dtype=bool)
    while not done.all():
        excess = _cdf(family, weights, x) - q
        low, high = np.where(excess < 0.0, x, low), np.where(excess < 0.0, high, x)
        with np.errstate(all="ignore"):
            newton = x - excess / np.exp(_log_prob(family, weights, x))
        # Newton's step if it stays in the bracket and the last one halved the error; otherwise halve the bracket
        trusted = (np.abs(excess) < 0.5 * last) | (np.abs(newton - x) <= tolerance)
        trusted &= (newton >= low) & (newton <= high)
        step = np.where(trusted, newton, 0.5 * (low + high)) - x
        x, last = np.where(done, x, x + step), np.abs(excess)
        done |= np.abs(step) <= tolerance
    return x


def _half_spread(family: Family, weights: Weights) -> FloatArray:
    """½ E|x - x'| for two independent values, which is also ∫ F (1 - F)."""
    return _integrated_spread(family, weights) if isinstance(family, Continuous) else _counted_spread(family, weights)


def _counted_spread(family: Family, weights: Weights) -> FloatArray:
    """Σ_k F(k) (1 - F(k)), term by term between the quantiles of ``RARE`` and 1 - ``RARE``."""
    first, last = (float(end(_quantile(family, weights, q))) for end, q in ((np.min, RARE), (np.max, 1.0 - RARE)))
    k, mean = np.full(family.shape[1:], first), _mix(weights, family.moments()[0])
    # below, F ≪ 1 and Σ F(j) = E[(k - x)₊]; above, 1 - F ≪ 1 and Σ (1 - F(j)) = E[(x - k)₊]
    F = _cdf(family, weights, k - 1.0)
    spread: FloatArray = 0.5 * (_mix(weights, family.distance(k)) - mean + k)
    while k.flat[0] <= last:
        F = F + np.exp(_log_prob(family, weights, k))
        spread += F * (1.0 - F)
        k = k + 1.0
    above: FloatArray = 0.5 * (_mix(weights, family.distance(k)) + mean - k)
    return spread + above


def _integrated_spread(family: Continuous, weights: Weights) -> FloatArray:
    """∫ F (1 - F) dx with x = centre + size · sinh sinh u: the trapezoidal rule in u, or pairwise if that is cheaper.

    F is analytic, so the error falls exponentially with the number of points.
    """
    location, width, reach = family.extent()
    low, high = location.min(axis=0), location.max(axis=0)
    centre, half = 0.5 * (low + high), 0.5 * (high - low)
    size = half + width.max(axis=0)
    end = np.arcsinh(np.arcsinh((half + reach.max(axis=0)) / size))
    step = np.minimum(COARSE, FINE * width.min(axis=0) / size)
    n = min(int(np.ceil(np.max(end / step, initial=1.0))), MOST)
    if isinstance(family, Normal) and 2 * n > len(weights) // 2:
        return _pairwise_spread(family, weights)
    spread = np.zeros(family.shape[1:])
    for j in range(-n, n + 1):
        u = end * (j / n)
        x = centre + size * np.sinh(np.sinh(u))
        # the smaller of F and 1 - F, by symmetry of the components: 1 - F would lose the digits of a heavy tail
        tail = _cdf(family, weights, x if j <= 0 else 2.0 * location - x)
        spread += tail * (1.0 - tail) * np.cosh(np.sinh(u)) * np.cosh(u)
    total: FloatArray = spread * size * end / n
    return total


def _pairwise_spread(family: Normal, weights: Weights) -> FloatArray:
    """½ Σ_kl w_k w_l E|x_k - x_l|, each pair once."""
    # k = l: E|x - x'| = 2σ/√π
    spread = _mix(weights**2, np.sqrt(family.var / np.pi))
    for k in range(len(weights) - 1):
        others = slice(k + 1, None)
        gaps = mean_absolute(family.mean[others] - family.mean[k], family.var[others] + family.var[k])
        spread += weights[k] * _mix(weights[others], gaps)
    return spread
