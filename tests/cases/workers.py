"""What several tables need inside of a worker."""

import gc
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from decent_dp.comm import torch_communicator


def network(seed: int = 0) -> nn.Module:
    """Four parameters, equal on all workers; tanh, so that gradients depend on all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model: nn.Module, t: int, rank: int) -> Tensor:
    """Another loss for every step and worker."""
    return model(torch.full((2, 3), 0.1 * (1 + t) * (1 + rank))).square().mean()


def flat(model: nn.Module) -> Tensor:
    """All parameters in one tensor, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def short_notes() -> AbstractContextManager[object]:
    """Wait a moment only for what other workers say of a failure, where nobody else fails."""
    return mock.patch.object(torch_communicator, "_NOTES_S", 0.3)


def stay_until_left(folder: Path, num_workers: int) -> None:
    """Say nothing to anybody until that many workers have `leave`d."""
    deadline = time.monotonic() + 20
    while len(list(folder.iterdir())) < num_workers and time.monotonic() < deadline:
        time.sleep(0.01)


def leave(folder: Path, rank: int) -> None:
    """Let those who `stay_until_left` go."""
    (folder / str(rank)).touch()


class Held(NamedTuple):
    """What this process holds."""

    num_descriptors: int
    num_threads: int
    num_tensors: int
    num_handles: int
    resident_kib: int


def held() -> Held:
    """Count, after collecting garbage."""
    gc.collect()
    objects = gc.get_objects()
    return Held(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        sum(issubclass(type(x), Tensor) for x in objects),
        sum(type(x).__name__ in ("_Works", "Exchange", "Arrived") for x in objects),
        int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    )
