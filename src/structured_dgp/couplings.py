"""Couplings: which blocks of the variational factor exist, as a partial order over latent GPs.

The posterior of the whitened inducing outputs is N(m, C Cᵀ) with a block lower-triangular factor C. A coupling says
which blocks C[i, k] may be non-zero: those where GP k *precedes* GP i. The relation must be a partial order that runs
along the flat index (layer by layer), because then block matrices of this pattern are closed under multiplication
and inversion, which fixes the sparsity of S = C Cᵀ and gives natural gradients in closed form.

A new coupling is a subclass with one method, ``precedes``; everything else follows from it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool

from structured_dgp.exceptions import CouplingError, InputError

Widths: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class LatentGP:
    """Where a latent GP stands: its layer, its position in that layer, and its flat index over all layers."""

    layer: int
    position: int
    index: int


Place: TypeAlias = int | Pair
Rule: TypeAlias = Callable[[LatentGP, LatentGP], bool]


def check_widths(widths: Iterable[int]) -> Widths:
    """The widths as a tuple of positive integers, or an error that says which one is not."""
    given = tuple(widths)
    if not all(isinstance(width, (int, np.integer)) for width in given):
        raise InputError(f"widths must be whole numbers, e.g. (5, 5, 1); got {given}.")
    result = tuple(map(int, given))
    if not result:
        raise InputError("widths is empty: a model needs at least an output layer, e.g. widths=(5, 5, 1).")
    for layer, width in enumerate(result):
        if width < 1:
            raise InputError(f"layer {layer} has width {width}: every layer needs at least one latent GP.")
    return result


def latent_gps(widths: Widths) -> tuple[LatentGP, ...]:
    """All latent GPs in flat order."""
    places = [(layer, position) for layer, width in enumerate(widths) for position in range(width)]
    return tuple(LatentGP(layer, position, index) for index, (layer, position) in enumerate(places))


@dataclass(frozen=True, eq=False)
class Structure:
    """What follows from a coupling for given widths, computed once.

    Attributes:
        widths: latent GPs per layer.
        blocks: the pairs (i, k) whose block C[i, k] exists, ordered by i, then k; diagonal blocks included.
        covariance: T x T, where S[i, j] can be non-zero (i and j share a predecessor).
        fill: T x T lower triangular, where the scalar factor c[i, j] of Theorem 1 can be non-zero.
    """

    widths: Widths
    blocks: tuple[Pair, ...]
    covariance: Bool[np.ndarray, "T T"]
    fill: Bool[np.ndarray, "T T"]

    @functools.cached_property
    def gps(self) -> tuple[LatentGP, ...]:
        return latent_gps(self.widths)

    @functools.cached_property
    def layers(self) -> tuple[range, ...]:
        """The flat indices of each layer."""
        ends = np.cumsum(self.widths).tolist()
        return tuple(range(end - width, end) for end, width in zip(ends, self.widths, strict=True))

    @functools.cached_property
    def block_index(self) -> dict[Pair, int]:
        """The place of each block (i, k) in ``blocks``."""
        return {pair: place for place, pair in enumerate(self.blocks)}

    @functools.cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each GP i, the k with a block C[i, k], ascending and ending in i itself."""
        rows: list[list[int]] = [[] for _ in self.gps]
        for i, k in self.blocks:
            rows[i].append(k)
        return tuple(map(tuple, rows))

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each GP k, the i with a block C[i, k], ascending and starting with k itself."""
        columns: list[list[int]] = [[] for _ in self.gps]
        for i, k in self.blocks:
            columns[k].append(i)
        return tuple(map(tuple, columns))

    @functools.cached_property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        """For each GP j, the i ≥ j whose covariance block S[i, j] can be non-zero, starting with j itself."""
        columns = np.tril(self.covariance).T
        return tuple(tuple(np.flatnonzero(column).tolist()) for column in columns)

    def n_parameters(self, n_inducing: int) -> int:
        """Free numbers in m and C."""
        n_gps, M = len(self.gps), n_inducing
        return n_gps * M + n_gps * M * (M + 1) // 2 + (len(self.blocks) - n_gps) * M * M

    def n_nonzeros(self, n_inducing: int) -> int:
        """Non-zero numbers in S."""
        return int(self.covariance.sum()) * n_inducing**2

    def contains(self, other: Structure) -> bool:
        """Whether every posterior with the other structure is also one with this structure."""
        return self.widths == other.widths and set(other.blocks) <= set(self.blocks)


class Coupling(ABC):
    """A rule that says, for any widths, which latent GPs precede which. Subclasses are hashable values."""

    @abstractmethod
    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        """Whether the block C[i, k] exists; asked only for k before i in flat order."""

    def relation(self, widths: Widths) -> Bool[np.ndarray, "T T"]:
        """The strict relation as a matrix [i, k], before the transitive closure."""
        gps = latent_gps(widths)
        rows = [[k.index < i.index and self.precedes(k, i, widths) for k in gps] for i in gps]
        return np.array(rows, dtype=bool).reshape(len(gps), len(gps))

    def structure(self, widths: Iterable[int]) -> Structure:
        """Blocks, covariance pattern and fill-in for these widths."""
        return _structure(self, check_widths(widths))

    def show(self, widths: Iterable[int]) -> str:
        """The pattern of S as a text picture, one character a block: ``print(StripesAndArrow().show((5, 5, 1)))``."""
        structure = self.structure(widths)
        first = {layer[0] for layer in structure.layers[1:]}

        def line(cells: Iterable[str], bar: str) -> str:
            return "".join((bar if j in first else "") + cell for j, cell in enumerate(cells))

        rule = line(["──"] * len(structure.gps), "┼─")
        lines = []
        for i, row in enumerate(structure.covariance):
            if i in first:
                lines.append(rule)
            lines.append(line(["■ " if filled else "· " for filled in row], "│ ").rstrip())
        return "\n".join(lines)


@functools.lru_cache(maxsize=256)
def _structure(coupling: Coupling, widths: Widths) -> Structure:
    order = _closure(coupling.relation(widths)) | np.eye(sum(widths), dtype=bool)
    # S[i, j] = Σ_{k ≤ i, k ≤ j} C[i, k] C[j, k]ᵀ
    covariance = (order.astype(int) @ order.T.astype(int)) > 0
    fill = np.tril(covariance)
    for j in range(len(fill)):
        # c[i, j] picks up Σ_{k<j} c[i, k] c[j, k]
        fill[j:, j] |= (fill[j:, :j] & fill[j, :j]).any(axis=1)
    blocks = tuple((int(i), int(k)) for i, k in zip(*np.nonzero(order), strict=True))
    return Structure(widths, blocks, covariance, fill)


def _closure(relation: Bool[np.ndarray, "T T"]) -> Bool[np.ndarray, "T T"]:
    """The smallest transitive relation that contains this one."""
    closed = relation.copy()
    for middle in range(len(closed)):
        closed |= np.outer(closed[:, middle], closed[middle])
    return closed


@dataclass(frozen=True)
class MeanField(Coupling):
    """No dependence between latent GPs (Salimbeni & Deisenroth, 2017)."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return False


