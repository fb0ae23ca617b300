"""Kernels: covariance functions with one lengthscale per input, written as matrix products.

A kernel answers three questions: ``cross(x, z)`` between two sets of points, ``gram(z)`` of one set with itself, and
``diagonal(x)``. ``gram`` differs from ``cross(z, z)`` for white noise, and knows that its own distances are zero.
All gradients are finite at zero distance. Kernels add and multiply: ``RBF(1.0) + White(1e-3)``.
"""

from __future__ import annotations

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.exceptions import InputError
from structured_dgp.parameters import Fixed, Positive
from structured_dgp.products import matmul_transposed


class Kernel(eqx.Module):
    """A covariance function."""

    @abstractmethod
    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        """k(x, z) between two sets of different points."""

    @abstractmethod
    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        """k(z, z) of one set of points with itself."""

    @abstractmethod
    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        """The diagonal of ``gram(x)``."""

    def __add__(self, other: Kernel) -> Sum:
        return Sum((self, other))

    def __mul__(self, other: Kernel) -> Product:
        return Product((self, other))


def squared_distance(x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
    """|x - z|², through one matrix product."""
    products = matmul_transposed(x, z)
    return jnp.maximum(jnp.sum(x * x, 1)[:, None] + jnp.sum(z * z, 1)[None, :] - 2.0 * products, 0.0)


def own_squared_distance(z: Float[Array, "m D"]) -> Float[Array, "m m"]:
    """|z - z'|² within one set, symmetric and exactly zero on the diagonal."""
    return jnp.where(jnp.eye(z.shape[0], dtype=bool), 0.0, squared_distance(z, z))


def safe_sqrt(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """√a with derivative zero at a = 0."""
    positive = a > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, a, 1.0)), 0.0)


class Stationary(Kernel):
    """variance · shape(|(x - z) / lengthscale|²)."""

    _lengthscale: Positive
    _variance: Positive

    def __init__(self, lengthscale: ArrayLike | Fixed = 1.0, variance: ArrayLike | Fixed = 1.0) -> None:
        self._lengthscale = Positive(lengthscale, "lengthscale")
        self._variance = Positive(variance, "variance", scalar=True)

    @property
    def lengthscale(self) -> Float[Array, "..."]:
        """One number, or one for each input."""
        return self._lengthscale.value

    @property
    def variance(self) -> Float[Array, ""]:
        return self._variance.value

    @abstractmethod
    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        """The correlation at a squared distance measured in lengthscales; 1 at 0."""

    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        return self.variance * self.shape(squared_distance(x / self.lengthscale, z / self.lengthscale))

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        return self.variance * self.shape(own_squared_distance(z / self.lengthscale))

    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        return jnp.broadcast_to(self.variance, x.shape[:1])


class RBF(Stationary):
    """variance · exp(-r²/2): infinitely smooth functions."""

    __init__ = Stationary.__init__

    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.exp(-0.5 * squared)


class Matern12(Stationary):
    """variance · exp(-r): continuous, nowhere differentiable functions."""

    __init__ = Stationary.__init__

    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.exp(-safe_sqrt(squared))


class Matern32(Stationary):
    """variance · (1 + √3 r) exp(-√3 r): functions with one derivative."""

    __init__ = Stationary.__init__

    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        scaled = safe_sqrt(3.0 * squared)
        return (1.0 + scaled) * jnp.exp(-scaled)


class Matern52(Stationary):
    """variance · (1 + √5 r + 5r²/3) exp(-√5 r): functions with two derivatives."""

    __init__ = Stationary.__init__

    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        scaled = safe_sqrt(5.0 * squared)
        return (1.0 + scaled + 5.0 / 3.0 * squared) * jnp.exp(-scaled)


