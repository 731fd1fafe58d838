"""What physics allows: the bytes a host must send per step, over its bandwidth."""

from __future__ import annotations

from benchmarks.sides import DTYPES
from decent_dp.topology import Average, Idle, Layout, Sharded, Swap, catalog, plan_of


def host_bytes(side: str, num_parameter_bytes: int, num_hosts: int, workers_per_host: int) -> float | None:
    """Payload bytes per step, mean over rounds, of the host that sends most; None where it is not known.

    A sum over k workers is counted as a ring, 2 (k - 1) / k of the tensor from each member to the next; in shards a
    member sends each other one a k-th of the tensor, twice.
    """
    kind, *rest = side.split(":")
    layout = Layout(num_hosts * workers_per_host, workers_per_host)
    n = layout.num_workers
    if kind == "alone":
        return 0.0
    if kind in ("ddp", "ddp-fp16"):
        scale = 0.5 if kind == "ddp-fp16" else 1.0
        crossing = 1 if num_hosts > 1 else 0  # ranks go host by host, so one link of the ring leaves each host
        return crossing * scale * 2 * (n - 1) / n * num_parameter_bytes
    is_narrow = len(rest) > 1
    payload = num_parameter_bytes * (DTYPES[rest[1]].itemsize / 4 if is_narrow else 1.0)
    topology = catalog.build(rest[0], layout)
    if topology.num_rounds is None:
        return None
    sent = [0.0] * num_hosts
    for t in range(topology.num_rounds):
        for rank in range(n):
            home = layout.node_of(rank)
            plan = plan_of(topology.round_at(t), rank) if kind == "package" else topology.plan_at(t, rank)
            if isinstance(plan, Swap):
                away = sum(layout.node_of(other) != home for other in plan.send_to)
                sent[home] += away * payload
            elif isinstance(plan, Sharded):
                across = plan.across.send_to if isinstance(plan.across, Swap) else ()
                sent[home] += len(across) * payload / workers_per_host
            elif isinstance(plan, Average):
                ranks = plan.ranks
                k = len(ranks)
                if is_narrow or plan.in_shards:
                    sent[home] += payload * 2 / k * sum(layout.node_of(other) != home for other in ranks)
                elif layout.node_of(ranks[(ranks.index(rank) + 1) % k]) != home:
                    sent[home] += payload * 2 * (k - 1) / k
            elif not isinstance(plan, Idle):
                return None
    return max(sent) / topology.num_rounds
