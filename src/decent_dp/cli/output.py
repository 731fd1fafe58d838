"""What commands print: tables, and the same numbers as JSON."""

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

WIDTH = 80


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite become null."""
    print(json.dumps(_finite(value), indent=1, ensure_ascii=True))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a table: the first column to the left, numbers to the right; closer together where they must be."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    apart = "  " if sum(widths) + 2 * len(widths) - 2 <= WIDTH else " "
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(apart.join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def wrapped(text: str, indent: int = 0, first: str = "") -> str:
    """Text in lines that fit; those after the first are indented."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def prints(characters: str) -> bool:
    """Whether the terminal's encoding has these characters."""
    try:
        characters.encode((sys.stdout and sys.stdout.encoding) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def size(num_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
