"""What this library costs beside the time on the wire, all of it in one report.

    python -m benchmarks.costs

Runs `exchange_cpu`, `optimizer`, `overhead`, `memory` and `wrap_time` with their defaults, about five minutes. Wants a
quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import exchange_cpu, memory, optimizer, original, overhead, report, wrap_time
from benchmarks.crew import ROOT
from benchmarks.record import provenance

_TITLE = "Costs beside the time on the wire"
_LEGEND = (
    "ratio: this library over what stands beside it, both measured in one run. CPU ms of an exchange are those of a "
    "worker beyond the bare loop. Optimizers are measured in several processes of each side; ratios are medians "
    "over these. Memory is what is resident beyond parameters, gradients and momentum, over the parameters."
)


def measure(package_python: Path) -> dict[str, dict[str, Any]]:
    """What each benchmark returns."""
    return {
        "exchange_cpu": exchange_cpu.measure(package_python=package_python),
        "optimizer": optimizer.measure(package_python=package_python),
        "overhead": overhead.measure(),
        "memory": memory.measure(package_python=package_python),
        "wrap_time": wrap_time.measure(),
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Head and rows as text."""
    exchange, step, loop = (results[name] for name in ("exchange_cpu", "optimizer", "overhead"))
    room, wrapped = results["memory"]["sides"], results["wrap_time"]
    against_package = median(1 / ratio for ratio in step["x_faster_than_package"])
    megabytes = f"{exchange['num_bytes'] / 1e6:.0f} MB"
    package = "decent-dp 0.2.3"
    lines = [
        ["cost", "this library", "beside it", "", "ratio"],
        [
            f"exchange of {megabytes} between two workers, CPU ms",
            f"{exchange['cpu_ms']['ours']:.1f}",
            package,
            f"{exchange['cpu_ms']['package']:.1f}",
            f"{exchange['ratio']:.2f}",
        ],
    ]
    steps = f"AccumAdamW step of {step['num_parameters'] / 1e6:.1f} M parameters, CPU ms"
    for name, label, ratio in (
        ("torch fused AdamW", "torch fused AdamW", median(step["x_torch_fused"])),
        ("package", package, against_package),
    ):
        lines.append([steps, f"{step['cpu_ms']['ours']:.1f}", label, f"{step['cpu_ms'][name]:.1f}", f"{ratio:.2f}"])
    lines.append(
        [
            f"training step of {loop['num_parameters'] / 1e6:.1f} M parameters, one worker, ms",
            f"{loop['wrapped_ms']:.1f}",
            "the plain loop",
            f"{loop['plain_ms']:.1f}",
            f"{loop['wrapped_ms'] / loop['plain_ms']:.3f}",
        ]
    )
    theirs = next(seen for name, seen in room.items() if name.startswith("package"))["resident_x_params"]
    for name, seen in room.items():
        if name.startswith("ours:"):
            ours = seen["resident_x_params"]
            what = f"memory, {name.removeprefix('ours:').replace(':', ', ')}"
            lines.append([what, f"{ours:.3f}", f"{package}, ring", f"{theirs:.3f}", f"{ours / theirs:.2f}"])
    lines.append(["process groups of exp at 256 workers", str(wrapped["num_groups_at_256"]), "", "", ""])
    lines.append([f"seconds to wrap at {wrapped['num_workers']} workers", f"{wrapped['seconds']:.2f}", "", "", ""])
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report and JSON"
    )
    options = parser.parse_args(arguments)
    results = measure(options.package_python or original.python())
    lines = table(results)
    print("\n".join(report.aligned(lines)))
    facts = {"date": datetime.date.today().isoformat(), **provenance(), "package": "decent-dp 0.2.3"}
    command = "python -m benchmarks.costs"
    stem = options.output / f"{facts['date']}-costs"
    options.output.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (stem.with_suffix(".md"), report.markdown(_TITLE, facts, command, lines, _LEGEND)),
        (stem.with_suffix(".json"), json.dumps({"facts": facts, **results}, indent=1) + "\n"),
    ):
        path.write_text(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
