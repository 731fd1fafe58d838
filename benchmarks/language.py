"""The demo's language model as work for a worker: built, trained for some steps, evaluated."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.crew import ROOT
from benchmarks.sides import DTYPES


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained.

    Attributes:
        steps: The whole schedule; a run that has not reached the target by then never does.
        width: Of the model.
        num_layers: Blocks.
        num_heads: Attention heads of a block.
        context: Characters of a window.
        batch: Windows of a worker and step.
        lr: The highest learning rate, reached after a tenth of the steps.
        windows: Of the held-out text that the loss is measured on.
        text: Path of a text; the works of Shakespeare when None.
    """

    steps: int = 800
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    context: int = 64
    batch: int = 16
    lr: float = 8e-3
    windows: int = 256
    text: str | None = None

    def corpus(self) -> Any:
        """Its text."""
        return demo().read_corpus(None if self.text is None else Path(self.text), self.context)

    def network(self, corpus: Any, seed: int) -> nn.Module:
        """A new replica, equal on all workers."""
        torch.manual_seed(seed)
        sizes = (len(corpus.alphabet), self.context, self.width, self.num_layers, self.num_heads)
        return demo().GPT(*sizes)  # type: ignore[no-any-return]

    @property
    def optim_fn(self) -> Callable[..., torch.optim.Optimizer]:
        """The demo's AdamW."""
        from decent_dp.optim import optim_fn_adamw

        return functools.partial(optim_fn_adamw, lr=self.lr, beta2=0.99)

    @property
    def lr_scheduler_fn(self) -> Callable[..., torch.optim.lr_scheduler.LRScheduler]:
        """The demo's warm-up and cosine."""
        from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup

        return functools.partial(lr_scheduler_fn_cosine_with_warmup, t_max=self.steps, t_warmup=self.steps // 10)


def demo() -> ModuleType:
    """The Shakespeare example as a module; a package of that name holds the texts, so the example goes first."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("shakespeare")


def batches_of(seed: int, rank: int) -> torch.Generator:
    """What the batches of a worker are drawn with; the same for all sides."""
    return torch.Generator().manual_seed(1000 * seed + rank)


@torch.no_grad()
def mean_loss(network: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean loss over batches of equal size, nats per character."""
    return fmean(network(x, y).item() for x, y in batches)


# -------------------------------------------------------------------- called in workers


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model on one worker.

    Attributes:
        network: Without a wrapper.
        model: What the loss is computed with.
        update: Backward and whatever it takes to have the parameters updated.
        drain: Waits until nothing travels.
        consensus: A context in which the replica is the average of all; None where it always is.
    """

    network: nn.Module
    model: nn.Module
    update: Callable[[Tensor], None]
    drain: Callable[[], None]
    consensus: Callable[[], contextlib.AbstractContextManager[Any]] | None


def _ours(task: Task, network: nn.Module, bucket_mib: float, topology: str, dtype: str | None = None) -> Trainee:
    from decent_dp import DecentralizedDataParallel

    model = DecentralizedDataParallel(
        network,
        task.optim_fn,
        task.lr_scheduler_fn,
        topology=topology,
        bucket_size_in_mb=bucket_mib,
        wire_dtype=None if dtype is None else DTYPES[dtype],
    )

    return Trainee(network, model, Tensor.backward, model.synchronize, model.consensus)


def _ddp(task: Task, network: nn.Module, bucket_mib: float, hook: Callable[..., Any] | None = None) -> Trainee:
    model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = task.optim_fn(list(network.named_parameters()))
    scheduler = task.lr_scheduler_fn(optimizer)

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return Trainee(network, model, update, lambda: None, None)


def _ddp_fp16(task: Task, network: nn.Module, bucket_mib: float) -> Trainee:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _ddp(task, network, bucket_mib, fp16_compress_hook)


def build(state: dict[str, Any], side: str, seed: int, task: dict[str, Any], bucket_mib: float) -> int:
    """Make a side's model, in place of the last; a collective call. Returns the number of its parameters."""
    state.pop("trainee", None)
    gc.collect()
    made = state["task"] = Task(**task)
    if "corpus" not in state:
        state["corpus"] = made.corpus()
        state["validation"] = list(state["corpus"].validation_batches(made.context, made.windows))
    network = made.network(state["corpus"], seed)
    kind, *rest = side.split(":")
    makers: dict[str, Callable[..., Trainee]] = {"ours": _ours, "ddp": _ddp, "ddp-fp16": _ddp_fp16}
    state["trainee"] = makers[kind](made, network, bucket_mib, *rest)
    state["generator"] = batches_of(seed, dist.get_rank())
    return sum(p.numel() for p in network.parameters())


def train(state: dict[str, Any], num_steps: int) -> float:
    """Take steps from a common start; returns the seconds until nothing travels from here."""
    task, trainee, corpus = state["task"], state["trainee"], state["corpus"]
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_steps):
        trainee.update(trainee.model(*corpus.batch(task.batch, task.context, state["generator"])))
    trainee.drain()
    return time.perf_counter() - begin


def evaluate(state: dict[str, Any]) -> dict[str, float]:
    """Losses of the consensus model, on this worker's share of the held-out windows, and of the replica, on all."""
    trainee, batches = state["trainee"], state["validation"]
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    share = [(x[rank::num_workers], y[rank::num_workers]) for x, y in batches]
    if trainee.consensus is None:
        return {"share": mean_loss(trainee.network, share)}
    replica = mean_loss(trainee.network, batches)
    with trainee.consensus():
        return {"share": mean_loss(trainee.network, share), "replica": replica}


def average(state: dict[str, Any]) -> float:
    """Seconds of replacing the replicas by their average, which whoever wants the consensus model pays once."""
    consensus = state["trainee"].consensus
    if consensus is None:
        return 0.0
    dist.barrier()
    begin = time.perf_counter()
    with consensus():
        return time.perf_counter() - begin


# -------------------------------------------------------------------- the runs
