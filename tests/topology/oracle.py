"""What the tests compare with: dense products, and plans carried out literally in numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decent_dp.topology import Average, Idle, Plan, Round, Sharded, Swap, Topology

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


def in_shards(plans: Sequence[Plan], x: Matrix, rank: int) -> Matrix:
    """What a worker has after its node's owners have averaged, mixed and handed out their parts."""
    plan, result = plans[rank], np.empty_like(x[rank])
    assert isinstance(plan, Sharded)
    for owner in plan.ranks:
        own = plans[owner]
        assert isinstance(own, Sharded)
        assert own.ranks == plan.ranks
        part = np.arange(len(result)) % len(plan.ranks) == plan.ranks.index(owner)
        mean = x[list(plan.ranks)][:, part].mean(axis=0)
        received = own.across.receive_from if isinstance(own.across, Swap) else {}
        result[part] = (1 - sum(received.values())) * mean
        for other, weight in received.items():
            sender = plans[other]
            assert isinstance(sender, Sharded)
            assert sender.ranks.index(other) == plan.ranks.index(owner)
            result[part] += weight * x[list(sender.ranks)][:, part].mean(axis=0)
    return result


def carry_out(plans: Sequence[Plan], x: Matrix) -> Matrix:
    """One round as the workers carry it out: every receive must be met by a send, and the other way round."""
    swaps = [plan.across if isinstance(plan, Sharded) else plan for plan in plans]
    sent = {(rank, to) for rank, plan in enumerate(swaps) for to in getattr(plan, "send_to", ())}
    expected = {(of, rank) for rank, plan in enumerate(swaps) for of in getattr(plan, "receive_from", ())}
    assert sent == expected
    after = np.empty_like(x)
    for rank, plan in enumerate(plans):
        if isinstance(plan, Idle):
            after[rank] = x[rank]
        elif isinstance(plan, Average):
            assert all(plans[member] == plan for member in plan.ranks)
            mean = x[list(plan.ranks)].mean(axis=0)
            after[rank] = (1 - plan.weight) * x[rank] + plan.weight * mean
        elif isinstance(plan, Sharded):
            after[rank] = in_shards(plans, x, rank)
        else:
            weight = sum(plan.receive_from.values())
            arrived = sum(w * x[j] for j, w in plan.receive_from.items())
            after[rank] = (1 - weight) * x[rank] + arrived
    return after


def plans_at(topology: Topology, t: int) -> list[Plan]:
    """The plans of all workers in step ``t``."""
    return [topology.plan_at(t, rank) for rank in range(topology.layout.num_workers)]
