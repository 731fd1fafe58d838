"""What the wrapper costs one worker: a transformer wrapped, against the plain loop with the same fused optimizer.

    python -m benchmarks.overhead

Both train in one process and take turns step by step, in alternating order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show
from benchmarks.work import Transformer


def run(
    state: dict[str, Any], width: int, num_layers: int, batch: int, length: int, num_warmup: int, num_steps: int
) -> dict[str, Any]:
    """Train both; returns milliseconds of every counted step."""
    from decent_dp import DecentralizedDataParallel

    work = Transformer(width, num_layers, batch, length)
    optim_fn = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    plain, wrapped = work.network(), DecentralizedDataParallel(work.network(), optim_fn)
    optimizer = optim_fn(plain.parameters())

    def train_plain(step: int) -> None:
        work.loss(plain, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train_wrapped(step: int) -> None:
        work.loss(wrapped, step, 0).backward()

    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    for step in range(num_warmup + num_steps):
        order = [("plain", train_plain), ("wrapped", train_wrapped)]
        for name, train in order if step % 2 else reversed(order):
            begin = time.perf_counter()
            train(step)
            if step >= num_warmup:
                times[name].append(1000 * (time.perf_counter() - begin))
    equal = all(torch.equal(p, q) for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True))
    return {"step_ms": times, "num_parameters": sum(p.numel() for p in plain.parameters()), "equal": equal}


def measure(
    width: int = 512,
    num_layers: int = 8,
    batch: int = 4,
    length: int = 64,
    num_warmup: int = 3,
    num_steps: int = 20,
) -> dict[str, Any]:
    """Overhead in percent: of the median step, and as the median over pairs of neighbouring steps."""
    with Lab(1, namespaces=False) as lab, Crew(lab, timeout_s=600) as crew:
        sizes = {"width": width, "num_layers": num_layers, "batch": batch, "length": length}
        counts = {"num_warmup": num_warmup, "num_steps": num_steps}
        (reply,) = crew.call("benchmarks.overhead:run", **sizes, **counts)
    plain, wrapped = reply["step_ms"]["plain"], reply["step_ms"]["wrapped"]
    return {
        "num_parameters": reply["num_parameters"],
        "plain_ms": median(plain),
        "wrapped_ms": median(wrapped),
        "overhead_percent": 100 * (median(wrapped) / median(plain) - 1),
        "paired_percent": 100 * (median(b / a for a, b in zip(plain, wrapped, strict=True)) - 1),
        "equal_parameters": reply["equal"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512, help="of the transformer (512)")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer (8; 25 M parameters)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 in a batch (4)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each (20)")
    options = parser.parse_args(arguments)
    result = measure(options.width, options.layers, options.batch, num_steps=options.steps)
    show(
        "overhead",
        result,
        f"{result['num_parameters'] / 1e6:.1f} M parameters, one worker: plain {result['plain_ms']:.1f} ms, wrapped "
        f"{result['wrapped_ms']:.1f} ms, {result['overhead_percent']:+.2f} % ({result['paired_percent']:+.2f} % in "
        "pairs)",
    )


if __name__ == "__main__":
    main()
