"""A hook of optimizers written for the original package: called before mixing, with what arrived in ``comm_buffer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from decent_dp.engine.exchange import Arrived
from decent_dp.topology import Average

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
        """Called once per bucket and step, with the edge and the weight a worker keeps now."""


def announce(bucket: Bucket, arrived: Arrived, rank: int) -> None:
    """Call the hook of the bucket's optimizer, if it has one.

    ``parameter.comm_buffer`` is, as in the original package, ``(1 - w) / (k - 1)`` times the sum of all k workers'
    parameters, this worker's included: for equal weights their mean.
    """
    if not isinstance(bucket.optimizer, PreAverageHook):
        return
    plan = arrived.plan
    bucket.storage.pack()
    if isinstance(plan, Average):
        ranks, nominal = list(plan.ranks), plan.weight * (1 - 1 / len(plan.ranks))
        kept = 1 - arrived.weight * (1 - 1 / len(plan.ranks))
        total = arrived.received * arrived.weight
    else:
        ranks, nominal = sorted({rank, *plan.receive_from}), sum(plan.receive_from.values())
        kept = 1 - arrived.weight
        total = (arrived.received + bucket.storage.flat / len(plan.receive_from)) * arrived.weight
    for parameter, view in zip(
        bucket.parameters, bucket.storage.views(total.to(bucket.storage.flat.dtype)), strict=True
    ):
        parameter.comm_buffer = view  # type: ignore[attr-defined]
    bucket.optimizer.pre_average_hook(Edge(ranks, 1 - nominal), kept)
