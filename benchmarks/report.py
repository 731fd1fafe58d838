"""From the blocks of a run to a table, a picture, a JSON file and a dated report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

_COLUMNS = ("side", "ms/step", "min to max", "x alone", "x limit", "CPU ms", "MiB/host", "sent", "wire ms")


@dataclass(frozen=True, slots=True)
class Row:
    """One side in numbers.

    Attributes:
        side: Its name.
        block_ms: Mean step of every block, over steps and workers.
        cpu_ms: CPU time of a worker per step, median over blocks.
        host_bytes: Payload that a host must send per step; None where that is not known.
        sent_bytes: What the interface of the busiest host counted per step; None on loopback.
        wire_ms: How long its bandwidth needs for that; None where the network is not shaped.
    """

    side: str
    block_ms: tuple[float, ...]
    cpu_ms: float
    host_bytes: float | None
    sent_bytes: float | None
    wire_ms: float | None

    @property
    def ms(self) -> float:
        """Median over blocks."""
        return median(self.block_ms)


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run.

    Attributes:
        title: What was run.
        facts: Settings and provenance, in the order of the report.
        command: The command line.
        rows: The sides, in the order of the run.
    """

    title: str
    facts: Mapping[str, Any]
    command: str
    rows: tuple[Row, ...]

    @property
    def alone_ms(self) -> float | None:
        """The step without communication: the first limit."""
        return next((row.ms for row in self.rows if row.side == "alone"), None)

    def limit_ms(self, row: Row) -> float | None:
        """The larger one of the two limits: compute alone; bytes over bandwidth."""
        limits = [limit for limit in (self.alone_ms, row.wire_ms) if limit is not None]
        return max(limits) if limits and self.alone_ms is not None else None


def table(result: Result) -> list[list[str]]:
    """Head and rows as text."""
    lines = [list(_COLUMNS)]
    for row in result.rows:
        lines.append(
            [
                row.side,
                f"{row.ms:.1f}",
                f"{min(row.block_ms):.1f} to {max(row.block_ms):.1f}",
                _ratio(row.ms, result.alone_ms),
                _ratio(row.ms, result.limit_ms(row)),
                f"{row.cpu_ms:.0f}",
                "?" if row.host_bytes is None else f"{row.host_bytes / 2**20:.1f}",
                "-" if row.sent_bytes is None else f"{row.sent_bytes / 2**20:.1f}",
                "-" if row.wire_ms is None else f"{row.wire_ms:.0f}",
            ]
        )
    return lines


LEGEND = (
    "ms/step: median over blocks of the mean step of all workers; min to max: over blocks; x alone: over the step of a "
    "worker that communicates with nobody; x limit: over the larger of that and wire ms; CPU ms: of one worker's "
    "threads per step; MiB/host: payload that the busiest host must send per step; sent: what its interface counted; "
    "wire ms: that payload over the bandwidth."
)


def as_text(result: Result) -> str:
    """The table for a terminal."""
    facts = [f"{name}: {value}" for name, value in result.facts.items()]
    return "\n".join([result.title, *facts, "", *aligned(table(result)), "", LEGEND])


def as_markdown(result: Result, picture: str) -> str:
    """The report."""
    return markdown(result.title, result.facts, result.command, table(result), LEGEND, picture)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    ]


def markdown(
    title: str, facts: Mapping[str, Any], command: str, lines: Sequence[Sequence[str]], legend: str, picture: str = ""
) -> str:
    """A report: facts, command, table with its head in the first line, legend, picture if there is one."""
    head, *rest = lines
    rows = ["| " + " | ".join(line) + " |" for line in (head, ["---"] + ["---:"] * (len(head) - 1), *rest)]
    listed = [f"- {name}: {value}" for name, value in facts.items()]
    parts = [f"# {title}", "", *listed, "", f"    {command}", "", *rows, "", legend]
    if picture:
        parts += ["", f"![]({picture})"]
    return "\n".join(parts) + "\n"


def as_json(result: Result) -> str:
    """Everything, the numbers of the blocks included."""
    rows = [{**asdict(row), "ms": row.ms} for row in result.rows]
    whole = {"title": result.title, "command": result.command, "facts": dict(result.facts), "rows": rows}
    return json.dumps(whole, indent=1) + "\n"


def write(result: Result, folder: Path, stem: str) -> list[Path]:
    """Write stem.md, stem.json and stem.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    report, numbers, picture = (folder / f"{stem}.{ending}" for ending in ("md", "json", "png"))
    report.write_text(as_markdown(result, picture.name))
    numbers.write_text(as_json(result))
    draw(result, picture)
    return [report, numbers, picture]


def draw(result: Result, path: Path) -> None:
    """A bar per side with the range of its blocks; lines where compute alone and the wire end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result.rows
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.32 * len(rows)), layout="constrained")
    for position, row in enumerate(rows):
        axes.barh(position, row.ms, height=0.7, color=_color(row.side))
        low, high = min(row.block_ms), max(row.block_ms)
        axes.plot([low, high], [position, position], color="black", linewidth=1)
        axes.text(max(high, row.ms), position, f" {row.ms:.0f}", va="center", fontsize=9)
        if row.wire_ms:
            label = "wire: bytes / bandwidth" if row is _first_with_wire(rows) else None
            axes.plot([row.wire_ms] * 2, [position - 0.42, position + 0.42], color="#d1495b", linewidth=2, label=label)
    if result.alone_ms is not None:
        axes.axvline(result.alone_ms, color="black", linestyle=":", linewidth=1, label="compute alone")
    axes.set_yticks(range(len(rows)), [row.side for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(max(row.block_ms) for row in rows))
    axes.set_xlabel("ms per step; bar: median of blocks, line: their range")
    axes.set_title(result.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower right", ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _first_with_wire(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.wire_ms)


def _color(side: str) -> str:
    if side.startswith("ours"):
        return "#2a6f97"
    return "#a9c6d8" if side.startswith("package") else "#b8b8b8"


def _ratio(value: float, base: float | None) -> str:
    return "-" if not base else f"{value / base:.3f}"
