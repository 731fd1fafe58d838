"""The sides: ways to train the same network on the same work, one function each.

    alone                      no communication: every worker for itself
    ddp                        torch DistributedDataParallel
    ddp-fp16                   the same with the fp16 compression hook
    package:TOPOLOGY           decent-dp 0.2.3 as published, in its own virtual environment
    ours:TOPOLOGY[:DTYPE]      this library, optionally with a wire dtype: bf16, fp16

The functions run in worker processes. Both packages import as ``decent_dp``; which one it is depends on the environment
of the worker.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.work import Work, make

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_optim_fn = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)


@dataclass(frozen=True, slots=True)
class Side:
    """A way to train.

    Attributes:
        model: What the loss is computed with.
        update: Backward and whatever it takes to have the parameters updated.
        drain: Waits until nothing travels.
    """

    model: nn.Module
    update: Callable[[torch.Tensor], None]
    drain: Callable[[], None]


def alone(work: Work, bucket_mib: float) -> Side:
    """No communication, one optimizer for all parameters."""
    return _with_optimizer(work.network())


def ddp(work: Work, bucket_mib: float, *, hook: Callable[..., Any] | None = None) -> Side:
    """Torch DDP with buckets of that size and gradients that live in them."""
    model = nn.parallel.DistributedDataParallel(
        work.network(), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    return _with_optimizer(model)


def ddp_fp16(work: Work, bucket_mib: float) -> Side:
    """Torch DDP whose gradients travel as fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return ddp(work, bucket_mib, hook=fp16_compress_hook)


def package(work: Work, bucket_mib: float, topology: str) -> Side:
    """The published package."""
    from decent_dp.ddp import DecentralizedDataParallel

    name = "one-peer-exp" if topology == "exp" else topology  # it documents exp and knows it by this name only
    model = DecentralizedDataParallel(work.network(), _optim_fn, topology=name, bucket_size_in_mb=bucket_mib)

    def drain() -> None:
        for operation in model._comm_ops:
            if operation is not None:
                operation.wait()

    return Side(model, torch.Tensor.backward, drain)


def ours(work: Work, bucket_mib: float, topology: str, dtype: str | None = None) -> Side:
    """This library."""
    from decent_dp import DecentralizedDataParallel

    model = DecentralizedDataParallel(
        work.network(),
        _optim_fn,
        topology=topology,
        bucket_size_in_mb=bucket_mib,
        wire_dtype=None if dtype is None else DTYPES[dtype],
    )
    return Side(model, torch.Tensor.backward, model.synchronize)


_SIDES: dict[str, Callable[..., Side]] = {
    "alone": alone,
    "ddp": ddp,
    "ddp-fp16": ddp_fp16,
    "package": package,
    "ours": ours,
}


def check(name: str) -> None:
    """Refuse what is not the name of a side.

    Raises:
        ValueError: Says which there are.
    """
    kind, *rest = name.split(":")
    most = {"package": 1, "ours": 2}.get(kind, 0)
    if kind not in _SIDES or not min(most, 1) <= len(rest) <= most or (len(rest) == 2 and rest[1] not in DTYPES):
        raise ValueError(
            f"unknown side {name!r}; sides are alone, ddp, ddp-fp16, package:TOPOLOGY, ours:TOPOLOGY and "
            f"ours:TOPOLOGY:DTYPE with DTYPE {' or '.join(DTYPES)}"
        )


def _with_optimizer(model: nn.Module) -> Side:
    """The ordinary loop: backward, step, zero_grad."""
    optimizer = _optim_fn(model.parameters())

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, update, lambda: None)


# -------------------------------------------------------------------- called in workers


def build(state: dict[str, Any], name: str, work: dict[str, Any], bucket_mib: float) -> None:
    """Make a side and keep it under its name; a collective call."""
    kind, *rest = name.split(":")
    made = make(**work)
    state[name] = (made, _SIDES[kind](made, bucket_mib, *rest))


def run(state: dict[str, Any], name: str, first_step: int, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Train a side for some steps from a common start.

    Returns:
        ``step_ms`` of each step after the warm-up, and ``cpu_ms``, CPU time of all threads of this worker per step.
    """
    work, side = state[name]
    rank = dist.get_rank()
    gc.collect()
    dist.barrier()
    times, cpu = [], 0.0
    for index in range(num_warmup + num_steps):
        if index == num_warmup:
            cpu = time.process_time()
        begin = time.perf_counter()
        side.update(work.loss(side.model, first_step + index, rank))
        times.append(1000 * (time.perf_counter() - begin))
    cpu = time.process_time() - cpu
    side.drain()
    return {"step_ms": times[num_warmup:], "cpu_ms": 1000 * cpu / num_steps}
