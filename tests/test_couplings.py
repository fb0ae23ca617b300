"""Couplings against patterns written down independently, and against random block matrices that have the pattern."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import dense
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from structured_dgp import RBF, DeepGP, Gaussian, Layer, Posterior
from structured_dgp.couplings import (
    BY_NAME,
    Coupling,
    FullyCoupled,
    LatentGP,
    MeanField,
    Order,
    StripesAndArrow,
    Structure,
    Widths,
    as_coupling,
    check_widths,
    latent_gps,
)
from structured_dgp.exceptions import CouplingError, InputError

Pattern = NDArray[np.bool_]

WIDTHS: list[Widths] = [(1,), (3,), (2, 2), (5, 5, 1), (3, 1, 2), (1, 3, 2), (2, 3, 3, 1), (2, 1, 2, 2, 2)]


@dataclass(frozen=True)
class Neighbours(Coupling):
    """As a user would write it; not transitive by itself."""

    def precedes(self, k: LatentGP, i: LatentGP, widths: Widths) -> bool:
        return k.layer == i.layer - 1 and k.position == i.position


def neighbours_pattern(widths: Widths) -> Pattern:
    """The closure of ``Neighbours``: same position, and the position exists in all layers between."""
    places = dense.gp_labels(widths)

    def precedes(k: tuple[int, int], i: tuple[int, int]) -> bool:
        return k[0] < i[0] and k[1] == i[1] and all(k[1] < width for width in widths[k[0] : i[0] + 1])

    return np.array([[precedes(k, i) for k in places] for i in places])


def first_with_last(k: LatentGP, i: LatentGP) -> bool:
    return k.layer == 0 and i.layer == 2


SHARED_BELOW = Order([(0, 2), (1, 2), (0, 3), (1, 4)])

CASES: dict[str, tuple[Coupling, Callable[[Widths], Pattern]]] = {
    **{name: (coupling, dense.patterns[name]) for name, coupling in BY_NAME.items()},
    "user": (Neighbours(), neighbours_pattern),
    "rule": (
        Order(first_with_last),
        lambda widths: np.array(
            [[k[0] == 0 and i[0] == 2 for k in dense.gp_labels(widths)] for i in dense.gp_labels(widths)]
        ),
    ),
    "pairs": (Order([(0, 0)]), dense.mean_field),
}

each_case = pytest.mark.parametrize("case", CASES)


def pattern_of(structure: Structure) -> Pattern:
    """The blocks as a matrix, diagonal included."""
    n_gps = sum(structure.widths)
    pattern = np.zeros((n_gps, n_gps), dtype=bool)
    for i, k in structure.blocks:
        pattern[i, k] = True
    return pattern


def non_zero_blocks(matrix: NDArray[np.float64], M: int) -> Pattern:
    n_gps = len(matrix) // M
    return np.array([[np.abs(dense.block(matrix, i, k, M)).max() > 1e-12 for k in range(n_gps)] for i in range(n_gps)])


def reachable(relation: Pattern) -> Pattern:
    """Closure by walking: [i, k] where a path leads from i down to k."""

    def below(i: int) -> set[int]:
        direct = set(np.flatnonzero(relation[i]).tolist())
        return direct.union(*map(below, direct))

    return np.array([[k in below(i) for k in range(len(relation))] for i in range(len(relation))])


def built_in_couplings() -> set[type[Coupling]]:
    classes: set[type[Coupling]] = set()
    queue = [Coupling]
    while queue:
        found = queue.pop().__subclasses__()
        classes |= set(found)
        queue += found
    return {cls for cls in classes if cls.__module__ == "structured_dgp.couplings"}


# --- The contract of every coupling ---------------------------------------------------------------


@each_case
def test_blocks_are_the_closed_relation(case: str) -> None:
    coupling, expected = CASES[case]
    for widths in WIDTHS:
        structure = coupling.structure(widths)
        closed = expected(widths) | np.eye(sum(widths), dtype=bool)
        np.testing.assert_array_equal(pattern_of(structure), closed, err_msg=str(widths))
        assert list(structure.blocks) == sorted(set(structure.blocks))


@each_case
def test_views_of_the_blocks_agree(case: str) -> None:
    for widths in WIDTHS:
        structure = CASES[case][0].structure(widths)
        pattern = pattern_of(structure)
        assert [(gp.layer, gp.position) for gp in structure.gps] == dense.gp_labels(widths)
        assert [gp.index for gp in structure.gps] == list(range(sum(widths)))
        assert [[structure.gps[i].layer for i in layer] for layer in structure.layers] == [
            [layer] * width for layer, width in enumerate(widths)
        ]
        assert structure.block_index == {pair: place for place, pair in enumerate(structure.blocks)}
        for i in range(sum(widths)):
            assert structure.predecessors[i] == tuple(np.flatnonzero(pattern[i]).tolist())
            assert structure.predecessors[i][-1] == i
            assert structure.successors[i] == tuple(np.flatnonzero(pattern[:, i]).tolist())
            assert structure.partners[i] == tuple(j for j in range(i, sum(widths)) if structure.covariance[j, i])


@each_case
def test_block_matrices_of_the_pattern_form_a_group(case: str) -> None:
    for widths in WIDTHS:
        rng, M = np.random.default_rng(1), 2
        structure = CASES[case][0].structure(widths)
        pattern = pattern_of(structure)
        A, B = (dense.random_factor(rng, pattern, M) for _ in range(2))
        np.testing.assert_array_equal(non_zero_blocks(A @ B, M), pattern, err_msg=str(widths))
        np.testing.assert_array_equal(non_zero_blocks(np.linalg.inv(A), M), pattern, err_msg=str(widths))


@each_case
def test_covariance_is_where_the_product_of_random_factors_is_not_zero(case: str) -> None:
    for widths in WIDTHS:
        rng, M = np.random.default_rng(2), 2
        structure = CASES[case][0].structure(widths)
        C = dense.random_factor(rng, pattern_of(structure), M)
        np.testing.assert_array_equal(structure.covariance, non_zero_blocks(C @ C.T, M), err_msg=str(widths))
        assert structure.n_nonzeros(M) == np.count_nonzero(np.abs(C @ C.T) > 1e-12)


@each_case
def test_fill_is_where_the_cholesky_factor_of_generic_numbers_is_not_zero(case: str) -> None:
    for widths in WIDTHS:
        check_fill(CASES[case][0].structure(widths))


def check_fill(structure: Structure) -> None:
    n_gps = sum(structure.widths)
    values = np.random.default_rng(3).uniform(0.5, 1.0, (n_gps, n_gps)) * structure.covariance
    matrix = values + values.T + 2.0 * n_gps * np.eye(n_gps)
    expected = np.abs(np.linalg.cholesky(matrix)) > 1e-12
    np.testing.assert_array_equal(structure.fill, expected, err_msg=str(structure.widths))


def test_fill_goes_beyond_the_covariance() -> None:
    """GPs 3 and 4 share no predecessor, but each shares one with GP 2."""
    structure = SHARED_BELOW.structure((2, 1, 2, 1))
    check_fill(structure)
    assert structure.fill[4, 3]
    assert not structure.covariance[4, 3]


@each_case
def test_parameters_are_counted(case: str) -> None:
    coupling, M = CASES[case][0], 3
    for widths in WIDTHS:
        structure = coupling.structure(widths)
        C = dense.random_factor(np.random.default_rng(4), pattern_of(structure), M)
        expected = np.count_nonzero(C) + sum(widths) * M
        assert structure.n_parameters(M) == expected, widths
        assert Posterior.prior(coupling, widths, M).n_parameters == expected


@each_case
def test_structures_are_computed_once_and_couplings_are_values(case: str) -> None:
    coupling = CASES[case][0]
    assert coupling.structure([2, 2, 1]) is coupling.structure((2, 2, 1))
    assert hash(coupling) == hash(coupling)
    assert coupling in {coupling}


def test_no_built_in_coupling_is_missing() -> None:
    named = {type(coupling) for coupling in BY_NAME.values()}
    assert len(named) == len(BY_NAME)
    assert named | {Order} == built_in_couplings()
    assert BY_NAME.keys() == dense.patterns.keys()
    assert {type(coupling) for coupling, _ in CASES.values()} >= built_in_couplings()


def test_built_in_couplings_with_the_same_name_are_equal() -> None:
    for coupling in BY_NAME.values():
        twin = type(coupling)()
        assert twin == coupling
        assert hash(twin) == hash(coupling)
    assert len(set(BY_NAME.values())) == len(BY_NAME)


def test_a_coupling_without_a_rule_cannot_be_made() -> None:
    class Forgotten(Coupling):
        pass

    assert inspect.isabstract(Forgotten)
    with pytest.raises(TypeError, match="precedes"):
        Forgotten()


# --- Numbers from the paper, and pictures ---------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("mf", 180_224), ("star", 671_744), ("fc", 1_982_464)])
def test_non_zeros_of_the_standard_architecture(name: str, expected: int) -> None:
    assert BY_NAME[name].structure((5, 5, 1)).n_nonzeros(128) == expected


def test_show_draws_the_covariance_with_bars_between_layers() -> None:
    assert StripesAndArrow().show((2, 2, 1)) == "\n".join(
        [
            "■ · │ ■ · │ ■",
            "· ■ │ · ■ │ ■",
            "────┼─────┼───",
            "■ · │ ■ · │ ■",
            "· ■ │ · ■ │ ■",
            "────┼─────┼───",
            "■ ■ │ ■ ■ │ ■",
        ]
    )
    assert MeanField().show((1,)) == "■"


@each_case
def test_show_agrees_with_the_covariance(case: str) -> None:
    coupling = CASES[case][0]
    for widths in WIDTHS:
        lines = [line for line in coupling.show(widths).splitlines() if "─" not in line]
        cells = [[cell == "■" for cell in line if cell in "■·"] for line in lines]
        np.testing.assert_array_equal(cells, coupling.structure(widths).covariance, err_msg=str(widths))


# --- Containment ----------------------------------------------------------------------------------


def test_couplings_contain_each_other_as_their_patterns_do() -> None:
    for widths in WIDTHS:
        for a, larger in BY_NAME.items():
            for b, smaller in BY_NAME.items():
                expected = not np.any(dense.patterns[b](widths) & ~dense.patterns[a](widths))
                assert larger.structure(widths).contains(smaller.structure(widths)) == expected, (a, b)


def test_structures_of_other_widths_are_not_contained() -> None:
    assert not FullyCoupled().structure((2, 1)).contains(MeanField().structure((1, 2)))


# --- Orders given by the user ---------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_closure_of_a_random_relation_is_what_can_be_reached(data: st.DataObject) -> None:
    widths = data.draw(st.sampled_from(WIDTHS))
    earlier = [(k, i) for i in range(sum(widths)) for k in range(i)]
    pairs = data.draw(st.lists(st.sampled_from(earlier), unique=True) if earlier else st.just([]))
    relation = np.zeros((sum(widths), sum(widths)), dtype=bool)
    for k, i in pairs:
        relation[i, k] = True
    structure = Order(pairs).structure(widths)
    pattern = reachable(relation) | np.eye(len(relation), dtype=bool)
    np.testing.assert_array_equal(pattern_of(structure), pattern)
    check_fill(structure)

    rng, M = np.random.default_rng(len(pairs)), 2
    A, B = (dense.random_factor(rng, pattern, M) for _ in range(2))
    np.testing.assert_array_equal(structure.covariance, non_zero_blocks(A @ A.T, M))
    assert not np.any(non_zero_blocks(A @ B, M) & ~pattern)
    assert not np.any(non_zero_blocks(np.linalg.inv(A), M) & ~pattern)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_places_rules_and_matrices_agree(seed: int) -> None:
    widths = (2, 3, 1, 2)
    relation = dense.random_relation(np.random.default_rng(seed), widths)
    gps = latent_gps(widths)
    flat = [(k, i) for i, k in np.argwhere(relation).tolist()]
    places = [((gps[k].layer, gps[k].position), (gps[i].layer, gps[i].position)) for k, i in flat]
    mixed = [(k, place) for (k, _), (_, place) in zip(flat, places, strict=True)]
    orders = [
        Order(flat),
        Order(places),
        Order(mixed),
        Order(lambda k, i: bool(relation[i.index, k.index])),
        Order(relation),
        Order(relation | np.eye(len(relation), dtype=bool)),
    ]
    expected = dense.transitive_closure(relation) | np.eye(len(relation), dtype=bool)
    for order in orders:
        np.testing.assert_array_equal(pattern_of(order.structure(widths)), expected)
        np.testing.assert_array_equal(order.relation(widths), relation)
        for i in gps:
            for k in gps[: i.index]:
                assert order.precedes(k, i, widths) == relation[i.index, k.index]


def test_orders_are_equal_when_their_pairs_are() -> None:
    assert Order([(0, 1), (1, 2)]) == Order(iter([(1, 2), (0, 1), (0, 1)]))
    assert hash(Order([(0, 1), (1, 2)])) == hash(Order([(1, 2), (0, 1)]))
    assert Order(np.array([[0, 0], [1, 0]], dtype=bool)) == Order([(0, 1)])
    assert Order([(0, 1)]) != Order([(0, 2)])
    assert Order(first_with_last) == Order(first_with_last)


@pytest.mark.parametrize("name", BY_NAME)
def test_an_order_can_spell_every_built_in_coupling(name: str) -> None:
    for widths in WIDTHS:
        order = Order(dense.patterns[name](widths)).structure(widths)
        built_in = BY_NAME[name].structure(widths)
        assert order.blocks == built_in.blocks
        np.testing.assert_array_equal(order.fill, built_in.fill)


@pytest.mark.parametrize(
    "pairs", [[(0, 1), (1, 0)], [(0, 1), (1, 3), (3, 0)], [((0, 0), (0, 1)), (1, 2), ((1, 0), 0)]], ids=str
)
def test_a_cycle_is_refused(pairs: list) -> None:
    message = r"cycle: GP 0 \(layer 0, position 0\) and GP 1 \(layer 0, position 1\) each precede the other"
    with pytest.raises(CouplingError, match=message):
        Order(pairs).structure((2, 1, 1))


@pytest.mark.parametrize(
    "relation",
    [
        [(3, 1), (0, 1)],
        [((2, 0), (0, 1))],
        np.arange(16).reshape(4, 4) == 7,  # the entry [1, 3]
        lambda k, i: (k.index, i.index) == (3, 1),
    ],
    ids=["pairs", "places", "matrix", "rule"],
)
def test_a_pair_against_the_layers_is_refused(relation: object) -> None:
    message = r"against the layer order: GP 3 \(layer 2, position 0\) cannot precede GP 1 \(layer 0, position 1\)"
    with pytest.raises(CouplingError, match=message):
        Order(relation).structure((2, 1, 1))


@pytest.mark.parametrize(
    ("pair", "name"), [((0, 4), "4"), ((-1, 2), "-1"), (((0, 2), (1, 0)), r"\(0, 2\)"), (((0, 0), (3, 0)), r"\(3, 0\)")]
)
def test_an_unknown_gp_is_refused(pair: tuple, name: str) -> None:
    with pytest.raises(CouplingError, match=rf"latent GP {name}, but the model has 4 latent GPs.*0\.\.3"):
        Order([pair]).structure((2, 1, 1))


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((), "widths is empty.*at least an output layer"),
        ((2, 0, 1), "layer 1 has width 0"),
        ((2, 1, -3), "layer 2 has width -3"),
    ],
)
def test_impossible_widths_are_refused(widths: Widths, message: str) -> None:
    for use in (check_widths, MeanField().structure, Order([]).structure, FullyCoupled().show):
        with pytest.raises(InputError, match=message):
            use(widths)


def test_couplings_by_name() -> None:
    assert as_coupling("star") == StripesAndArrow()
    assert as_coupling(Neighbours()) == Neighbours()
    with pytest.raises(CouplingError, match=r"unknown coupling 'STAR'.*'mf'.*'star', 'fc'"):
        as_coupling("STAR")


@pytest.mark.parametrize("coupling", [Neighbours(), SHARED_BELOW], ids=["class", "order"])
def test_a_coupling_of_the_users_own_runs_in_a_model(coupling: Coupling) -> None:
    """Widths with a gap: positions 1 of layers 0 and 2 are not connected, as layer 1 has no position 1."""
    widths, M, rng = (2, 1, 2, 1), 3, np.random.default_rng(5)
    reference = dense.random_dgp(rng, 2, widths, M, pattern_of(coupling.structure(widths)))
    x, y, eps = rng.standard_normal((4, 2)), rng.standard_normal((4, 1)), rng.standard_normal((2, 4, 5))
    model = DeepGP(
        [Layer(RBF(layer.lengthscale, layer.variance), layer.Z, layer.W) for layer in reference.layers],
        Posterior.from_dense(coupling, widths, reference.mean, reference.factor),
        Gaussian(reference.noise),
    )
    value = float(model.elbo(x, y, eps=eps, n_data=9))
    np.testing.assert_allclose(value, dense.elbo(reference, x, y, eps, n_data=9), rtol=1e-9)
