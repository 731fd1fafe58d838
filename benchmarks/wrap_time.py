"""How long wrapping takes, and how many process groups a large world needs.

    python -m benchmarks.wrap_time

Groups are counted from the topology of 256 workers, without starting any: one for all point-to-point messages of a
worker, and one for each distinct clique that it averages in. Seconds are those of the constructor with 8 gloo workers
on loopback, from a common start after the process group is up, of the slowest worker. The first optimizer of a process
makes torch import its compiler, whatever it is for; that is paid before, and told separately.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show
from decent_dp.topology import Layout, catalog


def num_groups(topology: str, num_workers: int, workers_per_node: int) -> int:
    """Process groups that the worker with most of them is in."""
    cliques = catalog.build(topology, Layout(num_workers, workers_per_node)).cliques()
    return 1 + max(sum(rank in clique for clique in cliques) for rank in range(num_workers))


def first_optimizer(state: dict[str, Any]) -> float:
    """Seconds that torch takes for the first optimizer of a process."""
    begin = time.perf_counter()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return time.perf_counter() - begin


def wrap(state: dict[str, Any], topology: str, parameters_mib: float) -> float:
    """Seconds from a common start until this worker's model is wrapped."""
    import decent_dp  # noqa: F401 - paid before the clock runs

    dist.barrier()
    begin = time.perf_counter()
    work = {"kind": "emulated", "parameters_mib": parameters_mib, "compute_s": 0.0}
    sides.build(state, f"ours:{topology}", work, bucket_mib=4)
    return time.perf_counter() - begin


def measure(
    topology: str = "exp", num_workers: int = 8, parameters_mib: float = 20, num_repeats: int = 3
) -> dict[str, Any]:
    """Seconds to wrap, each repeat with fresh processes, and groups at 256 workers of 8 a node."""
    seconds, torch_seconds = [], []
    with Lab(1, namespaces=False) as lab:
        for _ in range(num_repeats):
            with Crew(lab, num_workers) as crew:
                torch_seconds.append(max(crew.call("benchmarks.wrap_time:first_optimizer")))
                arguments = {"topology": topology, "parameters_mib": parameters_mib}
                seconds.append(max(crew.call("benchmarks.wrap_time:wrap", **arguments)))
    return {
        "topology": topology,
        "num_workers": num_workers,
        "seconds": median(seconds),
        "all_seconds": seconds,
        "first_optimizer_seconds": median(torch_seconds),
        "num_groups_at_256": num_groups(topology, 256, 8),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wrap_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="exp", help="name of a topology (exp)")
    parser.add_argument("--workers", type=int, default=8, help="workers to wrap with (8)")
    options = parser.parse_args(arguments)
    result = measure(options.topology, options.workers)
    show(
        "wrap_time",
        result,
        f"{result['topology']}: {result['num_groups_at_256']} process groups at 256 workers; {result['seconds']:.2f} s "
        f"to wrap at {result['num_workers']}, after {result['first_optimizer_seconds']:.2f} s that torch takes for the "
        "first optimizer of a process",
    )


if __name__ == "__main__":
    main()
