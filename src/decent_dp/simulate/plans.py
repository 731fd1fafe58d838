"""A topology as the simulator hands it to its workers: the plans of a round are made for all workers at once.

A training process asks for its own plan. In a simulation one process asks for those of all n workers, and deriving
them one by one would look at all rows n times. Here a pass over the rows makes them all, in time and memory linear in
the number of messages. The plans are those of `decent_dp.topology.plan_of`.
"""

from dataclasses import replace
from typing import Any

from decent_dp.topology import AnyTopology, Average, FunctionOfTime, Idle, Layout, Plan, Round, Sharded, Swap, Topology
from decent_dp.topology.plans import cliques_of

_MOST_IN_SHARDS = 64
"""Members of a clique that may average in shards; each sends a part to every other, k (k - 1) messages in all."""


def plans_of(round: Round, layout: Layout | None = None) -> list[Plan]:
    """What every worker does in a round, in rank order.

    Args:
        round: Of all workers.
        layout: Where they are, which says whether small cliques can average in shards; None: none do.

    Example:
        >>> plans_of(Round.of_cliques(3, [(0, 2)]))[1:]
        [Idle(), Swap(send_to=(0,), receive_from=mappingproxy({0: 0.5}))]
    """
    plans: list[Plan] = [Idle()] * round.num_workers
    in_clique = bytearray(round.num_workers)
    for average in cliques_of(round):
        if layout is not None and len(average.ranks) <= _MOST_IN_SHARDS:
            average = replace(average, in_shards=layout.are_apart_or_together(average.ranks))
        for rank in average.ranks:
            plans[rank] = average
            in_clique[rank] = True
    send_to: list[list[int]] = [[] for _ in round.rows]
    receive_from: list[dict[int, float]] = [{} for _ in round.rows]
    for rank, row in enumerate(round.rows):
        if not in_clique[rank]:
            for other, weight in row:
                if other != rank:
                    receive_from[rank][other] = weight
                    send_to[other].append(rank)
    for rank, (receivers, senders) in enumerate(zip(send_to, receive_from, strict=True)):
        if receivers or senders:
            plans[rank] = Swap(tuple(receivers), senders)
    return plans


def _sharded_plans_of(between: Round, L: int) -> list[Plan]:
    """What every worker does on two levels, as `decent_dp.topology.plans.sharded_plan_of` says."""
    plans: list[Plan] = []
    for node, plan in enumerate(plans_of(between)):
        ranks = tuple(range(node * L, (node + 1) * L))
        if isinstance(plan, Average):
            others = tuple(other for other in plan.ranks if other != node)
            plan = Swap(others, dict.fromkeys(others, plan.weight / len(plan.ranks)))
        for k in range(L):
            across: Swap | Idle = Idle()
            if isinstance(plan, Swap):
                receive_from = {other * L + k: weight for other, weight in plan.receive_from.items()}
                across = Swap(tuple(other * L + k for other in plan.send_to), receive_from)
            plans.append(Sharded(ranks, across))
    return plans


def share_plans(topology: AnyTopology, *, in_process: bool = True) -> AnyTopology:
    """The same topology, which makes the plans of a round for all workers at once.

    Args:
        topology: Any.
        in_process: For virtual workers: cliques average as one sum, since memory is shared and cutting the parameters
            into a part for each member saves nothing. Otherwise as on a cluster, save for cliques of more than 64.
    """
    shared: _SharedCycle | _SharedFunction
    if isinstance(topology, FunctionOfTime):
        shared = _SharedFunction(
            topology.name, topology.layout, topology.fn, topology.named_cliques, topology.doubly_stochastic
        )
    else:
        shared = _SharedCycle(
            topology.name, topology.layout, topology.rounds, topology.doubly_stochastic, topology.between
        )
    object.__setattr__(shared, "_where", None if in_process else topology.layout)
    return shared


class _SharedCycle(Topology):
    """A cycle whose answers are kept."""

    __slots__ = ("_answers", "_where")
    _answers: dict[Any, Any]
    _where: Layout | None

    def __post_init__(self) -> None:
        Topology.__post_init__(self)
        object.__setattr__(self, "_answers", {})

    def plan_at(self, t: int, rank: int) -> Plan:
        index = t % len(self.rounds)
        if index not in self._answers:
            if self.between is not None and self.layout.workers_per_node > 1:
                self._answers[index] = _sharded_plans_of(self.between[index], self.layout.workers_per_node)
            else:
                self._answers[index] = plans_of(self.rounds[index], self._where)
        plan: Plan = self._answers[index][rank]
        return plan

    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """None: virtual workers need no groups."""
        return ()

    def fingerprint(self) -> str:
        if "fingerprint" not in self._answers:
            self._answers["fingerprint"] = Topology.fingerprint(self)
        text: str = self._answers["fingerprint"]
        return text


class _SharedFunction(FunctionOfTime):
    """A function of the step whose answers are kept."""

    __slots__ = ("_answers", "_where")
    _answers: dict[Any, Any]
    _where: Layout | None

    def __post_init__(self) -> None:
        FunctionOfTime.__post_init__(self)
        object.__setattr__(self, "_answers", {})

    def plan_at(self, t: int, rank: int) -> Plan:
        round, plans = self._at(t)
        if not plans:
            plans.update(enumerate(plans_of(round, self._where)))
        return plans[rank]

    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """None: virtual workers need no groups."""
        return ()

    def fingerprint(self) -> str:
        if "fingerprint" not in self._answers:
            self._answers["fingerprint"] = FunctionOfTime.fingerprint(self)
        text: str = self._answers["fingerprint"]
        return text
