"""Several hosts on one machine: network namespaces joined by a bridge, each with its own shaped uplink.

    host 0  eth0 --tbf--> |        |
    host 1  eth0 --tbf--> | bridge |       everything in namespaces of its own, nothing on the machine's network
    host 2  eth0 --tbf--> |        |

The token bucket is on the host's own end of the link, so what a host sends leaves at the rate, and the kernel's back
pressure reaches the sending socket without losses. What arrives is not shaped a second time: where every host sends
to one other at a time, as in all rounds measured here, a downlink carries what one uplink lets through.

Between the hosts TCP runs `CONGESTION_CONTROL`, Linux's own default, whatever the machine has chosen: with bbr, for
one, a connection that is alone on its link leaves a part of it idle, and those that share one get unequal parts.

Needs root and iproute2. Without either the hosts are processes on the loopback interface, and `Lab.why_not_shaped`
says so. Traffic never leaves the namespaces.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

PREFIX = "ddplab"
CONGESTION_CONTROL = "cubic"
_MTU_BYTES = 1500
_NETWORK = "10.117.0"
_MIN_BURST_BYTES = 64 * 1024  # one segment as the kernel hands it over; smaller ones would be cut up first
_BURST_S = 2e-3
_QUEUE_S = 50e-3
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_numbers = itertools.count()


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no ip or tc here (Debian: apt-get install iproute2)"
    return None


class LabError(RuntimeError):
    """A command of iproute2 failed."""


class Lab:
    """Hosts to start processes on; a context manager.

    Args:
        num_hosts: How many.
        rate_bits_per_s: What each host may send; None does not shape.
        namespaces: False stays on loopback even where namespaces could be made.

    Attributes:
        why_not_shaped: Why the network is not shaped; None when it is.
    """

    def __init__(self, num_hosts: int, rate_bits_per_s: float | None = None, *, namespaces: bool = True) -> None:
        self.num_hosts = num_hosts
        self.rate_bits_per_s = rate_bits_per_s
        reason = why_not() if namespaces else "loopback was asked for"
        self.has_namespaces = reason is None
        self.why_not_shaped = reason or (None if rate_bits_per_s else "no rate was given")
        self._name = f"{PREFIX}-{_identity(os.getpid())}-{next(_numbers)}"
        self._processes: list[subprocess.Popen[str]] = []
        self._ports = itertools.count(29500)
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def description(self) -> str:
        """One line for tables and reports."""
        if self.why_not_shaped is None:
            assert self.rate_bits_per_s is not None
            uplinks = f"uplinks of {self.rate_bits_per_s / 1e6:g} Mbit/s, TCP {CONGESTION_CONTROL}"
            return f"{self.num_hosts} hosts in network namespaces, {uplinks}"
        where = "in network namespaces" if self.has_namespaces else "on loopback"
        return f"{self.num_hosts} hosts {where}; the network is NOT shaped: {self.why_not_shaped}"

    # ---------------------------------------------------------------- up and down

    def __enter__(self) -> Lab:
        self._catch_signals()
        atexit.register(self.close)
        try:
            if self.has_namespaces:
                clear_stale()
                self._bring_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and remove the namespaces; the links go with them. Again does nothing."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._processes.clear()
        if self.has_namespaces:
            for name in _namespaces():
                if name.startswith(f"{self._name}-"):
                    _remove(name)
        atexit.unregister(self.close)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _catch_signals(self) -> None:
        """Turn signals that would end the process at once into exceptions, so that the lab is taken down."""

        def leave(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, leave)

    def _bring_up(self) -> None:
        switch = f"{self._name}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            name = self._namespace(host)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            ends = ("type", "veth", "peer", "name", "eth0", "mtu", str(_MTU_BYTES), "netns", name)
            _ip("-n", switch, "link", "add", f"port{host}", "mtu", str(_MTU_BYTES), *ends)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _ip("-n", name, "link", "set", "eth0", "addrgenmode", "none")  # one address, the one below
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            way = ("dev", "eth0", "src", self.address(host), "congctl", CONGESTION_CONTROL)
            _ip("-n", name, "route", "replace", f"{_NETWORK}.0/24", *way)
            if self.rate_bits_per_s:
                bucket = tbf_arguments(self.rate_bits_per_s)
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)

    # ---------------------------------------------------------------- use

    def address(self, host: int) -> str:
        """The address of a host; the hosts share loopback where there are no namespaces."""
        return f"{_NETWORK}.{host + 1}" if self.has_namespaces else "127.0.0.1"

    def free_port(self) -> int:
        """A port that nobody listens on at host 0."""
        if self.has_namespaces:
            return next(self._ports)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def environment(self) -> dict[str, str]:
        """What gloo needs to find its way, the same on all hosts."""
        interface = "eth0" if self.has_namespaces else "lo"
        return {"GLOO_SOCKET_IFNAME": interface, "MASTER_ADDR": self.address(0)}

    def sent_bytes(self) -> list[int] | None:
        """What each host has sent up to now, protocol headers of large segments counted once; None on loopback."""
        if not self.has_namespaces:
            return None
        shown = [
            json.loads(_ip("-n", self._namespace(h), "-s", "-j", "link", "show", "eth0")) for h in range(self.num_hosts)
        ]
        return [int(links[0]["stats64"]["tx"]["bytes"]) for links in shown]

    def start(
        self, host: int, command: Sequence[str], environment: dict[str, str], stderr: IO[str], cwd: Path
    ) -> subprocess.Popen[str]:
        """Start a process on a host, with pipes to write to and read from; the lab ends it if nobody else does."""
        inside = ["ip", "netns", "exec", self._namespace(host)] if self.has_namespaces else []
        process = subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env={**os.environ, **self.environment(), **environment},
        )
        self._processes.append(process)
        return process

    def _namespace(self, host: int) -> str:
        return f"{self._name}-h{host}"


def tbf_arguments(rate_bits_per_s: float) -> list[str]:
    """Arguments of `tc ... tbf`: bursts of 2 ms, so that timers keep up; a queue of 50 ms, so that TCP never loses."""
    burst_bytes = max(_MIN_BURST_BYTES, int(rate_bits_per_s / 8 * _BURST_S))
    queue_us = int(_QUEUE_S * 1e6)
    return ["rate", f"{int(rate_bits_per_s)}bit", "burst", f"{burst_bytes}b", "latency", f"{queue_us}us"]


def clear_stale() -> list[str]:
    """Remove the namespaces of labs whose process is gone; returns their names."""
    stale = [name for name in _namespaces() if not _is_alive(name)]
    for name in stale:
        _remove(name)
    return stale


def own_namespaces() -> list[str]:
    """Names of the namespaces that labs of this process have left open."""
    mine = f"{PREFIX}-{_identity(os.getpid())}-"
    return [name for name in _namespaces() if name.startswith(mine)]


def _namespaces() -> list[str]:
    """All namespaces of labs, of this process or others."""
    lines = _ip("netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{PREFIX}-")]


def _remove(name: str) -> None:
    """End what still runs in a namespace of a lab, and delete it."""
    with contextlib.suppress(LabError):
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _identity(pid: int) -> str:
    """A process id with the time it started at, since ids are used again; empty when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc") else str(pid)
    return f"{pid}-{fields[19]}"


def _is_alive(name: str) -> bool:
    parts = name.split("-")
    return len(parts) == 5 and parts[1].isdigit() and _identity(int(parts[1])) == f"{parts[1]}-{parts[2]}"


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout
