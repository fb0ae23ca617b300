"""Natural gradients for every coupling.

Block matrices with the pattern of a coupling form a group, so a posterior can be moved from within:

    m ← m + C d,        C ← C r(X),        r(X) = I + X + …

with X in the coupling's pattern, lower triangular on the diagonal. At X = 0 the Fisher information of N(m, C Cᵀ) is
diagonal in (d, X): one for d and for the entries of X off the diagonal, two on it. The natural gradient of a loss with
gradients g_m and G is therefore, for a step of size ρ,

    d = -ρ Cᵀ g_m
    X = -ρ mask(Cᵀ G), its diagonal halved

and its squared length |d|² + Σ_{a≠b} X_ab² + 2 Σ_a X_aa² is twice the KL divergence of the step, to second order. A
step that is longer than the trust region is shortened to its radius.

C never leaves its family, whatever the loss: the diagonal of r(X) stays positive, for I + X with a radius below √2.

The products are in single precision, whatever the precision of the posterior, which is what makes such a step as cheap
as one of Adam. Nothing is lost: the gradient is of full precision and the step is added to C and m, so that the next
step sees and corrects the rounding of this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from structured_dgp.couplings import Structure
from structured_dgp.exceptions import InputError
from structured_dgp.linalg import eliminate
from structured_dgp.posterior import Posterior
from structured_dgp.products import transposed

RETRACTIONS = ("linear", "exponential", "conjugate")
"""How to take a step X.

