"""What the link between two hosts really carries: one transfer over gloo."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.crew import Crew


def transfer(state: dict[str, Any], num_bytes: int) -> float:
    """Send from worker 0 to the last one; returns the seconds it took there."""
    last = dist.get_world_size() - 1
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(payload, last)
    elif dist.get_rank() == last:
        dist.recv(payload, 0)
    return time.perf_counter() - begin


def goodput_bits_per_s(crew: Crew, num_bytes: int) -> float:
    """Payload bits per second from the first host to the last; headers take 4 % of what the link carries."""
    crew.call("benchmarks.link:transfer", num_bytes=2**16)
    return float(8 * num_bytes / crew.call("benchmarks.link:transfer", num_bytes=num_bytes)[-1])
