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
same noise ε. No inverse, and no LAPACK call on tiny matrices: elementwise arithmetic over all points, samples
and GPs of a layer at once, and only for the columns j that the coupling's pattern leaves non-zero. The output layer
is not sampled; its conditional mean and covariance are returned.

The heavy work is products of features (rows, M) with blocks S[j, i] (M, M). They are taken on the side of the lower
layer, where first-layer features do not depend on the Monte-Carlo sample, and side by side for each pair of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.couplings import Pair, Structure
from structured_dgp.kernels import Kernel
from structured_dgp.linalg import whitener
from structured_dgp.parameters import Constant, cast
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.precision import Precision, as_array
from structured_dgp.products import inner_products, matmul, matmul_transposed, quadratic_forms

Columns: TypeAlias = dict[int, Float[Array, "n #R T"]]
"""For each earlier GP j, a number for every point, sample, and GP i of one layer; zero where the coupling has none."""

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
                whitener=_layer_whitener(layer, jitter, precision),
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


def _layer_whitener(layer: Layer, jitter: float, precision: Precision) -> Float[Array, "M M"]:
    """W of the layer's kernel matrix; in mixed precision factorised in float64 and rounded afterwards."""
    if precision == "mixed":
        wide = cast(layer, jnp.float64)
        return whitener(wide.kernel.gram(wide.inducing), jitter).astype(layer.inducing.dtype)
    return whitener(layer.kernel.gram(layer.inducing), jitter)


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
    h = x[:, None]
    hidden: list[Array] = []
    products: dict[tuple[int, int], Float[Array, "n #R K M"]] = {}
    factor: list[LayerFactor] = []
    for level, layer in enumerate(prepared):
        A = _features(layer, h)
        mean = _over_rows(matmul, A, layer.mean_weights)
        shift = 0.0 if layer.layer.mean is None else h @ layer.layer.mean.value
        for upper, cross in layer.cross.items():
            products[level, upper] = _over_rows(matmul, A, cross).reshape(*A.shape[:2], -1, A.shape[-1])
        prior = _prior_variances(layer, h)
        variance = prior + _over_rows(quadratic_forms, A, layer.excess)  # S̃_ii = k(x, x) + A_i · (S[i, i] - I) A_i
        floor = jnp.maximum(ROUNDING[str(prior.dtype)] * prior, 1e-12)
        covariance = _covariances(structure, level, A, products)
        earlier = _earlier_columns(structure, level, covariance, factor)
        # μ̂ = μ̃ + Σ_j c_ij ε_j over the GPs j of earlier layers
        conditional_mean = mean + shift + _noise_terms(earlier, eps)

        if level == len(prepared) - 1:
            full = (n_points, n_samples, len(structure.layers[level]))
            conditional_cov = _output_covariance(structure, variance, covariance, earlier, floor)
            return Outputs(
                hidden,
                jnp.broadcast_to(conditional_mean, full),
                jnp.broadcast_to(conditional_cov, (*full, full[-1])),
            )

        factor.append(_own_columns(structure, level, variance, covariance, earlier, floor))
        own = {j: column for j, column in factor[level].columns.items() if j not in earlier}
        gps = structure.layers[level]
        h = conditional_mean + _noise_terms(own, eps) + factor[level].diagonal * eps[..., gps.start : gps.stop]
        hidden.append(h)
    raise AssertionError("a model has at least one layer")


def _over_rows(function: Callable[..., Array], a: Float[Array, "n R M"], b: Array) -> Float[Array, "n R _"]:
    """``function(a, b)`` with points and samples as the rows of one matrix."""
    return function(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:2], -1)


def _features(layer: PreparedLayer, h: Float[Array, "n R D"]) -> Float[Array, "n R M"]:
    """A = K_xz Wᵀ."""
    K = _over_rows(layer.layer.kernel.cross, h, layer.layer.inducing)
    return _over_rows(matmul_transposed, K, layer.whitener)


def _prior_variances(layer: PreparedLayer, h: Float[Array, "n R D"]) -> Float[Array, "n R 1"]:
    """k(x, x)."""
    return layer.layer.kernel.diagonal(h.reshape(-1, h.shape[-1])).reshape(*h.shape[:2], 1)


