"""One step of AccumAdamW: this library's, the published package's, and torch's fused AdamW beside them.

    python -m benchmarks.optimizer

Inside a training loop of a transformer, of which only the steps of the optimizer are counted, in turns and in whole
windows of 4 steps. All of it in several fresh processes of each side, since what a step of the package costs depends on
where its temporary tensors happen to lie in the process (about 13,000 or 24,000 page faults in each step), for as long
as that runs. The ratios are medians over the processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import original
from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show
from benchmarks.work import Transformer

_WINDOW = 4


def build(state: dict[str, Any], name: str, width: int, num_layers: int) -> int:
    """Make a model and its optimizer, torch or accum, of the package in this environment; counts the parameters."""
    work = Transformer(width, num_layers, batch=1, length=16)
    model = work.network()
    model[1].requires_grad_(False)  # the encoder alone is what is counted
    params = list(model[0].parameters())
    if name == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    else:
        from decent_dp.optim import AccumAdamW

        optimizer = AccumAdamW(params, lr=1e-4, weight_decay=0.1, accum_iter=_WINDOW)
    state[name] = work, model, optimizer
    return sum(p.numel() for p in params)


def run(state: dict[str, Any], name: str, num_windows: int) -> float:
    """Train; returns CPU milliseconds per step of the optimizer."""
    work, model, optimizer = state[name]
    cpu = 0.0
    for step in range(num_windows * _WINDOW):
        optimizer.zero_grad()
        work.loss(model, step, 0).backward()
        begin = time.process_time()
        optimizer.step()
        cpu += time.process_time() - begin
    return 1000 * cpu / (num_windows * _WINDOW)


def measure(
    width: int = 512,
    num_layers: int = 4,
    num_processes: int = 7,
    num_blocks: int = 5,
    *,
    package_python: Path | None = None,
    with_package: bool = True,
) -> dict[str, Any]:
    """CPU milliseconds per step, medians over the blocks of each process, and ratios, medians over processes."""
    if with_package:
        package_python = package_python or original.python()
    cpu: dict[str, list[float]] = {}
    with Lab(1, namespaces=False) as lab:
        for _ in range(num_processes):
            with ExitStack() as stack:
                here = stack.enter_context(Crew(lab))
                turns = [("torch fused AdamW", "torch", here), ("ours", "accum", here)]
                if with_package:
                    theirs = stack.enter_context(Crew(lab, python=package_python))
                    turns.append(("package", "accum", theirs))
                blocks: dict[str, list[float]] = {}
                for label, name, crew in turns:
                    (num_parameters,) = crew.call(
                        "benchmarks.optimizer:build", name=name, width=width, num_layers=num_layers
                    )
                    crew.call("benchmarks.optimizer:run", name=name, num_windows=1)
                    blocks[label] = []
                for _ in range(num_blocks):
                    for label, name, crew in turns:
                        (reply,) = crew.call("benchmarks.optimizer:run", name=name, num_windows=1)
                        blocks[label].append(reply)
            for label, values in blocks.items():
                cpu.setdefault(label, []).append(median(values))
    ms = {label: median(values) for label, values in cpu.items()}
    result: dict[str, Any] = {"num_parameters": num_parameters, "cpu_ms": ms, "processes": cpu}
    result["x_torch_fused"] = [a / b for a, b in zip(cpu["ours"], cpu["torch fused AdamW"], strict=True)]
    if with_package:
        result["x_faster_than_package"] = [a / b for a, b in zip(cpu["package"], cpu["ours"], strict=True)]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=7, help="fresh processes of each side (7)")
    parser.add_argument("--blocks", type=int, default=5, help="turns of each in a process (5)")
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    parser.add_argument("--without-package", action="store_true", help="leave the published package out")
    options = parser.parse_args(arguments)
    result = measure(
        num_processes=options.processes,
        num_blocks=options.blocks,
        package_python=options.package_python,
        with_package=not options.without_package,
    )
    parts = [f"{label} {_spread(result['processes'][label], 1)} ms" for label in result["cpu_ms"]]
    faster = (
        f", package / ours {_spread(result['x_faster_than_package'], 2)}" if "x_faster_than_package" in result else ""
    )
    show(
        "optimizer",
        result,
        f"CPU of a step of {result['num_parameters'] / 1e6:.1f} M parameters, by process: {', '.join(parts)}; "
        f"ours / torch {_spread(result['x_torch_fused'], 2)}{faster}",
    )


def _spread(values: Sequence[float], digits: int) -> str:
    """The median and the range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
