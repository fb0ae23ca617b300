"""Theorem 1: data points through the layers, with the inducing outputs marginalised analytically.

For one data point, the values f of all latent GPs would be jointly Gaussian if the layers' inputs were known, with

    μ̃_i  = A_i · m_i
    S̃_ij = A_i · S[i, j] A_j                              i ≠ j
    S̃_ii = k(x, x) - |A_i|² + A_i · S[i, i] A_i

where A_i are the whitened features of GP i's layer at its input. Theorem 1 says that the conditional of a layer given
all earlier ones has the usual Gaussian form even though the inputs are themselves sampled. Process the GPs in flat
order and keep the Cholesky factor c of S̃, one scalar at a time:

    c_ij = (S̃_ij - Σ_{k<j} c_ik c_jk) / c_jj                 j < i
    c_ii = √(S̃_ii - Σ_{j<i} c_ij²)
    f_i  = μ̃_i + Σ_{j≤i} c_ij ε_j

This is Eqs. (muhatn) and (Sigmahatn) of the paper: with f = μ̃ + c ε, the solve S̃⁻¹(f - μ̃) collapses to reusing the
same noise ε. No inverse, and no LAPACK call on tiny matrices: ``triangular.py`` does it with elementwise arithmetic
over all points and samples at once, a layer at a time. The output layer is not sampled; its conditional mean and
covariance are returned.

The heavy work is products of features (rows, M) with blocks S[j, i] (M, M). They are taken on the side of the lower
layer, where first-layer features do not depend on the Monte-Carlo sample, and side by side for each pair of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from structured_dgp.couplings import Pair, Structure
from structured_dgp.kernels import Kernel
from structured_dgp.linalg import jittered_cholesky, whitener
from structured_dgp.parameters import Constant, cast
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.precision import Precision, as_array
from structured_dgp.products import inner_products, matmul, matmul_transposed, quadratic_forms
from structured_dgp.triangular import factorise, solve_columns

Products: TypeAlias = dict[tuple[int, int], Float[Array, "n #R _ M"]]
"""Features of a lower layer times S[j, i] for the pairs in ``layer_pairs(structure, lower, upper)``."""

ROUNDING = {"float64": 1e-12, "float32": 1e-5}
"""A conditional variance below this part of the prior variance is rounding error.

It is the square of what the Cholesky recursion divides by. |A|² cancels against k(x, x), with the error of features
that were multiplied by a whitener of norm jitter^(-1/2): in float32 far more than the unit of rounding.
"""


class Layer(eqx.Module):
    """The prior of one layer: a kernel, inducing inputs (M, D_in), and a fixed linear mean function (D_in, width)."""

    kernel: Kernel
    inducing: Float[Array, "M D"]
    mean: Constant | None

    def __init__(self, kernel: Kernel, inducing: ArrayLike, mean: ArrayLike | None = None) -> None:
        self.kernel = kernel
        self.inducing = as_array(inducing)
        self.mean = None if mean is None else Constant(as_array(mean))


class PreparedLayer(eqx.Module):
    """A layer as the data points meet it: everything that does not depend on them, computed once.

    Attributes:
        whitener: W = L⁻¹, so that features are A = K_xz Wᵀ.
        mean_weights: m of the layer's GPs, (M, T_l).
        excess: S[i, i] - I of the layer's GPs side by side, (M, T_l·M); symmetric blocks.
        cross: for each later or equal layer, S[j, i] for the pairs in ``layer_pairs``, side by side.
    """

    layer: Layer
    whitener: Float[Array, "M M"]
    mean_weights: Float[Array, "M T"]
    excess: Float[Array, "M _"]
    cross: dict[int, Float[Array, "M _"]]


class Outputs(NamedTuple):
    """What propagation returns for R samples of n points; the model's methods put the samples first.

    Attributes:
        hidden: what each hidden layer hands on, (R, n, T_l), mean function included.
        mean: conditional mean of the output GPs given the hidden samples, (R, n, T_L).
        cov: their conditional covariance, (R, n, T_L, T_L).
    """

    hidden: list[Float[Array, "_ _ _"]]
    mean: Float[Array, "_ _ P"]
    cov: Float[Array, "_ _ P P"]


def layer_pairs(structure: Structure, lower: int, upper: int) -> list[Pair]:
    """The pairs (i, j), i > j, with j in the lower layer, i in the upper one and S[i, j] not zero."""
    in_upper = structure.layers[upper]
    return [(i, j) for j in structure.layers[lower] for i in structure.partners[j] if i > j and i in in_upper]


def prepare(
    layers: tuple[Layer, ...], posterior: AbstractPosterior, jitter: float, precision: Precision
) -> tuple[PreparedLayer, ...]:
    """The part of propagation that depends on parameters alone."""
    structure, M = posterior.structure, posterior.n_inducing
    mean, rows = posterior.moments()
    whitening = whiteners(layers, jitter, precision)
    eye = jnp.eye(M, dtype=mean.dtype)

    def block(i: int, j: int) -> Float[Array, "M M"]:
        place = structure.partners[j].index(i)
        return rows[j][:, place * M : (place + 1) * M]

    prepared = []
    for lower, layer in enumerate(layers):
        gps = structure.layers[lower]
        pairs = {upper: layer_pairs(structure, lower, upper) for upper in range(lower, len(layers))}
        prepared.append(
            PreparedLayer(
                layer=layer,
                whitener=whitening[lower],
                mean_weights=mean[gps.start : gps.stop].T,
                excess=jnp.concatenate([block(j, j) - eye for j in gps], axis=1),
                cross={
                    upper: jnp.concatenate([block(i, j) for i, j in pairs[upper]], axis=1)
                    for upper in pairs
                    if pairs[upper]
                },
            )
        )
    return tuple(prepared)


def whiteners(layers: tuple[Layer, ...], jitter: float, precision: Precision) -> Float[Array, "L M M"]:
    """W of each layer's kernel matrix; in mixed precision factorised in float64 and rounded afterwards."""
    dtype = layers[0].inducing.dtype
    if precision == "mixed":
        layers = cast(layers, jnp.float64)
    K = jnp.stack([layer.kernel.gram(layer.inducing) for layer in layers])
    return jax.lax.map(lambda K: whitener(K, jitter), K).astype(dtype)


