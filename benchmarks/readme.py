"""The performance table of the README, from the newest reports.

python -m benchmarks.readme            rewrite it
python -m benchmarks.readme --check    say whether it is up to date
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.crew import ROOT

REPORTS = ROOT / "benchmarks" / "reports"
README = ROOT / "README.md"
BEGIN, END = "<!-- performance: python -m benchmarks.readme -->", "<!-- end of performance -->"
PRESETS = {
    "hosts": "4 hosts, 400 Mbit/s",
    "nodes": "4 hosts x 2 workers, 400 Mbit/s",
    "jitter": "4 hosts, 1 Gbit/s, jitter",
}


def newest(preset: str, folder: Path = REPORTS) -> tuple[Path, dict[str, Any]]:
    """The last report of a preset."""
    path = max(path for path in folder.glob(f"*-{preset}.json") if path.stem[11:] == preset)
    return path, json.loads(path.read_text())


def name_of(side: str) -> str:
    """How the README calls a side."""
    kind, *rest = side.split(":")
    if kind in ("alone", "ddp", "ddp-fp16"):
        return {"alone": "no communication", "ddp": "torch DDP", "ddp-fp16": "torch DDP, fp16 hook"}[kind]
    wire = f", {rest[1]} wire" if len(rest) > 1 else ""
    return ("decent-dp 0.2.3" if kind == "package" else "this library") + f", `{rest[0]}`{wire}"


def performance() -> str:
    """The table and where it comes from."""
    reports = {preset: newest(preset) for preset in PRESETS}
    ms = {preset: {row["side"]: row["ms"] for row in report["rows"]} for preset, (_, report) in reports.items()}
    sides = list(dict.fromkeys(row["side"] for _, report in reports.values() for row in report["rows"]))
    order = ("alone", "ddp", "package", "ours")
    sides.sort(key=lambda side: next(k for k, kind in enumerate(order) if side.split(":")[0].startswith(kind)))
    lines = ["| ms per step | " + " | ".join(PRESETS.values()) + " |", "|---" + "|---:" * len(PRESETS) + "|"]
    for side in sides:
        cells = [f"{ms[preset][side]:.0f}" if side in ms[preset] else "" for preset in PRESETS]
        lines.append(f"| {name_of(side)} | " + " | ".join(cells) + " |")
    links = ", ".join(
        f"[{preset}]({path.with_suffix('.md').relative_to(ROOT)})" for preset, (path, _) in reports.items()
    )
    return "\n".join([*lines, "", f"Reports with spread, limits, hardware, versions and commands: {links}."])


def rewritten(text: str) -> str:
    """The README with the table of today."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + performance() + "\n" + END + rest.split(END)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is out of date")
    options = parser.parse_args(arguments)
    text = README.read_text()
    if options.check:
        parser.exit(int(rewritten(text) != text))
    README.write_text(rewritten(text))


if __name__ == "__main__":
    main()
