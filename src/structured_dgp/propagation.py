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
same noise ε. No inverse, and no LAPACK call on tiny matrices: elementwise arithmetic over all points and samples at
once, and only for the c_ij that the coupling's pattern leaves non-zero. The output layer is not sampled; its
conditional mean and covariance are returned.

The heavy work is products of features (rows, M) with blocks S[j, i] (M, M). They are taken on the side of the lower
layer, where first-layer features do not depend on the Monte-Carlo sample, and side by side for each pair of layers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from structured_dgp.couplings import Pair, Structure
from structured_dgp.kernels import Kernel
from structured_dgp.linalg import whitener
from structured_dgp.parameters import Constant, cast
from structured_dgp.posterior import AbstractPosterior
from structured_dgp.precision import Precision, as_array

Scalars: TypeAlias = dict[Pair, Float[Array, "#R n"]]
"""One number for each data point and sample, for each pair of latent GPs (i, j)."""

VARIANCE_FLOOR = 1e-12  # a conditional variance below this is rounding error; keeps √ and its derivative finite


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
    """What propagation returns for R samples of n points.

    Attributes:
        hidden: what each hidden layer hands on, (R, n, T_l), mean function included.
        mean: conditional mean of the output GPs given the hidden samples, (R, n, T_L).
        cov: their conditional covariance, (R, n, T_L, T_L).
    """

    hidden: list[Float[Array, "R n _"]]
    mean: Float[Array, "R n P"]
    cov: Float[Array, "R n P P"]


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
    eps: Float[Array, "R n T_hidden"],
) -> Outputs:
    """Theorem 1 for all points and samples at once. First-layer quantities carry a sample axis of length one."""
    n_samples, n_points = eps.shape[:2]
    h = x[None]
    hidden: list[Array] = []
    products: dict[tuple[int, int], Float[Array, "#R n K M"]] = {}
    c: Scalars = {}
    for level, layer in enumerate(prepared):
        gps = structure.layers[level]
        A = _features(layer, h)
        mean = A @ layer.mean_weights
        for upper, cross in layer.cross.items():
            products[level, upper] = (A @ cross).reshape(*A.shape[:2], -1, A.shape[-1])
        s = _covariances(layer, structure, level, h, A, products)
        shift = 0.0 if layer.layer.mean is None else h @ layer.layer.mean.value

        if level == len(prepared) - 1:
            c |= _cross_factor(structure, gps, s, c)
            correction = _noise_terms(structure, gps, c, eps)
            full = (n_samples, n_points, len(gps))
            return Outputs(
                hidden,
                jnp.broadcast_to(mean + correction + shift, full),
                jnp.broadcast_to(_output_covariance(structure, gps, s, c), (*full, len(gps))),
            )

        c |= _factor(structure, gps, s, c)
        h = mean + _noise_terms(structure, gps, c, eps) + shift
        hidden.append(h)
    raise AssertionError("a model has at least one layer")


def _features(layer: PreparedLayer, h: Float[Array, "R n D"]) -> Float[Array, "R n M"]:
    """A = K_xz Wᵀ."""
    K = layer.layer.kernel.cross(h.reshape(-1, h.shape[-1]), layer.layer.inducing)
    return (K @ layer.whitener.T).reshape(*h.shape[:2], -1)


def _covariances(
    layer: PreparedLayer,
    structure: Structure,
    level: int,
    h: Float[Array, "R n D"],
    A: Float[Array, "R n M"],
    products: dict[tuple[int, int], Float[Array, "#R n K M"]],
) -> Scalars:
    """S̃_ij for the GPs i of this layer and their partners j ≤ i."""
    gps = structure.layers[level]
    prior = layer.layer.kernel.diagonal(h.reshape(-1, h.shape[-1])).reshape(h.shape[:2])
    # S̃_ii = k(x, x) + A_i · (S[i, i] - I) A_i
    quadratic = quadratic_forms(A.reshape(-1, A.shape[-1]), layer.excess).reshape(*A.shape[:2], len(gps))
    s: Scalars = {(i, i): prior + quadratic[..., t] for t, i in enumerate(gps)}
    for lower in range(level + 1):
        if (lower, level) in products:
            # S̃_ij = A_i · (S[i, j] A_j)
            bilinear = jnp.sum(A[:, :, None, :] * products[lower, level], axis=-1)
            s |= {pair: bilinear[..., t] for t, pair in enumerate(layer_pairs(structure, lower, level))}
    return s


