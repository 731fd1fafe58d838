"""Plans made for all workers at once are those that each would make."""

import pytest

from decent_dp.simulate.plans import share_plans
from decent_dp.topology import Average, Layout, build, from_matrices
from virtual import names_for

LAYOUTS = [Layout(1, 1), Layout(12, 1), Layout(16, 4), Layout(16, 1), Layout(8, 8)]
CASES = [(name, layout) for layout in LAYOUTS for name in names_for(layout.num_workers, layout.workers_per_node)]


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_plan_is_the_same(name, layout, in_process):
    topology = build(name, layout)
    shared = share_plans(topology, in_process=in_process)
    for t in range(min(topology.num_rounds or 3, 8)):
        for rank in range(layout.num_workers):
            expected, plan = topology.plan_at(t, rank), shared.plan_at(t, rank)
            assert plan == expected
            if isinstance(plan, Average):
                assert plan.in_shards == (expected.in_shards and not in_process)
    assert shared.fingerprint() == topology.fingerprint()
    assert shared.num_rounds == topology.num_rounds


def test_a_worker_that_only_sends_has_a_plan():
    W = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    V = [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    topology = from_matrices([W, V], doubly_stochastic=False)
    shared = share_plans(topology)
    assert [shared.plan_at(t, rank) for t in (0, 1) for rank in range(3)] == [
        topology.plan_at(t, rank) for t in (0, 1) for rank in range(3)
    ]
