"""Runs the command line: in this process, or as users do."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from decent_dp.cli.main import main


class Ran(NamedTuple):
    """What a command has left."""

    code: int
    out: str
    err: str


def in_process(capsys: pytest.CaptureFixture[str], line: str) -> Ran:
    """Run a command line without a process of its own."""
    capsys.readouterr()
    code = main(line.split())
    return Ran(code, *capsys.readouterr())


def as_user(*words: str, **environment: str) -> Ran:
    """Run ``python -m decent_dp`` with some words."""
    ran = subprocess.run(
        [sys.executable, "-m", "decent_dp", *words],
        capture_output=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())