@dataclass(frozen=True)
class Stripes(Coupling):
    """Hidden GPs at the same position of different layers."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return k.layer < i.layer < len(widths) - 1 and k.position == i.position


@dataclass(frozen=True)
class Arrow(Coupling):
    """Every hidden GP with every output GP."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return k.layer < i.layer == len(widths) - 1


@dataclass(frozen=True)
class StripesAndArrow(Coupling):
    """Stripes and arrow together: the paper's STAR."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return Stripes().precedes(k, i, widths) or Arrow().precedes(k, i, widths)


@dataclass(frozen=True)
class FullyCoupled(Coupling):
    """Everything with everything: the paper's FC."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return True


@dataclass(frozen=True, init=False)
class Order(Coupling):
    """Any partial order, given as pairs (k, i) that say "k precedes i", as a rule, or as a matrix.

    Pairs hold flat indices, or (layer, position) places; a boolean T x T matrix is read as [i, k]. The transitive
    closure is taken. A cycle, or a pair that runs against the layers, is refused::

        Order([(0, 5), (5, 10)])                                   # flat indices
        Order([((0, 0), (1, 0)), ((1, 0), (2, 0))])                # (layer, position)
        Order(lambda k, i: k.layer == 0 and i.layer == 2)          # a rule over LatentGP
    """

    given: Rule | frozenset[tuple[Place, Place]]

    def __init__(self, relation: Rule | Iterable[tuple[Place, Place]] | Bool[np.ndarray, "T T"]) -> None:
        if isinstance(relation, np.ndarray):
            if relation.dtype != bool:
                raise CouplingError("an array is read as a boolean T x T matrix [i, k]: use .astype(bool).")
            relation = [(int(k), int(i)) for i, k in np.argwhere(relation)]
        given = relation if callable(relation) else frozenset((_place(k), _place(i)) for k, i in relation)
        object.__setattr__(self, "given", given)

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return bool(self.relation(widths)[i.index, k.index])

    def relation(self, widths: Widths) -> Bool[np.ndarray, "T T"]:
        gps = latent_gps(widths)
        matrix = np.zeros((len(gps), len(gps)), dtype=bool)
        for k, i in self._pairs(gps):
            matrix[i.index, k.index] = k.index != i.index
        _refuse_disorder(matrix, gps)
        return matrix

    def _pairs(self, gps: tuple[LatentGP, ...]) -> list[tuple[LatentGP, LatentGP]]:
        if isinstance(self.given, frozenset):
            places: dict[Place, LatentGP] = {gp.index: gp for gp in gps}
            places |= {(gp.layer, gp.position): gp for gp in gps}
            for place in (place for pair in self.given for place in pair if place not in places):
                raise CouplingError(
                    f"the relation names latent GP {place}, but the model has {len(gps)} latent GPs in layers "
                    f"{[gp.layer for gp in gps]}: use flat indices 0..{len(gps) - 1} or (layer, position) pairs."
                )
            return [(places[k], places[i]) for k, i in self.given]
        return [(k, i) for k in gps for i in gps if k != i and self.given(k, i)]


