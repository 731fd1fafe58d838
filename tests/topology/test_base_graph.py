"""The Base-(k+1) graph is exact after a short cycle, for every number of workers."""

import math

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Average, Layout, Round, Swap, base_graph, draw

from .oracle import Matrix

LENGTHS = {  # for k = 1, 2, 3, 4
    3: (3, 1, 1, 1),
    5: (5, 3, 3, 1),
    6: (4, 2, 2, 2),
    7: (5, 4, 3, 3),
    9: (7, 2, 2, 2),
    10: (6, 4, 4, 2),
    12: (5, 3, 2, 2),
    15: (7, 4, 4, 2),
    16: (4, 4, 2, 2),
    20: (7, 5, 4, 2),
    24: (6, 4, 3, 3),
    25: (9, 6, 5, 2),
    32: (5, 5, 3, 3),
    33: (11, 6, 5, 5),
    48: (7, 5, 3, 3),
    64: (6, 6, 3, 3),
}


def multiplied(round: Round, X: Matrix) -> Matrix:
    """W X, by the few weights of each row."""
    width = max(len(row) for row in round.rows)
    padded = [[*row, *[(0, 0.0)] * (width - len(row))] for row in round.rows]
    ranks, weights = (np.array([[entry[part] for entry in row] for row in padded]) for part in (0, 1))
    return np.asarray(sum(weights[:, c, None] * X[ranks[:, c]] for c in range(width)))


@pytest.mark.parametrize("k", range(1, 9))
def test_a_cycle_leaves_the_mean_for_1_to_256_workers(k: int) -> None:
    for n in range(1, 257):
        topology = base_graph(Layout(n, 1), k + 1)
        assert topology.num_rounds <= 2 * math.log(n, k + 1) + 2 + 1e-9
        X = np.eye(n)
        for round in topology.rounds:
            assert max(len(row) for row in round.rows) - 1 <= k
            X = multiplied(round, X)
        assert np.linalg.norm(X - 1 / n) < 1e-12


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("n", [5, 12, 23, 60])
def test_every_round_is_symmetric(k: int, n: int) -> None:
    for round in base_graph(Layout(n, 1), k + 1).rounds:
        np.testing.assert_allclose(round.matrix(), round.matrix().T, atol=1e-15)


@pytest.mark.parametrize("n", LENGTHS)
def test_the_lengths_of_the_cycles(n: int) -> None:
    assert tuple(base_graph(Layout(n, 1), k + 1).num_rounds for k in (1, 2, 3, 4)) == LENGTHS[n]


def test_the_rounds_of_five_workers_in_pairs() -> None:
    pairs = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    inside = [Round.of_cliques(5, cliques) for cliques in pairs]
    first, second, hand_over, third, fourth = base_graph(Layout(5, 1), 2).rounds
    assert [first, second, third, fourth] == inside * 2
    W = np.eye(5)
    W[:2, :2] = 0.5
    W[3:, 3:] = [[0.2, 0.8], [0.8, 0.2]]
    np.testing.assert_allclose(hand_over.matrix(), W, atol=1e-15)


def test_those_left_over_from_a_hand_over_average_in_cliques() -> None:
    assert (
        draw(base_graph(Layout(17, 1), 4))
        .splitlines()[2]
        .endswith("(0 1 2 3) (4 5 6 7) (8 9 10 11) (12 13 14) (15 16; .941)")
    )


def test_a_base_of_all_workers_is_complete() -> None:
    for base in (7, 8, 1000):
        assert base_graph(Layout(7, 1), base).rounds == (Round.of_cliques(7, [range(7)]),)


@pytest.mark.parametrize(("base", "words"), [(1, "'base-1'.*at least 2.*'base-2'"), (2.5, "2.5"), (True, "True")])
def test_a_wrong_base_is_refused(base, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        base_graph(Layout(4, 1), base)


def test_the_last_part_averages_inside_its_pieces_from_its_turn_on() -> None:
    topology = base_graph(Layout(110, 1), 5)  # parts of 4 * 25 and 2 * 5 workers: 3 rounds inside, then 3
    assert topology.num_rounds == 6
    assert isinstance(topology.plan_at(3, 100), Swap)
    for t in (4, 5):
        assert topology.plan_at(t, 100) == Average((100, 101, 102, 103, 104), 1.0)
        assert topology.plan_at(t, 109) == Average((105, 106, 107, 108, 109), 1.0)


def test_of_equally_few_factors_the_most_even_ones_are_taken() -> None:
    sizes = [len(round.rows[0]) for round in base_graph(Layout(12, 1), 6).rounds]
    assert sizes == [3, 4]  # not 2 and 6
