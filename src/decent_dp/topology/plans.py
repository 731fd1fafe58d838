"""What one worker does in a round, derived from the matrix alone.

The mixing strength and the arrival of data are the step's business; a plan only says who sends to whom and
with which weight, so that carrying out the plans of all workers multiplies by W.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from decent_dp.topology.rounds import Round, Row

_TOLERANCE = 1e-12
"""Weights closer than this are equal: sums such as 1 - 1/3 - 1/3 are off by a rounding or two."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to send, nothing to receive: x stays as it is."""


@dataclass(frozen=True, slots=True)
class Average:
    """One collective on a clique: ``x <- (1 - weight) x + weight * mean``.

    Args:
        ranks: The clique, three or more workers, ascending.
        weight: Weight of the clique's mean; exactly 1.0 when all weights in the clique are equal.
        in_shards: Whether every member can average a part for all others without more traffic between nodes than a
            ring has: no two members share a node, or all do.
    """

    ranks: tuple[int, ...]
    weight: float
    in_shards: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Swap:
    """Point-to-point messages: ``x <- (1 - sum of weights) x + sum_j weight_j x_j``.

    Args:
        send_to: Workers that receive this worker's parameters, ascending.
        receive_from: Weight of the parameters of each worker that sends; read-only, ascending by rank.
    """

    send_to: tuple[int, ...]
    receive_from: Mapping[int, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "receive_from", MappingProxyType(dict(sorted(self.receive_from.items()))))

    def __hash__(self) -> int:
        return hash((self.send_to, tuple(self.receive_from.items())))

    def __reduce__(self) -> "tuple[Callable[..., Swap], tuple[tuple[int, ...], dict[int, float]]]":
        return Swap, (self.send_to, dict(self.receive_from))  # a read-only view cannot be pickled


@dataclass(frozen=True, slots=True)
class Sharded:
    """Two levels: ``x <- (1 - sum of weights) m + sum_j weight_j m_j``, m being the mean over this worker's node.

    Each worker owns an equal part of the parameters, its shard. It averages the shard over its node, exchanges the
    mean with the owners of the same shard on other nodes, and hands the result to its node. What leaves a node is one
    copy of the model for each node it sends to, however many workers it has.

    Args:
        ranks: The workers of the node, two or more, ascending.
        across: What the owner does with its shard: a swap with workers of other nodes, or nothing.
    """

    ranks: tuple[int, ...]
    across: Swap | Idle


Plan: TypeAlias = Idle | Average | Swap | Sharded


def plan_of(round: Round, rank: int) -> Plan:
    """What worker ``rank`` does in ``round``.

    - :class:`Idle` if its row is the identity and nobody else gives it weight;
    - :class:`Average` if it belongs to a clique of three or more that mix with each other alone, with one
      weight ``a`` for all others: then ``weight = k a`` for k workers;
    - :class:`Swap` otherwise: a pair, a directed shift, several neighbours, a star.

    All members of a clique come to the same decision.

    Args:
        round: The mixing step of all workers.
        rank: The worker.

    Example:
        >>> round = Round.of_cliques(6, [(0, 1, 2), (3, 4)])
        >>> plan_of(round, 1)
        Average(ranks=(0, 1, 2), weight=1.0)
        >>> plan_of(round, 3)
        Swap(send_to=(4,), receive_from=mappingproxy({4: 0.5}))
        >>> plan_of(round, 5)
        Idle()
    """
    row = round.rows[rank]
    if len(row) >= 3:
        for average in cliques_of(round):
            if rank in average.ranks:
                return average
    send_to = tuple(i for i, other in enumerate(round.rows) if i != rank and _gives_weight_to(other, rank))
    receive_from = {j: weight for j, weight in row if j != rank}
    return Swap(send_to, receive_from) if send_to or receive_from else Idle()


def sharded_plan_of(between: Round, rank: int, workers_per_node: int) -> Plan:
    """What worker ``rank`` does on two levels; with one worker a node, what its node does.

    Args:
        between: The mixing step of all nodes.
        rank: The worker.
        workers_per_node: L; worker i is on node i // L.

    Example:
        >>> sharded_plan_of(Round.of_cliques(2, [(0, 1)]), 1, workers_per_node=2)
        Sharded(ranks=(0, 1), across=Swap(send_to=(3,), receive_from=mappingproxy({3: 0.5})))
    """
    L = workers_per_node
    node, local_rank = divmod(rank, L)
    plan = plan_of(between, node)
    if L == 1:
        return plan
    if isinstance(plan, Average):
        others = tuple(other for other in plan.ranks if other != node)
        plan = Swap(others, dict.fromkeys(others, plan.weight / len(plan.ranks)))
    if isinstance(plan, Swap):
        receive_from = {other * L + local_rank: weight for other, weight in plan.receive_from.items()}
        plan = Swap(tuple(other * L + local_rank for other in plan.send_to), receive_from)
    assert isinstance(plan, (Swap, Idle))
    return Sharded(tuple(range(node * L, node * L + L)), plan)


def cliques_of(round: Round) -> tuple[Average, ...]:
    """The plans of all cliques of ``round`` that one collective serves, ordered by their lowest rank."""
    num_owners = Counter(id(row) for row in round.rows)
    num_readers = [0] * round.num_workers
    for row in {id(row): row for row in round.rows}.values():
        for rank, _ in row:
            num_readers[rank] += num_owners[id(row)]
    found = []
    for rank, row in enumerate(round.rows):
        if len(row) >= 3 and row[0][0] == rank:  # the clique is met once, at its lowest rank
            average = _clique_at(round, row, num_owners, num_readers)
            if average is not None:
                found.append(average)
    return tuple(found)


def _clique_at(round: Round, lowest: Row, num_owners: Counter[int], num_readers: list[int]) -> Average | None:
    """The clique whose lowest member has the row ``lowest``, or None if its workers are no such clique."""
    ranks = tuple(rank for rank, _ in lowest)
    k, a = len(ranks), lowest[1][1]
    seen: set[int] = set()
    for rank in ranks:
        row = round.rows[rank]
        if num_readers[rank] != k or len(row) != k:
            return None
        if id(row) in seen:
            continue
        seen.add(id(row))
        is_shared = num_owners[id(row)] > 1  # then each entry stands beside the diagonal for one of its owners
        for expected, (other, weight) in zip(ranks, row, strict=True):
            if other != expected or (abs(weight - a) > _TOLERANCE and (is_shared or other != rank)):
                return None
    weight = k * a
    return Average(ranks, 1.0 if abs(weight - 1) <= _TOLERANCE else weight)


def _gives_weight_to(row: Row, rank: int) -> bool:
    at = bisect_left(row, (rank,))
    return at < len(row) and row[at][0] == rank
