"""What saving costs training: the call, the step after it, memory, and resuming.

    python -m benchmarks.checkpoint_cost

Workers on this machine train a stack of linear layers with AdamW over a ring; medians over some saves, of the slowest
worker. `step after` is the first step after `async_save` has returned; `during` are all steps until the checkpoint is
written, that one included.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show


def train_and_save(state: dict[str, Any], width: int, batch: int, num_saves: int, folder: str) -> dict[str, float]:
    """Seconds of calls and steps, and bytes of memory, on this worker."""
    from decent_dp import DecentralizedDataParallel
    from decent_dp.checkpoint import async_save, load, save

    torch.set_num_threads(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    optim_fn = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    model = DecentralizedDataParallel(nn.Sequential(*layers), optim_fn, topology="ring")
    x = torch.randn(batch, width)

    def seconds(call: Any) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def step() -> None:
        model(x).square().mean().backward()

    def agreed(goes_on: bool) -> bool:
        answer = torch.tensor(int(goes_on))
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return bool(answer)

    for _ in range(5):
        step()
    plain, undisturbed, after, during, calls, whole = [], [], [], [], [], []
    for _ in range(num_saves):
        before = []
        for _ in range(4):
            agreed(True)  # as between the steps below
            before.append(seconds(step))
        plain += before
        undisturbed.append(fmean(before))
        begin = time.perf_counter()
        saving = async_save(model, f"{folder}/async", keep=1)
        calls.append(time.perf_counter() - begin)
        after.append(seconds(step))
        beside = [after[-1]]
        # no worker may stop while others step, and the slowest has written at the end
        while agreed(not saving.done):
            beside.append(seconds(step))
        during.append(fmean(beside))
        saving.wait()
        step()
    for _ in range(num_saves):
        dist.barrier()
        whole.append(seconds(lambda: save(model, f"{folder}/sync", keep=1)))
    dist.barrier()
    loading = seconds(lambda: load(model, f"{folder}/sync"))
    return {
        "step": median(plain),
        "step_after": median(after),
        "ratio": median(after) / median(plain),
        "ratio_during": median(during) / median(undisturbed),
        "async_call": median(calls),
        "save": median(whole),
        "load": loading,
        "state_mb": 4 * 4 * sum(p.numel() for p in model.parameters()) / 1e6,
    }


def measure(num_workers: int, width: int, batch: int, num_saves: int) -> dict[str, Any]:
    """The slowest worker's medians; seconds, megabytes a worker."""
    folder = tempfile.mkdtemp(prefix="decent-dp-")
    try:
        with Lab(1, namespaces=False) as lab, Crew(lab, num_workers) as crew:
            arguments = {"width": width, "batch": batch, "num_saves": num_saves, "folder": folder}
            results = crew.call("benchmarks.checkpoint_cost:train_and_save", **arguments)
    finally:
        shutil.rmtree(Path(folder), ignore_errors=True)
    slowest = {key: round(max(result[key] for result in results), 4) for key in results[0]}
    return {"num_workers": num_workers, "width": width, "batch": batch, **slowest}


def main() -> None:
    """Measure a few sizes and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=24)
    args = parser.parse_args()
    for num_workers in args.workers:
        for width, batch in ((256, 256), (768, 128)):
            result = measure(num_workers, width, batch, args.saves)
            show(
                "checkpoint_cost",
                result,
                f"{num_workers} workers, {result['state_mb']:.0f} MB each: a step takes {result['step']:.3f} s and the "
                f"one after async_save {result['ratio']:.2f} times that, until all is written "
                f"{result['ratio_during']:.2f} times; the call {result['async_call']:.3f} s, "
                f"save {result['save']:.3f} s, load {result['load']:.3f} s",
            )


if __name__ == "__main__":
    main()
