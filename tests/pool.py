"""Gloo workers that live for the whole test run.

Starting Python and importing torch costs seconds, a process group some milliseconds. So the workers are
forked once from a server that has torch loaded, and every case gets a process group of its own among the
first n of them:

    def mean_of_ranks(rank: int, n: int) -> float:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x.item() / n

    def test_mean(pool: Pool) -> None:
        assert pool.run(mean_of_ranks, 4) == [1.5] * 4

A worker that failed is cleaned and used again; one that died or hung is killed and replaced.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from processes import die_with_parent, process_info

MAX_WORKERS = 8
_START_TIMEOUT_S = 90.0
_GRACE_S = 1.0  # past a group timeout, for the error to travel up to its rank's answer
# The first optimizer that is made imports torch._dynamo: seconds in every worker, unless it is here already.
_PRELOAD = ["numpy", "pytest", "torch", "torch.distributed", "torch._dynamo"]


class WorkerError(NamedTuple):
    """What one rank raised; `WorkerDied` and `WorkerHung` are type names for ranks that could not answer."""

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "WorkerError":
        """Text alone: a kept traceback would hold the frames of the case, and their process groups, alive."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


class WorkerFailure(Exception):  # noqa: N818 - a failure of the case; the errors are inside
    """At least one rank of a case did not return.

    Attributes:
        errors: The error of each rank that failed, by rank.
    """

    def __init__(self, name: str, num_workers: int, errors: dict[int, WorkerError]) -> None:
        self.errors = errors
        parts = [f"{name}: {len(errors)} of {num_workers} workers failed"]
        for rank, error in errors.items():
            parts.append(f"--- rank {rank}: {error.type_name}: {error.message}\n{error.traceback}".rstrip())
        super().__init__("\n".join(parts))


class Resources(NamedTuple):
    """What a worker holds between two cases."""

    num_descriptors: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class _Case:
    """What one rank is told; the call is pickled apart, so that a failing import is an error of the case."""

    rank: int
    num_workers: int
    call: bytes
    store: Path
    group_timeout_s: float | None
    environment: dict[str, str]
    import_path: list[str]
    warning_filters: list[tuple[Any, ...]]


