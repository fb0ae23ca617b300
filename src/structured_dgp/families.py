"""The simple distributions that predictions are mixtures of, in NumPy: many of one kind at once, without any averaging.

A family holds K distributions for each entry of an array of shape (n, P) or (n,) and answers for each of them; its
answers have shape (K, n, P) or (K, n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.special import betaln, erf, gammaincc, gammaln, ndtr, ndtri, stdtr, stdtrit, wrightomega, xlog1py, xlogy

from structured_dgp.exceptions import InputError

TINY, LARGE = float(np.finfo(np.float64).tiny), float(np.finfo(np.float64).max)
RATES = (TINY, 1e100)  # of Poisson counts

FloatArray = Float[NDArray[np.float64], "..."]
Limits = dict[str, tuple[float, float]]
Nodes = tuple[Float[NDArray[np.float64], " Q"], Float[NDArray[np.float64], " Q"]]


def normal_nodes(roughness: float) -> Nodes:
    """Points z and weights w with E[g(z)] ≈ Σ w g(z), z ~ N(0, 1), for smooth g that vary over lengths 1/roughness.

    The trapezoidal rule with at most 401 points. Its error is near 1e-10 up to a roughness of 20; Gauss-Hermite would
    need a number of points that grows with the square of the roughness.
    """
    step = max(0.9 / np.sqrt(1.0 + roughness**2), 0.04)
    z = step * np.arange(-np.ceil(8.0 / step), np.ceil(8.0 / step) + 1.0)
    w = np.exp(-0.5 * z**2)
    return z, w / w.sum()


def _gamma_nodes(df: float, lowest: float) -> Nodes:
    """Points t and log weights with E[h(log g)] ≈ Σ w h(t), g ~ Gamma(ν/2, ν/2), by the trapezoidal rule.

    The points cover all but exp(-32) of the probability, and go on down to ``lowest``, or for 400 points.
    """
    t = min(0.35, 0.8 * np.sqrt(2.0 / df)) * np.arange(-400.0, 401.0)
    # log p(t) = ν/2 (t - exp t + 1) + constant
    log_w = 0.5 * df * (t - np.expm1(t))
    keep = (log_w > -32.0) | ((t < 0.0) & (t >= lowest))
    return t[keep], log_w[keep] - np.log(np.exp(log_w[keep]).sum())


def mean_absolute(mean: FloatArray, var: FloatArray) -> FloatArray:
    """E|x| for x ~ N(mean, var)."""
    std = np.sqrt(var)
    z = mean / std
    # σ (z erf(z/√2) + √(2/π) exp(-z²/2))
    value: FloatArray = std * (z * erf(z * np.sqrt(0.5)) + np.sqrt(2.0 / np.pi) * np.exp(-0.5 * z**2))
    return value


@dataclass(frozen=True, eq=False)
class Family(ABC):
    """K distributions for each entry of an array (n, P) or (n,). Smaller arrays are broadcast; none is copied."""

    limits: ClassVar[Limits]
    """The arrays by name, and the smallest and largest value each may hold."""

    def __post_init__(self) -> None:
        arrays = {name: np.asarray(getattr(self, name)) for name in self.limits}
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        if len(shape) not in (2, 3) or shape[0] == 0:
            raise InputError(f"{type(self).__name__} needs arrays of shape (K, n, P) or (K, n), K ≥ 1; got {shape}.")
        for name, array in arrays.items():
            low, high = self.limits[name]
            if array.size and not (float(array.min()) >= low and float(array.max()) <= high):
                raise InputError(
                    f"{name} of {type(self).__name__} must lie in [{low:.3g}, {high:.3g}] and not be NaN; "
                    f"it spans [{array.min():.3g}, {array.max():.3g}]."
                )
            kind = array.dtype if np.issubdtype(array.dtype, np.floating) else np.float64
            object.__setattr__(self, name, np.broadcast_to(array.astype(kind, copy=False), shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """(K, n, P) or (K, n)."""
        return np.shape(getattr(self, next(iter(self.limits))))

    def arrays(self) -> dict[str, FloatArray]:
        return {name: getattr(self, name) for name in self.limits}

    def __getitem__(self, index: Any) -> Family:
        """The distributions of some entries, in float64; ``index`` addresses the axes after K."""
        part = object.__new__(type(self))
        where = (slice(None), *(index if isinstance(index, tuple) else (index,)))
        taken = {name: array[where].astype(np.float64, copy=False) for name, array in self.arrays().items()}
        for array in taken.values():
            array.flags.writeable = False
        for each in fields(self):
            object.__setattr__(part, each.name, taken.get(each.name, getattr(self, each.name)))
        return part

    def pick(self, which: Int[np.ndarray, "S ..."]) -> Family:
        """Component ``which`` of each entry, S times."""
        return replace(self, **{k: np.take_along_axis(v, which, axis=0) for k, v in self.arrays().items()})

    @abstractmethod
    def moments(self) -> tuple[FloatArray, FloatArray]:
        """Mean and variance."""

    @abstractmethod
    def cdf(self, y: FloatArray) -> FloatArray:
        """P(value ≤ y)."""

    @abstractmethod
    def log_prob(self, y: FloatArray) -> FloatArray:
        """Log density, or log probability of a count."""

    @abstractmethod
    def distance(self, y: FloatArray) -> FloatArray:
        """E|value - y|."""

    @abstractmethod
    def bracket(self, q: float) -> tuple[FloatArray, FloatArray]:
        """Bounds on the quantile; for counts the lower one lies strictly below it."""

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> FloatArray:
        """One value of each distribution."""

    @abstractmethod
    def rescale(self, scale: FloatArray, shift: FloatArray) -> Family:
        """The distributions of scale · value + shift."""


class Continuous(Family):
    """Densities on the real line."""

    @abstractmethod
    def extent(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Centre; length over which the CDF varies; distance beyond which the tails are negligible."""


