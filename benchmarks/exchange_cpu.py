"""CPU time of exchanging 100 MB between two workers on loopback: this library's and the published package's.

    python -m benchmarks.exchange_cpu

Both go through their real wrapper, in turns. The network computes nothing, its gradients are never written and the
optimizer does nothing, so what a step costs is the exchange: copies, sending, receiving, mixing, in all threads of a
worker and in the kernel for it. The same loop without a wrapper is subtracted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import original
from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show
from benchmarks.sides import DTYPES


class _Nothing(torch.autograd.Function):
    """Passes a tensor through; its backward hands out memory that is never written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.like = weight.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.empty_like(ctx.like)


class _Network(nn.Module):
    def __init__(self, num_bytes: int, num_layers: int) -> None:
        super().__init__()
        numel = num_bytes // 4 // num_layers
        self.weights = nn.ParameterList(torch.randn(numel) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Nothing.apply(x, weight)  # type: ignore[no-untyped-call]
        return x


class _NoOptimizer(torch.optim.Optimizer):
    """Leaves parameters as they are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def build(state: dict[str, Any], side: str, num_bytes: int, num_layers: int, bucket_mb: float) -> None:
    """Make a side: alone, package, ours or ours:DTYPE."""
    torch.manual_seed(dist.get_rank())
    network = _Network(num_bytes, num_layers)
    drain: Callable[[], None] = lambda: None  # noqa: E731
    if side == "alone":
        model: nn.Module = network
    else:
        from decent_dp.ddp import DecentralizedDataParallel

        kind, _, dtype = side.partition(":")
        options: dict[str, Any] = {"wire_dtype": DTYPES[dtype]} if dtype else {}
        model = DecentralizedDataParallel(
            network, _NoOptimizer, topology="ring", bucket_size_in_mb=bucket_mb, **options
        )
        if kind == "ours":
            drain = model.synchronize
    state[side] = (model, drain)


def run(state: dict[str, Any], side: str, num_warmup: int, num_steps: int) -> dict[str, float]:
    """Take steps; returns CPU and wall milliseconds per step of this worker."""
    model, drain = state[side]
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for index in range(num_warmup + num_steps):
        if index == num_warmup:
            begin, cpu = time.perf_counter(), time.process_time()
        model(torch.zeros(1)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    drain()
    dist.barrier()
    return {"cpu_ms": 1000 * cpu / num_steps, "wall_ms": 1000 * wall / num_steps}


def measure(
    num_bytes: int = 100_000_000,
    num_blocks: int = 7,
    num_steps: int = 6,
    *,
    package_python: Path | None = None,
    with_package: bool = True,
) -> dict[str, Any]:
    """CPU milliseconds per exchange and worker, medians over blocks, without the cost of the bare loop."""
    here = ["alone", "ours", "ours:bf16"]
    cpu: dict[str, list[float]] = {side: [] for side in [*here, "package alone", "package"]}
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(2, namespaces=False))
        turns = [(side, side, crew) for crew in [stack.enter_context(Crew(lab))] for side in here]
        if with_package:
            theirs = stack.enter_context(Crew(lab, python=package_python or original.python()))
            turns += [("package alone", "alone", theirs), ("package", "package", theirs)]
        for _, side, crew in turns:
            crew.call("benchmarks.exchange_cpu:build", side=side, num_bytes=num_bytes, num_layers=4, bucket_mb=25)
        for _ in range(num_blocks):
            for name, side, crew in turns:
                replies = crew.call("benchmarks.exchange_cpu:run", side=side, num_warmup=2, num_steps=num_steps)
                cpu[name].append(fmean(reply["cpu_ms"] for reply in replies))
    net = {side: median(cpu[side]) - median(cpu["alone"]) for side in here[1:]}
    result: dict[str, Any] = {"num_bytes": num_bytes, "cpu_ms": net, "blocks": cpu}
    if with_package:
        net["package"] = median(cpu["package"]) - median(cpu["package alone"])
        result["ratio"] = net["ours"] / net["package"]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=float, default=100, help="what is exchanged (100)")
    parser.add_argument("--blocks", type=int, default=7, help="turns of every side (7)")
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    parser.add_argument("--without-package", action="store_true", help="measure this library only")
    options = parser.parse_args(arguments)
    result = measure(
        int(1e6 * options.megabytes),
        options.blocks,
        package_python=options.package_python,
        with_package=not options.without_package,
    )
    parts = [f"{side} {ms:.0f} ms" for side, ms in result["cpu_ms"].items()]
    ratio = f"; ours / package {result['ratio']:.2f}" if "ratio" in result else ""
    show("exchange_cpu", result, f"CPU of exchanging {options.megabytes:g} MB, per worker: {', '.join(parts)}{ratio}")


if __name__ == "__main__":
    main()
