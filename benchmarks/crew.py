"""Worker processes on the hosts of a lab, called like functions."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.lab import Lab

ROOT = Path(__file__).resolve().parents[1]
_END_S = 5.0
_STDERR_CHARACTERS = 3000


class CrewError(RuntimeError):
    """A worker ended or did not answer."""


class Crew:
    """Workers of one process group, ranks numbered host by host.

    Args:
        lab: Where they run.
        workers_per_host: On each host of the lab.
        python: Interpreter of the virtual environment they live in.
        environment: Further variables.
        timeout_s: How long an answer may take.
    """

    def __init__(
        self,
        lab: Lab,
        workers_per_host: int = 1,
        python: Path | str = sys.executable,
        environment: dict[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.num_workers = lab.num_hosts * workers_per_host
        self._timeout_s = timeout_s
        self._stderr = [tempfile.TemporaryFile("w+") for _ in range(self.num_workers)]  # noqa: SIM115 - closed by close()
        world = {
            "MASTER_PORT": str(lab.free_port()),
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_WORLD_SIZE": str(workers_per_host),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        if str(python) != sys.executable:
            world["PYTHONPATH"] = ""  # or both packages would be looked for in the same place
        command = [str(python), "-m", "benchmarks.worker"]
        self._workers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(self.num_workers):
                host, local = divmod(rank, workers_per_host)
                own = {**world, "RANK": str(rank), "LOCAL_RANK": str(local)}
                self._workers.append(lab.start(host, command, own, self._stderr[rank], ROOT))
            self._collect("init_process_group")
        except BaseException:
            self.close()
            raise

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Call ``module:name`` on all workers at once with their state and the arguments; results by rank."""
        request = json.dumps({"function": function, "arguments": arguments}) + "\n"
        for rank, worker in enumerate(self._workers):
            assert worker.stdin is not None
            try:
                worker.stdin.write(request)
                worker.stdin.flush()
            except OSError:
                raise self._error(rank, function, "has ended") from None
        return self._collect(function)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the workers end; those that do not are killed."""
        for worker in self._workers:
            assert worker.stdin is not None
            if not worker.stdin.closed:
                worker.stdin.close()
        deadline = time.monotonic() + _END_S
        while any(worker.poll() is None for worker in self._workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        for stderr in self._stderr:
            stderr.close()

    def _collect(self, function: str) -> list[Any]:
        """One reply of every worker, each a line."""
        deadline = time.monotonic() + self._timeout_s
        streams = {worker.stdout.fileno(): rank for rank, worker in enumerate(self._workers) if worker.stdout}
        received = dict.fromkeys(streams, b"")
        waiting = set(streams)
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                rank = streams[min(waiting)]
                raise self._error(rank, function, f"did not answer within {self._timeout_s:g} s")
            for descriptor in readable:
                chunk = os.read(descriptor, 2**16)
                if not chunk:
                    raise self._error(streams[descriptor], function, "has ended")
                received[descriptor] += chunk
                if received[descriptor].endswith(b"\n"):
                    waiting.discard(descriptor)
        return [json.loads(received[descriptor])["result"] for descriptor in sorted(streams, key=streams.__getitem__)]

    def _error(self, rank: int, function: str, what: str) -> CrewError:
        time.sleep(0.5)  # others may be about to write down the cause
        logs = []
        for number, stderr in enumerate(self._stderr):
            stderr.seek(0)
            text = stderr.read()[-_STDERR_CHARACTERS:].strip()
            if text:
                logs.append(f"--- rank {number}\n{text}")
        return CrewError("\n".join([f"rank {rank} {what} in {function}", *logs]))
