"""What a worker of the pool does (see `pool.py` for what it is told)."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from processes import die_with_parent

# A rank that returned keeps its groups until all have: a peer may still be connecting to it, and destroying a
# group waits for nobody. A rank that failed cleans up at once, which is how its peers come to know.
RETURNED = b"returned"
CLEAN_UP = b"clean up"


class WorkerError(NamedTuple):
    """What one rank raised; `WorkerDied` and `WorkerHung` are type names for ranks that could not answer."""

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "WorkerError":
        """Text alone: a kept traceback would hold the frames of the case, and their process groups, alive."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True, slots=True)
class Case:
    """What one rank is told; the call is pickled apart, so that a failing import is an error of the case."""

    rank: int
    num_workers: int
    call: bytes
    store: Path
    group_timeout_s: float | None
    environment: dict[str, str]
    import_path: list[str]
    warning_filters: list[tuple[Any, ...]]


def work(pipe: connection.Connection, stacks_path: Path) -> None:
    """Answer cases until the parent is gone."""
    die_with_parent()
    os.setsid()  # so that what a case starts can be killed with the worker, and Ctrl+C is for the parent alone
    multiprocessing.current_process().daemon = False  # a case may start data workers
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that collecting after a case walks over what the case has made, not over all of torch
    with stacks_path.open("wb") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                case = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                return
            pipe.send_bytes(_answer(case, pipe))


def _answer(case: Case, pipe: connection.Connection) -> bytes:
    """The pickled result of a case, or the pickled error; the worker is clean afterwards."""
    errors: list[WorkerError] = []
    result = b""
    sys.path[:] = case.import_path
    with exact_environment(case.environment), _torch_defaults(), _lost_errors(errors), warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, lineno in reversed(case.warning_filters):
            texts = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
            warnings.filterwarnings(action, next(texts), category, next(texts), lineno)
        torch.manual_seed(case.rank)
        random.seed(case.rank)
        np.random.seed(case.rank)
        try:
            result = _call(case)
        except BaseException as error:  # SystemExit as well: the worker lives on
            errors.append(WorkerError.of(error))
        else:
            pipe.send_bytes(RETURNED)
            pipe.recv_bytes()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            errors.append(WorkerError.of(error))
        # Group names hold this counter; after a failed init_process_group it differs from that of other workers.
        dist.distributed_c10d._world.group_count = 0
        gc.collect()  # here, so that destructors warn under the filters of the case
    return pickle.dumps(errors[0]) if errors else result


def _call(case: Case) -> bytes:
    """Make the process group, call the function; what it leaves in local variables ends with this frame."""
    fn, args = pickle.loads(case.call)
    if case.group_timeout_s is not None:
        timeout = timedelta(seconds=case.group_timeout_s)
        # A file: connecting to a TCPStore looks names up, which may take 5 s on a machine without DNS.
        store = dist.FileStore(str(case.store), case.num_workers)
        dist.init_process_group("gloo", store=store, rank=case.rank, world_size=case.num_workers, timeout=timeout)
        dist.barrier()  # a rank that fails at once would otherwise leave while its peers still connect to it
    return pickle.dumps(fn(case.rank, case.num_workers, *args))


@contextlib.contextmanager
def exact_environment(environment: dict[str, str]) -> Iterator[None]:
    """Exactly these variables inside; the former ones afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _torch_defaults() -> Iterator[None]:
    """Put torch's switches back that a case may have turned."""
    dtype, grad, num_threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def _lost_errors(errors: list[WorkerError]) -> Iterator[None]:
    """Count exceptions that Python can only print (destructors, threads) as errors of the case."""

    def note(lost: Any) -> None:
        errors.append(WorkerError.of(lost.exc_value))

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = note
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before
