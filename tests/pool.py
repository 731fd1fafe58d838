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
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

from pool_worker import CLEAN_UP, RETURNED, Case, WorkerError, exact_environment, work
from processes import process_info

MAX_WORKERS = 8
_START_TIMEOUT_S = 90.0
_CLEAN_UP_TIMEOUT_S = 10.0
_GRACE_S = 1.0  # past a group timeout, for the error to travel up to its rank's answer


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


class Pool:
    """Up to `MAX_WORKERS` gloo workers on this machine, started when first needed and kept."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pool_server"])
        # One thread: those that a library starts on import would not survive the fork.
        paths = os.pathsep.join(path for path in sys.path if path)
        with exact_environment(os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}):
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
                case = Case(rank, n, call, store, group_timeout_s, environment, sys.path, filters)
                worker.send(pickle.dumps(case))
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
            if index < len(self._workers):
                if self._workers[index].is_idle():
                    continue
                self._workers[index].kill()
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
        self.process = context.Process(target=work, args=(child, stacks), daemon=True)
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

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: noticed while collecting
            self.connection.send_bytes(message)

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
        """Kill the process and what it has started (it leads a session of its own); nothing the second time."""
        if self.connection.closed:
            return
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


def _collect(workers: list[_Worker], answers: dict[int, Any], timeout_s: float, group_timeout_s: float) -> None:
    """Fill in the answers by rank; the ranks that are missing afterwards have died or hang."""
    returned: dict[int, _Worker] = {}
    for rank, message in _messages(dict(enumerate(workers)), timeout_s, group_timeout_s):
        if message == RETURNED:
            returned[rank] = workers[rank]
        else:
            answers[rank] = pickle.loads(message)
    for worker in returned.values():
        worker.send(CLEAN_UP)
    for rank, message in _messages(returned, group_timeout_s + _CLEAN_UP_TIMEOUT_S, 0.0):
        answers[rank] = pickle.loads(message)


def _messages(
    waiting: dict[int, _Worker], timeout_s: float, timeout_after_death_s: float
) -> Iterator[tuple[int, bytes]]:
    """The next message of each worker, until all have sent one or died, or time is up."""
    waiting = dict(waiting)
    deadline = time.monotonic() + timeout_s
    while waiting:
        watched = [end for worker in waiting.values() for end in (worker.connection, worker.process.sentinel)]
        if not connection.wait(watched, max(0.0, deadline - time.monotonic())):
            return
        for rank, worker in list(waiting.items()):
            try:
                if worker.connection.poll():
                    message = worker.connection.recv_bytes()
                    del waiting[rank]
                    yield rank, message
                elif not worker.process.is_alive():
                    raise EOFError
            except (EOFError, ConnectionError):
                del waiting[rank]
                worker.process.join(5.0)
                deadline = min(deadline, time.monotonic() + timeout_after_death_s + _GRACE_S)
