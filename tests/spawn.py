"""Scripts in processes of their own, for tests in which a whole process is killed, stopped or launched.

    run = spawn_script(CODE, 2, signals=[SignalAt("step 3", rank=1, signal=signal.SIGKILL)])
    assert run.ranks[0].code != 0
    assert "rank 1" in run.ranks[0].stderr

Every process starts Python anew, so what does not need one of its own belongs into the pool (see `pool.py`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import processes
from processes import command_of, environment_of, running_processes

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SignalAt:
    """Send `signal` as soon as a rank has printed a line that starts with `marker`.

    Attributes:
        marker: The beginning of the line, on standard output of the rank.
        rank: The rank that prints and gets the signal.
        signal: The signal.
        to_launcher: Send it to torchrun and not to the rank.
    """

    marker: str
    rank: int
    signal: int
    to_launcher: bool = False


@dataclass(frozen=True, slots=True)
class ScriptOutput:
    """What became of one process.

    Attributes:
        code: The exit code, negative for a signal; None for a rank under torchrun, which keeps it to itself.
        stdout: Standard output.
        stderr: Standard error.
        wall_s: Seconds from the common start to its end; None for a rank under torchrun.
        left_stopped: A `SignalAt` had stopped it, so it was killed when all others had ended.
    """

    code: int | None
    stdout: str
    stderr: str
    wall_s: float | None
    left_stopped: bool = False


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What became of all processes.

    Attributes:
        ranks: The ranks in order.
        launcher: The torchrun process, if there was one.
        leftovers: Command lines of descendants that outlived all of them; they were killed.
    """

    ranks: list[ScriptOutput]
    launcher: ScriptOutput | None
    leftovers: list[str]


def spawn_script(
    script: str | Path,
    n: int,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 60.0,
    signals: Sequence[SignalAt] = (),
    torchrun: bool = False,
    leftover_grace_s: float = 2.0,
) -> ScriptRun:
    """Run a script in n processes of their own and wait for all; none of them remains, whatever happens.

    The launch variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free
    one) are set, by torchrun if that is asked for. Modules are found where this process finds them.

    Args:
        script: The path of a file; or a string, the code itself.
        n: The number of ranks.
        args: Arguments of the script.
        env: Further variables; None takes a variable away.
        timeout_s: How long all may take together.
        signals: Signals to send while they run.
        torchrun: Start them by `torchrun --standalone --nproc-per-node n`.
        leftover_grace_s: How long descendants may outlive the processes before they count as left over.

    Raises:
        TimeoutError: Not all have ended in time; the message holds what they have printed.
    """
    with tempfile.TemporaryDirectory(prefix="decent-dp-spawn-") as name:
        directory = Path(name)
        if isinstance(script, str):
            code, script = textwrap.dedent(script), directory / "script.py"
            script.write_text(code)
        # Every descendant inherits this variable, however detached it is, so all can be found by it.
        tag = f"DECENT_DP_TEST_RUN_{uuid.uuid4().hex}"
        fixed = {
            tag: "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
        }
        launch = _Torchrun if torchrun else _Ranks
        try:
            group = launch(directory, [str(script), *args], n, fixed, env or {})
            _watch(group, list(signals), timeout_s)
            leftovers = _leftovers(tag, leftover_grace_s)
            return ScriptRun(group.rank_outputs(), group.launcher_output(), leftovers)
        finally:
            while left := _tagged(tag):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_POLL_S)


class _Process:
    """One process, started at once, that writes into files of its own."""

    def __init__(
        self, command: list[str], variables: Mapping[str, str | None], output: Path, death_signal: int
    ) -> None:
        output.mkdir()
        self.output = output
        self.wall_s: float | None = None
        self.stopped = False
        self._begin = time.monotonic()
        environment = {key: value for key, value in (os.environ | variables).items() if value is not None}
        with (output / "stdout.log").open("wb") as stdout, (output / "stderr.log").open("wb") as stderr:
            self.popen = subprocess.Popen(
                # The first one arranges its death with ours, and becomes the second one.
                [sys.executable, "-I", processes.__file__, str(int(death_signal)), sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def has_ended(self) -> bool:
        if self.popen.poll() is None:
            return False
        if self.wall_s is None:
            self.wall_s = time.monotonic() - self._begin
        return True

    def result(self) -> ScriptOutput:
        return ScriptOutput(self.popen.returncode, *_texts(self.output), self.wall_s, self.stopped)


class _Ranks:
    """One process a rank."""

    def __init__(
        self,
        directory: Path,
        command: list[str],
        n: int,
        fixed: Mapping[str, str],
        env: Mapping[str, str | None],
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(n):
            launch = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(n),
            }
            launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            output = directory / f"rank{rank}"
            self.processes.append(_Process(command, {**fixed, **launch, **env}, output, signal.SIGKILL))

    def output_of(self, rank: int) -> Path:
        return self.processes[rank].output

    def send(self, order: SignalAt) -> None:
        process = self.processes[order.rank]
        process.popen.send_signal(order.signal)
        process.stopped = order.signal == signal.SIGSTOP

    def rank_outputs(self) -> list[ScriptOutput]:
        return [process.result() for process in self.processes]

    def launcher_output(self) -> ScriptOutput | None:
        return None


class _Torchrun:
    """torchrun, and the ranks as its children."""

    def __init__(
        self,
        directory: Path,
        command: list[str],
        n: int,
        fixed: Mapping[str, str],
        env: Mapping[str, str | None],
    ) -> None:
        self._logs, self._n = directory / "ranks", n
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
        launcher += [f"--log-dir={self._logs}", "--redirects=3"]
        # On SIGTERM torchrun ends its ranks; SIGKILL would leave them alone.
        output = directory / "launcher"
        self.processes = [_Process([*launcher, *command], {**fixed, **env}, output, signal.SIGTERM)]

    def output_of(self, rank: int) -> Path:
        # <log dir>/<run id>/attempt_<k>/<local rank>
        return max(self._logs.glob(f"*/attempt_*/{rank}"), default=self._logs / "not-yet")

    def send(self, order: SignalAt) -> None:
        launcher = self.processes[0].popen
        if order.to_launcher:
            launcher.send_signal(order.signal)
            return
        for info in running_processes():
            if info.parent_pid == launcher.pid and environment_of(info.pid).get("RANK") == str(order.rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.pid, order.signal)

    def rank_outputs(self) -> list[ScriptOutput]:
        return [ScriptOutput(None, *_texts(self.output_of(rank)), None) for rank in range(self._n)]

    def launcher_output(self) -> ScriptOutput | None:
        return self.processes[0].result()


def _watch(group: _Ranks | _Torchrun, signals: list[SignalAt], timeout_s: float) -> None:
    """Send the signals when their time has come, until all processes have ended."""
    deadline = time.monotonic() + timeout_s
    try:
        while not all(_have_ended(group)):
            for order in list(signals):
                stdout, _ = _texts(group.output_of(order.rank))
                if any(line.startswith(order.marker) for line in stdout.splitlines()):
                    signals.remove(order)
                    group.send(order)
            if time.monotonic() > deadline:
                outputs = [str(output) for output in [*group.rank_outputs(), group.launcher_output()]]
                raise TimeoutError("\n".join([f"not all processes have ended in {timeout_s:g} s", *outputs]))
            time.sleep(_POLL_S)
    finally:
        for process in group.processes:
            process.popen.kill()
            process.popen.wait()
        _have_ended(group)


def _have_ended(group: _Ranks | _Torchrun) -> list[bool]:
    """Which processes have ended or stand still; every one is asked, for the time of its end."""
    return [process.has_ended() or process.stopped for process in group.processes]


def _texts(output: Path) -> tuple[str, str]:
    """Standard output and standard error so far."""
    files = [output / "stdout.log", output / "stderr.log"]
    out, err = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return out, err


def _tagged(tag: str) -> list[int]:
    return [info.pid for info in running_processes() if tag in environment_of(info.pid)]


def _leftovers(tag: str, grace_s: float) -> list[str]:
    """Command lines of the tagged processes that have not ended within the grace."""
    deadline = time.monotonic() + grace_s
    while (left := _tagged(tag)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [command_of(pid) for pid in left]