def _covariances(
    structure: Structure,
    level: int,
    A: Float[Array, "n R M"],
    products: dict[tuple[int, int], Float[Array, "n #R K M"]],
) -> Columns:
    """S̃_ij = A_i · (S[i, j] A_j) for the GPs i of this layer and their partners j < i."""
    gps = structure.layers[level]
    columns: Columns = {}
    for lower in range(level + 1):
        if (lower, level) not in products:
            continue
        values = inner_products(A, products[lower, level])
        pairs = layer_pairs(structure, lower, level)
        for j in sorted({j for _, j in pairs}):
            places = [place for place, pair in enumerate(pairs) if pair[1] == j]
            rows = [pairs[place][0] - gps.start for place in places]
            part = values[..., places[0] : places[-1] + 1]
            columns[j] = part if len(rows) == len(gps) else part @ jnp.eye(len(gps), dtype=A.dtype)[np.array(rows)]
    return columns


class LayerFactor(NamedTuple):
    """The rows c_i of a hidden layer's GPs: the entries left of the diagonal by column, and the diagonal."""

    columns: Columns
    diagonal: Float[Array, "n #R T"]


def _entry(structure: Structure, factor: list[LayerFactor], j: int, k: int) -> Float[Array, "n #R 1"]:
    """c_jk of a GP j of an earlier layer."""
    gp = structure.gps[j]
    values = factor[gp.layer].diagonal if j == k else factor[gp.layer].columns[k]
    return values[..., gp.position : gp.position + 1]


def _earlier_columns(structure: Structure, level: int, covariance: Columns, factor: list[LayerFactor]) -> Columns:
    """c_ij = (S̃_ij - Σ_{k<j} c_ik c_jk) / c_jj for the GPs i of this layer and j of earlier layers."""
    gps = structure.layers[level]
    columns: Columns = {}
    for j in range(gps.start):
        if structure.fill[gps.start : gps.stop, j].any():
            terms = [columns[k] * _entry(structure, factor, j, k) for k in columns if structure.fill[j, k]]
            columns[j] = _minus(covariance.get(j), terms) / _entry(structure, factor, j, j)
    return columns


def _own_columns(
    structure: Structure,
    level: int,
    variance: Float[Array, "n R T"],
    covariance: Columns,
    earlier: Columns,
    floor: Float[Array, "n R 1"],
) -> LayerFactor:
    """The same for j in this layer, and c_ii = √(S̃_ii - Σ_{j<i} c_ij²)."""
    gps = structure.layers[level]
    if not np.tril(structure.fill[gps.start : gps.stop, gps.start : gps.stop], -1).any():
        return LayerFactor(earlier, _root(_minus(variance, [column**2 for column in earlier.values()]), floor))
    columns = dict(earlier)
    diagonal = []
    for place, j in enumerate(gps):
        own = {k: column[..., place : place + 1] for k, column in columns.items()}
        diagonal.append(_root(_minus(variance[..., place : place + 1], [entry**2 for entry in own.values()]), floor))
        if structure.fill[j + 1 : gps.stop, j].any():
            terms = [columns[k] * own[k] for k in columns]
            below = jnp.asarray(np.arange(len(gps)) > place, variance.dtype)
            columns[j] = below * _minus(covariance.get(j), terms) / diagonal[-1]
    return LayerFactor(columns, jnp.concatenate(jnp.broadcast_arrays(*diagonal), axis=-1))


def _minus(start: Array | None, terms: list[Array]) -> Array:
    """start - Σ terms; no start counts as zero."""
    total = sum(terms[1:], terms[0]) if terms else None
    if total is None or start is None:
        return start if total is None else -total  # type: ignore[return-value]
    return start - total


def _root(variance: Float[Array, "n #R T"], floor: Float[Array, "n #R 1"]) -> Float[Array, "n #R T"]:
    return jnp.sqrt(jnp.maximum(variance, floor))


def _noise_terms(columns: Columns, eps: Float[Array, "n R T_hidden"]) -> Float[Array, "n #R T"] | float:
    """Σ_j c_ij ε_j over the given columns."""
    return sum((column * eps[..., j, None] for j, column in columns.items()), 0.0)


def _output_covariance(
    structure: Structure,
    variance: Float[Array, "n R P"],
    covariance: Columns,
    earlier: Columns,
    floor: Float[Array, "n R 1"],
) -> Float[Array, "n R P P"]:
    """Σ̂ = S̃_ii' - Σ_j c_ij c_i'j over the hidden GPs j; its diagonal stays positive."""
    first, width = structure.layers[-1].start, variance.shape[-1]
    eye = jnp.eye(width, dtype=variance.dtype)
    explained = [column[..., :, None] * column[..., None, :] for column in earlier.values()]
    total = _minus(variance[..., :, None] * eye, explained)
    for j in range(first, first + width):
        if j in covariance:
            # Column j holds the GPs after j; the covariance is symmetric.
            entries = covariance[j][..., :, None] * eye[j - first]
            total = total + entries + jnp.swapaxes(entries, -1, -2)
    return jnp.where(eye > 0, jnp.maximum(total, floor[..., None]), total)
