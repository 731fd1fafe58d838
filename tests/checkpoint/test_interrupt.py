"""Ctrl+C: saved once, ended cleanly, by all workers at the same step; twice: at once."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from cases.workers import loss_of, network
from decent_dp import ConfigurationError, DecentralizedDataParallel
from decent_dp.checkpoint import StopSignal, checkpoints, save
from ids import ROOT
from virtual import wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)


def test_the_first_is_a_wish_and_the_second_interrupts():
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(model, every=2) as stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGINT)
        loss_of(model, 0, 0).backward()
        assert not stop.requested()  # at step 1 nobody is asked
        loss_of(model, 1, 0).backward()
        assert stop.requested()
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ConfigurationError, match="every must be at least 1"):
        StopSignal(model, every=0)


def stop_at(rank, n, directory):
    model = DecentralizedDataParallel(network(), SGD, topology="ring")
    with StopSignal(model, every=3) as stop:
        for t in range(20):
            if (rank, t) == (1, 4):
                os.kill(os.getpid(), signal.SIGINT)
            loss_of(model, t, rank).backward()
            if stop.requested():
                save(model, directory)
                break
    return model.t


def test_all_workers_stop_after_the_same_step(pool, tmp_path: Path):
    assert pool.run(stop_at, 3, tmp_path) == [6] * 3
    assert [manifest.step for manifest in checkpoints(tmp_path)] == [6]


SMALL = {"--width": "16", "--heads": "2", "--layers": "1", "--sample": "20", "--context": "16", "--report-every": "3"}


class Demo:
    """The example on a small text, as a user would start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text.txt"
        self.text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, output: str, *more: str) -> subprocess.Popen[str]:
        small = [word for pair in SMALL.items() for word in pair]
        given = ["--data", str(self.text), "--output", str(self.folder / output), *small, *more]
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "shakespeare.py"), *given],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def interrupt(self, output: str, *more: str) -> tuple[int, str, int]:
        """Press Ctrl+C after the first step; returns exit code, last line, and step of the latest checkpoint."""
        process = self.start(output, "--save-every", "1", *more)
        saved, deadline = self.folder / output / "checkpoints", time.monotonic() + 60
        while not checkpoints_there(saved) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
        assert errors == ""
        return process.returncode, said.splitlines()[-1], checkpoints(saved)[-1].step


@pytest.fixture
def demo(tmp_path: Path):
    """Processes end with the test."""
    runs = Demo(tmp_path)
    yield runs
    for process in runs.started:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_the_example_goes_on_with_the_same_curve(demo, tmp_path: Path):
    straight = demo.start("straight", "--steps", "60")
    code, last_line, step = demo.interrupt("stopped", "--steps", "60")
    assert (code, step % 10) == (130, 0)
    assert last_line.startswith(f"stopped after step {step}, saved in ")
    assert 0 < step < 60
    resumed = demo.start("stopped", "--steps", "60", "--resume")
    (whole, errors), (rest, more_errors) = (process.communicate(timeout=60) for process in (straight, resumed))
    assert errors == more_errors == ""
    assert f"goes on after step {step}" in rest
    losses, losses_of_resumed = ([line for line in said.splitlines() if "took" not in line] for said in (whole, rest))
    assert losses[-7:] == losses_of_resumed[-7:]  # the sample and the losses, before training too
    assert (tmp_path / "stopped" / "curves.png").read_bytes() == (tmp_path / "straight" / "curves.png").read_bytes()


def test_all_workers_of_the_example_end_cleanly(demo):
    code, last_line, step = demo.interrupt("stopped", "--workers", "2")
    assert code == 130
    assert re.fullmatch(rf"stopped after step {step}, saved in \S+: go on with --resume", last_line)


def checkpoints_there(folder: Path) -> bool:
    return folder.is_dir() and any(entry.startswith("step-") for entry in os.listdir(folder))


def test_the_loop_of_the_page_runs_and_goes_on(tmp_path: Path):
    code = (ROOT / "docs" / "checkpoints.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "first.py").write_text(code.replace('"checkpoints", 200', '"checkpoints", 60'))
    (tmp_path / "second.py").write_text(code)
    for name, steps in (("first.py", [50, 60]), ("second.py", [150, 200])):
        command = [sys.executable, "-W", "error", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert [manifest.step for manifest in checkpoints(tmp_path / "checkpoints")] == steps
