"""One table, one battery: every topology of the catalog passes all of this on every layout it serves."""

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Idle, Layout, build, names

from .oracle import LAYOUTS, carry_out, plans_at, product

BUILT_IN = ("alternating-exp-ring", "complete", "exp", "one-peer-exp", "ring")


def serves(name: str, n: int, local: int) -> bool:
    """Every layout, save that the alternating exponential ring needs a power of two of nodes."""
    return name != "alternating-exp-ring" or (n // local).bit_count() == 1


SIZES = [(n, 1) for n in range(1, 18)] + [(n, local) for n, local in LAYOUTS if local > 1]
CASES = [(name, n, local) for name in BUILT_IN for n, local in SIZES]


def test_the_table_names_every_built_in() -> None:
    assert set(BUILT_IN) <= set(names())
    assert names() == tuple(sorted(names()))


@pytest.mark.parametrize(("name", "n", "local"), [case for case in CASES if not serves(*case)])
def test_a_layout_that_is_not_served_is_refused(name: str, n: int, local: int) -> None:
    with pytest.raises(TopologyError, match=f"'{name}'.* {n // local} nodes of {local} workers"):
        build(name, Layout(n, local))


@pytest.mark.parametrize(("name", "n", "local"), [case for case in CASES if serves(*case)])
def test_member(name: str, n: int, local: int) -> None:
    topology = build(name, Layout(n, local))
    assert topology.layout == Layout(n, local)
    assert topology.num_rounds == len(topology.rounds)
    x = np.random.default_rng(n).normal(size=(n, 3))
    for t, round in enumerate(topology.rounds):
        W = round.matrix()
        assert W.shape == (n, n)
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(carry_out(plans_at(topology, t), x), W @ x, atol=1e-13)
    assert np.linalg.norm(np.linalg.matrix_power(product(topology.rounds), 200) - 1 / n) < 1e-3


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_worker_is_one_identity_round(name: str) -> None:
    topology = build(name, Layout(1, 1))
    assert topology.num_rounds == 1
    assert topology.plan_at(7, 0) == Idle()
    assert topology.cliques() == ()


@pytest.mark.parametrize("name", BUILT_IN)
def test_steps_run_through_the_cycle_without_skipping(name: str) -> None:
    topology = build(name, Layout(8, 1))
    for t in range(3 * topology.num_rounds):
        assert topology.round_at(t) is topology.rounds[t % topology.num_rounds]
