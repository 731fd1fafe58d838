"""A script for decent-dp 0.2.3 of PyPI: it uses every public name of that package, and prints what it saw as JSON.

It runs unchanged under that package and under this one; `tests/test_original_package.py` says what must come out.
"""

import json
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from decent_dp.ddp import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, DecentralizedDataParallel
from decent_dp.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from decent_dp.topo import Edge, Topology, TopologyReg
from decent_dp.utils import initialize_dist

EPOCHS, BATCHES = 2, 6


@TopologyReg.register("weighted-pairs")
class WeightedPairs(Topology):
    """Neighbours average, keeping 0.6, then those across the node boundaries, keeping 0.75."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        assert self._n_nodes * self._local_world_size == n
        assert 0 <= self._rank < n
        inside = [Edge(ranks=[i, i + 1], weight=0.6) for i in range(0, n, 2)]
        across = [Edge(ranks=sorted([i, (i + 1) % n]), weight=0.75) for i in range(1, n, 2)]
        return [inside, across]


class Watching(torch.optim.SGD):
    """Notes what arrived before it is mixed."""

    def __init__(self, params: list[tuple[str, torch.Tensor]], calls: list, lr: float) -> None:
        super().__init__([p for _, p in params], lr=lr)
        self.calls = calls

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = p.detach().flatten().tolist()
                self.calls.append((list(edge.ranks), edge.weight, weight, kept, p.comm_buffer.flatten().tolist()))


def accum_adam_itself(params: list[tuple[str, torch.Tensor]], decoupled: bool) -> torch.optim.Optimizer:
    tensors = [p for _, p in params]
    if decoupled:
        return AccumAdamW(tensors, lr=2e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, accum_iter=3)
    return AccumAdam(tensors, lr=2e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, accum_iter=3)


class Regression(nn.Module):
    """A model that returns its loss, as in the quick start."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)


def batches(seed: int, n: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(n, 32, 6, generator=generator)
    return [(x, x.sum(1)) for x in xs]


def gathered(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def replica(model: DecentralizedDataParallel) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def train(model: DecentralizedDataParallel, epochs: int = EPOCHS) -> dict:
    """The loop of the quick start."""
    losses = []
    for epoch in range(epochs):
        model.train()
        for batch in batches(100 * epoch + dist.get_rank()):
            loss = model(batch)
            model.zero_grad()
            loss.backward()

        model.eval()
        for batch in batches(10_000, 1):
            with torch.no_grad():
                loss = model(batch)
        losses.append(loss.item())
    return {"losses": losses, "lr": model.get_lr()}


def hooked(topology: str, local_world_size: int | None = None, strength: float = 1.0) -> list:
    """What the hooks of all workers saw."""
    calls: list = []
    optim_fn: OPTIM_FN_TYPE = partial(Watching, calls=calls, lr=0.05)
    torch.manual_seed(dist.get_rank())
    options = {} if local_world_size is None else {"_local_world_size": local_world_size}
    model = DecentralizedDataParallel(Regression(), optim_fn, topology=topology, **options)
    model.set_adaptive_factor(strength)
    model.train()
    for batch in batches(dist.get_rank()):
        loss = model(batch)
        model.zero_grad()
        loss.backward()
    return gathered(calls)


def trained(optim_fn: OPTIM_FN_TYPE, *further: object) -> dict:
    """Train, and average in both ways; further arguments are those of the constructor."""
    torch.manual_seed(dist.get_rank())
    model = DecentralizedDataParallel(Regression(), optim_fn, *further)
    seen = train(model)
    before = replica(model)
    seen["distance"] = model.global_avg(return_d2c=True)
    seen["averaged"] = replica(model)
    model.revert_global_avg()
    seen["reverted"] = replica(model) == before
    seen["before"] = before
    seen["nothing"] = model.global_avg(will_revert=False)
    seen["kept"] = replica(model)
    return seen


def accumulated() -> dict:
    """Accumulate over three micro-batches, twice."""
    torch.manual_seed(dist.get_rank())
    model = DecentralizedDataParallel(Regression(), partial(optim_fn_adam, lr=1e-2), topology="complete")
    model.train()
    model.set_accumulate_grad(False)
    model(batches(7, 1)[0]).backward()
    moved = []
    for index, batch in enumerate(batches(dist.get_rank())):
        before = replica(model)
        model.set_accumulate_grad(index % 3 != 2)
        (model(batch) / 3).backward()
        moved.append(replica(model) != before)
    model.set_accumulate_grad()
    before = replica(model)
    model(batches(7, 1)[0]).backward()
    return {"moved": moved, "moved_by_default": replica(model) != before}


def main() -> None:
    torch.set_num_threads(1)
    rank, world_size = initialize_dist()
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    names = ["complete", "ring", "one-peer-exp", "weighted-pairs"]

    scheduler_fn: LR_SCHEDULER_FN_TYPE = partial(
        lr_scheduler_fn_cosine_with_warmup, t_max=EPOCHS * BATCHES, t_warmup=3, cosine_eta_min=1e-6, warmup_decay=0.01
    )
    optimizers: dict[str, OPTIM_FN_TYPE] = {
        "optim_fn_adam": partial(optim_fn_adam, lr=2e-2, beta1=0.9, beta2=0.99, weight_decay=1 / 32768, eps=1e-8),
        "optim_fn_adamw": partial(optim_fn_adamw, lr=2e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8),
        "optim_fn_accum_adam": partial(
            optim_fn_accum_adam, lr=2e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=1 / 32768, accum_iter=4
        ),
        "optim_fn_accum_adamw": partial(
            optim_fn_accum_adamw, lr=2e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, accum_iter=4
        ),
        "AccumAdam": partial(accum_adam_itself, decoupled=False),
        "AccumAdamW": partial(accum_adam_itself, decoupled=True),
    }
    seen: dict[str, object] = {"ranks": gathered(rank)}
    seen["registry"] = sorted(TopologyReg.registry)
    seen["registered"] = TopologyReg.registry["weighted-pairs"] is WeightedPairs
    seen["hooks"] = {name: hooked(name) for name in names}
    if world_size == 4:
        seen["hooks"]["alternating-exp-ring"] = hooked("alternating-exp-ring", local_world_size=2)
    seen["weaker"] = hooked("weighted-pairs", strength=0.5)
    seen["trained"] = {
        name: gathered(trained(optim_fn, scheduler_fn, names[index % len(names)]))
        for index, (name, optim_fn) in enumerate(optimizers.items())
    }
    # model, optim_fn, lr_scheduler_fn, topology, scaler, grad_clip_norm, param_as_bucket_view,
    # sync_buffer_in_global_avg, bucket_size_in_mb, _local_world_size
    further = (scheduler_fn, "ring", None, 1.0, False, True, 1, world_size)
    seen["all_positional"] = gathered(trained(optimizers["optim_fn_adamw"], *further))
    seen["accumulated"] = gathered(accumulated())

    model = DecentralizedDataParallel(Regression(), optimizers["optim_fn_adamw"])
    seen["names"] = [name for name, _ in model.named_parameters()]
    seen["modes"] = [model.train() is model and model.training, model.eval() is model and not model.training]
    seen["modes"].append(model.train(False) is model and not model.training)
    if rank == 0:
        print(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
