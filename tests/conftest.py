"""Fixtures that all tests share."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from pool import Pool
from processes import command_of, running_processes

_GRACE_S = 1.0
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # they end with this process


# A shell lets what it starts in the background ignore Ctrl+C, and so would all processes of the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # small tensors; the other cores belong to the pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The gloo workers of this run."""
    with Pool() as workers:
        yield workers


def _children() -> set[int]:
    pids = {info.pid for info in running_processes() if info.parent_pid == os.getpid()}
    return {pid for pid in pids if not any(helper in command_of(pid) for helper in _HELPERS)}


@contextlib.contextmanager
def children_end() -> Iterator[None]:
    """Fail when a child process that was started inside still runs a moment after the end."""
    before = _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        commands = [f"{pid}: {command_of(pid)}" for pid in sorted(left)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail("the test left processes running:\n" + "\n".join(commands))


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """Fail a test that leaves a child process of its own running."""
    with children_end():
        yield
