"""What simulations found: a table, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from decent_dp.simulate.run import Record, Run

_WIDTH = 80


def as_dict(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Everything, for JSON."""
    return [{**asdict(run), "factors": dict(run.factors)} for run in runs]


def as_json(runs: Sequence[Run]) -> str:
    """The text of a file; numbers that are not finite become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(as_dict(runs)), indent=1) + "\n"


def as_csv(runs: Sequence[Run]) -> str:
    """A line a record, with the topology in front; empty where there is no such measure."""
    names = [field.name for field in fields(Record)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not any(run.records for run in runs):
        writer.writerow(["topology", "step_s"])
        writer.writerows([run.topology, run.step_s] for run in runs)
        return text.getvalue()
    writer.writerow(["topology", *names])
    for run in runs:
        writer.writerows([run.topology, *(getattr(record, name) for name in names)] for record in run.records)
    return text.getvalue()


def summarize(runs: Sequence[Run], target: float | None = None) -> tuple[list[str], list[list[str]]]:
    """A header, and a row for each run, of the columns that any of them has.

    Args:
        runs: Of one problem.
        target: Loss of the consensus that is to be reached.
    """
    columns: list[tuple[str, list[str]]] = [("topology", [run.topology for run in runs])]
    last = [run.records[-1] if run.records else None for run in runs]
    for title, name, places in (
        ("distance", "consensus_distance", 0),
        ("loss", "loss", 0),
        ("loss*", "loss_of_consensus", 0),
        ("accuracy", "accuracy", 1),
        ("accuracy*", "accuracy_of_consensus", 1),
    ):
        values = [getattr(record, name) if record else None for record in last]
        columns.append((title, [_percent(v) if places else _number(v) for v in values]))
    for factor in dict.fromkeys(name for run in runs for name, _ in run.factors):
        columns.append((factor, [_number(dict(run.factors).get(factor)) for run in runs]))
    columns.append(("ms/step", ["" if run.step_s is None else f"{1000 * run.step_s:.1f}" for run in runs]))
    if target is not None:
        reached = [run.reached(target) for run in runs]
        columns.append((f"steps to {target:g}", [str(r.step) if r else "never" for r in reached]))
        columns.append(
            (f"s to {target:g}", ["" if r is None or r.time_s is None else f"{r.time_s:.1f}" for r in reached])
        )
    columns = [column for column in columns if any(column[1])]
    return [title for title, _ in columns], [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]


def as_markdown(runs: Sequence[Run], target: float | None = None) -> str:
    """The table of `summarize` for a page of documentation."""
    header, rows = summarize(runs, target)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *[[f"`{row[0]}`", *row[1:]] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_text(runs: Sequence[Run], target: float | None = None) -> str:
    """The table of `summarize` for a terminal of 80 columns, in several parts if it is wider."""
    header, rows = summarize(runs, target)
    columns = [[header[i], *(row[i] for row in rows)] for i in range(len(header))]
    first = [name[:22] for name in columns[0]]
    parts: list[list[list[str]]] = [[]]
    for column in columns[1:]:
        if len(_lines([first, *parts[-1], column])[0]) > _WIDTH:
            parts.append([])
        parts[-1].append(column)
    text = "\n\n".join("\n".join(_lines([first, *part])) for part in parts)
    return text + "\n\n* of the average of all replicas" * any(title.endswith("*") for title in header)


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _number(value: float | None) -> str:
    """Four digits."""
    if value is None:
        return ""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"
