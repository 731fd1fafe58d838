"""A run that has everything in it that a checkpoint must keep, for the pool."""

import hashlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp import DecentralizedDataParallel
from decent_dp.checkpoint import load, save
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw

COSINE = partial(lr_scheduler_fn_cosine_with_warmup, t_max=20, t_warmup=3)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "accum-adamw": partial(optim_fn_accum_adamw, lr=0.01, accum_iter=4),
}
TINY = 100 / 2**20


class Network(nn.Module):
    """Dropout, running statistics, a buffer outside of the state dict, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.third, self.frozen = nn.Linear(8, 8), nn.Linear(8, 3)
        self.third.weight = self.second.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        x = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)
        return self.frozen(self.third(torch.relu(self.second(x))))


class Sampler:
    """Draws batches, with a state."""

    def __init__(self, seed: int) -> None:
        self.seed, self.position = seed, 0

    def draw(self) -> Tensor:
        self.position += 1
        return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * self.position + self.seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    whole = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        whole.update(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else repr(tensor.item()).encode()
        )
    return whole.hexdigest()


def train(
    rank: int,
    n: int,
    optimizer: str,
    topology: str,
    bucket_mb: float,
    first: int,
    last: int,
    read: Path | None,
    write: Path | None,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Train with a scaler, clipping, windows of two backwards; the save is inside of a window."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=3)
    model = DecentralizedDataParallel(
        Network(), OPTIMIZERS[optimizer], COSINE, topology, scaler, 1.0, bucket_size_in_mb=bucket_mb, **options
    )
    sampler, generator = Sampler(rank), torch.Generator().manual_seed(rank)
    model.train()
    is_first = True
    if read is not None:
        loaded = load(model, read, extra={"sampler": sampler, "generator": generator})
        assert (loaded.step, loaded.extra["note"], model.t) == (first, ["as it was", 7], first)
    for t in range(first, last):
        if not (is_first and read is not None):
            with model.no_sync():
                scaler.scale(model(sampler.draw()).square().mean()).backward()
        is_first = False
        x = sampler.draw() + torch.rand(1, generator=generator) + random.random() + float(np.random.rand())
        factor = float("inf") if (rank, t) == (1, 4) else 1.0
        scaler.scale(model(x).square().mean() * factor).backward()
    if write is not None:  # after the first backward of a window
        with model.no_sync():
            scaler.scale(model(sampler.draw()).square().mean()).backward()
        extra = {"sampler": sampler, "generator": generator, "note": ["as it was", 7]}
        save(model, write, extra=extra)
    model.synchronize()
    rng = torch.rand(1).item(), random.random(), float(np.random.rand()), generator.get_state().sum().item()
    return model.t, model.get_lr(), scaler.state_dict(), digest(model), rng