def _place(place: Place) -> Place:
    return (int(place[0]), int(place[1])) if isinstance(place, tuple) else int(place)


def _refuse_disorder(matrix: Bool[np.ndarray, "T T"], gps: tuple[LatentGP, ...]) -> None:
    """Raise when the relation has a cycle or runs against the flat order; the message names the pair."""
    closed = _closure(matrix)
    cyclic = np.argwhere(np.tril(closed & closed.T, -1))
    if len(cyclic):
        i, k = (gps[index] for index in cyclic[0])
        raise CouplingError(
            f"the relation has a cycle: {_name(k)} and {_name(i)} each precede the other. "
            "Remove one of the two directions; a coupling is a partial order."
        )
    against = np.argwhere(np.triu(matrix))
    if len(against):
        i, k = (gps[index] for index in against[0])
        raise CouplingError(
            f"the relation runs against the layer order: {_name(k)} cannot precede {_name(i)}. "
            "Write the pair the other way round: the GP with the smaller flat index comes first."
        )


def _name(gp: LatentGP) -> str:
    return f"GP {gp.index} (layer {gp.layer}, position {gp.position})"


BY_NAME: dict[str, Coupling] = {
    "mf": MeanField(),
    "stripes": Stripes(),
    "arrow": Arrow(),
    "star": StripesAndArrow(),
    "fc": FullyCoupled(),
}


def as_coupling(coupling: str | Coupling) -> Coupling:
    """A coupling from its short name, or the coupling itself."""
    if isinstance(coupling, Coupling):
        return coupling
    if coupling in BY_NAME:
        return BY_NAME[coupling]
    raise CouplingError(f"unknown coupling {coupling!r}: use one of {', '.join(map(repr, BY_NAME))} or a Coupling.")
