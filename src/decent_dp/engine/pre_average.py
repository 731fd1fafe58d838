"""A hook of optimizers written for the original package: called before mixing, with what arrived in ``comm_buffer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from decent_dp.engine.exchange import Arrived
from decent_dp.topology import Average, Sharded, Swap

if TYPE_CHECKING:
    from decent_dp.engine.bucket import Bucket


@dataclass
class Edge:
    """Workers that average with each other: ``x_i <- w x_i + (1 - w) / (k - 1) * sum of the others``, k = len(ranks).

    Attributes:
        ranks: The workers.
        weight: What a worker keeps (w).
        group: Unused here; the original package keeps a process group in it.
    """

    ranks: Sequence[int]
    weight: float
    group: Any = None


@runtime_checkable
class PreAverageHook(Protocol):
    """An optimizer that wants to see what arrived before it is mixed."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        """Called once per bucket and step, with the edge and the weight a worker keeps of its own."""


def announce(bucket: Bucket, arrived: Arrived, rank: int) -> Arrived:
    """Call the hook of the bucket's optimizer, if it has one, and return what is to be mixed.

    ``parameter.comm_buffer`` is, as in the original package, ``(1 - w) / (k - 1)`` times the sum of all k workers'
    parameters, this worker's included: for equal weights their mean. What the hook writes there is mixed.
    """
    if not isinstance(bucket.optimizer, PreAverageHook):
        return arrived
    bucket.storage.pack()
    plan, x = arrived.plan, bucket.storage.flat
    if isinstance(plan, Sharded):  # all of its workers count alike where nodes give each other equal weights
        other_nodes = plan.across.receive_from if isinstance(plan.across, Swap) else ()
        nodes = {other // len(plan.ranks) for other in (rank, *other_nodes)}
        members = [node * len(plan.ranks) + k for node in sorted(nodes) for k in range(len(plan.ranks))]
        plan = Average(tuple(members), 1.0)
    ranks = list(plan.ranks) if isinstance(plan, Average) else sorted({rank, *plan.receive_from})
    others = len(ranks) - 1
    # both kinds as x <- (1 - given) x + given * (mean of the others), and the sum of the edge from that
    if isinstance(plan, Average):
        given = plan.weight * others / len(ranks)
        buffer = arrived.received * (given * len(ranks) / others)
    else:
        given = sum(plan.receive_from.values())
        buffer = (arrived.received + x / others) * given
    buffer = buffer.to(x.dtype)
    for parameter, view in zip(bucket.parameters, bucket.storage.views(buffer), strict=True):
        parameter.comm_buffer = view  # type: ignore[attr-defined]
    before = buffer._version
    bucket.optimizer.pre_average_hook(Edge(ranks, 1 - given), 1 - given)
    if buffer._version == before:
        return arrived
    received = buffer * (others / (given * len(ranks))) if isinstance(plan, Average) else buffer / given - x / others
    return replace(arrived, received=received, sent=None, remainder=None)