class Discrete(Family):
    """Distributions on 0, 1, 2, ..."""

    def bracket(self, q: float) -> tuple[FloatArray, FloatArray]:
        mean, var = self.moments()
        # Cantelli: P(value ≥ μ + tσ) ≤ 1/(1 + t²) ≥ P(value ≤ μ - tσ)
        low = np.floor(mean - np.sqrt(var * (1.0 - q) / q)) - 1.0
        return np.maximum(low, -1.0), np.ceil(mean + np.sqrt(var * q / (1.0 - q)))

    def rescale(self, scale: FloatArray, shift: FloatArray) -> Family:
        raise InputError(f"{type(self).__name__} counts have no units: only continuous predictions can be rescaled.")


def _average(parts: Iterable[tuple[float, Family]], answer: Callable[[Family], FloatArray]) -> FloatArray:
    return reduce(np.add, (np.exp(log_weight) * answer(part) for log_weight, part in parts))


def _log_average(parts: Iterable[tuple[float, Family]], y: FloatArray) -> FloatArray:
    return reduce(np.logaddexp, (log_weight + part.log_prob(y) for log_weight, part in parts))


@final
@dataclass(frozen=True, eq=False)
class Normal(Continuous):
    """N(mean, var)."""

    mean: FloatArray
    var: FloatArray
    limits: ClassVar[Limits] = {"mean": (-LARGE, LARGE), "var": (TINY, LARGE)}

    def moments(self) -> tuple[FloatArray, FloatArray]:
        return self.mean, self.var

    def cdf(self, y: FloatArray) -> FloatArray:
        value: FloatArray = ndtr((y - self.mean) / np.sqrt(self.var))
        return value

    def log_prob(self, y: FloatArray) -> FloatArray:
        # -½ (log 2πσ² + (y - μ)²/σ²)
        return -0.5 * (np.log(2.0 * np.pi * self.var) + (y - self.mean) ** 2 / self.var)

    def distance(self, y: FloatArray) -> FloatArray:
        return mean_absolute(y - self.mean, self.var)

    def bracket(self, q: float) -> tuple[FloatArray, FloatArray]:
        quantile = self.mean + np.sqrt(self.var) * ndtri(q)
        return quantile, quantile

    def sample(self, rng: np.random.Generator) -> FloatArray:
        return rng.normal(self.mean, np.sqrt(self.var))

    def rescale(self, scale: FloatArray, shift: FloatArray) -> Family:
        return replace(self, mean=scale * self.mean + shift, var=scale**2 * self.var)

    def extent(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        std = np.sqrt(self.var)
        return self.mean, std, 8.5 * std


@final
@dataclass(frozen=True, eq=False)
class StudentT(Continuous):
    """loc + scale · t + ε with t Student-t distributed and ε ~ N(0, var): noise with heavy tails on an uncertain value.

    With var > 0, a mixture of normals over the precision of t (error near 1e-9); with var = 0, exact. For df ≤ 2 the
    variance is infinite, and for df ≤ 1 the mean reported is the median.
    """

    df: float
    loc: FloatArray
    scale: FloatArray
    var: FloatArray = field(default_factory=lambda: np.zeros(()))
    limits: ClassVar[Limits] = {"loc": (-LARGE, LARGE), "scale": (TINY, LARGE), "var": (0.0, LARGE)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.df < LARGE:
            raise InputError(f"df of StudentT must be one finite positive number; got {self.df}.")

    def parts(self, lowest: float = 0.0) -> Iterator[tuple[float, Normal]]:
        """t = z/√g with z ~ N(0, 1), g ~ Gamma(ν/2, ν/2): given g, the value is N(loc, scale²/g + var)."""
        for log_g, log_weight in zip(*_gamma_nodes(self.df, lowest), strict=True):
            yield log_weight, Normal(self.loc, self.scale**2 * np.exp(-log_g) + self.var)

    def moments(self) -> tuple[FloatArray, FloatArray]:
        factor = self.df / (self.df - 2.0) if self.df > 2.0 else np.inf
        return self.loc, factor * self.scale**2 + self.var

    def cdf(self, y: FloatArray) -> FloatArray:
        if self.var.any():
            return _average(self.parts(), lambda part: part.cdf(y))
        value: FloatArray = stdtr(self.df, (y - self.loc) / self.scale)
        return value

    def log_prob(self, y: FloatArray) -> FloatArray:
        if self.var.any():
            # a residual r is most likely to come from g near s²/r²
            farthest = np.max(np.abs(y - self.loc) / self.scale, initial=1.0)
            return _log_average(self.parts(lowest=-2.0 * np.log(farthest) - 3.0 - 40.0 / (1.0 + self.df)), y)
        nu, z = self.df, (y - self.loc) / self.scale
        # -log B(ν/2, ½) - ½ log ν - log s - (ν+1)/2 log(1 + z²/ν)
        constant = -betaln(0.5 * nu, 0.5) - 0.5 * np.log(nu)
        value: FloatArray = constant - np.log(self.scale) - (0.5 * nu + 0.5) * np.log1p(z**2 / nu)
        return value

    def distance(self, y: FloatArray) -> FloatArray:
        if self.df <= 1.0:
            raise InputError(f"the CRPS needs a finite mean, so df > 1; got df={self.df}. Use log_prob instead.")
        if self.var.any():
            return _average(self.parts(), lambda part: part.distance(y))
        z, density = (y - self.loc) / self.scale, np.exp(self.log_prob(y))
        # s (z (2T(z) - 1) + 2 t(z) (ν + z²)/(ν - 1)), where t(z) = s · density
        far = 2.0 * self.scale * density * (self.df + z**2) / (self.df - 1.0)
        value: FloatArray = self.scale * (z * (2.0 * stdtr(self.df, z) - 1.0) + far)
        return value

    def bracket(self, q: float) -> tuple[FloatArray, FloatArray]:
        # a sum exceeds a + b only if one of its terms exceeds a or b: share the tail between them
        std, low, high = np.sqrt(self.var), 0.5 * q, 0.5 + 0.5 * q
        return (
            self.loc + self.scale * stdtrit(self.df, low) + std * ndtri(low),
            self.loc + self.scale * stdtrit(self.df, high) + std * ndtri(high),
        )

    def sample(self, rng: np.random.Generator) -> FloatArray:
        return rng.normal(self.loc, np.sqrt(self.var)) + self.scale * rng.standard_t(self.df, self.shape)

    def rescale(self, scale: FloatArray, shift: FloatArray) -> Family:
        size = np.abs(scale)
        return replace(self, loc=scale * self.loc + shift, scale=size * self.scale, var=size**2 * self.var)

    def extent(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        # beyond r, ∫ (1 - F) falls as r^(1-ν)
        reach = max(10.0 ** min(12.0 / (self.df - 1.0), 200.0), -stdtrit(self.df, 1e-14))
        std = np.sqrt(self.var)
        return self.loc, 0.6 * np.hypot(self.scale, std), reach * self.scale + 8.5 * std


@final
@dataclass(frozen=True, eq=False)
class Bernoulli(Discrete):
    """1 with probability p, otherwise 0."""

    p: FloatArray
    limits: ClassVar[Limits] = {"p": (0.0, 1.0)}

    def moments(self) -> tuple[FloatArray, FloatArray]:
        return self.p, self.p * (1.0 - self.p)

    def cdf(self, y: FloatArray) -> FloatArray:
        return np.where(y < 0.0, 0.0, np.where(y < 1.0, 1.0 - self.p, 1.0))

    def log_prob(self, y: FloatArray) -> FloatArray:
        # log pʸ (1-p)¹⁻ʸ
        value = xlogy(y == 1.0, self.p) + xlog1py(y == 0.0, -self.p)
        return np.where((y == 0.0) | (y == 1.0), value, -np.inf)

    def distance(self, y: FloatArray) -> FloatArray:
        return (1.0 - self.p) * np.abs(y) + self.p * np.abs(1.0 - y)

    def sample(self, rng: np.random.Generator) -> FloatArray:
        return (rng.random(self.shape) < self.p).astype(np.float64)


@final
@dataclass(frozen=True, eq=False)
class Poisson(Discrete):
    """Counts with rate · exp(ε) events expected, ε ~ N(0, log_var).

    With log_var = 0, exact. Otherwise log probabilities have an error near 1e-9 (log_var < 1), and so has the CDF
    while √(rate · log_var) < 5 and log_var < 0.5; it is below 1e-4 beyond.
    """

    rate: FloatArray
    log_var: FloatArray = field(default_factory=lambda: np.zeros(()))
    limits: ClassVar[Limits] = {"rate": RATES, "log_var": (0.0, 100.0)}

    def parts(self) -> Iterator[tuple[float, Poisson]]:
        """Given ε, the counts have rate · exp(ε)."""
        std = np.sqrt(self.log_var)
        # as a function of ε, the CDF at a count near λ varies over lengths 1/√λ
        roughness = float(np.max(std * np.sqrt(self.rate) * np.exp(std), initial=0.0))
        for z, weight in zip(*normal_nodes(roughness), strict=True):
            yield np.log(weight), Poisson(np.clip(self.rate * np.exp(std * z), *RATES))

    def moments(self) -> tuple[FloatArray, FloatArray]:
        # E = λ exp(v/2), Var = E + E² (exp v - 1)
        mean = self.rate * np.exp(0.5 * self.log_var)
        return mean, mean + mean**2 * np.expm1(self.log_var)

    def cdf(self, y: FloatArray) -> FloatArray:
        if self.log_var.any():
            return _average(self.parts(), lambda part: part.cdf(y))
        k = np.floor(y)
        # P(count ≤ k) = Γ(k+1, λ)/Γ(k+1)
        return np.where(k < 0.0, 0.0, gammaincc(np.maximum(k, 0.0) + 1.0, self.rate))

    def log_prob(self, y: FloatArray) -> FloatArray:
        possible = (y >= 0.0) & (y == np.floor(y))
        k = np.where(possible, y, 0.0)
        log_rate = np.log(self.rate)
        if self.log_var.any():
            value = _log_integral(k, log_rate, np.maximum(self.log_var, 1e-20))
        else:
            value = k * log_rate - self.rate
        # k log λ - λ - log k!
        return np.where(possible, value - gammaln(k + 1.0), -np.inf)

    def distance(self, y: FloatArray) -> FloatArray:
        if self.log_var.any():
            return _average(self.parts(), lambda part: part.distance(y))
        # λ - y + 2 E[(y - count)₊], with E[(y - count)₊] = y F(⌊y⌋) - λ F(⌊y⌋ - 1)
        return self.rate - y + 2.0 * (y * self.cdf(y) - self.rate * self.cdf(y - 1.0))

    def sample(self, rng: np.random.Generator) -> FloatArray:
        return rng.poisson(self.rate * np.exp(rng.normal(0.0, np.sqrt(self.log_var)))).astype(np.float64)


def _log_integral(k: FloatArray, mean: FloatArray, var: FloatArray) -> FloatArray:
    """log ∫ exp(k f - exp f) N(f | mean, var) df, by the trapezoidal rule around the largest integrand."""
    # where d/df = 0: f = μ + vk - u with u exp(u) = v exp(μ + vk); there exp f = u/v, curvature -(1 + u)/v
    u = wrightomega(np.log(var) + mean + var * k)
    rate, slope = u / var, k - u / var
    total, step = np.zeros(np.shape(u)), 0.5
    for s in np.arange(-20.0, 10.0, step):
        d = s * np.sqrt(var / (1.0 + u))
        total += step * np.exp(-rate * (np.expm1(d) - d) - 0.5 * s**2 / (1.0 + u))
    value: FloatArray = k * (mean + var * slope) - rate - 0.5 * var * slope**2 - 0.5 * np.log(2.0 * np.pi * (1.0 + u))
    return value + np.log(total)
