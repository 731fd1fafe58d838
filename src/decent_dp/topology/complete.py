"""Everybody averages with everybody."""

from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round
from decent_dp.topology.topology import Topology


def complete(layout: Layout) -> Topology:
    """All n workers take the mean of all in every round.

    ``W = J``, all entries 1/n: exact in one round, for any n.

    Cost: one collective a step, 2 (n - 1) / n copies of the model sent per worker.

    Args:
        layout: Any.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(complete(Layout(num_workers=4, workers_per_node=2))))
        0: (0 1 2 3)

    References:
        The all-reduce that the decentralized topologies are compared with: Wang et al., From Promise to
        Practice: Realizing High-performance Decentralized Training, ICLR 2025, arXiv 2410.11998.
    """
    n = layout.num_workers
    return Topology("complete", layout, (Round.of_cliques(n, [range(n)]),))
