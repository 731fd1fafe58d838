"""One table, one battery: every topology of the catalog passes all of this on every layout it serves."""

import re
import time

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Idle, Layout, Topology, build, names

from .members import MEMBERS, rounds_of, serves
from .oracle import LAYOUTS, carry_out, plans_at, product

SIZES = [(n, 1) for n in range(1, 18)] + [(n, local) for n, local in LAYOUTS if local > 1]
CASES = [(name, n, local) for name in MEMBERS for n, local in SIZES]


def test_the_table_names_every_built_in() -> None:
    assert set(MEMBERS) <= set(names())
    assert names() == tuple(sorted(names()))


@pytest.mark.parametrize(("name", "n", "local"), [case for case in CASES if not serves(*case)])
def test_a_layout_that_is_not_served_is_refused_with_a_way_out(name: str, n: int, local: int) -> None:
    with pytest.raises(TopologyError, match=f"'{name}'.* needs .*got ({n} workers|{n // local} nodes)") as caught:
        build(name, Layout(n, local))
    others = set(re.findall(r"'([a-z0-9-]+)'", str(caught.value))) - {name}
    assert len(others) >= 3
    for other in others:
        build(other, Layout(n, local))


@pytest.mark.parametrize(("name", "n", "local"), [case for case in CASES if serves(*case)])
def test_member(name: str, n: int, local: int) -> None:
    topology = build(name, Layout(n, local))
    assert topology.layout == Layout(n, local)
    assert topology.doubly_stochastic
    rounds = rounds_of(topology)
    x = np.random.default_rng(n).normal(size=(n, 3))
    for t, round in enumerate(rounds):
        W = round.matrix()
        assert W.shape == (n, n)
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(carry_out(plans_at(topology, t), x), W @ x, atol=1e-13)
        assert np.count_nonzero(W, axis=1).max() - 1 <= MEMBERS[name].max_partners(n, local)
    left = float(np.linalg.norm(product(rounds) - 1 / n, 2))
    if isinstance(topology, Topology):
        assert (left < 1e-12) == MEMBERS[name].is_exact(n, local)
    assert np.linalg.norm(np.linalg.matrix_power(product(rounds), 200) - 1 / n) < 1e-3


@pytest.mark.parametrize("name", MEMBERS)
def test_one_worker_is_one_identity_round(name: str) -> None:
    topology = build(name, Layout(1, 1))
    assert topology.num_rounds in (1, None)
    assert topology.plan_at(7, 0) == Idle()
    assert topology.cliques() == ()


@pytest.mark.parametrize("name", [name for name in MEMBERS if serves(name, 2, 2)])
def test_two_workers_take_the_mean_of_their_pair(name: str) -> None:
    for round in rounds_of(build(name, Layout(2, 2))):
        assert round.matrix().tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("name", MEMBERS)
def test_steps_run_through_the_cycle_without_skipping(name: str) -> None:
    topology = build(name, Layout(16, 1))
    cycle = rounds_of(topology)
    for t in range(3 * len(cycle)):
        again = topology.num_rounds is None
        assert topology.round_at(t) == (build(name, Layout(16, 1)).round_at(t) if again else cycle[t % len(cycle)])


@pytest.mark.parametrize("name", MEMBERS)
def test_the_same_name_and_layout_give_the_same_topology(name: str) -> None:
    first, second = (build(name, Layout(16, 4)) for _ in range(2))
    assert first == second
    assert first.fingerprint() == second.fingerprint() != build(name, Layout(16, 2)).fingerprint()


@pytest.mark.parametrize("name", MEMBERS)
def test_thousands_of_workers_take_seconds(name: str) -> None:
    began = time.perf_counter()
    topology = build(name, Layout(4096, 8))
    topology.plan_at(3, 4095)
    topology.cliques()
    topology.fingerprint()
    assert time.perf_counter() - began < 10
