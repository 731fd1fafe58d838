"""Regenerate the tables of docs/choosing.md: runs every command in it and puts its output in place of the old one.

A command stands in a line of its own, ``    $ decent-dp simulate ...``; lines that end in a backslash go on. The table
follows between two comments. Run in the root of the repository: ``.venv/bin/python docs/make_choosing.py``. With
``--check`` nothing is written, and the exit code is 1 if a table has changed.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from decent_dp.cli.main import main

PAGE = Path(__file__).parent / "choosing.md"
BEGIN, END = "<!-- made by the command above -->", "<!-- end -->"
_BLOCK = re.compile(rf"^( +\$ decent-dp [^\n]*\n(?: +[^\n]+\n)*\n){BEGIN}\n.*?{END}", re.MULTILINE | re.DOTALL)


def run(command: str) -> str:
    """The table that a command prints as Markdown."""
    words = shlex.split(command.replace("\\\n", " ").strip().removeprefix("$ decent-dp"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main([*words, "--markdown"])
    if code != 0:
        raise SystemExit(f"{command.strip()}: exit code {code}")
    return output.getvalue().strip()


def regenerate(text: str, make: Callable[[str], str] = run) -> str:
    """The page with every table made anew.

    Args:
        text: The page.
        make: Gives the table of a command.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}{BEGIN}\n\n{make(block[1])}\n\n{END}", text)


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    new = regenerate(old)
    if "--check" in sys.argv:
        sys.exit(int(new != old))
    PAGE.write_text(new, encoding="utf-8")
