"""The values the topologies of one round must show: spectral gaps, neighbours, refusals."""

import math

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Average, Layout, Swap, Topology, hypercube, static_exp, static_ring, torus


def gap(topology: Topology) -> float:
    """1 - ||W - J||; all these matrices are normal."""
    (round,) = topology.rounds
    return 1 - float(np.linalg.norm(round.matrix() - 1 / round.num_workers, 2))


@pytest.mark.parametrize(("n", "expected"), [(8, 0.19526), (16, 0.05075), (32, 0.01281), (64, 0.00321)])
def test_the_gap_of_the_static_ring(n: int, expected: float) -> None:
    assert round(gap(static_ring(Layout(n, 1))), 5) == expected


@pytest.mark.parametrize("n", [3, 4, 5, 7, 12, 33])
def test_the_static_ring_shrinks_the_distance_by_a_cosine(n: int) -> None:
    assert gap(static_ring(Layout(n, 1))) == pytest.approx(1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3, abs=1e-12)


def test_the_static_ring_swaps_with_both_neighbours() -> None:
    topology = static_ring(Layout(5, 1))
    assert topology.plan_at(3, 0) == Swap((1, 4), {1: 1 / 3, 4: 1 / 3})
    assert static_ring(Layout(2, 1)).plan_at(0, 0) == Swap((1,), {1: 0.5})
    assert static_ring(Layout(3, 1)).plan_at(0, 0) == Average((0, 1, 2), 1.0)


@pytest.mark.parametrize(
    ("n", "expected"), [(4, 0.6667), (8, 0.5), (16, 0.4), (32, 0.3333), (64, 0.2857), (25, 0.4891)]
)
def test_the_gap_of_the_static_exponential_graph(n: int, expected: float) -> None:
    assert round(gap(static_exp(Layout(n, 1))), 4) == expected


@pytest.mark.parametrize("n", [2, 6, 10, 24, 36, 100])
def test_the_static_exponential_graph_of_even_size_has_the_gap_two_over_one_plus_tau(n: int) -> None:
    assert gap(static_exp(Layout(n, 1))) == pytest.approx(2 / (1 + math.ceil(math.log2(n))), abs=1e-12)


def test_the_static_exponential_graph_is_directed() -> None:
    assert static_exp(Layout(7, 1)).plan_at(0, 0) == Swap((1, 2, 4), {3: 0.25, 5: 0.25, 6: 0.25})


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_the_gap_of_the_hypercube(n: int) -> None:
    assert gap(hypercube(Layout(n, 1))) == pytest.approx(2 / (1 + math.log2(n)), abs=1e-12)


def test_the_hypercube_meets_every_digit() -> None:
    assert hypercube(Layout(8, 1)).plan_at(0, 5) == Swap((1, 4, 7), {1: 0.25, 4: 0.25, 7: 0.25})


@pytest.mark.parametrize(("n", "expected"), [(16, 0.4), (32, 0.11716), (64, 0.11716)])
def test_the_gap_of_the_torus(n: int, expected: float) -> None:
    assert round(gap(torus(Layout(n, 1))), 5) == expected


@pytest.mark.parametrize(("n", "b"), [(9, 3), (12, 4), (15, 5), (18, 6), (21, 7), (24, 6), (36, 6), (60, 10)])
def test_the_torus_is_the_squarest_and_shrinks_the_distance_by_the_cosine_of_its_longer_side(n: int, b: int) -> None:
    assert gap(torus(Layout(n, 1))) == pytest.approx(1 - (3 + 2 * math.cos(2 * math.pi / b)) / 5, abs=1e-12)


def test_the_torus_closes_at_its_edges() -> None:
    plan = torus(Layout(12, 4)).plan_at(0, 4)  # three rows of four; row 1, column 0
    assert plan == Swap((0, 5, 7, 8), {0: 0.2, 5: 0.2, 7: 0.2, 8: 0.2})


@pytest.mark.parametrize(("n", "nearest"), [(2, "nearest 9;"), (10, "nearest 9 and 12;"), (17, "nearest 16 and 18;")])
def test_a_refused_torus_names_the_nearest_sizes(n: int, nearest: str) -> None:
    with pytest.raises(TopologyError, match=nearest):
        torus(Layout(n, 1))


def test_a_refused_hypercube_names_the_nearest_sizes() -> None:
    with pytest.raises(TopologyError, match="nearest 8 and 16; got 12 workers"):
        hypercube(Layout(12, 4))
