"""The benchmarks run, in tiny form; what they measure here means nothing.

This folder has no __init__.py: as a package it would hide the one that it tests, which has the same name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench, costs, exchange_cpu, lab, limits, link, memory, optimizer, overhead, report, wrap_time
from benchmarks.crew import ROOT, Crew, CrewError
from benchmarks.lab import Lab
from benchmarks.work import Emulated

needs_namespaces = pytest.mark.skipif(lab.why_not() is not None, reason=f"no namespaces: {lab.why_not()}")
WORK = {"kind": "emulated", "parameters_mib": 0.5, "num_layers": 4, "compute_s": 0.004}
_HOLD = """
import sys, time
from benchmarks.lab import Lab
with Lab(2, 1e8):
    print("up", flush=True)
    time.sleep(30)
"""


def namespaces_of(pid: int) -> list[str]:
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{lab.PREFIX}-{pid}-")]


def leave(holder: subprocess.Popen[str], number: signal.Signals) -> None:
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    assert len(namespaces_of(holder.pid)) == 3
    holder.send_signal(number)
    holder.wait(timeout=20)
    holder.stdout.close()


@pytest.fixture
def holder() -> subprocess.Popen[str]:
    """A process that keeps a lab up."""
    return subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True, cwd=ROOT)


# -------------------------------------------------------------------- the lab


def test_lab_shapes_or_says_why_not() -> None:
    rate = 40e6
    with Lab(2, rate) as hosts:
        if hosts.has_namespaces:
            assert len(lab.own_namespaces()) == 3
        with Crew(hosts) as crew:
            goodput = link.goodput_bits_per_s(crew, 1_000_000)
    if hosts.has_namespaces:
        assert hosts.why_not_shaped is None
        assert 0.3 * rate < goodput < 1.15 * rate
        assert lab.own_namespaces() == []
    else:
        assert "NOT shaped" in hosts.description


_CONNECT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
_LISTEN = """
import socket
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


@needs_namespaces
def test_both_ends_of_a_connection_run_the_same_congestion_control() -> None:
    with Lab(2) as hosts:
        listener = hosts.start(0, [sys.executable, "-c", _LISTEN], {}, sys.stderr, ROOT)
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        caller = hosts.start(1, [sys.executable, "-c", _CONNECT, hosts.address(0), port], {}, sys.stderr, ROOT)
        assert caller.communicate(timeout=30)[0].strip() == lab.CONGESTION_CONTROL
        assert listener.communicate(timeout=30)[0].strip() == lab.CONGESTION_CONTROL


