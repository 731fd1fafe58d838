"""``decent-dp inspect``: what is inside of a checkpoint."""

from __future__ import annotations

import argparse
import datetime
from dataclasses import asdict
from typing import Any

from decent_dp.checkpoint import Inspection, inspect
from decent_dp.cli.output import print_json, size
from decent_dp.cli.parsing import add_checkpoint

_INSPECT = """\
What is inside of a checkpoint: step, workers, topology, sizes, and how far the
replicas are apart. One process reads it, and executes nothing of it.
"""


def add(subparsers: Any) -> None:
    """Add ``inspect``."""
    parser = subparsers.add_parser("inspect", help="say what is inside of a checkpoint", description=_INSPECT)
    add_checkpoint(parser)
    parser.add_argument(
        "--no-distance", action="store_true", help="do not read all replicas for their consensus distance"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read and print."""
    found = inspect(args.directory, step=args.step, distance=not args.no_distance)
    if args.json:
        print_json({**asdict(found), "path": str(found.path)})
    else:
        print("\n".join(f"{name:<20}{value}" for name, value in _facts(found)))
    return 0


def _facts(found: Inspection) -> list[tuple[str, str]]:
    num_nodes = found.num_workers // found.workers_per_node
    parts = found.part_bytes
    sizes = size(min(parts)) if min(parts) == max(parts) else f"{size(min(parts))} to {size(max(parts))}"
    saved = datetime.datetime.fromtimestamp(found.saved_at).astimezone()
    facts = [
        ("checkpoint", str(found.path)),
        ("step", str(found.step)),
        ("saved", saved.isoformat(sep=" ", timespec="seconds")),
        ("workers", f"{found.num_workers} on {num_nodes} node{'s' * (num_nodes != 1)}"),
        ("topology", found.topology),
        ("wire dtype", "that of the parameters" if found.wire_dtype == "None" else found.wire_dtype),
        ("parameters", f"{found.num_parameters:,}"),
        ("optimizer", found.optimizer),
        ("scheduler", found.scheduler),
        ("scaler", found.scaler),
        ("size", f"{size(sum(parts))}, {sizes} a worker"),
    ]
    if found.consensus_distance is not None:
        facts.append(("consensus distance", f"{found.consensus_distance:.6g}"))
    facts.append(("saved besides", ", ".join(found.extra) or "nothing"))
    return facts
