"""One step of AccumAdamW: this library's, the published package's, and torch's fused AdamW beside them.

    python -m benchmarks.optimizer

On the parameters of a transformer with gradients that stay the same, in turns. A window is 4 steps and what is counted
are whole windows.
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
    """Make an optimizer, torch or accum, of the package in this environment; returns the number of parameters."""
    params = list(Transformer(width, num_layers).network()[0].parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    if name == "torch":
        state[name] = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    else:
        from decent_dp.optim import AccumAdamW

        state[name] = AccumAdamW(params, lr=1e-4, weight_decay=0.1, accum_iter=_WINDOW)
    return sum(p.numel() for p in params)


def run(state: dict[str, Any], name: str, num_windows: int) -> dict[str, float]:
    """Step; returns CPU and wall milliseconds per step."""
    optimizer = state[name]
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_windows * _WINDOW):
        optimizer.step()
    num_steps = num_windows * _WINDOW
    wall_ms = 1000 * (time.perf_counter() - begin) / num_steps
    return {"cpu_ms": 1000 * (time.process_time() - cpu) / num_steps, "wall_ms": wall_ms}


def measure(
    width: int = 512,
    num_layers: int = 4,
    num_blocks: int = 7,
    *,
    package_python: Path | None = None,
    with_package: bool = True,
) -> dict[str, Any]:
    """CPU milliseconds per step, medians over blocks, and ratios."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(1, namespaces=False))
        here = stack.enter_context(Crew(lab))
        turns = [("torch fused AdamW", "torch", here), ("ours", "accum", here)]
        if with_package:
            theirs = stack.enter_context(Crew(lab, python=package_python or original.python()))
            turns.append(("package", "accum", theirs))
        cpu: dict[str, list[float]] = {}
        for label, name, crew in turns:
            (num_parameters,) = crew.call("benchmarks.optimizer:build", name=name, width=width, num_layers=num_layers)
            crew.call("benchmarks.optimizer:run", name=name, num_windows=1)
            cpu[label] = []
        for _ in range(num_blocks):
            for label, name, crew in turns:
                (reply,) = crew.call("benchmarks.optimizer:run", name=name, num_windows=1)
                cpu[label].append(reply["cpu_ms"])
    ms = {label: median(values) for label, values in cpu.items()}
    result: dict[str, Any] = {"num_parameters": num_parameters, "cpu_ms": ms, "blocks": cpu}
    result["x_torch_fused"] = ms["ours"] / ms["torch fused AdamW"]
    if with_package:
        result["x_faster_than_package"] = ms["package"] / ms["ours"]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=7, help="turns of each (7)")
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    parser.add_argument("--without-package", action="store_true", help="leave the published package out")
    options = parser.parse_args(arguments)
    result = measure(
        num_blocks=options.blocks, package_python=options.package_python, with_package=not options.without_package
    )
    parts = [f"{label} {ms:.1f} ms" for label, ms in result["cpu_ms"].items()]
    faster = f", package / ours {result['x_faster_than_package']:.2f}" if "x_faster_than_package" in result else ""
    show(
        "optimizer",
        result,
        f"CPU of a step of {result['num_parameters'] / 1e6:.1f} M parameters: {', '.join(parts)}; "
        f"ours / torch {result['x_torch_fused']:.2f}{faster}",
    )


if __name__ == "__main__":
    main()
