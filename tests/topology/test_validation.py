"""A wrong topology is refused when it is built, by name, round and rank."""

import copy
import pickle

import numpy as np
import pytest

from decent_dp.errors import ConfigurationError, TopologyError
from decent_dp.topology import (
    Idle,
    Layout,
    Round,
    Topology,
    alternating_exp_ring,
    complete,
    exp,
    from_edges,
    from_matrices,
    ring,
)

GOOD = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
OTHER = np.array([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]])


def changed(entries: dict[tuple[int, int], float]) -> np.ndarray:
    W = OTHER.copy()
    for at, value in entries.items():
        W[at] = value
    return W


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({(2, 1): 0.4}, ["round 1", "rank 2", "0.9", "sum to 1"]),
        ({(1, 1): 1.2, (1, 2): -0.2}, ["round 1", "rank 1", "-0.2", "negative"]),
        ({(1, 2): float("nan")}, ["round 1", "rank 1", "nan", "finite"]),
        ({(1, 2): float("inf")}, ["round 1", "rank 1", "inf", "finite"]),
        ({(1, 1): 0.9, (1, 2): 0.1}, ["round 1", "rank 1", "1.4", "column", "doubly_stochastic=False"]),
    ],
)
def test_a_wrong_matrix_is_named(entries: dict[tuple[int, int], float], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        from_matrices([GOOD, changed(entries)], name="mine")
    assert isinstance(caught.value, ConfigurationError)
    assert isinstance(caught.value, ValueError)
    for word in ["'mine'", *words]:
        assert word in str(caught.value)


def test_row_stochastic_only_is_accepted_when_declared() -> None:
    W = np.array([[0.9, 0.1], [0.5, 0.5]])
    topology = from_matrices([W], doubly_stochastic=False)
    assert not topology.doubly_stochastic
    np.testing.assert_array_equal(topology.round_at(5).matrix(), W)


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        ([GOOD, np.eye(4)], ["round 1", "4 x 4", "3"]),
        ([GOOD, np.ones((3, 2))], ["round 1", "(3, 2)", "square"]),
        (GOOD, ["round 0", "(3,)", "list"]),
        (GOOD.tolist(), ["round 0", "(3,)", "list"]),
        ([], ["no rounds"]),
        ([[["a"]]], ["round 0", "numbers"]),
    ],
)
def test_a_wrong_shape_is_named(matrices, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        from_matrices(matrices)
    for word in words:
        assert word in str(caught.value)


def test_a_layout_of_another_size_is_named() -> None:
    with pytest.raises(TopologyError, match=r"round 0.*3 x 3.*4 workers"):
        from_matrices([GOOD], Layout(4, 2))


def test_a_topology_must_connect_everybody_over_a_cycle() -> None:
    assert from_matrices([GOOD, OTHER]).num_rounds == 2
    with pytest.raises(TopologyError, match=r"worker 2.*worker 0"):
        from_matrices([GOOD])
    one_way = np.array([[1.0, 0.0], [0.5, 0.5]])
    with pytest.raises(TopologyError, match=r"worker 1.*worker 0"):
        from_matrices([one_way], doubly_stochastic=False)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((((0, 0.5), (2, 0.5)), ((1, 1.0),)), ["round 0", "rank 0", "2"]),
        ((((1, 0.5), (0, 0.5)), ((1, 1.0),)), ["round 0", "rank 0", "ascending"]),
        ((((0, 0.0), (1, 1.0)), ((0, 1.0),)), ["round 0", "rank 0", "0"]),
    ],
)
def test_a_round_made_by_hand_is_checked(rows, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology("mine", Layout(2, 1), (Round(rows),))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([[(0, 1, 0.5)], [(1, 3, 0.5)]], ["round 1", "rank 3", "0 to 2"]),
        ([[(1, 1, 0.5)]], ["round 0", "rank 1", "itself"]),
        ([[(0, 1, 0.5), (1, 0, 0.2)]], ["round 0", "0", "1", "twice"]),
        ([[(0, 1, 0.6), (1, 2, 0.6)]], ["round 0", "rank 1", "1.2"]),
        ([[(0, 1, -0.5)]], ["round 0", "rank 0", "-0.5"]),
        ([[(0, 1, float("nan"))]], ["round 0", "rank 0", "nan"]),
        ([[(0, 1)]], ["round 0", "(0, 1)", "(i, j, weight)"]),
        ([[(0, 1.5, 0.5)]], ["round 0", "1.5", "whole"]),
    ],
)
def test_a_wrong_edge_is_named(edges, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        from_edges(edges, Layout(3, 1))
    for word in words:
        assert word in str(caught.value)


def test_edges_give_both_workers_the_weight_and_keep_the_rest() -> None:
    topology = from_edges([[(0, 1, 0.25), (1, 2, 0.75)], [(2, 3, 1.0)]], Layout(4, 1), name="path")
    first = np.array([[0.75, 0.25, 0, 0], [0.25, 0, 0.75, 0], [0, 0.75, 0.25, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(topology.rounds[0].matrix(), first, atol=1e-15)
    np.testing.assert_allclose(topology.rounds[1].matrix()[2:, 2:], [[0, 1], [1, 0]], atol=0)
    assert topology.name == "path"
    assert topology.plan_at(1, 0) == Idle()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1), ["num_workers", "0"]),
        ((4, 0), ["workers_per_node", "0"]),
        ((6, 4), ["6", "4", "divide"]),
        ((2.5, 1), ["num_workers", "2.5", "whole"]),
        ((True, 1), ["num_workers", "True"]),
    ],
)
def test_a_wrong_layout_is_named(arguments, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        Layout(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_layout_numbers_its_nodes_in_order() -> None:
    layout = Layout(np.int64(6), 2)
    assert layout.num_nodes == 3
    assert [layout.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert layout.ranks_of(1) == range(2, 4)
    with pytest.raises(TopologyError, match="6"):
        layout.node_of(6)
    with pytest.raises(TopologyError, match="3"):
        layout.ranks_of(3)


@pytest.mark.parametrize(
    ("cliques", "words"),
    [
        ([(0, 1), (1, 2)], ["rank 1", "two cliques"]),
        ([(0, 0)], ["rank 0", "twice"]),
        ([(0, 4)], ["rank 4", "0 to 3"]),
        ([(-1, 0)], ["rank -1"]),
    ],
)
def test_wrong_cliques_are_named(cliques, words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        Round.of_cliques(4, cliques)
    for word in words:
        assert word in str(caught.value)


def test_questions_out_of_range_are_refused() -> None:
    topology = ring(Layout(4, 1))
    with pytest.raises(TopologyError, match="rank 4"):
        topology.plan_at(0, 4)
    with pytest.raises(TopologyError, match="step -1"):
        topology.round_at(-1)


def test_cliques_come_once_and_in_order() -> None:
    two_level = alternating_exp_ring(Layout(16, 4))
    assert two_level.cliques() == ()  # carried out in shards
    topology = Topology("one level", two_level.layout, two_level.rounds)
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    pairs = [nodes[i] + nodes[j] for i, j in ((0, 1), (2, 3), (0, 2), (1, 3))]
    assert topology.cliques() == tuple(sorted(nodes + pairs))


def test_fingerprints_tell_topologies_apart() -> None:
    W = np.full((4, 4), 0.25)
    tilted = from_matrices([W + 1e-10 * np.kron(np.eye(2), [[1, -1], [-1, 1]])], name="complete")
    values = [
        complete(Layout(4, 1)),
        complete(Layout(4, 2)),
        complete(Layout(8, 1)),
        ring(Layout(4, 1)),
        exp(Layout(4, 1)),
        from_matrices([W], name="other"),
        from_matrices([W, W], name="complete"),
        tilted,
    ]
    assert len({value.fingerprint() for value in values}) == len(values)
    again = from_matrices([W], Layout(4, 1), name="complete")  # rows shared in another way
    assert again == complete(Layout(4, 1))
    assert again.fingerprint() == complete(Layout(4, 1)).fingerprint()


def test_a_fingerprint_does_not_change_between_runs() -> None:
    assert ring(Layout(4, 2)).fingerprint() == "08a240e5c561dbb0"


def test_a_topology_is_a_value() -> None:
    topology = exp(Layout(6, 2))
    topology.plan_at(0, 0)
    assert "Topology(name='exp'" in repr(topology)
    assert len(repr(topology)) < 200
    with pytest.raises(AttributeError):
        topology.name = "other"  # type: ignore[misc]
    for twin in (pickle.loads(pickle.dumps(topology)), copy.deepcopy(topology)):
        assert twin == topology
        assert twin.plan_at(1, 3) == topology.plan_at(1, 3)
