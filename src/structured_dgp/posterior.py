"""The variational posterior N(m, C Cᵀ) over whitened inducing outputs, for any coupling that is a partial order."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from structured_dgp.couplings import Coupling, Pair, Structure, Widths, as_coupling, check_widths
from structured_dgp.exceptions import CouplingError, InputError
from structured_dgp.precision import as_array, wide_scope


class AbstractPosterior(eqx.Module):
    """What propagation and the ELBO ask of a Gaussian posterior over the whitened inducing outputs v (T, M)."""

    widths: eqx.AbstractVar[Widths]

    @property
    @abstractmethod
    def structure(self) -> Structure:
        """Which covariances can be non-zero."""

    @property
    @abstractmethod
    def n_inducing(self) -> int:
        """M, the number of inducing points of every layer."""

    @abstractmethod
    def moments(self) -> tuple[Float[Array, "T M"], tuple[Float[Array, "M _"], ...]]:
        """The mean m and, for each GP j, its covariances S[j, i] with ``structure.partners[j]``, side by side."""

    @abstractmethod
    def kl(self) -> Float[Array, ""]:
        """KL[q(v) || N(0, I)]."""

    @abstractmethod
    def evaluated(self) -> AbstractPosterior:
        """The same posterior, with the work that its moments and its KL share done once."""

    @abstractmethod
    def factor(self) -> Float[Array, "TM TM"]:
        """The dense factor C, flat order: layer, GP, inducing point."""

    @abstractmethod
    def sample(self, key: PRNGKeyArray, n_samples: int) -> Float[Array, "S T M"]:
        """Draws of v."""

    @wide_scope
    def covariance(self) -> Float[np.ndarray, "TM TM"]:
        """The dense S = C Cᵀ, for inspection."""
        C = np.asarray(self.factor(), np.float64)
        return C @ C.T

    @wide_scope
    def precision(self) -> Float[np.ndarray, "TM TM"]:
        """The dense S⁻¹, for inspection."""
        inverse = np.linalg.inv(np.asarray(self.factor(), np.float64))
        return inverse.T @ inverse


class Posterior(AbstractPosterior):
    """A posterior whose factor has the blocks of a coupling.

    The blocks are stored as one array, in the order of ``structure.blocks``; above the diagonal of a diagonal block
    the numbers are ignored and stay zero in training.
    """

    coupling: Coupling = eqx.field(static=True)
    widths: Widths = eqx.field(static=True)
    mean: Float[Array, "T M"]
    blocks: Float[Array, "B M M"]

    @property
    def structure(self) -> Structure:
        return self.coupling.structure(self.widths)

    @property
    def n_inducing(self) -> int:
        return int(self.mean.shape[1])

    @property
    def n_parameters(self) -> int:
        return self.structure.n_parameters(self.n_inducing)

    @classmethod
    @wide_scope
    def from_dense(
        cls, coupling: str | Coupling, widths: Iterable[int], mean: ArrayLike, factor: ArrayLike
    ) -> Posterior:
        """A posterior from its mean (T, M) and its dense lower-triangular factor (T·M, T·M)."""
        coupling, widths = as_coupling(coupling), check_widths(widths)
        structure = coupling.structure(widths)
        m, C = np.asarray(mean, np.float64), np.asarray(factor, np.float64)
        n_gps = len(structure.gps)
        if m.ndim != 2 or m.shape[0] != n_gps or m.shape[1] < 1:
            raise InputError(f"mean must have shape ({n_gps}, M) for widths {widths}; got {m.shape}.")
        M = m.shape[1]
        if C.shape != (n_gps * M, n_gps * M):
            raise InputError(f"factor must have shape ({n_gps * M}, {n_gps * M}), T·M in each axis; got {C.shape}.")
        if not (np.isfinite(m).all() and np.isfinite(C).all()):
            raise InputError("mean and factor must be finite: they hold NaN or infinity.")
        grid = C.reshape(n_gps, M, n_gps, M).transpose(0, 2, 1, 3)
        _check_pattern(grid, structure)
        blocks = np.stack([grid[pair] for pair in structure.blocks])
        return cls(coupling=coupling, widths=widths, mean=as_array(m), blocks=as_array(blocks))

    @classmethod
    def initial(
        cls,
        coupling: str | Coupling,
        widths: Iterable[int],
        n_inducing: int,
        hidden_scale: float = 1e-5,
        output_scale: float = 1.0,
    ) -> Posterior:
        """Where training starts: mean zero, small hidden factors, output factor at the prior, no coupling yet."""
        coupling, widths = as_coupling(coupling), check_widths(widths)
        for name, scale in (("hidden_scale", hidden_scale), ("output_scale", output_scale)):
            if not (np.isfinite(scale) and scale > 0.0):
                raise InputError(f"{name} must be a positive number: the factor must be invertible; got {scale}.")
        structure = coupling.structure(widths)
        blocks = np.zeros((len(structure.blocks), n_inducing, n_inducing))
        for gp in structure.gps:
            is_output = gp.layer == len(widths) - 1
            place = structure.block_index[gp.index, gp.index]
            blocks[place] = np.eye(n_inducing) * (output_scale if is_output else hidden_scale)
        mean = as_array(np.zeros((len(structure.gps), n_inducing)))
        return cls(coupling=coupling, widths=widths, mean=mean, blocks=as_array(blocks))

    @classmethod
    def prior(cls, coupling: str | Coupling, widths: Iterable[int], n_inducing: int) -> Posterior:
        """The posterior that equals the prior, N(0, I)."""
        return cls.initial(coupling, widths, n_inducing, hidden_scale=1.0)

    @wide_scope
    def to(self, coupling: str | Coupling) -> Posterior:
        """The same distribution in a coupling that contains this one, with the new blocks at zero (a warm start)."""
        coupling = as_coupling(coupling)
        target = coupling.structure(self.widths)
        if not target.contains(self.structure):
            raise CouplingError(
                f"{coupling} does not contain {self.coupling}: a posterior can only be converted to a coupling with "
                "at least the same blocks, as in MF -> STAR -> FC."
            )
        M = self.n_inducing
        places = np.array([target.block_index[pair] for pair in self.structure.blocks])
        blocks = jnp.zeros((len(target.blocks), M, M), self.blocks.dtype).at[places].set(self.blocks)
        return Posterior(coupling=coupling, widths=self.widths, mean=self.mean, blocks=blocks)

    def factor_blocks(self) -> Float[Array, "B M M"]:
        """The blocks C[i, k], with zeros above the diagonal of the diagonal ones."""
        diagonal = np.array([i == k for i, k in self.structure.blocks])
        keep = np.tril(np.ones((self.n_inducing, self.n_inducing), bool)) | ~diagonal[:, None, None]
        return jnp.where(keep, self.blocks, 0.0)

    @wide_scope
    def moments(self) -> tuple[Float[Array, "T M"], tuple[Float[Array, "M _"], ...]]:
        return self.mean, covariance_rows(self.structure, self.factor_blocks())

    @wide_scope
    def kl(self) -> Float[Array, ""]:
        return factor_kl(self.structure, self.mean, self.factor_blocks())

    def evaluated(self) -> Posterior:
        return self  # they share nothing that takes time

    @wide_scope
    def factor(self) -> Float[Array, "TM TM"]:
        n_gps, M = self.mean.shape
        rows, columns = np.array(self.structure.blocks).T
        grid = jnp.zeros((n_gps, n_gps, M, M), self.blocks.dtype).at[rows, columns].set(self.factor_blocks())
        return grid.transpose(0, 2, 1, 3).reshape(n_gps * M, n_gps * M)

    @wide_scope
    def sample(self, key: PRNGKeyArray, n_samples: int) -> Float[Array, "S T M"]:
        # v_i = m_i + Σ_{k ≤ i} C[i, k] z_k
        noise = jax.random.normal(key, (n_samples, *self.mean.shape), self.mean.dtype)
        rows, columns = np.array(self.structure.blocks).T
        steps = jnp.einsum("bac,sbc->sba", self.factor_blocks(), noise[:, columns])
        return self.mean + jnp.zeros_like(noise).at[:, rows].add(steps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def covariance_rows(structure: Structure, C: Float[Array, "B M M"]) -> tuple[Float[Array, "M _"], ...]:
    """For each GP j, S[j, i] = Σ_{k ≤ i, k ≤ j} C[j, k] C[i, k]ᵀ for all its partners i ≥ j, side by side."""
    return tuple(_covariance_row(structure, C, j) for j in range(len(structure.gps)))


def _covariance_row(structure: Structure, C: Float[Array, "B M M"], j: int) -> Float[Array, "M _"]:
    partners, M = structure.partners[j], C.shape[1]
    by_shared: dict[tuple[int, ...], list[int]] = {}
    for i in partners:
        shared = tuple(k for k in structure.predecessors[j] if k in structure.predecessors[i])
        by_shared.setdefault(shared, []).append(i)
    pieces: dict[int, Array] = {}
    for shared, group in by_shared.items():
        left = C[_places(structure, [(j, k) for k in shared])]
        right = C[_places(structure, [(i, k) for k in shared for i in group])].reshape(len(shared), len(group), M, M)
        wide = jnp.einsum("kac,kibc->aib", left, right)
        pieces |= {i: wide[:, place] for place, i in enumerate(group)}
        if len(by_shared) == 1:
            return wide.reshape(M, len(partners) * M)
    return jnp.concatenate([pieces[i] for i in partners], axis=1)


def _covariance_forward(structure: Structure, C: Array) -> tuple[tuple[Array, ...], Array]:
    return covariance_rows(structure, C), C


def _covariance_backward(structure: Structure, C: Array, gradients: tuple[Array, ...]) -> tuple[Array]:
    """With Ĝ the gradient of S, both triangles added: dC[U, k] = Ĝ[U, U] C[U, k] for the GPs U that k precedes.

    Any two GPs in U share the predecessor k, so every block Ĝ[U, U] exists.
    """
    M = C.shape[1]
    below = jnp.concatenate([g.reshape(M, -1, M).transpose(1, 2, 0) for g in gradients])  # G[i, j], i ≥ j
    pairs = [(i, j) for j, partners in enumerate(structure.partners) for i in partners]
    place = {pair: index for index, pair in enumerate(pairs)}
    on_diagonal = np.array([i == j for i, j in pairs])
    below = jnp.where(on_diagonal[:, None, None], below + below.transpose(0, 2, 1), below)
    both = jnp.concatenate([below, below.transpose(0, 2, 1)])
    columns: list[Array] = []
    order: list[Pair] = []
    for k in range(len(structure.gps)):
        above = structure.successors[k]
        index = np.array([[place[i, j] if i >= j else place[j, i] + len(pairs) for j in above] for i in above])
        panel = C[_places(structure, [(i, k) for i in above])]
        columns.append(jnp.einsum("ijab,jbc->iac", both[index], panel))
        order += [(i, k) for i in above]
    return (jnp.concatenate(columns)[np.argsort(_places(structure, order))],)


covariance_rows.defvjp(_covariance_forward, _covariance_backward)


def _places(structure: Structure, pairs: Iterable[Pair]) -> Int[np.ndarray, " n"]:
    """Where the blocks (i, k) stand in the array of blocks."""
    return np.array([structure.block_index[pair] for pair in pairs])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def factor_kl(structure: Structure, m: Float[Array, "T M"], C: Float[Array, "B M M"]) -> Float[Array, ""]:
    """KL[N(m, C Cᵀ) || N(0, I)] = ½ (|m|² + Σ |C[i, k]|² - T M) - Σ log |diag C[i, i]|."""
    places = _places(structure, [(gp.index, gp.index) for gp in structure.gps])
    diagonal = jnp.diagonal(C[places], axis1=1, axis2=2)
    return 0.5 * (jnp.sum(m**2) + jnp.sum(C**2) - m.size) - jnp.sum(jnp.log(jnp.abs(diagonal)))


def _kl_forward(structure: Structure, m: Array, C: Array) -> tuple[Array, tuple[Array, Array]]:
    return factor_kl(structure, m, C), (m, C)


def _kl_backward(structure: Structure, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    m, C = residuals
    on_diagonal = np.array([i == k for i, k in structure.blocks])[:, None, None] & np.eye(m.shape[1], dtype=bool)
    return g * m, g * (C - jnp.where(on_diagonal, 1.0 / jnp.where(on_diagonal, C, 1.0), 0.0))


factor_kl.defvjp(_kl_forward, _kl_backward)


def _check_pattern(grid: Float[np.ndarray, "T T M M"], structure: Structure) -> None:
    """Refuse a dense factor with numbers outside its coupling's blocks, or with a zero on its diagonal."""
    for i, k in np.argwhere(np.any(grid != 0.0, axis=(2, 3))).tolist():
        if k > i:
            raise InputError(
                f"factor has non-zero numbers in block ({i}, {k}), above the diagonal: pass the Cholesky factor of the "
                "covariance, numpy.linalg.cholesky(S)."
            )
        if (i, k) not in structure.block_index:
            raise CouplingError(
                f"factor has non-zero numbers in block ({i}, {k}), which the coupling does not have. Use a coupling in "
                f"which GP {k} precedes GP {i}, or set the block to zero."
            )
    for i in range(len(grid)):
        if np.any(np.triu(grid[i, i], 1)):
            raise InputError(
                f"the diagonal block of GP {i} is not lower triangular: pass the Cholesky factor of the covariance, "
                "numpy.linalg.cholesky(S)."
            )
        if np.any(np.diagonal(grid[i, i]) == 0.0):
            raise InputError(f"the diagonal block of GP {i} has a zero on its diagonal: the covariance is singular.")
