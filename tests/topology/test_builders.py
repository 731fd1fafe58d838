"""The values each built-in topology must show."""

import math
import re
import time
import tracemalloc

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import (
    Average,
    Idle,
    Layout,
    Round,
    Swap,
    alternating_exp_ring,
    build,
    complete,
    exp,
    ring,
)

from .oracle import distance_to_mean, plans_at, product


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_complete_is_exact_in_one_round(n: int) -> None:
    topology = complete(Layout(n, 1))
    assert topology.num_rounds == 1
    assert distance_to_mean(topology.rounds) < 1e-15 * n
    if n >= 3:
        assert topology.plan_at(0, 1) == Average(tuple(range(n)), 1.0)
        assert topology.cliques() == (tuple(range(n)),)
    else:
        assert topology.plan_at(0, 1) == Swap((0,), {0: 0.5})


@pytest.mark.parametrize("n", [6, 8, 10, 16])
def test_even_ring_contracts_by_cos_two_pi_over_n_a_round(n: int) -> None:
    topology = ring(Layout(n, 1))
    assert topology.num_rounds == 2
    radius = max(abs(np.linalg.eigvals(product(topology.rounds) - 1 / n)))
    assert math.sqrt(radius) == pytest.approx(math.cos(2 * math.pi / n), abs=1e-7)


def test_ring_of_16_contracts_by_92388_a_round() -> None:
    radius = max(abs(np.linalg.eigvals(product(ring(Layout(16, 1)).rounds) - 1 / 16)))
    assert round(math.sqrt(radius), 5) == 0.92388


@pytest.mark.parametrize("start", [0, 1])
def test_ring_of_4_is_exact_in_two_rounds(start: int) -> None:
    assert distance_to_mean(ring(Layout(4, 1)).rounds, start) < 1e-15


def test_even_ring_alternates_two_matchings() -> None:
    first, second = ring(Layout(6, 1)).rounds
    assert first == Round.of_cliques(6, [(0, 1), (2, 3), (4, 5)])
    assert second == Round.of_cliques(6, [(1, 2), (3, 4), (5, 0)])


@pytest.mark.parametrize("n", [3, 5, 7, 17])
def test_odd_ring_rotates_the_idle_worker(n: int) -> None:
    topology = ring(Layout(n, 1))
    assert topology.num_rounds == n
    idle = []
    for t in range(n):
        plans = plans_at(topology, t)
        idle += [rank for rank, plan in enumerate(plans) if plan == Idle()]
        for rank, plan in enumerate(plans):
            if isinstance(plan, Swap):
                assert plan.send_to == tuple(plan.receive_from)
                assert (plan.send_to[0] - rank) % n in (1, n - 1)
    assert sorted(idle) == list(range(n))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_exp_of_a_power_of_two_is_exact_from_any_round(n: int) -> None:
    topology = exp(Layout(n, 1))
    assert topology.num_rounds == int(math.log2(n))
    for start in range(topology.num_rounds):
        assert distance_to_mean(topology.rounds, start) < 1e-14
    for t in range(topology.num_rounds):
        for rank, plan in enumerate(plans_at(topology, t)):
            assert plan == Swap((rank ^ 2**t,), {rank ^ 2**t: 0.5})


@pytest.mark.parametrize(("n", "left"), [(5, 0.202), (6, 0.217), (7, 0.125), (12, 0.209), (24, 0.207), (25, 0.192)])
def test_exp_of_other_sizes_leaves_this_much_after_a_cycle(n: int, left: float) -> None:
    topology = exp(Layout(n, 1))
    assert topology.num_rounds == math.ceil(math.log2(n))
    for start in range(topology.num_rounds):
        assert round(distance_to_mean(topology.rounds, start), 3) == left


def test_exp_of_other_sizes_is_directed() -> None:
    topology = exp(Layout(6, 1))
    assert topology.plan_at(0, 0) == Swap((1,), {5: 0.5})
    assert topology.plan_at(2, 1) == Swap((5,), {3: 0.5})
    assert topology.cliques() == ()


def test_exp_and_one_peer_exp_are_one_topology() -> None:
    assert build("exp", Layout(12, 4)) == build("one-peer-exp", Layout(12, 4))
    assert build("exp", Layout(12, 4)).fingerprint() == build("one-peer-exp", Layout(12, 4)).fingerprint()


@pytest.mark.parametrize("num_nodes", [2, 4, 8])
@pytest.mark.parametrize("local", [1, 2, 4])
def test_alternating_exp_ring_is_exact_after_a_cycle(num_nodes: int, local: int) -> None:
    topology = alternating_exp_ring(Layout(num_nodes * local, local))
    assert topology.num_rounds == 2 * int(math.log2(num_nodes))
    assert distance_to_mean(topology.rounds) < 1e-14


@pytest.mark.parametrize("num_nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("local", [1, 2, 4])
def test_alternating_exp_ring_sends_half_of_the_node_pairs_over_the_network(num_nodes: int, local: int) -> None:
    layout = Layout(num_nodes * local, local)
    crossing = []
    for round in alternating_exp_ring(layout).rounds:
        joined = set()
        for rank, row in enumerate(round.rows):
            nodes = {layout.node_of(rank), *(layout.node_of(j) for j, _ in row)}
            assert len(nodes) <= 2
            assert all(w == 1 / len(row) for _, w in row)
            assert len(row) == len(nodes) * local
            if len(nodes) == 2:
                joined.add(frozenset(nodes))
        crossing.append(len(joined))
    if num_nodes == 2:  # a single pair cannot be halved: it is joined in every second round
        assert crossing == [0, 1]
    else:
        assert crossing == [num_nodes // 4] * len(crossing)


def test_alternating_exp_ring_starts_with_the_first_pair_inside_its_nodes() -> None:
    rounds = alternating_exp_ring(Layout(8, 2)).rounds
    assert rounds == (
        Round.of_cliques(8, [(0, 1), (2, 3), (4, 5, 6, 7)]),
        Round.of_cliques(8, [(0, 1, 2, 3), (4, 5), (6, 7)]),
        Round.of_cliques(8, [(0, 1), (4, 5), (2, 3, 6, 7)]),
        Round.of_cliques(8, [(0, 1, 4, 5), (2, 3), (6, 7)]),
    )


@pytest.mark.parametrize("local", [1, 2, 5])
def test_alternating_exp_ring_on_one_node_averages_over_it(local: int) -> None:
    topology = alternating_exp_ring(Layout(local, local))
    assert topology.rounds == (Round.of_cliques(local, [range(local)]),)


def test_alternating_exp_ring_with_one_worker_a_node_idles() -> None:
    topology = alternating_exp_ring(Layout(4, 1))
    assert topology.plan_at(0, 0) == Idle()
    assert topology.plan_at(0, 2) == Swap((3,), {3: 0.5})


def test_alternating_exp_ring_refuses_other_node_counts() -> None:
    with pytest.raises(TopologyError) as caught:
        alternating_exp_ring(Layout(12, 4))
    message = str(caught.value)
    assert "3 nodes of 4 workers" in message
    assert re.search(r"1, 2, 4, 8", message)
    for name in ("complete", "exp", "ring"):
        assert name in message
        build(name, Layout(12, 4))


def test_a_large_clique_takes_linear_memory() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    topology = complete(Layout(4096, 8))
    assert topology.plan_at(3, 4095) == Average(tuple(range(4096)), 1.0)
    assert topology.cliques() == (tuple(range(4096)),)
    assert len(topology.fingerprint()) == 16
    elapsed = time.perf_counter() - began
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 * 2**20
    assert elapsed < 5
