"""A topology as a few lines of text."""

from collections.abc import Iterator

from decent_dp.topology.function_of_time import AnyTopology
from decent_dp.topology.plans import Average, Idle, Sharded, Swap

_NUM_DRAWN = 4


def draw(topology: AnyTopology, num_rounds: int | None = None) -> str:
    """The rounds of one cycle, a line each, as a person would write them down.

    ``(0 1 2)`` is a group that takes its mean, ``(0 1; .2)`` one whose members give each other the weight .2,
    ``0>1`` a message one way and ``0>1; .2`` one with another weight than a half, ``[0 1]>[2 3]`` one of the mean of
    a node to all workers of another; ``idle 4`` mixes nothing.

    Args:
        topology: What to draw.
        num_rounds: Rounds to draw, from the first on; without it one cycle, and four rounds where there is none.

    Example:
        >>> from decent_dp.topology import Layout, from_edges
        >>> print(draw(from_edges([[(0, 1, 0.5), (2, 3, 0.25)], [(1, 2, 0.5)]], Layout(4, 1))))
        0: (0 1) (2 3; .25)
        1: (1 2) idle 0 3
    """
    num_rounds = num_rounds or topology.num_rounds or _NUM_DRAWN
    return "\n".join(f"{t}: {_line(topology, t)}" for t in range(num_rounds))


def _line(topology: AnyTopology, t: int) -> str:
    words: list[str] = []
    idle: list[str] = []
    for rank in range(topology.layout.num_workers):
        plan = topology.plan_at(t, rank)
        if isinstance(plan, Idle):
            idle.append(str(rank))
        elif isinstance(plan, Average):
            if rank == plan.ranks[0]:
                words.append(_group(plan.ranks, plan.weight / len(plan.ranks)))
        elif isinstance(plan, Sharded):
            if rank == plan.ranks[0]:
                words.extend(_node(topology, t, plan))
        elif _is_pair(topology, t, rank, plan):
            partner, weight = next(iter(plan.receive_from.items()))
            if rank < partner:
                words.append(_group((rank, partner), weight))
        else:
            for other in plan.send_to:
                weight = dict(topology.round_at(t).rows[other])[rank]
                words.append(f"{rank}>{other}" + ("" if weight == 0.5 else f"; {_number(weight)}"))
    return " ".join(words + (["idle", *idle] if idle else []))


def _node(topology: AnyTopology, t: int, plan: Sharded) -> Iterator[str]:
    """A group, if all workers that meet take their common mean; else the messages between nodes."""
    first, row = plan.ranks[0], topology.round_at(t).rows[plan.ranks[0]]
    ranks = tuple(rank for rank, _ in row)
    if all(topology.round_at(t).rows[rank] == row for rank in ranks):
        if first == ranks[0]:
            yield _group(ranks, row[0][1])
    elif isinstance(plan.across, Swap):
        for other in plan.across.send_to:
            receiver = topology.plan_at(t, other)
            assert isinstance(receiver, Sharded)
            assert isinstance(receiver.across, Swap)
            weight = receiver.across.receive_from[first]
            nodes = f"[{_list(plan.ranks)}]>[{_list(receiver.ranks)}]"
            yield nodes + ("" if weight == 0.5 else f"; {_number(weight)}")


def _list(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))


def _is_pair(topology: AnyTopology, t: int, rank: int, plan: Swap) -> bool:
    """Whether the worker and one partner give each other the same weight and meet nobody else."""
    if len(plan.send_to) != 1 or tuple(plan.receive_from) != plan.send_to:
        return False
    partner = plan.send_to[0]
    return topology.plan_at(t, partner) == Swap((rank,), {rank: plan.receive_from[partner]})


def _group(ranks: tuple[int, ...], weight: float) -> str:
    members = _list(ranks)
    is_mean = abs(weight * len(ranks) - 1) <= 1e-12
    return f"({members})" if is_mean else f"({members}; {_number(weight)})"


def _number(weight: float) -> str:
    return f"{weight:.3g}".removeprefix("0")
