"""What topologies send, how fast replicas agree, how far apart they stay: against the documents' values."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Layout, Round, Topology, build, from_edges, from_function, from_matrices, names
from decent_dp.topology.analysis import analyze, compare
from decent_dp.topology.mixing import mixing
from decent_dp.topology.symmetry import blocks_of
from decent_dp.topology.traffic import traffic

from .members import serves
from .oracle import Matrix, distance_to_mean, product


def directed_exp(layout: Layout) -> Topology:
    """The one-peer exponential graph with shifts, also where n is a power of two."""
    n = layout.num_workers
    eye = np.eye(n)
    shifts = (1 << t for t in range((n - 1).bit_length()))
    return from_matrices([(eye + np.roll(eye, s, axis=0)) / 2 for s in shifts], layout, name="directed exp")


def recursion(matrices: list[Matrix], *, constant: bool, num_rounds: int = 6000) -> float:
    """Stationary squared deviation from the mean, by going round and round until it settles."""
    n, m = len(matrices[0]), len(matrices)
    P = np.eye(n) - 1 / n
    state, before, after = np.zeros((n, n)), -1.0, 0.0
    for _ in range(num_rounds):
        if abs(after - before) <= 1e-10 * max(1.0, after):
            break
        before, after = after, 0.0
        for W in matrices:
            state = P @ W @ state + P if constant else P @ W @ state @ W.T @ P + P
            after += (np.sum(state**2) if constant else np.trace(state)) / n / m
    return after


# what is sent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "mean", "peak"),
    [
        ("complete", 4, 1.94, 1.94),
        ("static-exp", 4, 23, 23),
        ("exp", 4, 3.2, 8),
        ("hierarchical", 4, 1.0, 1.0),
        ("complete", 16, 1.98, 1.98),
        ("static-exp", 16, 39, 39),
        ("exp", 16, 4.6, 8),
        ("hierarchical", 16, 1.0, 1.0),
    ],
)
def test_copies_that_leave_a_node(name: str, nodes: int, mean: float, peak: float) -> None:
    found = traffic(build(name, Layout(8 * nodes, 8)))
    assert found.leaving_node == pytest.approx(mean, abs=0.05 if mean > 2 else 0.005)
    assert found.leaving_node_peak == pytest.approx(peak, abs=0.005)
    assert found.leaving_busiest_node == pytest.approx(found.leaving_node)  # nodes are alike in these


@pytest.mark.parametrize(("nodes", "mean"), [(4, 4.6), (16, 39 / 7)])
def test_copies_that_leave_a_node_with_directed_shifts(nodes: int, mean: float) -> None:
    found = traffic(directed_exp(Layout(8 * nodes, 8)))
    assert found.leaving_node == pytest.approx(mean)
    assert found.leaving_node_peak == 8


@pytest.mark.parametrize(("nodes", "busiest"), [(4, 7.4), (16, 8)])
def test_copies_that_leave_a_node_with_random_matchings(nodes: int, busiest: float) -> None:
    n = 8 * nodes
    found = traffic(build("random-matching", Layout(n, 8)))
    assert found.leaving_node == pytest.approx(8 * (n - 8) / (n - 1), rel=0.02)
    assert found.leaving_busiest_node == pytest.approx(busiest, rel=0.02)
    assert found.leaving_node_peak == 8


@pytest.mark.parametrize("nodes", [4, 16])
def test_copies_that_leave_a_node_with_averages_over_joined_nodes(nodes: int) -> None:
    two_level = build("alternating-exp-ring", Layout(8 * nodes, 8))
    assert isinstance(two_level, Topology)
    as_rings = replace(two_level, between=None)  # each joined pair as one collective over its 2L workers
    found = traffic(as_rings)
    assert found.leaving_node == pytest.approx(0.94, abs=0.005)
    assert found.leaving_node_peak == pytest.approx(1.88, abs=0.006)
    found = traffic(two_level)
    assert (found.leaving_node, found.leaving_node_peak) == (0.5, 1.0)
    assert found.per_worker == pytest.approx(2 * 7 / 8 + 0.5 / 8)


@pytest.mark.parametrize(
    ("name", "n", "per_worker", "partners"),
    [("complete", 16, 2 * 15 / 16, 15), ("ring", 16, 1, 1), ("ring", 5, 0.8, 0.8), ("exp", 24, 1, 1),
     ("static-ring", 16, 2, 2), ("static-exp", 24, 5, 5), ("hypercube", 16, 4, 4), ("torus", 16, 4, 4),
     ("base-2", 24, 5 / 6, 5 / 6), ("base-3", 24, (4 / 3 + 3) / 4, 1.25), ("random-matching", 6, 1, 1)],
)  # fmt: skip
def test_copies_a_worker_sends(name: str, n: int, per_worker: float, partners: float) -> None:
    found = traffic(build(name, Layout(n, 1)))
    assert found.per_worker == pytest.approx(per_worker)
    assert found.partners == pytest.approx(partners)


@pytest.mark.parametrize("name", [name for name in names() if name != "random-matching"])
@pytest.mark.parametrize("n", [8, 12])
def test_with_one_worker_a_node_everything_leaves_it(name: str, n: int) -> None:
    if serves(name, n):
        found = traffic(build(name, Layout(n, 1)))
        assert found.leaving_node == pytest.approx(found.per_worker)


@pytest.mark.parametrize("name", names())
def test_nothing_leaves_a_single_node(name: str) -> None:
    if serves(name, 12, 12):
        found = traffic(build(name, Layout(12, 12)))
        assert found.leaving_node == found.leaving_busiest_node == found.leaving_node_peak == 0


def test_narrow_averages_are_in_shards_and_leave_the_node_more_often() -> None:
    complete = build("complete", Layout(32, 8))
    assert traffic(complete, narrow_wire=True).leaving_node == pytest.approx(8 * 24 * 2 / 32)
    assert traffic(complete, narrow_wire=True).per_worker == traffic(complete).per_worker
    hierarchical = build("hierarchical", Layout(32, 8))
    assert traffic(hierarchical, narrow_wire=True) == traffic(hierarchical)


def test_a_worker_that_keeps_nothing_takes_all_from_others() -> None:
    shift = np.roll(np.eye(4), 1, axis=0)
    assert traffic(from_matrices([shift, (np.eye(4) + shift) / 2])).partners == 1


# how fast replicas agree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "rounds"),
    [("complete", 7, 1), ("exp", 16, 4), ("exp", 2, 1), ("ring", 4, 2), ("base-2", 24, 6), ("base-3", 24, 4),
     ("base-2", 5, 5), ("hypercube", 2, 1), ("static-ring", 3, 1)],
)  # fmt: skip
def test_rounds_to_exactness(name: str, n: int, rounds: int) -> None:
    found = mixing(build(name, Layout(n, 1)))
    assert (found.rounds_to_exact, found.contraction_per_step) == (rounds, 0.0)
    assert found.spectral_gap == 1


@pytest.mark.parametrize(
    ("name", "nodes", "local", "rounds"),
    [("alternating-exp-ring", 4, 8, 4), ("alternating-exp-ring", 1, 8, 1), ("alternating-exp-ring", 8, 1, 6),
     ("hierarchical", 4, 8, 2), ("hierarchical", 1, 4, 1)],
)  # fmt: skip
def test_rounds_to_exactness_on_two_levels(name: str, nodes: int, local: int, rounds: int) -> None:
    assert mixing(build(name, Layout(nodes * local, local))).rounds_to_exact == rounds


@pytest.mark.parametrize(("n", "distance"), [(5, 0.202), (6, 0.217), (7, 0.125), (12, 0.209), (24, 0.207), (25, 0.192)])
def test_distance_after_a_cycle(n: int, distance: float) -> None:
    found = mixing(build("exp", Layout(n, 1)))
    assert found.cycle_distance == pytest.approx(distance, abs=5e-4)
    assert found.rounds_to_exact is None


@pytest.mark.parametrize(
    ("name", "n", "gap", "digits"),
    [("static-ring", 8, 0.19526, 5), ("static-ring", 16, 0.05075, 5), ("static-ring", 32, 0.01281, 5),
     ("static-ring", 64, 0.00321, 5), ("static-exp", 4, 2 / 3, 9), ("static-exp", 8, 0.5, 9),
     ("static-exp", 16, 0.4, 9),
     ("static-exp", 32, 1 / 3, 9), ("static-exp", 64, 2 / 7, 9), ("static-exp", 25, 0.489, 3), ("hypercube", 8, 0.5, 9),
     ("hypercube", 64, 2 / 7, 9), ("torus", 16, 0.4, 9), ("torus", 32, 0.11716, 5), ("torus", 64, 0.11716, 5)],
)  # fmt: skip
def test_spectral_gaps(name: str, n: int, gap: float, digits: int) -> None:
    assert mixing(build(name, Layout(n, 1))).spectral_gap == pytest.approx(gap, abs=0.6 * 10**-digits)


@pytest.mark.parametrize("n", [6, 16, 64])
def test_the_ring_shrinks_by_a_cosine(n: int) -> None:
    found = mixing(build("ring", Layout(n, 1)))
    assert found.contraction_per_step == pytest.approx(math.cos(2 * math.pi / n), abs=1e-9)


@pytest.mark.parametrize("name", [name for name in names() if name != "random-matching"])
@pytest.mark.parametrize("n", [6, 7, 8])
def test_distance_and_contraction_are_those_of_the_dense_product(name: str, n: int) -> None:
    if not serves(name, n):
        return
    topology = build(name, Layout(n, 1))
    assert isinstance(topology, Topology)
    found = mixing(topology)
    assert found.cycle_distance == pytest.approx(distance_to_mean(topology.rounds), abs=1e-12)
    if found.rounds_to_exact is None:
        values = np.abs(np.linalg.eigvals(product(topology.rounds) - 1 / n))
        assert found.contraction_per_step == pytest.approx(values.max() ** (1 / len(topology.rounds)), abs=1e-9)


def test_a_cycle_that_is_exact_when_played_several_times() -> None:
    W = np.zeros((8, 8))
    for i in range(8):
        W[i, [2 * i % 8, (2 * i + 1) % 8]] = 0.5  # de Bruijn: digits are shifted in
    found = mixing(from_matrices([W]))
    assert (found.rounds_to_exact, found.contraction_per_step) == (3, 0.0)


def test_replicas_that_only_go_round_never_agree() -> None:
    found = mixing(from_matrices([np.roll(np.eye(3), 1, axis=0)]))
    assert (found.contraction_per_step, found.noise, found.heterogeneity) == (1.0, math.inf, math.inf)


def test_a_fast_contraction_is_not_taken_for_exactness() -> None:
    W = np.full((4, 4), 0.25 - 1e-5) + np.eye(4) * 4e-5
    found = mixing(from_matrices([W] * 4))
    assert found.rounds_to_exact is None
    assert found.contraction_per_step == pytest.approx(4e-5, rel=1e-3)


# how far noise and unlike data keep them apart ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "noise"),
    [("complete", 16, 0.9375), ("static-ring", 16, 2.4096), ("torus", 16, 1.1393), ("hypercube", 16, 1.1393),
     ("exp", 16, 1.6250), ("random-matching", 16, 1.758), ("ring", 16, 2.245), ("exp", 24, 1.81), ("base-2", 24, 2.09),
     ("base-3", 24, 1.59)],
)  # fmt: skip
def test_stationary_noise(name: str, n: int, noise: float) -> None:
    assert mixing(build(name, Layout(n, 1))).noise == pytest.approx(noise, rel=0.005)


@pytest.mark.parametrize("r", [1, 2, 3, 5, 8])
def test_noise_of_one_peer_exp_in_closed_form(r: int) -> None:
    n = 2**r
    assert mixing(build("exp", Layout(n, 1))).noise == pytest.approx((2 * n - 2 - r) / n, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in names() if name != "random-matching"])
@pytest.mark.parametrize(("n", "local"), [(1, 1), (2, 2), (6, 2), (7, 1), (8, 2), (9, 3), (12, 4)])
def test_factors_are_those_of_the_dense_recursions(name: str, n: int, local: int) -> None:
    if not serves(name, n, local):
        return
    topology = build(name, Layout(n, local))
    assert isinstance(topology, Topology)
    found, matrices = mixing(topology), [round.matrix() for round in topology.rounds]
    assert found.noise == pytest.approx(recursion(matrices, constant=False), rel=1e-6)
    assert found.heterogeneity == pytest.approx(recursion(matrices, constant=True), rel=1e-6)


def test_factors_where_only_rows_sum_to_one() -> None:
    rng = np.random.default_rng(3)
    matrices = [rng.random((5, 5)) for _ in range(3)]
    matrices = [W / W.sum(axis=1, keepdims=True) for W in matrices]
    found = mixing(from_matrices(matrices, doubly_stochastic=False))
    assert found.noise == pytest.approx(recursion(matrices, constant=False), rel=1e-6)
    assert found.heterogeneity == pytest.approx(recursion(matrices, constant=True), rel=1e-6)


@pytest.mark.parametrize("n", [5, 16])
def test_random_matchings_in_expectation_and_followed(n: int) -> None:
    layout = Layout(n, 1)
    matching = build("random-matching", layout)
    expected = mixing(matching)
    followed = mixing(from_function("pairs", layout, matching.round_at))
    assert (expected.method, followed.method) == ("expectation", "average over 2000 rounds")
    assert followed.noise == pytest.approx(expected.noise, rel=0.02)
    assert followed.heterogeneity == pytest.approx(expected.heterogeneity, rel=0.05)
    assert followed.contraction_per_step < expected.contraction_per_step  # typical, against root mean square
    if n == 16:
        assert expected.contraction_per_step**2 == pytest.approx(0.4667, abs=1e-4)


def test_a_function_of_the_step_may_be_exact() -> None:
    layout = Layout(4, 1)
    exp = build("exp", layout)
    found = mixing(from_function("exp again", layout, exp.round_at))
    assert (found.rounds_to_exact, found.contraction_per_step) == (2, 0.0)
    assert found.noise == pytest.approx(mixing(exp).noise, rel=1e-3)


@pytest.mark.parametrize(("n", "least"), [(24, 10), (32, 30), (48, 50)])
def test_unlike_data_part_the_ring_far_more_than_others(n: int, least: float) -> None:
    ring = mixing(build("ring", Layout(n, 1))).heterogeneity
    for name in ("exp", "base-2"):
        assert least < ring / mixing(build(name, Layout(n, 1))).heterogeneity < 150


# how it is computed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "size"),
    [("complete", 12, 1), ("exp", 12, 1), ("exp", 16, 1), ("hypercube", 16, 1), ("torus", 12, 1), ("static-ring", 9, 1),
     ("ring", 12, 2), ("ring", 7, 7), ("base-2", 12, 12)],
)  # fmt: skip
def test_blocks_have_the_norms_and_products_of_the_matrices(name: str, n: int, size: int) -> None:
    topology = build(name, Layout(n, 1))
    assert isinstance(topology, Topology)
    blocks = blocks_of(topology.rounds)
    assert (blocks.num_blocks, blocks.size) == (n // size, size)
    total = blocks.projection
    for t in range(topology.num_rounds):
        total = blocks.apply(t, total)
    dense = product(topology.rounds) - 1 / n
    assert np.linalg.norm(total) == pytest.approx(np.linalg.norm(dense), abs=1e-12)
    assert np.sort(np.abs(np.linalg.eigvals(total).ravel())) == pytest.approx(
        np.sort(np.abs(np.linalg.eigvals(dense))), abs=1e-6
    )


def test_many_workers_where_all_see_the_same() -> None:
    found = mixing(build("static-ring", Layout(2048, 1)))
    assert found.spectral_gap == pytest.approx(1 - (1 + 2 * math.cos(2 * math.pi / 2048)) / 3, rel=1e-6)
    assert mixing(build("ring", Layout(512, 1))).contraction_per_step == pytest.approx(math.cos(2 * math.pi / 512))
    base = build("base-2", Layout(700, 1))
    assert mixing(base).rounds_to_exact == base.num_rounds
    assert mixing(build("hierarchical", Layout(8 * 512, 8))).rounds_to_exact == 9
    assert mixing(build("random-matching", Layout(10**4, 1))).noise == pytest.approx(2, rel=1e-3)


def test_too_many_workers_are_refused_with_a_reason() -> None:
    topology = build("ring", Layout(601, 1))
    with pytest.raises(TopologyError, match=r"'ring'.*601 workers.*give fewer workers"):
        mixing(topology)
    found = analyze(topology)
    assert found.mixing is None
    assert found.reason is not None
    assert found.traffic.per_worker < 1
    wide = from_function("still", Layout(500, 1), lambda t: Round.identity(500))
    with pytest.raises(TopologyError, match="at most 150 workers"):
        mixing(wide)


def test_sixty_four_workers_take_well_under_a_second_each() -> None:
    for n in (63, 64):
        begin = time.perf_counter()
        found = compare(Layout(n, 1))
        assert (time.perf_counter() - begin) / len(found.analyses) < 1.0


# all at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "local"), [(1, 1), (12, 4), (16, 4)])
def test_every_name_is_compared_the_same_or_refused(n: int, local: int) -> None:
    found = compare(Layout(n, local))
    assert sorted([*found.analyses, *found.same, *found.refused]) == list(names())
    for name in names():
        assert (name in found.refused) == (not serves(name, n, local))
    assert set(found.same.values()) <= set(found.analyses)


def test_one_name_stands_for_the_same_rounds() -> None:
    found = compare(Layout(4, 4))
    for other, name in [("alternating-exp-ring", "complete"), ("base-4", "complete"), ("one-peer-exp", "exp"),
                        ("base-2", "exp")]:  # fmt: skip
        assert found.same[other] == name
    assert "hierarchical" in found.analyses  # the mean of all as well, but in shards
    assert list(found.analyses) == sorted(found.analyses)


def test_edges_of_the_users_own() -> None:
    found = analyze(from_edges([[(0, 1, 0.5)], [(1, 2, 0.25)]], Layout(3, 1)))
    assert found.mixing is not None
    assert 0 < found.mixing.contraction_per_step < 1
    assert found.traffic.per_worker == pytest.approx(2 / 3)