class Pool:
    """Up to `MAX_WORKERS` gloo workers on this machine, started when first needed and kept."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        # Threads that a library starts on import would not survive the fork.
        with _environment(os.environ | {"OMP_NUM_THREADS": "1"}):
            forkserver.ensure_running()
        self._directory = Path(tempfile.mkdtemp(prefix="decent-dp-pool-"))
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._num_cases = 0
        atexit.register(self.close)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout_s: float = 30.0,
        group_timeout_s: float | None = 20.0,
        local_world_size: int | None = None,
        expect_errors: bool = False,
    ) -> list[Any]:
        """Run `fn(rank, n, *args)` on the first n workers, inside a fresh default process group.

        Each rank sees the environment and the warning filters of the caller, the launch variables RANK,
        WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, one thread, and random generators seeded with its rank.

        Args:
            fn: A function at the top of a module; arguments and results are pickled.
            n: The number of workers.
            args: Further arguments, the same for all ranks.
            timeout_s: How long the case may take; ranks that have not answered by then count as hung. After
                the death of a rank, the others get no longer than the timeout of the group.
            group_timeout_s: The timeout of the process group; None: no process group is made.
            local_world_size: The value of LOCAL_WORLD_SIZE; all n by default.
            expect_errors: Return the errors of failing ranks, as `WorkerError`, in place of their results.

        Returns:
            The results by rank.

        Raises:
            WorkerFailure: A rank raised, died or hung, and `expect_errors` is off.
        """
        call = pickle.dumps((fn, args))
        workers = self._first(n)
        self._num_cases += 1
        store = self._directory / f"store-{self._num_cases}"
        local = local_world_size or n
        answers: dict[int, Any] = {}
        try:
            for rank, worker in enumerate(workers):
                launch = {
                    "RANK": rank,
                    "WORLD_SIZE": n,
                    "LOCAL_RANK": rank % local,
                    "LOCAL_WORLD_SIZE": local,
                }
                environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | {k: str(v) for k, v in launch.items()}
                filters = list(warnings.filters)
                worker.send(_Case(rank, n, call, store, group_timeout_s, environment, sys.path, filters))
            _collect(workers, answers, timeout_s, group_timeout_s or 0.0)
        finally:
            # Also after an interrupt: a worker that is still inside the case cannot be used again.
            for rank, worker in enumerate(workers):
                if rank not in answers:
                    answers[rank] = worker.end(timeout_s)
            store.unlink(missing_ok=True)
        results = [answers[rank] for rank in range(n)]
        errors = {rank: result for rank, result in enumerate(results) if isinstance(result, WorkerError)}
        if errors and not expect_errors:
            raise WorkerFailure(f"{fn.__module__}.{fn.__qualname__}", n, errors)
        return results

    def resources(self, n: int) -> list[Resources]:
        """Open descriptors and threads of the first n workers, which are between two cases."""
        pids = [worker.process.pid for worker in self._first(n)]
        return [Resources(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for pid in pids]

    def pids(self) -> list[int]:
        """The process ids of the workers that were started, by rank."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill all workers; does nothing the second time."""
        atexit.unregister(self.close)
        while self._workers:
            self._workers.pop().kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _first(self, n: int) -> list["_Worker"]:
        """The first n workers, started or replaced where there is none alive."""
        if not 1 <= n <= MAX_WORKERS:
            raise ValueError(f"n={n}: a case has 1 to {MAX_WORKERS} workers")
        started = []
        for index in range(n):
            if index < len(self._workers) and self._workers[index].is_idle():
                continue
            self._num_started += 1
            stacks = self._directory / f"stacks-{self._num_started}"
            worker = _Worker(self._context, stacks)
            self._workers[index : index + 1] = [worker]
            started.append(worker)
        for worker in started:
            worker.wait_until_ready()
        return self._workers[:n]


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, context: Any, stacks: Path) -> None:
        self.connection, child = context.Pipe()
        self._stacks = stacks
        self.process = context.Process(target=_work, args=(child, stacks), daemon=True)
        self.process.start()
        child.close()

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_START_TIMEOUT_S):
            self.kill()
            raise RuntimeError(f"a test worker did not start within {_START_TIMEOUT_S:.0f} s")
        self.connection.recv_bytes()

    def is_idle(self) -> bool:
        """Alive, and nothing to read: no end of file either."""
        return self.process.is_alive() and not self.connection.poll()

    def send(self, case: _Case) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: noticed while collecting
            self.connection.send_bytes(pickle.dumps(case))

    def end(self, timeout_s: float) -> WorkerError:
        """Kill a worker that gave no answer, and say what had become of it."""
        if not self.process.is_alive():
            code = self.process.exitcode
            self.kill()
            return WorkerError("WorkerDied", f"the process ended with code {code}", "")
        info = process_info(self.process.pid)
        stacks = self._dump_stacks()
        self.kill()
        stopped = ", the process was stopped" if info is not None and info.state == "T" else ""
        return WorkerError("WorkerHung", f"no answer (the case may take {timeout_s:g} s){stopped}", stacks)

    def kill(self) -> None:
        """Kill the process and what it has started (it leads a session of its own)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _dump_stacks(self) -> str:
        """The stacks of all threads; empty when the process cannot even take a signal."""
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and self._stacks.stat().st_size == 0:
            time.sleep(0.01)
        time.sleep(0.02)  # the dump is written line by line
        return self._stacks.read_text()


def _collect(workers: list[_Worker], answers: dict[int, Any], timeout_s: float, timeout_after_death_s: float) -> None:
    """Fill in the answers by rank until all workers have answered or died, or time is up."""
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(workers))
    while waiting:
        watched = [end for worker in waiting.values() for end in (worker.connection, worker.process.sentinel)]
        if not connection.wait(watched, max(0.0, deadline - time.monotonic())):
            return
        for rank, worker in list(waiting.items()):
            try:
                if worker.connection.poll():
                    answers[rank] = pickle.loads(worker.connection.recv_bytes())
                    del waiting[rank]
                elif not worker.process.is_alive():
                    raise EOFError
            except (EOFError, ConnectionError):
                del waiting[rank]
                worker.process.join(5.0)
                deadline = min(deadline, time.monotonic() + timeout_after_death_s + _GRACE_S)


# ---- inside the worker ----


def _work(pipe: connection.Connection, stacks_path: Path) -> None:
    """Answer cases until the parent is gone."""
    # The workers die with the server and the server with the parent: it waits for the last holder of this
    # descriptor to close it, and every worker inherits one.
    die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)
    os.setsid()
    multiprocessing.current_process().daemon = False  # a case may start data workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            pipe.send_bytes(_answer(case))


def _answer(case: _Case) -> bytes:
    """The pickled result of a case, or the pickled error; the worker is clean afterwards."""
    errors: list[WorkerError] = []
    result = b""
    sys.path[:] = case.import_path
    with _environment(case.environment), _torch_defaults(), _lost_errors(errors), warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, lineno in reversed(case.warning_filters):
            texts = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
            warnings.filterwarnings(action, next(texts), category, next(texts), lineno)
        torch.manual_seed(case.rank)
        random.seed(case.rank)
        try:
            result = _call(case)
        except BaseException as error:  # SystemExit as well: the worker lives on
            errors.append(WorkerError.of(error))
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            errors.append(WorkerError.of(error))
        gc.collect()  # here, so that destructors warn under the filters of the case
    return pickle.dumps(errors[0]) if errors else result


def _call(case: _Case) -> bytes:
    """Make the process group, call the function; what it leaves in local variables ends with this frame."""
    fn, args = pickle.loads(case.call)
    if case.group_timeout_s is not None:
        timeout = timedelta(seconds=case.group_timeout_s)
        # A file: connecting to a TCPStore looks names up, which may take 5 s on a machine without DNS.
        store = dist.FileStore(str(case.store), case.num_workers)
        dist.init_process_group("gloo", store=store, rank=case.rank, world_size=case.num_workers, timeout=timeout)
    return pickle.dumps(fn(case.rank, case.num_workers, *args))


@contextlib.contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
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