``linear``: r(X) = I + X. ``exponential``: I + X + X²/2. ``conjugate``: the diagonal blocks of r(X) are those R with
R Rᵀ = (I - X - Xᵀ)⁻¹, so that a step is straight in the precision of each GP: of size 1, it is the exact update of a
conjugate model.
"""

RADIUS_LIMIT = float(np.sqrt(2.0))
GROWTH = 2.0
"""By how much a conjugate step may let a variance grow. Shrinking is safe, growing without bound is not."""
SHORT = 0.3
"""A conjugate step is short if |X + Xᵀ| is below this for every GP; variances then change by less than half."""


class Direction(NamedTuple):
    """A step in the group: ``mean`` is d, ``blocks`` is X, ``length`` its Fisher norm."""

    mean: Float[Array, "T M"]
    blocks: Float[Array, "B M M"]
    length: Float[Array, ""]


def natural_direction(posterior: Posterior, gradient: Posterior) -> Direction:
    """The inverse Fisher information times the gradient, in the coordinates (d, X)."""
    structure, C, G = posterior.structure, posterior.factor_blocks(), gradient.blocks
    M = posterior.n_inducing
    on_diagonal = np.array([i == k for i, k in structure.blocks])[:, None, None]
    weight = np.where(on_diagonal, np.tril(np.ones((M, M))) - 0.5 * np.eye(M), 1.0)
    X = jnp.asarray(weight, C.dtype) * _transposed_product(structure, C, G)
    d = _transposed_times_vector(structure, C, gradient.mean)
    fisher = jnp.asarray(np.where(on_diagonal, 1.0 + np.eye(M), 1.0), C.dtype)
    return Direction(d, X, jnp.sqrt(jnp.sum(d**2) + jnp.sum(fisher * X**2)))


def retract(posterior: Posterior, step: Direction, retraction: str = "conjugate") -> Posterior:
    """The posterior after a step in the group."""
    return jax.tree.map(jnp.add, posterior, movement(posterior, step, retraction))


def movement(posterior: Posterior, step: Direction, retraction: str = "conjugate") -> Posterior:
    """What a step in the group adds to the mean and to the factor."""
    structure, C, X, d = posterior.structure, posterior.factor_blocks(), step.blocks, step.mean
    if retraction == "conjugate":
        diagonal = np.array([place for place, (i, k) in enumerate(structure.blocks) if i == k])
        E = X.at[diagonal].set(_conjugate_changes(X[diagonal]))
        blocks = group_product(structure, C, E)
        # The mean moves with the new covariance, C R Rᵀ Cᵀ, where R = I + E.
        d = d + _transposed_times_vector(structure, E, d)
        d = d + _times_vector(structure, E, d)
    else:
        blocks = group_product(structure, C, X)
        if retraction == "exponential":
            blocks = blocks + 0.5 * group_product(structure, blocks, X)
    mean = _times_vector(structure, C, d)
    return Posterior(coupling=posterior.coupling, widths=posterior.widths, mean=mean, blocks=blocks)


def _conjugate_changes(X: Float[Array, "T M M"]) -> Float[Array, "T M M"]:
    """R - I for the lower triangular R with R Rᵀ = (I - X - Xᵀ)⁻¹: the step X taken in the precision.

    Short steps, as almost all are after the first few, are taken to second order: this needs no factorisation, and R
    is invertible for any X.
    """
    longest = jnp.max(jax.vmap(_largest_eigenvalue)(X + jnp.swapaxes(X, 1, 2)))
    return jax.lax.cond(longest < SHORT, _second_order_changes, jax.vmap(_conjugate_change), X)


def _second_order_changes(X: Float[Array, "T M M"]) -> Float[Array, "T M M"]:
    """X + X² + Φ(Xᵀ X): with I added, its square is I + H + H² + O(X³), H = X + Xᵀ.

    Φ takes the lower half, with half of the diagonal, and X² is lower triangular, so that one product makes both.
    """
    half_of_diagonal = 0.5 * jnp.sum(X**2, axis=1)[:, None, :] * jnp.eye(X.shape[1], dtype=X.dtype)
    return X + jnp.tril((X + jnp.swapaxes(X, 1, 2)) @ X) - half_of_diagonal


def _conjugate_change(X: Float[Array, "M M"]) -> Float[Array, "M M"]:
    """The same for one GP and a step of any length.

    Where that would let a variance grow by more than ``GROWTH``, or the precision would not be positive, R = I + X,
    shortened so that it is invertible.
    """
    eye = jnp.eye(X.shape[0], dtype=X.dtype)
    P = eye - X - X.T
    # eliminate gives L⁻¹ with L Lᵀ = P; from the other corner, it gives the factor of P⁻¹ that is lower triangular.
    _, W = eliminate(P[::-1, ::-1])
    R = W.T[::-1, ::-1]
    short = X * jnp.minimum(1.0, 0.5 / jnp.maximum(jnp.linalg.norm(X), 1e-30))
    return jnp.where(_largest_eigenvalue(R @ R.T) <= GROWTH, R - eye, short)


def _largest_eigenvalue(A: Float[Array, "M M"], iterations: int = 8) -> Float[Array, ""]:
    """Of a symmetric matrix, in absolute value, by power iteration; NaN if A is. From below, to a few per cent."""
    z = jnp.cos(jnp.arange(A.shape[0], dtype=A.dtype))  # not close to an eigenvector of anything in particular
    size = jnp.ones((), A.dtype)
    for _ in range(iterations):
        z = A @ (z / jnp.linalg.norm(z))
        size = jnp.linalg.norm(z)
        z = jnp.where(size > 0.0, z, 1.0)
    return size


class NaturalState(NamedTuple):
    """How many steps were made, and the Fisher norm of the last one before it was shortened."""

    steps: Int[Array, ""]
    length: Float[Array, ""]


def check_radius(radius: float, retraction: str) -> None:
    """Refuse an unknown retraction, and a trust region in which the factor could become singular."""
    if retraction not in RETRACTIONS:
        raise InputError(f"unknown retraction {retraction!r}: use one of {', '.join(map(repr, RETRACTIONS))}.")
    if not 0.0 < radius < (RADIUS_LIMIT if retraction == "linear" else np.inf):
        raise InputError(
            f"radius must be positive, and below √2 with the linear retraction, so that the factor stays invertible; "
            f"got {radius} with the {retraction} retraction."
        )


def natural_gradient(
    learning_rate: float | optax.Schedule, radius: float | optax.Schedule = 5.0, retraction: str = "conjugate"
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation: natural-gradient steps for every ``Posterior`` in the parameters.

    Args:
        learning_rate: ρ, a number or a schedule. 1 is the exact optimum of a quadratic loss.
        radius: the largest length of a step in Fisher norm, a number or a schedule; a step of length ℓ changes the
            posterior by a KL divergence of about ℓ²/2. The linear retraction needs a number below √2.
        retraction: how the step is taken.

    Other parameters pass through unchanged: combine it with ``optax.partition``.
    """
    if not callable(radius):
        check_radius(radius, retraction)
    elif retraction == "linear":
        raise InputError("the linear retraction needs a radius that is a number below √2, not a schedule.")

    def init(params: Any) -> NaturalState:
        del params
        return NaturalState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates: Any, state: NaturalState, params: Any = None, **extra: Any) -> tuple[Any, NaturalState]:
        del extra
        if params is None:
            raise ValueError("natural_gradient needs the parameters: optimiser.update(gradient, state, parameters).")
        rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        longest = radius(state.steps) if callable(radius) else radius
        lengths: list[Array] = []

        def one(gradient: Any, posterior: Any) -> Any:
            if not isinstance(posterior, Posterior):
                return gradient
            # The gradient is divided by its largest entry, so that no square of single precision overflows.
            scale = jnp.maximum(jnp.max(jnp.abs(gradient.mean)), jnp.max(jnp.abs(gradient.blocks)))
            scale = jnp.maximum(scale, np.finfo(scale.dtype).tiny)
            unit, single = jax.tree.map(lambda a: (a / scale).astype(jnp.float32), gradient), _single(posterior)
            direction = natural_direction(single, unit)
            size = jnp.minimum(rate * scale, longest / direction.length).astype(jnp.float32)
            lengths.append((rate * scale * direction.length).astype(jnp.float32))
            step = Direction(-size * direction.mean, -size * direction.blocks, size * direction.length)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), movement(single, step, retraction), posterior)

        moved = jax.tree.map(one, updates, params, is_leaf=lambda node: isinstance(node, Posterior))
        length = jnp.stack(lengths).max() if lengths else state.length
        return moved, NaturalState(state.steps + 1, length)

    return optax.GradientTransformationExtraArgs(init, update)


