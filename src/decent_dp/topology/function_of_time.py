"""A topology without a cycle: a function of the step gives its rounds."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import index
from typing import TypeAlias

from decent_dp.errors import TopologyError
from decent_dp.topology.checks import check_round
from decent_dp.topology.layout import Layout, check_layout
from decent_dp.topology.plans import Average, Plan, cliques_of, plan_of
from decent_dp.topology.rounds import Round
from decent_dp.topology.topology import Topology

_NUM_KEPT = 8
"""Rounds kept with their plans; a run uses the last two."""

_NUM_COMPARED = 8
"""Rounds that make a fingerprint."""


@dataclass(frozen=True, slots=True)
class FunctionOfTime:
    """Rounds over the workers of a layout: step ``t`` plays the round ``fn(t)``.

    Answers what a :class:`Topology` does, save that there is no cycle: ``num_rounds`` is None and there are no
    ``rounds``. A round is made and checked when it is first asked for, and the last few are kept. That the
    rounds connect all workers is not checked.

    Args:
        name: What messages call it.
        layout: The workers and nodes it is for.
        fn: Gives the round of step ``t``, counted from 0: a function of ``t`` alone, equal on all workers and in
            every run. It may be asked for any step, in any order, more than once.
        named_cliques: Every set of three or more ranks that ever averages together with one weight. Groups are
            made of them when a model is wrapped, so a round with any other clique is refused.
        doubly_stochastic: As for :class:`Topology`.

    Raises:
        TopologyError: Here for round 0, later for the round of a step: it is no mixing of these workers, or has a
            clique that was not named; or two calls for step 0 gave different rounds.

    Example:
        >>> tour = FunctionOfTime("tour", Layout(4, 1), lambda t: Round.of_cliques(4, [(0, 1 + t * t % 3)]))
        >>> tour.plan_at(0, 0)
        Swap(send_to=(1,), receive_from=mappingproxy({1: 0.5}))
        >>> tour.plan_at(10**6, 2)
        Swap(send_to=(0,), receive_from=mappingproxy({0: 0.5}))
    """

    name: str
    layout: Layout
    fn: Callable[[int], Round] = field(repr=False)
    named_cliques: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    doubly_stochastic: bool = True
    _kept: OrderedDict[int, tuple[Round, dict[int, Plan]]] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if not callable(self.fn):
            raise TopologyError(f"topology {self.name!r}: fn={self.fn!r}; give a function from a step t to a Round")
        object.__setattr__(self, "named_cliques", self._checked_cliques())
        if _digest(self.round_at(0)) != _digest(self._make(0)):
            raise TopologyError(
                f"topology {self.name!r}, step 0: the function gave two different rounds when it was called twice; it "
                "must depend on t alone: seed what is random in it with t"
            )

    @property
    def num_rounds(self) -> None:
        """None: there is no cycle."""

    def round_at(self, t: int) -> Round:
        """The round of step ``t``, counted from 0."""
        return self._at(t)[0]

    def plan_at(self, t: int, rank: int) -> Plan:
        """What worker ``rank`` does in step ``t``, counted from 0."""
        if not 0 <= rank < self.layout.num_workers:
            raise TopologyError(
                f"topology {self.name!r} has no rank {rank}: ranks go from 0 to {self.layout.num_workers - 1}"
            )
        round, plans = self._at(t)
        plan = plans.get(rank)
        if plan is None:
            plan = plan_of(round, rank)
            if isinstance(plan, Average):
                plan = replace(plan, in_shards=self.layout.are_apart_or_together(plan.ranks))
            plans[rank] = plan
        return plan

    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """The cliques that were named, in one order on all workers."""
        return self.named_cliques

    def fingerprint(self) -> str:
        """A short text of the cliques and the first few rounds, equal on all workers and in all runs."""
        head = (self.name, self.layout.num_workers, self.layout.workers_per_node, self.doubly_stochastic)
        whole = hashlib.sha256(repr((*head, "function of time", self.named_cliques)).encode())
        for t in range(_NUM_COMPARED):
            whole.update(_digest(self.round_at(t)))
        return whole.hexdigest()[:16]

    def _at(self, t: int) -> tuple[Round, dict[int, Plan]]:
        """The round of a step and the plans made of it so far."""
        if t < 0:
            raise TopologyError(f"step {t}: steps are counted from 0")
        kept = self._kept.get(t)
        if kept is None:
            kept = self._kept[t] = (self._make(t), {})
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return kept

    def _make(self, t: int) -> Round:
        where = f"topology {self.name!r}, step {t}"
        round: object = self.fn(t)
        if not isinstance(round, Round):
            raise TopologyError(
                f"{where}: the function gave a {type(round).__name__}; it must return a Round, such as "
                "Round.of_cliques(n, pairs) or Round.of_matrix(W)"
            )
        check_round(where, self.layout.num_workers, round, doubly_stochastic=self.doubly_stochastic)
        for average in cliques_of(round):
            if average.ranks not in self.named_cliques:
                raise TopologyError(
                    f"{where}: ranks {average.ranks} average together, and this clique was not named; the groups of "
                    "cliques are made when a model is wrapped, so name each one beforehand with cliques=[...], or "
                    "mix in pairs"
                )
        return round

    def _checked_cliques(self) -> tuple[tuple[int, ...], ...]:
        n = self.layout.num_workers
        wanted = f"give each as three or more ranks from 0 to {n - 1}, such as cliques=[(0, 1, 2)]"
        cliques = set()
        try:
            for given in self.named_cliques:
                ranks = [index(rank) for rank in given]
                if len(set(ranks)) != len(ranks) or len(ranks) < 3 or min(ranks) < 0 or max(ranks) >= n:
                    raise TopologyError(
                        f"topology {self.name!r}: {tuple(ranks)} is no clique to name; {wanted}; pairs need no name"
                    )
                cliques.add(tuple(sorted(ranks)))
        except TypeError:
            raise TopologyError(f"topology {self.name!r}: cliques={self.named_cliques!r}; {wanted}") from None
        return tuple(sorted(cliques))


AnyTopology: TypeAlias = Topology | FunctionOfTime
"""A cycle of rounds, or a function of the step."""


def _digest(round: Round) -> bytes:
    whole = hashlib.sha256()
    known: dict[int, bytes] = {}  # workers that share a row share its digest
    for row in round.rows:
        digest = known.get(id(row))
        if digest is None:
            digest = known[id(row)] = hashlib.sha256(repr(row).encode()).digest()
        whole.update(digest)
    return whole.digest()