@jax.custom_vjp
def quadratic_forms(A: Float[Array, "n M"], S: Float[Array, "M TM"]) -> Float[Array, "n T"]:
    """A · S_t A for symmetric blocks S_t that stand side by side.

    The gradient with respect to A is 2 g (S A), which the forward pass has already computed.
    """
    return _quadratic_forward(A, S)[0]


def _quadratic_forward(A: Array, S: Array) -> tuple[Array, tuple[Array, Array]]:
    products = (A @ S).reshape(A.shape[0], -1, A.shape[1])
    return jnp.sum(A[:, None, :] * products, axis=-1), (A, products)


def _quadratic_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    A, products = residuals
    A_gradient = 2.0 * jnp.sum(g[:, :, None] * products, axis=1)
    weighted = (g[:, :, None] * A[:, None, :]).reshape(A.shape[0], -1)
    return A_gradient, A.T @ weighted


quadratic_forms.defvjp(_quadratic_forward, _quadratic_backward)


def _partners_before(structure: Structure, i: int, stop: int) -> list[int]:
    """The j < stop with a factor entry c_ij."""
    return [j for j in range(stop) if structure.fill[i, j]]


def _factor_entry(structure: Structure, i: int, j: int, s: Scalars, c: Scalars) -> Float[Array, "#R n"]:
    """c_ij = (S̃_ij - Σ_{k<j} c_ik c_jk) / c_jj."""
    terms = [c[i, k] * c[j, k] for k in _partners_before(structure, i, j) if structure.fill[j, k]]
    start = s.get((i, j))
    total = -sum(terms[1:], terms[0]) if start is None else start - sum(terms) if terms else start
    return total / c[j, j]


def _factor(structure: Structure, gps: range, s: Scalars, earlier: Scalars) -> Scalars:
    """The rows c_i of a hidden layer's GPs."""
    c = dict(earlier)
    for i in gps:
        for j in _partners_before(structure, i, i):
            c[i, j] = _factor_entry(structure, i, j, s, c)
        variance = s[i, i] - sum(c[i, j] ** 2 for j in _partners_before(structure, i, i))
        c[i, i] = jnp.sqrt(jnp.maximum(variance, VARIANCE_FLOOR))
    return c


def _cross_factor(structure: Structure, gps: range, s: Scalars, earlier: Scalars) -> Scalars:
    """The entries c_ij of the output GPs with hidden GPs j."""
    c = dict(earlier)
    for i in gps:
        for j in _partners_before(structure, i, gps.start):
            c[i, j] = _factor_entry(structure, i, j, s, c)
    return c


def _noise_terms(
    structure: Structure, gps: range, c: Scalars, eps: Float[Array, "R n T_hidden"]
) -> Float[Array, "#R n T"]:
    """Σ_j c_ij ε_j over the hidden GPs j ≤ i."""
    n_hidden = eps.shape[-1]

    def terms(i: int) -> Array:
        partners = _partners_before(structure, i, min(i + 1, n_hidden))
        zero = jnp.zeros((1, eps.shape[1]), eps.dtype)
        return sum((c[i, j] * eps[..., j] for j in partners), zero)

    return jnp.stack(jnp.broadcast_arrays(*[terms(i) for i in gps]), axis=-1)


def _output_covariance(structure: Structure, gps: range, s: Scalars, c: Scalars) -> Float[Array, "#R n P P"]:
    """S̃_ii' - Σ_j c_ij c_i'j over the hidden GPs j."""

    def entry(i: int, k: int) -> Array:
        shared = [j for j in _partners_before(structure, i, gps.start) if structure.fill[k, j]]
        start = s.get((max(i, k), min(i, k)), jnp.zeros_like(s[i, i]))
        value = start - sum(c[i, j] * c[k, j] for j in shared)
        return jnp.maximum(value, VARIANCE_FLOOR) if i == k else value

    rows = [jnp.stack(jnp.broadcast_arrays(*[entry(i, k) for k in gps]), axis=-1) for i in gps]
    return jnp.stack(jnp.broadcast_arrays(*rows), axis=-2)