def propagate(
    prepared: tuple[PreparedLayer, ...],
    structure: Structure,
    x: Float[Array, "n D"],
    eps: Float[Array, "n R T_hidden"],
) -> Outputs:
    """Theorem 1 for all points and samples at once; here, and in the result, samples are the second axis.

    First-layer quantities do not depend on the sample: their sample axis has length one.
    """
    n_points, n_samples = eps.shape[:2]
    noise = gps_first(eps)
    h = x[:, None]
    hidden: list[Array] = []
    products: Products = {}
    factor = jnp.zeros((0, 0, n_points, 1), x.dtype)
    for level, layer in enumerate(prepared):
        gps = structure.layers[level]
        A = _features(layer.layer, layer.whitener, h)
        mean = _over_rows(matmul, A, layer.mean_weights)
        shift = 0.0 if layer.layer.mean is None else h @ layer.layer.mean.value
        for upper, cross in layer.cross.items():
            products[level, upper] = _over_rows(matmul, A, cross).reshape(*A.shape[:2], -1, A.shape[-1])
        prior = layer.layer.kernel.diagonal(h.reshape(-1, h.shape[-1])).reshape(h.shape[:2])
        floor = variance_floor(prior)
        variance = prior + gps_first(_over_rows(quadratic_forms, A, layer.excess))
        earlier = _earlier_columns(structure, level, A, products, factor)
        conditional_mean = mean + shift
        if earlier is not None:  # μ̂ = μ̃ + Σ_j c_ij ε_j over the GPs j of earlier layers
            conditional_mean = conditional_mean + gps_last(_sum_columns(earlier, noise[: gps.start]))

        if level == len(prepared) - 1:
            cov = _conditional_covariance(structure, level, variance, A, products, earlier)
            eye = jnp.eye(len(gps), dtype=cov.dtype)[..., None, None]
            cov = jnp.moveaxis(jnp.where(eye > 0, jnp.maximum(cov, floor), cov), (0, 1), (2, 3))
            full = (n_points, n_samples, len(gps))
            return Outputs(hidden, jnp.broadcast_to(conditional_mean, full), jnp.broadcast_to(cov, (*full, len(gps))))

        own_noise = noise[gps.start : gps.stop]
        if len(_blocks(structure, level)) > 1:
            own = factorise(_conditional_covariance(structure, level, variance, A, products, earlier), floor)
            h = conditional_mean + gps_last(_sum_columns(own, own_noise))
        else:
            explained = 0.0 if earlier is None else jnp.sum(earlier**2, axis=0)
            diagonal = jnp.sqrt(jnp.maximum(variance - explained, floor))
            own = jnp.eye(len(gps), dtype=x.dtype)[..., None, None] * diagonal
            h = conditional_mean + gps_last(diagonal * own_noise)
        hidden.append(h)
        factor = _extended(factor, earlier, own, n_samples)
    raise AssertionError("a model has at least one layer")


