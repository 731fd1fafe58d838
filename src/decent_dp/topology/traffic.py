"""What a topology sends: copies of the model per worker, and copies that leave a node.

On a slow network the second decides. Counted as the engine carries rounds out:

- a message of a pair, a shift or several neighbours is one copy;
- an average over a clique of k workers is a ring in rank order: every member sends 2 (k - 1) / k copies to the next
  one, so as many leave each node the clique has members on, if there are several;
- in shards, every member sends 2/k of a copy to each other member. The engine does so where the wire dtype has 16 bits
  or is narrower than the parameters, and on CPUs where as much leaves the nodes either way;
- on two levels, 2 (L - 1) / L copies stay in the node, and 1/L of a copy leaves with each worker for every node that
  its node sends to.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from decent_dp.topology.function_of_time import AnyTopology
from decent_dp.topology.layout import Layout
from decent_dp.topology.plans import cliques_of
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.topology import Topology

_NUM_COUNTED = 1000
"""Rounds counted where there is no cycle, with 64 workers or fewer; with more, fewer."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Copies of the model sent in a step, over one cycle.

    Args:
        per_worker: Copies a worker sends, mean over workers and steps.
        partners: Other workers whose parameters a worker takes, mean over workers and steps; the number of
            messages where there are no collectives.
        leaving_node: Copies that leave a node, mean over nodes and steps.
        leaving_busiest_node: Copies that leave the node that sends most in a step, mean over steps.
        leaving_node_peak: The most copies that leave a node in a step.
    """

    per_worker: float
    partners: float
    leaving_node: float
    leaving_busiest_node: float
    leaving_node_peak: float


def traffic(topology: AnyTopology, *, narrow_wire: bool = False) -> Traffic:
    """Count what is sent, over one cycle, or over the first 1,000 rounds (fewer for many workers) without one.

    Args:
        topology: What to count.
        narrow_wire: Whether parameters travel in 16 bits or fewer than they have; averages are in shards then.

    Example:
        >>> from decent_dp.topology import build
        >>> traffic(build("exp", Layout(num_workers=32, workers_per_node=8)))
        Traffic(per_worker=1.0, partners=1.0, leaving_node=3.2, leaving_busiest_node=3.2, leaving_node_peak=8.0)
    """
    layout = topology.layout
    n, N = layout.num_workers, layout.num_nodes
    num_rounds = topology.num_rounds or max(16, min(_NUM_COUNTED, 64 * _NUM_COUNTED // n))
    sent = partners = leaving = busiest = peak = 0.0
    for t in range(num_rounds):
        if isinstance(topology, Topology) and topology.between is not None and layout.workers_per_node > 1:
            of_round = _two_level(topology.between[t], layout)
        else:
            of_round = _one_level(topology.round_at(t), layout, narrow_wire=narrow_wire)
        sent += of_round[0]
        partners += _num_taken(topology.round_at(t))
        leaving += sum(of_round[1])
        most = max(of_round[1])
        busiest, peak = busiest + most, max(peak, most)
    return Traffic(
        per_worker=sent / n / num_rounds,
        partners=partners / n / num_rounds,
        leaving_node=leaving / N / num_rounds,
        leaving_busiest_node=busiest / num_rounds,
        leaving_node_peak=peak,
    )


def _one_level(round: Round, layout: Layout, *, narrow_wire: bool) -> tuple[float, list[float]]:
    """Copies sent by all workers, and those leaving each node."""
    sent, leaving = 0.0, [0.0] * layout.num_nodes
    in_cliques: set[int] = set()
    for average in cliques_of(round):
        in_cliques.update(average.ranks)
        k = len(average.ranks)
        sent += 2 * (k - 1)
        members = Counter(layout.node_of(rank) for rank in average.ranks)
        for node, num_members in members.items():
            if narrow_wire:
                leaving[node] += num_members * (k - num_members) * 2 / k
            elif len(members) > 1:
                leaving[node] += 2 * (k - 1) / k
    for rank, row in enumerate(round.rows):
        if rank not in in_cliques:
            for other, _ in row:
                if other != rank:
                    sent += 1
                    leaving[layout.node_of(other)] += layout.node_of(other) != layout.node_of(rank)
    return sent, leaving


def _two_level(between: Round, layout: Layout) -> tuple[float, list[float]]:
    leaving = [0.0] * layout.num_nodes
    for node, row in enumerate(between.rows):
        for other, _ in row:
            leaving[other] += other != node
    return sum(leaving) + 2 * (layout.workers_per_node - 1) * layout.num_nodes, leaving


def _num_taken(round: Round) -> int:
    """Weights beside the diagonal."""
    return sum(len(row) - _keeps(row, rank) for rank, row in enumerate(round.rows))


def _keeps(row: Row, rank: int) -> bool:
    at = bisect_left(row, (rank,))
    return at < len(row) and row[at][0] == rank
