"""What the other workers say and how they end when one dies or hangs, and what a wrong launch is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.errors import LaunchError
from decent_dp.utils import initialize_dist
from pool import Pool
from spawn import spawn_script

TIMEOUT_S = 8
LOST = 2
TOPOLOGIES = ("ring", "exp", "complete", "hierarchical")
CASES = [(topology, order) for topology in TOPOLOGIES for order in (signal.SIGKILL, signal.SIGSTOP)]
# One process imports torch and forks the four workers of every case; from there on each lives as if it was launched.
TRAINING = f"""
import json, os, signal, socket, sys, time
from datetime import timedelta
from functools import partial
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from decent_dp import DecentralizedDataParallel

TIMEOUT_S, LOST = {TIMEOUT_S}, {LOST}


def train(topology):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # all cases start at once
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    sgd, timeout = partial(torch.optim.SGD, lr=0.1), timedelta(seconds=TIMEOUT_S)
    model = DecentralizedDataParallel(model, sgd, topology=topology, bucket_size_in_mb=1e-4, timeout=timeout)
    for t in range(6):
        if t == 3 and dist.get_rank() == LOST:
            print("step 3", flush=True)
            time.sleep(100)
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.05)


class Worker:
    def __init__(self, rank, port, folder):
        self.out, self.err = folder / f"{{rank}}.out", folder / f"{{rank}}.err"
        self.code = self.ended = None
        self.out.touch()
        self.pid = os.fork()
        if self.pid == 0:
            for number, path in enumerate((self.out, self.err), start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port))

    def has_ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.code is not None


class Run:
    def __init__(self, topology, order, folder):
        self.topology, self.order, self.signalled = topology, order, None
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.workers = []
        for rank in range(4):
            self.workers.append(Worker(rank, port, folder))
            if self.workers[-1].pid == 0:
                train(topology)
                sys.exit()

    def has_ended(self):
        lost = self.workers[LOST]
        if self.signalled is None and lost.out.read_text():
            self.signalled = time.monotonic()
            os.kill(lost.pid, self.order)
        if all([worker.has_ended() for worker in self.workers if worker is not lost]):
            if not lost.has_ended():
                os.kill(lost.pid, signal.SIGKILL)
            return lost.has_ended()

    def seen(self):
        return [[w.code, w.ended - self.signalled, w.err.read_text()] for w in self.workers]


runs = [Run(*case, Path(sys.argv[2]) / str(number)) for number, case in enumerate(json.loads(sys.argv[1]))]
while not all([run.has_ended() for run in runs]):
    time.sleep(0.02)
print(json.dumps([run.seen() for run in runs]))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All cases at once, since most of their time is waiting: code, seconds after the signal and standard error."""
    folder = tmp_path_factory.mktemp("endings")
    run = spawn_script(TRAINING, 1, args=[json.dumps(CASES), str(folder)], timeout_s=90)
    assert run.ranks[0].code == 0, run.ranks[0].stderr
    assert run.leftovers == []
    return json.loads(run.ranks[0].stdout)


@pytest.mark.parametrize(("topology", "order"), CASES)
def test_others_end_and_name_the_lost_worker(topology: str, order: int, endings: list[Any]) -> None:
    ranks = endings[CASES.index((topology, order))]
    for rank in {0, 1, 2, 3} - {LOST}:
        code, after_s, text = ranks[rank]
        assert code == 1
        assert after_s < 3 * TIMEOUT_S
        message = text.strip().splitlines()[-1]
        # Step 2 was under way everywhere when the lost worker came to step 3; nobody gets past step 5.
        assert re.search(rf"ExchangeError: rank {rank}, step [2345]: the exchange of bucket 0 \(", message), text
        assert re.search(rf"with rank {LOST} failed|itself had lost rank {LOST}\b", message), message


LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
WRONG_LAUNCHES = {
    "only RANK": ({"RANK": "0"}, "RANK set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
    "no RANK": (
        {name: value for name, value in LAUNCH.items() if name != "RANK"},
        "WORLD_SIZE set but RANK missing",
    ),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE set but MASTER_ADDR, MASTER_PORT missing"),
    "words": (LAUNCH | {"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc' in the environment; it must be a whole number"),
    "nothing": (LAUNCH | {"RANK": ""}, "RANK is '' in the environment; it must be a whole number"),
    "negative": (LAUNCH | {"RANK": "-1"}, "RANK is -1 in the environment; it must not be negative"),
    "rank too large": (LAUNCH | {"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks go from 0 to WORLD_SIZE - 1"),
    "no workers": (LAUNCH | {"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0; ranks go from 0 to WORLD_SIZE - 1"),
    "port is a word": (LAUNCH | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http' in the environment"),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launch variable is set."""
    for name in (*LAUNCH, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("variables", "message"), WRONG_LAUNCHES.values(), ids=WRONG_LAUNCHES)