def propagate_given(
    layers: tuple[Layer, ...],
    whitening: Float[Array, "L M M"],
    structure: Structure,
    x: Float[Array, "n D"],
    v: Float[Array, "S T M"],
    eps: Float[Array, "S n T_hidden"],
) -> Outputs:
    """Data points through the layers for S given draws ``v`` of all inducing outputs; samples are the first axis.

    Given v, the GPs are independent, and each point has f = A v + √(k(x, x) - |A|²) ε.
    """
    h = x[None]
    hidden: list[Array] = []
    for gps, layer, W in zip(structure.layers, layers, whitening, strict=True):
        A = _features(layer, W, h)
        mean = A @ jnp.swapaxes(v[:, gps.start : gps.stop], 1, 2)
        if layer.mean is not None:
            mean = mean + h @ layer.mean.value
        prior = layer.kernel.diagonal(h.reshape(-1, h.shape[-1])).reshape(h.shape[:2])
        variance = jnp.maximum(prior - jnp.sum(A * A, -1), variance_floor(prior))[..., None]
        if gps.stop == len(structure.gps):
            cov = variance[..., None] * jnp.eye(len(gps), dtype=x.dtype)
            return Outputs(hidden, mean, jnp.broadcast_to(cov, (*mean.shape, len(gps))))
        h = mean + jnp.sqrt(variance) * eps[..., gps.start : gps.stop]
        hidden.append(h)
    raise AssertionError("a model has at least one layer")


def layer_function(
    layer: Layer,
    whitener: Float[Array, "M M"],
    v: Float[Array, "T M"],
    h: Float[Array, "n D"],
    noise: Float[Array, "n T"],
    jitter: float,
) -> Float[Array, "n T"]:
    """f = A v + chol(K_xx - A Aᵀ) ε, the prior conditional given the inducing outputs, jointly over rows."""
    A = layer.kernel.cross(h, layer.inducing) @ whitener.T
    L, _ = jittered_cholesky(layer.kernel.gram(h) - A @ A.T, jitter)
    f = A @ v.T + L @ noise
    return f if layer.mean is None else f + h @ layer.mean.value


def functions_given(
    layers: tuple[Layer, ...],
    whitening: Float[Array, "L M M"],
    structure: Structure,
    x: Float[Array, "n D"],
    v: Float[Array, "S T M"],
    key: PRNGKeyArray,
    jitter: float,
) -> list[Float[Array, "S n _"]]:
    """Joint draws over all points of what each layer hands on, for S given draws of all inducing outputs."""
    h = jnp.broadcast_to(x, (len(v), *x.shape))
    results = []
    keys = jax.random.split(key, len(layers))
    for gps, layer, W, layer_key in zip(structure.layers, layers, whitening, keys, strict=True):
        noise = jax.random.normal(layer_key, (len(v), x.shape[0], len(gps)), x.dtype)

        def one(args: tuple[Array, Array, Array], layer: Layer = layer, W: Array = W) -> Array:
            return layer_function(layer, W, *args, jitter)

        h = jax.lax.map(one, (v[:, gps.start : gps.stop], h, noise))
        results.append(h)
    return results


