"""The published package, decent-dp 0.2.3, in a virtual environment of its own: it has the import name of this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.crew import ROOT

VERSION = "0.2.3"
FOLDER = ROOT / ".bench" / f"decent-dp-{VERSION}"


def python(folder: Path = FOLDER) -> Path:
    """The interpreter of that environment, which is made on the first call (some minutes).

    Its torch is the one in constraints.txt, the same as of this library's environment.

    Raises:
        RuntimeError: If it cannot be made; without the package, leave its sides out.
    """
    interpreter = folder / "bin" / "python"
    if _has_package(interpreter):
        return interpreter
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    install = [str(interpreter), "-m", "pip", "install", "--quiet"]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*install, "--constraint", str(constraints), torch, "numpy"],
        [*install, "--no-deps", f"decent-dp=={VERSION}"],
        [*install, "loguru"],
    ]
    print(f"making an environment for decent-dp {VERSION} ...", file=sys.stderr, flush=True)
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"no environment for decent-dp {VERSION}: '{' '.join(command[1:])}' failed:\n{done.stderr.strip()}"
            )
    if not _has_package(interpreter):
        raise RuntimeError(f"the environment has no decent-dp {VERSION}; remove its folder and try again")
    return interpreter


def _has_package(interpreter: Path) -> bool:
    if not interpreter.exists():
        return False
    code = "import importlib.metadata as m, loguru, torch; print(m.version('decent-dp'))"
    done = subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == VERSION