def test_lab_without_root_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with Lab(3, 1e9) as hosts:
        assert not hosts.has_namespaces
        assert hosts.environment() == {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        assert hosts.description == "3 hosts on loopback; the network is NOT shaped: network namespaces need root"


@needs_namespaces
def test_lab_goes_when_an_error_passes() -> None:
    with pytest.raises(ZeroDivisionError), Lab(2):
        len(lab.own_namespaces()) / 0
    assert lab.own_namespaces() == []


@needs_namespaces
def test_lab_goes_when_terminated(holder: subprocess.Popen[str]) -> None:
    leave(holder, signal.SIGTERM)
    assert namespaces_of(holder.pid) == []


@needs_namespaces
def test_lab_of_a_killed_run_goes_with_the_next(holder: subprocess.Popen[str]) -> None:
    with Lab(1):
        alive = lab.own_namespaces()
        leave(holder, signal.SIGKILL)
        assert len(namespaces_of(holder.pid)) == 3
        removed = lab.clear_stale()
        assert [name for name in removed if name.startswith(f"{lab.PREFIX}-{holder.pid}-")]
        assert namespaces_of(holder.pid) == []
        assert lab.own_namespaces() == alive


def test_crew_tells_what_a_worker_said() -> None:
    with Lab(1, namespaces=False) as hosts, Crew(hosts) as crew, pytest.raises(CrewError, match="no such side"):
        crew.call("benchmarks.sides:run", name="no such side", first_step=0, num_warmup=0, num_steps=1)


# -------------------------------------------------------------------- the bench


def test_all_sides_in_one_run(tmp_path: Path) -> None:
    sides = ("alone", "ddp", "ddp-fp16", "ours:ring", "ours:exp:bf16", "ours:complete")
    run = bench.Run(WORK, sides, bucket_mib=0.25, num_blocks=2, num_warmup=1, num_steps=2)
    with Lab(2, namespaces=False) as hosts:
        rows, facts = bench.measure(hosts, run)
    assert [row.side for row in rows] == list(sides)
    assert all(len(row.block_ms) == 2 and min(row.block_ms) > 3.9 for row in rows)
    assert all(row.wire_ms is None for row in rows)
    assert "Mbit/s" in facts["one transfer of all parameters"]
    result = report.Result("tiny", facts, "python -m benchmarks.bench", rows)
    written = report.write(result, tmp_path, "tiny")
    assert [path.name for path in written] == ["tiny.md", "tiny.json", "tiny.png"]
    assert json.loads(written[1].read_text())["rows"][3]["side"] == "ours:ring"
    assert "| ours:ring |" in written[0].read_text()
    assert written[2].read_bytes().startswith(b"\x89PNG")
    assert "x alone" in report.as_text(result)


def test_limits() -> None:
    mib = 2**20
    assert limits.host_bytes("alone", mib, 4, 1) == 0
    assert limits.host_bytes("ddp", mib, 4, 1) == 1.5 * mib
    assert limits.host_bytes("ddp-fp16", mib, 4, 2) == 0.875 * mib
    assert limits.host_bytes("ours:ring", mib, 4, 1) == mib
    assert limits.host_bytes("ours:exp:bf16", mib, 4, 1) == mib / 2
    assert limits.host_bytes("package:complete", mib, 4, 1) == 1.5 * mib
    assert limits.host_bytes("ours:ring", mib, 4, 2) == mib  # two workers cross in every second round
    assert limits.host_bytes("package:alternating-exp-ring", mib, 4, 2) == 0.75 * mib  # hosts cross in turns
    assert limits.host_bytes("ours:alternating-exp-ring", mib, 4, 2) == 0.5 * mib
    assert limits.host_bytes("ours:hierarchical:bf16", mib, 4, 2) == mib / 2
    assert limits.host_bytes("ours:complete", mib, 4, 1) == 1.5 * mib


def test_sides_that_a_layout_cannot_have_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.possible(["alone", "ours:nonsense"], 2, 1) == ("alone",)
    assert "left out ours:nonsense" in capsys.readouterr().err
    for name in ("nobody", "alone:ring", "ours", "ours:ring:fp8", "package:ring:bf16"):
        with pytest.raises(ValueError, match="unknown side"):
            bench.possible([name], 2, 1)


def test_presets_and_options() -> None:
    for name, preset in bench.PRESETS.items():
        options = bench.parse(["--preset", name])
        assert options.compute_ms == preset["compute_ms"]
        assert options.sides == preset["sides"]
    options = bench.parse(["--preset", "jitter", "--rate-mbit", "50", "--sides", "alone"])
    assert (options.rate_mbit, options.jitter, options.sides) == (50, [0.0, 0.5], ["alone"])
    with pytest.raises(SystemExit):
        bench.parse(["--sides", "nobody"])


def test_jitter_is_of_the_step_and_worker_alone() -> None:
    works = [Emulated(0.01, 1, 0.0, (0.0, 0.5)) for _ in range(2)]
    factors = []
    for work in works:
        model = work.network()
        seen = []
        for step, rank in ((0, 0), (0, 1), (1, 0)):
            work.loss(model, step, rank)
            seen.append(work._clock.factor)
        factors.append(seen)
    assert factors[0] == factors[1]
    assert len(set(factors[0])) == 3
    assert all(1 <= factor <= 1.5 for factor in factors[0])


# -------------------------------------------------------------------- the small ones


def test_exchange_cpu() -> None:
    result = exchange_cpu.measure(1_000_000, num_blocks=1, num_steps=1, with_package=False)
    assert set(result["cpu_ms"]) == {"ours", "ours:bf16"}


def test_memory() -> None:
    seen = memory.measure(("ours:ring",), num_workers=2, parameters_mib=4, bucket_mib=1)["sides"]["ours:ring"]
    assert seen["params_mib"] == 4
    assert seen["computed_mib"] == pytest.approx(4, rel=0.01)


def test_overhead() -> None:
    result = overhead.measure(width=64, num_layers=1, batch=1, length=8, num_warmup=1, num_steps=2)
    assert result["equal_parameters"]


def test_optimizer() -> None:
    result = optimizer.measure(width=64, num_layers=1, num_processes=2, num_blocks=1, with_package=False)
    assert len(result["x_torch_fused"]) == 2
    assert min(result["x_torch_fused"]) > 0


def test_wrap_time() -> None:
    result = wrap_time.measure(num_workers=2, parameters_mib=0.5, num_repeats=1)
    assert result["num_groups_at_256"] == 1
    assert result["seconds"] > 0


def test_costs_in_one_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = {"ours:ring": {"resident_x_params": 1.0}, "package:ring": {"resident_x_params": 1.25}}
    results = {
        "exchange_cpu": {"num_bytes": 100_000_000, "cpu_ms": {"ours": 30.0, "package": 60.0}, "ratio": 0.5},
        "optimizer": {
            "num_parameters": 12_600_000,
            "cpu_ms": {"torch fused AdamW": 6.0, "ours": 12.0, "package": 48.0},
            "x_torch_fused": [2.0, 1.9, 2.2],
            "x_faster_than_package": [4.0, 5.0, 3.0],
        },
        "overhead": {"num_parameters": 25_500_000, "plain_ms": 400.0, "wrapped_ms": 404.0},
        "memory": {"sides": room},
        "wrap_time": {"num_workers": 8, "num_groups_at_256": 1, "seconds": 0.5},
    }
    monkeypatch.setattr(costs, "measure", lambda package_python: results)
    costs.main(["--package-python", sys.executable, "--output", str(tmp_path)])
    ratios = [line[-1] for line in costs.table(results)]
    assert ratios == ["ratio", "0.50", "2.00", "0.25", "1.010", "0.80", "", ""]
    written, numbers = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert "| memory, ring | 1.000 | decent-dp 0.2.3, ring | 1.250 | 0.80 |" in written.read_text()
    assert json.loads(numbers.read_text())["overhead"] == results["overhead"]
    assert str(written) in capsys.readouterr().out