def _single(posterior: Posterior) -> Posterior:
    return jax.tree.map(lambda a: a.astype(jnp.float32), posterior)


def group_product(structure: Structure, A: Float[Array, "B M M"], B: Float[Array, "B M M"]) -> Float[Array, "B M M"]:
    """(A B)[u, p] = Σ_{p ≤ i ≤ u} A[u, i] B[i, p]."""
    place = structure.block_index
    between = {(u, p): [i for i in structure.predecessors[u] if (i, p) in place] for u, p in structure.blocks}
    return jnp.stack([sum(A[place[u, i]] @ B[place[i, p]] for i in between[u, p]) for u, p in structure.blocks])


def _transposed_product(structure: Structure, C: Array, G: Array) -> Float[Array, "B M M"]:
    """(Cᵀ G)[i, p] = Σ_{u ≥ i} C[u, i]ᵀ G[u, p] for p ≤ i."""
    place, turned = structure.block_index, transposed(C)
    return jnp.stack(
        [sum(turned[place[u, i]] @ G[place[u, p]] for u in structure.successors[i]) for i, p in structure.blocks]
    )


def _times_vector(structure: Structure, C: Array, v: Float[Array, "T M"]) -> Float[Array, "T M"]:
    """(C v)_i = Σ_{k ≤ i} C[i, k] v_k."""
    rows, columns = np.array(structure.blocks).T
    return jnp.zeros_like(v).at[rows].add(jnp.einsum("bac,bc->ba", C, v[columns]))


def _transposed_times_vector(structure: Structure, C: Array, v: Float[Array, "T M"]) -> Float[Array, "T M"]:
    """(Cᵀ v)_k = Σ_{i ≥ k} C[i, k]ᵀ v_i."""
    rows, columns = np.array(structure.blocks).T
    return jnp.zeros_like(v).at[columns].add(jnp.einsum("bac,ba->bc", C, v[rows]))
