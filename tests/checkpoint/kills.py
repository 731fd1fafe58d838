"""Kill workers at random moments of training and saving, and go on from what is there.

    python -m checkpoint.kills 50        (in tests/, prints what happened)

Every worker notes a digest of its whole state after each step. A run is deterministic, so the same step must have the
same digest whenever it is taken again: a mixture of two checkpoints, or a state that lost anything, would differ.
"""

import contextlib
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.checkpoint import async_save, checkpoints, inspect, load, save
from decent_dp.comm import torch_communicator
from decent_dp.engine.training_state import capture
from pool import Pool, WorkerFailure

NUM_WORKERS = 3
SAVE_EVERY = 3
TIMEOUT_S = 2.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Dropout(0.1), nn.Linear(400, 400), nn.Linear(400, 8))


def digest(model: DecentralizedDataParallel) -> str:
    """Of the parameters, the optimizer state and what is in flight."""
    state = capture(model._replica)
    whole = hashlib.sha256(repr(model.t).encode())
    for name, parameter in model.named_parameters():
        whole.update(parameter.detach().numpy().tobytes())
        whole.update(state["optimizer"][name]["state"]["momentum_buffer"].numpy().tobytes())
        if state["exchange"] is not None:
            whole.update(state["exchange"]["received"][name].numpy().tobytes())
    return whole.hexdigest()


def train(rank: int, n: int, directory: Path, notes: Path, num_steps: int) -> int:
    """Resume, then train and save for some steps, or until somebody is killed; returns the step reached."""
    with mock.patch.object(torch_communicator, "_NOTES_S", 0.3):
        return _train(rank, directory, notes, num_steps)


def _train(rank: int, directory: Path, notes: Path, num_steps: int) -> int:
    model = DecentralizedDataParallel(
        network(), partial(torch.optim.SGD, lr=0.01, momentum=0.9), topology="ring", bucket_size_in_mb=0.3
    )
    known = dict(line.split() for line in _whole_lines(notes / str(rank)))
    torch.manual_seed(rank)
    if checkpoints(directory):
        loaded = load(model, directory)
        assert loaded.extra == {"step": model.t}
    last = model.t + num_steps
    with (notes / str(rank)).open("a") as file:
        file.write("\n")  # ends a line that a kill has cut
        while True:
            found = digest(model) if model.t else "start"
            assert known.setdefault(str(model.t), found) == found, f"rank {rank}: step {model.t} differs this time"
            file.write(f"{model.t} {found}\n")
            file.flush()
            if model.t % SAVE_EVERY == 0:
                if (model.t // SAVE_EVERY) % 2:
                    save(model, directory, extra={"step": model.t}, keep=2)
                else:
                    async_save(model, directory, extra={"step": model.t}, keep=2)
                if model.t >= last:
                    return model.t
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * model.t + rank))
            model(inputs).square().mean().backward()


def _whole_lines(file: Path) -> list[str]:
    lines = file.read_text().split("\n") if file.exists() else []
    return [line for line in lines if len(line.split()) == 2 and len(line.split()[1]) in (5, 64)]


@dataclass
class Summary:
    """What happened.

    Attributes:
        num_kills: Times that somebody was killed.
        num_of_all: Of these, times that all were.
        num_while_saving: Of these, times that a checkpoint was being written.
        last_step: Step of the last checkpoint.
    """

    num_kills: int = 0
    num_of_all: int = 0
    num_while_saving: int = 0
    last_step: int = 0


def kill_at_random(num_kills: int, budget_s: float, seed: int, folder: Path) -> Summary:
    """Kill, resume and check again and again.

    Raises:
        AssertionError: A resumed state was not that of the step, or a checkpoint was lost.
    """
    chance, summary = random.Random(seed), Summary()
    directory, notes = folder / "checkpoints", folder / "notes"
    notes.mkdir()
    deadline = time.monotonic() + budget_s
    with Pool() as pool:
        while summary.num_kills < num_kills and time.monotonic() < deadline:
            pool.resources(NUM_WORKERS)  # all alive
            pids = pool.pids()[:NUM_WORKERS]
            victims = pids if chance.random() < 0.3 else [chance.choice(pids)]
            timer = threading.Timer(chance.uniform(0.1, 0.9), _kill, [victims, directory, summary])
            timer.start()
            results = pool.run(train, NUM_WORKERS, directory, notes, 300, group_timeout_s=TIMEOUT_S, expect_errors=True)
            timer.join()
            errors = [result for result in results if not isinstance(result, int)]
            wrong = [error for error in errors if error.type_name == "AssertionError"]
            if wrong or (errors and not any(error.type_name == "WorkerDied" for error in errors)):
                raise WorkerFailure("kills", NUM_WORKERS, dict(enumerate(errors)))
            if not errors:
                continue  # killed before it had begun, and replaced
            summary.num_kills += 1
            summary.num_of_all += victims == pids
            found = checkpoints(directory)
            assert len(found) <= 3  # a kill between appearing and removing leaves one more
            if found:
                whole = inspect(directory)  # reads every part of all workers
                assert whole.step >= summary.last_step, (whole.step, summary.last_step)
                summary.last_step = whole.step
        pool.run(train, NUM_WORKERS, directory, notes, 5)  # and goes on
    return summary


def _kill(pids: list[int], directory: Path, summary: Summary) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    summary.num_while_saving += any(directory.glob(".partial-*"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        print(kill_at_random(int(sys.argv[1]), 600, 1, Path(name)), f"{time.monotonic() - began:.0f} s")
