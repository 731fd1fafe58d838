"""A finite cycle of rounds, checked when it is built."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from decent_dp.errors import TopologyError
from decent_dp.topology.checks import check_rounds
from decent_dp.topology.layout import Layout
from decent_dp.topology.plans import Average, Plan, cliques_of, plan_of, sharded_plan_of
from decent_dp.topology.rounds import Round


@dataclass(frozen=True, slots=True)
class Topology:
    """A finite cycle of rounds over the workers of a layout: step ``t`` plays round ``t mod num_rounds``.

    Args:
        name: What messages call it.
        layout: The workers and nodes it is for.
        rounds: The cycle.
        doubly_stochastic: Whether the columns of every round sum to 1 as the rows do, so that mixing leaves
            the mean of the replicas unchanged. False accepts rounds of which only the rows sum to 1.
        between: Made by `two_level`: the rounds between nodes, which are then carried out in shards.

    Raises:
        TopologyError: A round is no mixing of these workers, or the cycle does not connect them; the message
            names round, rank and the number found.

    Example:
        >>> rounds = (Round.of_cliques(4, [(0, 1)]), Round.of_cliques(4, [(1, 2), (0, 3)]))
        >>> pairs = Topology("pairs", Layout(4, 1), rounds)
        >>> pairs.num_rounds, pairs.plan_at(2, 2), pairs.plan_at(3, 2)
        (2, Idle(), Swap(send_to=(1,), receive_from=mappingproxy({1: 0.5})))
    """

    name: str
    layout: Layout
    rounds: tuple[Round, ...] = field(repr=False)
    doubly_stochastic: bool = True
    between: tuple[Round, ...] | None = field(default=None, repr=False)
    _plans: dict[tuple[int, int], Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", tuple(self.rounds))
        check_rounds(self.name, self.layout.num_workers, self.rounds, doubly_stochastic=self.doubly_stochastic)

    @classmethod
    def two_level(
        cls, name: str, layout: Layout, between: Sequence[Round], *, doubly_stochastic: bool = True
    ) -> "Topology":
        """A cycle of rounds between nodes, in which each node takes part with the mean of its workers.

        Every worker moves a shard, 1/L of the parameters: see `decent_dp.topology.Sharded`.

        Args:
            name: What messages call it.
            layout: The workers and nodes.
            between: One row a node.
            doubly_stochastic: As for the class.

        Example:
            >>> pair = Topology.two_level("pair", Layout(4, 2), [Round.of_cliques(2, [(0, 1)])])
            >>> pair.plan_at(0, 1).ranks, pair.plan_at(0, 1).across.send_to
            ((0, 1), (3,))
        """
        rounds = tuple(round.spread(layout.workers_per_node) for round in between)
        return cls(name, layout, rounds, doubly_stochastic, tuple(between))

    @property
    def num_rounds(self) -> int:
        """Rounds in a cycle."""
        return len(self.rounds)

    def round_at(self, t: int) -> Round:
        """The round of step ``t``, counted from 0."""
        return self.rounds[self._index(t)]

    def plan_at(self, t: int, rank: int) -> Plan:
        """What worker ``rank`` does in step ``t``, counted from 0."""
        if not 0 <= rank < self.layout.num_workers:
            raise TopologyError(
                f"topology {self.name!r} has no rank {rank}: ranks go from 0 to {self.layout.num_workers - 1}"
            )
        key = (self._index(t), rank)
        plan = self._plans.get(key)
        if plan is None and self.between is not None:
            plan = self._plans[key] = sharded_plan_of(self.between[key[0]], rank, self.layout.workers_per_node)
        elif plan is None:
            plan = plan_of(self.rounds[key[0]], rank)
            if isinstance(plan, Average):
                plan = replace(plan, in_shards=self.layout.are_apart_or_together(plan.ranks))
            self._plans[key] = plan
        return plan

    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every distinct clique that averages together, in one order on all workers."""
        if self.between is not None and self.layout.workers_per_node > 1:
            return ()
        return tuple(sorted({average.ranks for round in self.rounds for average in cliques_of(round)}))

    def fingerprint(self) -> str:
        """A short text that differs between different topologies, equal on all workers and in all runs.

        Example:
            >>> Topology("alone", Layout(1, 1), (Round.identity(1),)).fingerprint()
            '86243f1eba64cf60'
        """
        head = (self.name, self.layout.num_workers, self.layout.workers_per_node, self.doubly_stochastic)
        whole = hashlib.sha256(repr(head if self.between is None else (*head, "two-level")).encode())
        known: dict[int, bytes] = {}  # workers that share a row share its digest
        for round in self.rounds:
            for row in round.rows:
                digest = known.get(id(row))
                if digest is None:
                    packed = b"".join(struct.pack("<qd", rank, weight) for rank, weight in row)
                    digest = known[id(row)] = hashlib.sha256(packed).digest()
                whole.update(digest)
        return whole.hexdigest()[:16]

    def _index(self, t: int) -> int:
        if t < 0:
            raise TopologyError(f"step {t}: steps are counted from 0")
        return t % len(self.rounds)
