"""What the tests need to know of processes, read from /proc (Linux)."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessInfo(NamedTuple):
    """One process as /proc shows it."""

    pid: int
    parent_pid: int
    state: str  # "R", "S", "T" (stopped), "Z" (ended, not collected), ...


def die_with_parent(with_signal: int = signal.SIGKILL) -> None:
    """Let the kernel send `with_signal` to this process when the thread that started it ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def process_info(pid: int) -> ProcessInfo | None:
    """One process, or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in brackets and may hold anything, so read from the last one on.
    state, parent_pid = stat.rpartition(")")[2].split()[:2]
    return ProcessInfo(pid, int(parent_pid), state)


def running_processes() -> Iterator[ProcessInfo]:
    """All processes that have not ended; one that has ended and waits to be collected is left out."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (info := process_info(int(entry))) is not None and info.state != "Z":
            yield info


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it is gone or not ours to read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def command_of(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":  # <signal> <program> <arguments>: become that program, which dies with our parent
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
