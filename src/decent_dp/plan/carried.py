"""What a round costs every worker, following how the engine carries its plans out.

    Swap       point to point: the bucket to every receiver, at once
    Average    a ring collective, 2 (k - 1) / k of the bucket from each member to the next; or in shards, where every
               member averages a k-th of the bucket for all others
    Sharded    1/L of the bucket to each other member of the node; the own shard across; 1/L to each member again

A worker has one way into its node and one out of it. An exchange takes the first and then the second, each as long as
the bytes that it moves there times the seconds per byte at this round's concurrency; other buckets wait in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decent_dp.plan.wire import Wire
from decent_dp.topology import AnyTopology, Average, Layout, Sharded, Swap

Floats = NDArray[np.float64]


class Together:
    """Who waits for whom: sets of workers that go on when the last of them is there.

    Args:
        sets: For every worker the workers it waits for, itself included; workers that wait for the same set should be
            given the same object.
    """

    def __init__(self, sets: Sequence[Sequence[int]]) -> None:
        n = len(sets)
        labels: dict[int, int] = {}
        self._label = np.array([labels.setdefault(id(members), len(labels)) for members in sets])
        distinct = list({id(members): members for members in sets}.values())
        self._flat = np.concatenate([np.asarray(members, dtype=np.intp) for members in distinct])
        lengths = [len(members) for members in distinct]
        self._starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
        self._is_alone = all(len(members) == 1 for members in distinct) and n == len(distinct)

    def latest(self, x: Floats) -> Floats:
        """For every worker the largest value of its set."""
        if self._is_alone:
            return x
        return np.asarray(np.maximum.reduceat(x[self._flat], self._starts)[self._label])


@dataclass(frozen=True, slots=True)
class Carried:
    """A round, as the clock needs it; arrays have one number a worker.

    Attributes:
        inside_s_per_byte: Of a byte of the bucket, on the way inside of the node.
        across_s_per_byte: Alike, between nodes.
        latency_s: Of the whole exchange.
        num_passes: Passes over the parameters that mixing takes.
        takes_part: Whether it does not idle.
        first: Who must have started for the first way to begin.
        then: Who must be through the first way for the second to begin.
        last: Who must be through the second way for the exchange to end.
    """

    inside_s_per_byte: Floats
    across_s_per_byte: Floats
    latency_s: Floats
    num_passes: Floats
    takes_part: NDArray[np.bool_]
    first: Together
    then: Together
    last: Together


def carry(
    topology: AnyTopology, t: int, layout: Layout, wire: Wire, *, always_in_shards: bool, on_cpu: bool
) -> Carried:
    """How a round is carried out.

    Args:
        topology: Has the round.
        t: Its step.
        layout: The workers and nodes.
        wire: Times of traffic.
        always_in_shards: Whether averages never are a collective: what travels has 16 bits or is narrowed.
        on_cpu: Whether averages in shards are preferred where that is no detour.
    """
    n = layout.num_workers
    traffic = _Traffic(layout, wire)
    seen: set[tuple[int, ...]] = set()
    for rank in range(n):
        plan = topology.plan_at(t, rank)
        if isinstance(plan, Swap):
            traffic.add_swap(rank, plan)
        elif isinstance(plan, Sharded):
            traffic.add_sharded(rank, plan)
        elif isinstance(plan, Average) and plan.ranks not in seen:
            seen.add(plan.ranks)
            if always_in_shards or (plan.in_shards and on_cpu):
                traffic.add_shards(plan.ranks)
            else:
                traffic.add_collective(plan.ranks)
    return traffic.carried()


class _Traffic:
    """Adds up what the workers send in a round, in parts of a bucket."""

    def __init__(self, layout: Layout, wire: Wire) -> None:
        n = layout.num_workers
        self._layout, self._wire = layout, wire
        self._node = np.arange(n) // layout.workers_per_node
        self._inside, self._shards, self._direct = np.zeros(n), np.zeros(n), np.zeros(n)
        self._out, self._in = np.zeros(n), np.zeros(n)
        self._latency, self._passes = np.zeros(n), np.zeros(n)
        self._links = np.zeros(layout.num_nodes)  # of ring collectives, out of each node
        self._rings: list[tuple[Sequence[int], float, list[int]]] = []
        self._takes_part = np.zeros(n, dtype=bool)
        alone = [(rank,) for rank in range(n)]
        self._first: list[Sequence[int]] = list(alone)
        self._then, self._last = list(self._first), list(self._first)
        self._nodes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add_swap(self, rank: int, plan: Swap, num_shards: int = 1) -> None:
        share = 1 / num_shards
        home = self._node[rank]
        away = sum(self._node[other] != home for other in plan.send_to)
        from_away = sum(self._node[other] != home for other in plan.receive_from)
        near = max(len(plan.send_to) - away, len(plan.receive_from) - from_away)
        self._out[rank] += share * away
        self._in[rank] += share * from_away
        self._inside[rank] += share * near
        pattern = "pair_across" if away or from_away else "pair_inside"
        self._latency[rank] += self._wire.rate(pattern).latency_s
        self._passes[rank] = max(len(plan.receive_from), 1) if num_shards == 1 else 1.0
        members = tuple(sorted({rank, *plan.send_to, *plan.receive_from}))
        self._takes_part[rank] = True
        self._then[rank] = members
        if num_shards == 1:
            self._first[rank] = members

    def add_sharded(self, rank: int, plan: Sharded) -> None:
        L = len(plan.ranks)
        if isinstance(plan.across, Swap):
            self.add_swap(rank, plan.across, L)
        node = self._nodes.setdefault(plan.ranks, plan.ranks)
        self._shards[rank] += 2 * (L - 1) / L
        self._latency[rank] += 2 * self._wire.rate("shards_inside").latency_s
        self._passes[rank] = 1.0
        self._takes_part[rank] = True
        self._first[rank] = self._last[rank] = node

    def add_shards(self, ranks: tuple[int, ...]) -> None:
        k = len(ranks)
        num_on = np.bincount(self._node[list(ranks)])
        for rank in ranks:
            near = int(num_on[self._node[rank]]) - 1
            self._shards[rank] += 2 * near / k
            self._out[rank] += 2 * (k - 1 - near) / k
            self._in[rank] += 2 * (k - 1 - near) / k
            pattern = "pair_across" if near < k - 1 else "shards_inside"
            self._latency[rank] += 2 * self._wire.rate(pattern).latency_s
        self._join(ranks, 1.0)

    def add_collective(self, ranks: tuple[int, ...]) -> None:
        nodes = self._node[list(ranks)]
        spanned = sorted(set(nodes.tolist()))
        latency_s, s_per_byte = self._wire.collective(len(ranks), len(spanned))
        self._latency[list(ranks)] += latency_s
        if len(spanned) == 1:
            self._direct[list(ranks)] += s_per_byte
        else:
            np.add.at(self._links, nodes[nodes != np.roll(nodes, -1)], 1)
            self._rings.append((ranks, s_per_byte, spanned))
        self._join(ranks, 2.0)

    def _join(self, ranks: tuple[int, ...], num_passes: float) -> None:
        self._passes[list(ranks)] = num_passes
        self._takes_part[list(ranks)] = True
        for rank in ranks:
            self._first[rank] = self._then[rank] = ranks

    def carried(self) -> Carried:
        wire = self._wire
        inside = self._direct.copy()
        if self._inside.any():
            inside += self._inside * wire.inside()
        if self._shards.any():
            inside += self._shards * wire.inside(in_shards=True)
        across = np.zeros_like(inside)
        if self._out.any() or self._in.any():
            busy = np.maximum(self._busy_link(self._out), self._busy_link(self._in))[self._node]
            own = np.maximum(self._out, self._in) * wire.across(1)
            across += np.where(own > 0, np.maximum(busy, own), 0.0)
        for ranks, s_per_byte, nodes in self._rings:
            across[list(ranks)] += s_per_byte * wire.across(self._links[nodes].max()) / wire.across(1)
        then = Together(self._then)
        # the slower one of two nodes sets the pace of a flow between them
        return Carried(
            inside,
            np.where(across > 0, then.latest(across), 0.0),
            self._latency,
            self._passes,
            self._takes_part,
            Together(self._first),
            then,
            Together(self._last),
        )

    def _busy_link(self, sent: Floats) -> Floats:
        """Seconds per byte of a bucket that the link of each node is busy with what all of its workers send."""
        by_node = sent.reshape(self._layout.num_nodes, -1)
        num_flows = np.count_nonzero(by_node, axis=1)
        each = np.array([self._wire.across(k) / k if k else 0.0 for k in num_flows])
        return np.asarray(by_node.sum(axis=1) * each)
