"""How many workers there are and how many share a node."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import index

from decent_dp.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Layout:
    """The workers and the nodes they run on; ranks are numbered node by node.

    Args:
        num_workers: Workers in all, at least 1.
        workers_per_node: Workers on each node, at least 1 and a divisor of ``num_workers``.

    Raises:
        TopologyError: A number is not whole, below 1, or the nodes would not be equally full.

    Example:
        >>> layout = Layout(num_workers=8, workers_per_node=4)
        >>> layout.num_nodes, layout.node_of(5), layout.ranks_of(1)
        (2, 1, range(4, 8))
    """

    num_workers: int
    workers_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_workers", "workers_per_node"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        if self.num_workers % self.workers_per_node:
            raise TopologyError(
                f"{self.num_workers} workers with {self.workers_per_node} a node: workers_per_node (from "
                "LOCAL_WORLD_SIZE unless given) must divide num_workers, so that every node is equally full; give a "
                f"divisor of {self.num_workers}, such as 1 if the nodes are unequal"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return self.num_workers // self.workers_per_node

    def node_of(self, rank: int) -> int:
        """The node that worker ``rank`` runs on."""
        if not 0 <= rank < self.num_workers:
            raise TopologyError(f"rank {rank}: the ranks of this layout are 0 to {self.num_workers - 1}")
        return rank // self.workers_per_node

    def ranks_of(self, node: int) -> range:
        """The workers that run on ``node``."""
        if not 0 <= node < self.num_nodes:
            raise TopologyError(f"node {node}: the nodes of this layout are 0 to {self.num_nodes - 1}")
        return range(node * self.workers_per_node, (node + 1) * self.workers_per_node)

    def are_apart_or_together(self, ranks: Collection[int]) -> bool:
        """Whether no two of these workers share a node, or all of them do."""
        return len({self.node_of(rank) for rank in ranks}) in (1, len(ranks))


def _count(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = index(value)  # type: ignore[arg-type]  # whatever is not a whole number raises TypeError
    except TypeError:
        raise TopologyError(f"{name}={value!r}: give a whole number of at least 1") from None
    if count < 1:
        raise TopologyError(f"{name}={count}: give at least 1")
    return count


def check_layout(value: object) -> Layout:
    """Return the value if it is a layout, else raise `TopologyError`."""
    if not isinstance(value, Layout):
        raise TopologyError(f"layout={value!r}: give a Layout, such as Layout(num_workers=8, workers_per_node=4)")
    return value