def variance_floor(prior: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest conditional variance that is not rounding error."""
    return jax.lax.stop_gradient(jnp.maximum(ROUNDING[str(prior.dtype)] * prior, 1e-12))


def _over_rows(function: Callable[..., Array], a: Float[Array, "n R M"], b: Array) -> Float[Array, "n R _"]:
    """``function(a, b)`` with points and samples as the rows of one matrix."""
    return function(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:2], -1)


def _features(layer: Layer, whitener: Float[Array, "M M"], h: Float[Array, "n R D"]) -> Float[Array, "n R M"]:
    """A = K_xz Wᵀ."""
    return _over_rows(matmul_transposed, _over_rows(layer.kernel.cross, h, layer.inducing), whitener)


def gps_first(a: Float[Array, "n R T"]) -> Float[Array, "T n R"]:
    """The layout of ``triangular.py``."""
    return jnp.moveaxis(a, -1, 0)


def gps_last(a: Float[Array, "T n R"]) -> Float[Array, "n R T"]:
    """The layout of rows of features."""
    return jnp.moveaxis(a, 0, -1)


def _sum_columns(c: Float[Array, "K T n #R"], noise: Float[Array, "K n R"]) -> Float[Array, "T n R"]:
    """Σ_k c_ik ε_k."""
    return jnp.sum(c * noise[:, None], axis=0)


def _covariances(
    structure: Structure, lower: int, upper: int, A: Float[Array, "n R M"], products: Products
) -> Float[Array, "T_lower T n R"]:
    """S̃_ij = A_i · (S[i, j] A_j) for j in the lower layer and i > j in the upper one; zero where the coupling is."""
    below, above = structure.layers[lower], structure.layers[upper]
    shape = (len(below), len(above))
    pairs = layer_pairs(structure, lower, upper)
    if not pairs:
        return jnp.zeros((*shape, *A.shape[:2]), A.dtype)
    values = gps_first(inner_products(A, products[lower, upper]))
    if len(pairs) < len(below) * len(above):
        place = np.zeros((*shape, len(pairs)))
        for number, (i, j) in enumerate(pairs):
            place[j - below.start, i - above.start, number] = 1.0
        values = jnp.tensordot(jnp.asarray(place, A.dtype), values, axes=1)
    return values.reshape(*shape, *A.shape[:2])


def _earlier_columns(
    structure: Structure, level: int, A: Float[Array, "n R M"], products: Products, factor: Float[Array, "K K n #R"]
) -> Float[Array, "K T n R"] | None:
    """c_ij = (S̃_ij - Σ_{k<j} c_ik c_jk) / c_jj for the GPs i of this layer and j of earlier ones; None: all zero."""
    if not any((lower, level) in products for lower in range(level)):
        return None
    S = jnp.concatenate([_covariances(structure, lower, level, A, products) for lower in range(level)])
    factor = jnp.broadcast_to(factor, (*factor.shape[:2], *A.shape[:2]))
    return solve_columns(factor, S, tuple(block for lower in range(level) for block in _blocks(structure, lower)))


def _blocks(structure: Structure, level: int) -> tuple[range, ...]:
    """A layer's GPs in groups that are independent given the earlier layers: all of them, or one by one."""
    gps = structure.layers[level]
    if np.tril(structure.fill[gps.start : gps.stop, gps.start : gps.stop], -1).any():
        return tuple(range(j, j + 1) for j in gps)
    return (gps,)


def _conditional_covariance(
    structure: Structure,
    level: int,
    variance: Float[Array, "T n R"],
    A: Float[Array, "n R M"],
    products: Products,
    earlier: Float[Array, "K T n R"] | None,
) -> Float[Array, "T T n R"]:
    """Σ̂ = S̃_ii' - Σ_j c_ij c_i'j over the GPs j of earlier layers, for the GPs i, i' of this layer."""
    cov = jnp.eye(len(variance), dtype=variance.dtype)[..., None, None] * variance
    if (level, level) in products:
        below = _covariances(structure, level, level, A, products)
        cov = cov + below + jnp.swapaxes(below, 0, 1)
    return cov if earlier is None else cov - jnp.sum(earlier[:, :, None] * earlier[:, None, :], axis=0)


def _extended(
    factor: Float[Array, "K K n #R"],
    earlier: Float[Array, "K T n #R"] | None,
    own: Float[Array, "T T n #R"],
    n_samples: int,
) -> Float[Array, "H H n #R"]:
    """The factor with the rows of one more layer; entry k of row i stands at [k, i]."""
    if earlier is None:
        earlier = jnp.zeros((len(factor), len(own), *own.shape[2:]), own.dtype)
    if len(factor) == 0:
        return own
    full = (*own.shape[2:3], n_samples)
    factor, earlier, own = (jnp.broadcast_to(part, (*part.shape[:2], *full)) for part in (factor, earlier, own))
    below = jnp.zeros((len(own), len(factor), *full), own.dtype)
    return jnp.concatenate([jnp.concatenate([factor, earlier], 1), jnp.concatenate([below, own], 1)])
