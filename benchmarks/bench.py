"""Step times of all sides in one run, on several hosts with shaped links.

    python -m benchmarks.bench --preset hosts        4 hosts, 400 Mbit/s, 300 ms of compute
    python -m benchmarks.bench --preset nodes        4 hosts of 2 workers, 400 Mbit/s, 400 ms
    python -m benchmarks.bench --preset jitter       4 hosts, 1 Gbit/s, 300 ms x (1 + U[0, 0.5])

Needs root and iproute2 for the links; without them the same runs on loopback, and says that nothing is shaped. The
sides take turns, block by block, so that whatever else the machine does hits all alike. Every block begins with steps
that are not counted. Sides that cannot be set up (a topology this layout cannot have) are left out with a message.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import link, original, report, sides
from benchmarks.crew import ROOT, Crew
from benchmarks.lab import Lab
from benchmarks.limits import host_bytes
from benchmarks.record import provenance
from benchmarks.work import num_parameter_bytes

REPORTS = ROOT / "benchmarks" / "reports"
_BASELINES = ("alone", "ddp", "ddp-fp16")
_PLACES = ("--output", "--package-python")
_STEPS_APART = 1000  # every block has step numbers of its own, the same for all sides

PRESETS: dict[str, dict[str, Any]] = {
    "hosts": {
        "hosts": 4,
        "workers_per_host": 1,
        "rate_mbit": 400.0,
        "compute_ms": 300.0,
        "sides": [
            *_BASELINES,
            *("package:ring", "package:exp", "package:complete"),
            *("ours:ring", "ours:exp", "ours:complete", "ours:ring:bf16", "ours:exp:bf16"),
        ],
    },
    "nodes": {
        "hosts": 4,
        "workers_per_host": 2,
        "rate_mbit": 400.0,
        "compute_ms": 400.0,
        "sides": [
            *_BASELINES,
            *("package:ring", "package:exp", "package:alternating-exp-ring", "package:complete"),
            *("ours:ring", "ours:exp", "ours:alternating-exp-ring", "ours:complete"),
            *("ours:alternating-exp-ring:bf16", "ours:hierarchical", "ours:hierarchical:bf16"),
        ],
    },
    "jitter": {
        "hosts": 4,
        "workers_per_host": 1,
        "rate_mbit": 1000.0,
        "compute_ms": 300.0,
        "jitter": [0.0, 0.5],
        "steps": 24,
        "sides": [
            *_BASELINES,
            *("package:ring", "package:exp", "package:complete", "ours:ring", "ours:exp", "ours:complete"),
        ],
    },
}


@dataclass(frozen=True, slots=True)
class Run:
    """What to run.

    Attributes:
        work: Arguments of `benchmarks.work.make`, the kind among them.
        sides: Their names, in turn order.
        bucket_mib: Size of a bucket.
        num_blocks: Turns of every side.
        num_warmup: Steps at the start of a turn that are not counted.
        num_steps: Steps that are.
        workers_per_host: On each host.
        package_python: Interpreter of the published package's environment; made when None.
    """

    work: dict[str, Any]
    sides: tuple[str, ...]
    bucket_mib: float = 4
    num_blocks: int = 5
    num_warmup: int = 3
    num_steps: int = 12
    workers_per_host: int = 1
    package_python: Path | None = None


def measure(lab: Lab, run: Run, *, say: bool = False) -> tuple[tuple[report.Row, ...], dict[str, Any]]:
    """Run all sides in turns.

    Args:
        lab: Hosts, brought up.
        run: What to run.
        say: Whether to tell on standard error how far it is.

    Returns:
        A row per side, and facts measured on the way.
    """
    num_bytes = num_parameter_bytes(**run.work)
    facts: dict[str, Any] = {}
    with ExitStack() as stack:
        crews = {}
        if any(not name.startswith("package") for name in run.sides):
            crews["here"] = stack.enter_context(Crew(lab, run.workers_per_host))
        if any(name.startswith("package") for name in run.sides):
            python = run.package_python or original.python()
            crews["package"] = stack.enter_context(Crew(lab, run.workers_per_host, python))

        def crew_of(name: str) -> Crew:
            return crews["package" if name.startswith("package") else "here"]

        if lab.num_hosts > 1:
            goodput = link.goodput_bits_per_s(next(iter(crews.values())), num_bytes)
            facts["one transfer of all parameters"] = f"{goodput / 1e6:.0f} Mbit/s of payload"
        for name in run.sides:
            crew_of(name).call("benchmarks.sides:build", name=name, work=run.work, bucket_mib=run.bucket_mib)
        blocks: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in run.sides}
        sent: dict[str, list[float]] = {name: [] for name in run.sides}
        for block in range(run.num_blocks):
            for name in run.sides:
                arguments = {"first_step": _STEPS_APART * block, "num_warmup": run.num_warmup}
                arguments["num_steps"] = run.num_steps
                before = lab.sent_bytes()
                replies = crew_of(name).call("benchmarks.sides:run", name=name, **arguments)
                blocks[name].append(replies)
                sent[name].append(_most_sent(before, lab.sent_bytes(), run.num_warmup + run.num_steps))
                if say:
                    ms = _mean_ms(replies)
                    print(f"block {block + 1}/{run.num_blocks} {name}: {ms:.1f} ms", file=sys.stderr, flush=True)
    rows = []
    for name in run.sides:
        needed = host_bytes(name, num_bytes, lab.num_hosts, run.workers_per_host)
        has_wire = lab.why_not_shaped is None and lab.rate_bits_per_s and needed is not None
        rows.append(
            report.Row(
                side=name,
                block_ms=tuple(_mean_ms(replies) for replies in blocks[name]),
                cpu_ms=median(fmean(reply["cpu_ms"] for reply in replies) for replies in blocks[name]),
                host_bytes=needed,
                sent_bytes=median(sent[name]) if lab.has_namespaces else None,
                wire_ms=1000 * 8 * needed / lab.rate_bits_per_s if has_wire else None,
            )
        )
    return tuple(rows), facts


def _most_sent(before: list[int] | None, after: list[int] | None, num_steps: int) -> float:
    """Bytes per step of the host that sent most."""
    if before is None or after is None:
        return 0.0
    return max(b - a for a, b in zip(before, after, strict=True)) / num_steps


def _mean_ms(replies: list[dict[str, Any]]) -> float:
    return fmean(ms for reply in replies for ms in reply["step_ms"])


def possible(names: Sequence[str], num_hosts: int, workers_per_host: int) -> tuple[str, ...]:
    """The sides whose topology this layout can have; says on standard error which are left out."""
    kept = []
    for name in names:
        sides.check(name)
        try:
            host_bytes(name, 0, num_hosts, workers_per_host)
        except ValueError as error:
            print(f"left out {name}: {error}", file=sys.stderr)
        else:
            kept.append(name)
    return tuple(kept)


def _command(arguments: Sequence[str]) -> str:
    """The command line without what names places on this machine."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(_PLACES):
            kept.append(argument)
        skip = argument in _PLACES
    return shlex.join(["python", "-m", "benchmarks.bench", *kept])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a preset gives what is not given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="hosts", help="settings to start from (hosts)")
    parser.add_argument("--hosts", type=int, help="number of hosts")
    parser.add_argument("--workers-per-host", type=int, help="workers on each host")
    parser.add_argument("--rate-mbit", type=float, help="uplink of a host in Mbit/s; 0 does not shape")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, even as root")
    parser.add_argument("--work", choices=("emulated", "transformer"), default="emulated", help="what a step computes")
    parser.add_argument("--compute-ms", type=float, help="time of the emulated layers per step")
    parser.add_argument("--jitter", type=float, nargs=2, metavar=("A", "B"), help="compute x (1 + U[A, B])")
    parser.add_argument("--parameters-mib", type=float, default=20, help="parameters of the emulated layers (20)")
    parser.add_argument("--layers", type=int, default=20, help="emulated layers (20)")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer (256)")
    parser.add_argument("--bucket-mib", type=float, default=4, help="size of a bucket (4)")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="see benchmarks/sides.py; those of the preset")
    parser.add_argument("--blocks", type=int, default=5, help="turns of every side (5)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a turn that are not counted (3)")
    parser.add_argument("--steps", type=int, help="steps of a turn that are counted (12; jitter 24)")
    parser.add_argument("--package-python", type=Path, help="interpreter that has decent-dp 0.2.3; made when not given")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report, JSON and picture")
    parser.add_argument("--name", help="of these files, after the date (the preset)")
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    defaults = {"jitter": [0.0, 0.0], "steps": 12, **PRESETS[options.preset]}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        for name in options.sides:
            sides.check(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> report.Result:
    """Run, print, write."""
    options = parse(arguments)
    work: dict[str, Any] = {"kind": options.work}
    if options.work == "emulated":
        work |= {"parameters_mib": options.parameters_mib, "num_layers": options.layers}
        work |= {"compute_s": options.compute_ms / 1000, "jitter": options.jitter}
        what = f"{options.compute_ms:g} ms of emulated compute"
        if any(options.jitter):
            what += f" x (1 + U[{options.jitter[0]:g}, {options.jitter[1]:g}])"
    else:
        work |= {"width": options.width}
        what = "a transformer on CPU"
    names = possible(options.sides, options.hosts, options.workers_per_host)
    run = Run(
        work,
        names,
        options.bucket_mib,
        options.blocks,
        options.warmup,
        options.steps,
        options.workers_per_host,
        options.package_python,
    )
    with Lab(options.hosts, 1e6 * options.rate_mbit or None, namespaces=not options.loopback) as lab:
        rows, measured = measure(lab, run, say=True)
        description, is_shaped = lab.description, lab.why_not_shaped is None
    rate = f"{options.rate_mbit:g} Mbit/s" if is_shaped else "unshaped"
    parameters_mib = num_parameter_bytes(**work) / 2**20
    facts = {
        "date": datetime.date.today().isoformat(),
        "network": description,
        **measured,
        "work": f"{what}, {parameters_mib:.1f} MiB of parameters, SGD with momentum",
        "buckets": f"{options.bucket_mib:g} MiB",
        "turns": f"{run.num_blocks} of {run.num_steps} steps after {run.num_warmup} that are not counted",
        **provenance(),
        "package": f"decent-dp {original.VERSION}" if any(name.startswith("package") for name in names) else "not run",
    }
    result = report.Result(
        title=f"{options.hosts} hosts x {options.workers_per_host} workers, {rate}, {what}",
        facts=facts,
        command=_command(sys.argv[1:] if arguments is None else arguments),
        rows=rows,
    )
    print(report.as_text(result))
    if not options.no_report:
        stem = f"{facts['date']}-{options.name or options.preset}"
        for path in report.write(result, options.output, stem):
            print(f"wrote {path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path}")
    return result


if __name__ == "__main__":
    main()