class RationalQuadratic(Stationary):
    """variance · (1 + r²/(2α))^(-α): a mixture of RBF kernels of many lengthscales."""

    _alpha: Positive

    def __init__(
        self,
        lengthscale: ArrayLike | Fixed = 1.0,
        variance: ArrayLike | Fixed = 1.0,
        alpha: ArrayLike | Fixed = 1.0,
    ) -> None:
        super().__init__(lengthscale, variance)
        self._alpha = Positive(alpha, "alpha", scalar=True)

    @property
    def alpha(self) -> Float[Array, ""]:
        return self._alpha.value

    def shape(self, squared: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return jnp.exp(-self.alpha * jnp.log1p(squared / (2.0 * self.alpha)))


class Periodic(Kernel):
    """variance · exp(-2 Σ_d sin²(π (x_d - z_d) / period_d) / lengthscale_d²): functions that repeat."""

    _lengthscale: Positive
    _variance: Positive
    _period: Positive

    def __init__(
        self,
        lengthscale: ArrayLike | Fixed = 1.0,
        variance: ArrayLike | Fixed = 1.0,
        period: ArrayLike | Fixed = 1.0,
    ) -> None:
        self._lengthscale = Positive(lengthscale, "lengthscale")
        self._variance = Positive(variance, "variance", scalar=True)
        self._period = Positive(period, "period")

    @property
    def lengthscale(self) -> Float[Array, "..."]:
        return self._lengthscale.value

    @property
    def variance(self) -> Float[Array, ""]:
        return self._variance.value

    @property
    def period(self) -> Float[Array, "..."]:
        return self._period.value

    def _circle(self, x: Float[Array, "n D"]) -> Float[Array, "n 2*D"]:
        """Points on circles of radius 1/lengthscale: 4 sin²(a - b) is the squared distance at double the angle."""
        angle = 2.0 * jnp.pi * x / self.period
        return jnp.concatenate([jnp.cos(angle) / self.lengthscale, jnp.sin(angle) / self.lengthscale], axis=1)

    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        return self.variance * jnp.exp(-0.5 * squared_distance(self._circle(x), self._circle(z)))

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        return self.variance * jnp.exp(-0.5 * own_squared_distance(self._circle(z)))

    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        return jnp.broadcast_to(self.variance, x.shape[:1])


class Linear(Kernel):
    """Σ_d variance_d x_d z_d: Bayesian linear regression without intercept."""

    _variance: Positive

    def __init__(self, variance: ArrayLike | Fixed = 1.0) -> None:
        self._variance = Positive(variance, "variance")

    @property
    def variance(self) -> Float[Array, "..."]:
        """One number, or one for each input."""
        return self._variance.value

    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        return (x * self.variance) @ z.T

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        return self.cross(z, z)

    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        return jnp.sum(x * x * self.variance, axis=1)


class White(Kernel):
    """Independent noise at every point: variance on the diagonal of ``gram``, nothing between different points."""

    _variance: Positive

    def __init__(self, variance: ArrayLike | Fixed = 1e-3) -> None:
        self._variance = Positive(variance, "variance", scalar=True)

    @property
    def variance(self) -> Float[Array, ""]:
        return self._variance.value

    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        return jnp.zeros((x.shape[0], z.shape[0]), x.dtype)

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        return self.variance * jnp.eye(z.shape[0], dtype=z.dtype)

    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        return jnp.broadcast_to(self.variance, x.shape[:1])


class Combination(Kernel):
    """Several kernels joined by one operation on their values."""

    parts: tuple[Kernel, ...]

    @abstractmethod
    def join(self, values: list[Array]) -> Array:
        """The operation, applied to what each part answers."""

    def cross(self, x: Float[Array, "n D"], z: Float[Array, "m D"]) -> Float[Array, "n m"]:
        return self.join([part.cross(x, z) for part in self.parts])

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        return self.join([part.gram(z) for part in self.parts])

    def diagonal(self, x: Float[Array, "n D"]) -> Float[Array, " n"]:
        return self.join([part.diagonal(x) for part in self.parts])


class Sum(Combination):
    """The sum of kernels: the sum of independent functions."""

    def join(self, values: list[Array]) -> Array:
        return jax.tree.reduce(jnp.add, values)


class Product(Combination):
    """The product of kernels."""

    def join(self, values: list[Array]) -> Array:
        return jax.tree.reduce(jnp.multiply, values)


def lengthscale_of(kernel: Kernel) -> Float[Array, "..."]:
    """The lengthscales of a kernel, or of the first part of a sum or product that has some."""
    for part in (kernel, *(kernel.parts if isinstance(kernel, Combination) else ())):
        if isinstance(part, Stationary | Periodic):
            return part.lengthscale
    raise InputError(f"a {type(kernel).__name__} has no lengthscales.")
