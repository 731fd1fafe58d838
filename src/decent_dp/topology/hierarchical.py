"""Nodes mix with nodes, each as one."""

from collections.abc import Callable

from decent_dp.errors import TopologyError
from decent_dp.topology.function_of_time import AnyTopology
from decent_dp.topology.layout import Layout
from decent_dp.topology.one_peer import exp
from decent_dp.topology.topology import Topology


def hierarchical(layout: Layout, outer: Callable[[Layout], AnyTopology] = exp) -> Topology:
    """Any topology over the nodes, each node taking part with the mean of its workers.

    ``W = W_outer kron J_L``, J_L being the mean over the L workers of a node. It converges as ``outer`` does on N
    workers.

    Cost: carried out in shards (`decent_dp.topology.Sharded`): 2 (L - 1) / L copies of the model sent per worker
    inside its node, and for each message of ``outer`` 1/L of a copy across, so that one copy leaves the node.

    Args:
        layout: Any.
        outer: Builder of the topology between nodes; it is given a layout of N workers, one a node.

    Example:
        >>> from decent_dp.topology import draw, ring
        >>> print(draw(hierarchical(Layout(num_workers=8, workers_per_node=2), ring)))
        0: (0 1 2 3) (4 5 6 7)
        1: (0 1 6 7) (2 3 4 5)

    References:
        Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv 1811.10792, where the
        workers of a node act as one.
    """
    between = outer(Layout(layout.num_nodes, 1))
    if not isinstance(between, Topology):
        raise TopologyError(
            f"hierarchical over {between.name!r}: it has no cycle of rounds; give one that has, such as 'exp'"
        )
    return Topology.two_level(
        f"hierarchical({between.name})", layout, between.rounds, doubly_stochastic=between.doubly_stochastic
    )
