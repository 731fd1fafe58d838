"""Memory beyond parameters, gradients and optimizer state: measured at the process, and computed from its tensors.

    python -m benchmarks.memory

Every side runs in processes of its own, on loopback. Measured is the growth of the resident set since before the model
was made, after some steps (`resident`: gradients are gone) and at its highest within a step (`peak`), less parameters,
momentum and, for the peak, all gradients. Computed are the bytes of all tensors that are neither. A small model of the
same side is trained before, so that connections and libraries do not count.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import original, sides
from benchmarks.crew import Crew
from benchmarks.lab import Lab
from benchmarks.record import show

# Tensors get mappings of their own, so that freed memory leaves the resident set at once.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_NUM_STEPS = 4
SIDES = ("alone", "ours:ring", "ours:ring:bf16", "ours:complete", "ours:complete:bf16", "package:ring")


def observe(state: dict[str, Any], name: str, parameters_mib: float, bucket_mib: float) -> dict[str, float]:
    """Train a side; returns MiB of this worker: params, resident, peak, computed."""
    _train(state, name, 0.25, bucket_mib)
    state.clear()
    gc.collect()
    before = _status_mib("VmRSS")
    _train(state, name, parameters_mib, bucket_mib)
    model = state[name][1].model
    gc.collect()
    resident = _status_mib("VmRSS") - before
    _reset_peak()
    sides.run(state, name, 0, 0, _NUM_STEPS)
    peak = _status_mib("VmHWM") - before
    params = list(model.parameters())
    params_mib = sum(p.numel() * p.element_size() for p in params) / 2**20
    return {
        "params_mib": params_mib,
        "resident_mib": resident - 2 * params_mib,
        "peak_mib": peak - 3 * params_mib,
        "computed_mib": _other_tensors_mib(params, num_state=1),
    }


def _train(state: dict[str, Any], name: str, parameters_mib: float, bucket_mib: float) -> None:
    work = {"kind": "emulated", "parameters_mib": parameters_mib, "num_layers": 16, "compute_s": 0.0}
    sides.build(state, name, work, bucket_mib)
    sides.run(state, name, 0, 0, _NUM_STEPS)


def _other_tensors_mib(params: list[torch.nn.Parameter], num_state: int) -> float:
    """MiB of all tensors Python knows, storages counted once, without parameters and optimizer state of their size."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    params_bytes = sum(p.numel() * p.element_size() for p in params)
    return (sum(sizes.values()) - (1 + num_state) * params_bytes) / 2**20


def _status_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 2**10
    raise RuntimeError(f"/proc/self/status has no {key}")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(
    names: Sequence[str] = SIDES,
    num_workers: int = 4,
    parameters_mib: float = 64,
    bucket_mib: float = 8,
    *,
    package_python: Path | None = None,
) -> dict[str, Any]:
    """MiB of each side beyond parameters, gradients and momentum; the largest of its workers."""
    seen = {}
    with Lab(1, namespaces=False) as lab:
        for name in names:
            python = (package_python or original.python()) if name.startswith("package") else None
            options = {} if python is None else {"python": python}
            with Crew(lab, num_workers, environment=_ENVIRONMENT, **options) as crew:
                arguments = {"name": name, "parameters_mib": parameters_mib, "bucket_mib": bucket_mib}
                replies = crew.call("benchmarks.memory:observe", **arguments)
            seen[name] = {key: max(reply[key] for reply in replies) for key in replies[0]}
            for key in ("resident", "peak", "computed"):
                seen[name][f"{key}_x_params"] = seen[name][f"{key}_mib"] / seen[name]["params_mib"]
    return {"num_workers": num_workers, "parameters_mib": parameters_mib, "bucket_mib": bucket_mib, "sides": seen}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", metavar="SIDE", default=SIDES, help="see benchmarks/sides.py")
    parser.add_argument("--workers", type=int, default=4, help="workers (4)")
    parser.add_argument("--parameters-mib", type=float, default=64, help="parameters (64)")
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    options = parser.parse_args(arguments)
    for name in options.sides:
        sides.check(name)
    result = measure(options.sides, options.workers, options.parameters_mib, package_python=options.package_python)
    parts = [
        f"{name} {seen['resident_x_params']:.3f} resident, {seen['peak_x_params']:.3f} peak, "
        f"{seen['computed_x_params']:.3f} computed"
        for name, seen in result["sides"].items()
    ]
    show("memory", result, f"x parameters beyond parameters, gradients and momentum: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