def test_wrong_launch_variables_are_named(
    variables: dict[str, str], message: str, launched: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        launched.setenv(name, value)
    with pytest.raises(LaunchError, match=re.escape(message)) as caught:
        initialize_dist()
    assert "torchrun --nproc-per-node N script.py" in str(caught.value)
    assert not dist.is_initialized()


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port on which somebody listens who knows nothing of torch."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def test_busy_port_is_named(busy_port: int, launched: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCH | {"MASTER_PORT": str(busy_port)}).items():
        launched.setenv(name, value)
    with pytest.raises(LaunchError, match=rf"port {busy_port} \(MASTER_PORT\) is in use .*; choose a free one"):
        initialize_dist(timedelta(seconds=5))
    assert not dist.is_initialized()


def launch(variables: dict[str, str], timeout_s: float = 10.0) -> tuple[int, int]:
    """`initialize_dist` with these launch variables alone."""
    for name in (*LAUNCH, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    return initialize_dist(timedelta(seconds=timeout_s))


def summed(value: float) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


def without_a_launcher(rank: int, n: int) -> tuple[tuple[int, int], float]:
    return launch({}), summed(3.0)


def test_without_launch_variables_there_is_one_worker(pool: Pool) -> None:
    assert pool.run(without_a_launcher, 1, group_timeout_s=None) == [((0, 1), 3.0)]


def in_a_group(rank: int, n: int) -> tuple[tuple[int, int], bool]:
    group = dist.group.WORLD
    return launch({"RANK": "7"}), dist.group.WORLD is group


def test_an_initialised_group_is_used_as_it_is(pool: Pool) -> None:
    assert pool.run(in_a_group, 2) == [((0, 2), True), ((1, 2), True)]


def first_or_second_job(rank: int, n: int, port: int, folder: Path) -> Any:
    """Ranks 0 and 1 are one job; 2 and 3 come later, as another one on the same port."""
    variables = {**LAUNCH, "RANK": str(rank % 2), "MASTER_PORT": str(port)}
    if rank < 2:
        seen = launch(variables)
        (folder / f"started {rank}").touch()
        wait_for(folder, "failed", 2)
        return seen, summed(1.0)
    wait_for(folder, "started", 2)
    try:
        launch(variables, timeout_s=1.0)
        return summed(1.0)
    except (LaunchError, RuntimeError) as error:
        return type(error).__name__, str(error)
    finally:
        (folder / f"failed {rank}").touch()


def wait_for(folder: Path, name: str, number: int) -> None:
    while len(list(folder.glob(f"{name}*"))) < number:
        time.sleep(0.01)


def test_second_job_on_a_port_fails_and_leaves_the_first_alone(pool: Pool, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second, third, fourth = pool.run(first_or_second_job, 4, port, tmp_path, group_timeout_s=None)
    assert [first, second] == [((0, 2), 2.0), ((1, 2), 2.0)]
    assert third[0] == "LaunchError"
    assert re.match(rf"port {port} \(MASTER_PORT\) is in use", third[1])
    # A rank above 0 finds the store of the first job, in which it is taken.
    assert fourth[0] == "LaunchError"
    assert f"rank 1 is taken at 127.0.0.1:{port}" in fourth[1]


def uneven_ends(rank: int, n: int, topology: str) -> None:
    """Rank 1 takes its last step when the models of the others are gone already."""
    model = DecentralizedDataParallel(nn.Linear(4, 4), partial(torch.optim.SGD, lr=0.1), topology=topology)
    for t in range(4):
        loss = model(torch.ones(1, 4)).sum()
        if t == 3 and rank == 1:
            time.sleep(0.5)
        loss.backward()


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_the_last_exchange_needs_nobody(topology: str, pool: Pool) -> None:
    pool.run(uneven_ends, 4, topology)
