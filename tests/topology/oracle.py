"""What the tests compare with: dense products, and plans carried out literally in numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decent_dp.topology import Average, Idle, Plan, Round, Topology

Matrix = NDArray[np.float64]

LAYOUTS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 2), (8, 2), (8, 4), (12, 4), (16, 8)]


def product(rounds: Sequence[Round], start: int = 0) -> Matrix:
    """The matrix of one whole cycle that begins at round ``start``."""
    total = np.eye(rounds[0].num_workers)
    for step in range(len(rounds)):
        total = rounds[(start + step) % len(rounds)].matrix() @ total
    return total


def distance_to_mean(rounds: Sequence[Round], start: int = 0) -> float:
    """||product - J|| in the spectral norm."""
    n = rounds[0].num_workers
    return float(np.linalg.norm(product(rounds, start) - 1 / n, 2))


def carry_out(plans: Sequence[Plan], x: Matrix) -> Matrix:
    """One round as the workers carry it out: every receive must be met by a send, and the other way round."""
    sent = {(rank, to) for rank, plan in enumerate(plans) for to in getattr(plan, "send_to", ())}
    expected = {(of, rank) for rank, plan in enumerate(plans) for of in getattr(plan, "receive_from", ())}
    assert sent == expected
    after = np.empty_like(x)
    for rank, plan in enumerate(plans):
        if isinstance(plan, Idle):
            after[rank] = x[rank]
        elif isinstance(plan, Average):
            assert all(plans[member] == plan for member in plan.ranks)
            mean = x[list(plan.ranks)].mean(axis=0)
            after[rank] = (1 - plan.weight) * x[rank] + plan.weight * mean
        else:
            weight = sum(plan.receive_from.values())
            arrived = sum(w * x[j] for j, w in plan.receive_from.items())
            after[rank] = (1 - weight) * x[rank] + arrived
    return after


def plans_at(topology: Topology, t: int) -> list[Plan]:
    """The plans of all workers in step ``t``."""
    return [topology.plan_at(t, rank) for rank in range(topology.layout.num_workers)]
