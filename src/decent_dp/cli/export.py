"""``decent-dp export``: the consensus model of a checkpoint as a file."""

from __future__ import annotations

import argparse
from typing import Any

from decent_dp.checkpoint import export
from decent_dp.cli.output import print_json, size
from decent_dp.cli.parsing import add_checkpoint

_EXPORT = """\
Write the average of all replicas as a file that loads into the bare model:
safetensors if its name ends in .safetensors, else a state dict for
torch.load(FILE, weights_only=True). One process reads the checkpoint.
"""


def add(subparsers: Any) -> None:
    """Add ``export``."""
    parser = subparsers.add_parser(
        "export", help="write the consensus model of a checkpoint as a file", description=_EXPORT
    )
    add_checkpoint(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file, *.safetensors or *.pt")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Write and say so."""
    file = export(args.directory, args.out, step=args.step)
    num_bytes = file.stat().st_size
    if args.json:
        print_json({"file": str(file), "num_bytes": num_bytes})
    else:
        print(f"wrote {file}, {size(num_bytes)}")
    return 0
