"""Random runs against the dense recursion, for as long as wanted.

    python tests/soak.py --minutes 10

Four gloo workers train random small models with random topologies, optimizers and buckets; every worker takes a random
number of micro-batches per step, or none, uses random branches, and every exchange is delayed by 0 to 50 ms. After each
run the replicas are compared with a replay in plain torch. The seed is printed; `--seed` repeats a run.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from decent_dp import DecentralizedDataParallel, Layout
from decent_dp.topology import catalog
from faults import DelayedCommunicator
from virtual import names_for

NUM_WORKERS = 4
TOLERANCE = 1e-11
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
}


@dataclass(frozen=True)
class Trial:
    """One random run; a function of its seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        settings = {
            "widths": [draw.randint(1, 9) for _ in range(draw.randint(2, 5))],
            "num_heads": draw.randint(1, 3),
            "topology": draw.choice([*names_for(NUM_WORKERS, 1), "hierarchical(ring)", "hierarchical(static-ring)"]),
            "workers_per_node": draw.choice([1, 2, 4]),
            "optimizer": draw.choice(list(OPTIMIZERS)),
            "bucket_bytes": draw.choice([1, 100, 400, 1000, 10**7]),
            "as_view": draw.random() < 0.7,
            "clip": draw.choice([0.0, 0.0, 0.3]),
            "num_steps": draw.randint(4, 12),
            "delays": draw.random() < 0.8,
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def batches(self, t: int, rank: int) -> list[tuple[Tensor, int]]:
        """Inputs and heads of the micro-batches of one worker and step; none is a step without a gradient."""
        draw = random.Random(f"{self.seed} {t} {rank}")
        count = draw.choice([0, 1, 1, 1, 2, 3])
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        return [
            (torch.randn(2, self.widths[0], dtype=torch.float64, generator=generator), draw.randrange(self.num_heads))
            for _ in range(count)
        ]

    def network(self) -> nn.Module:
        """Tanh layers and a choice of heads, of which micro-batches use one each."""
        torch.manual_seed(self.seed)
        return Network(self.widths, self.num_heads).double()

    def replay(self) -> Tensor:
        """The same in plain torch, with one matrix product per round; shape (workers, parameters)."""
        topology = catalog.build(self.topology, Layout(NUM_WORKERS, self.workers_per_node))
        models = [self.network() for _ in range(NUM_WORKERS)]
        optimizers = [OPTIMIZERS[self.optimizer](model.parameters(), foreach=False) for model in models]
        for t in range(self.num_steps):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                for x, head in self.batches(t, rank):
                    model(x, head).backward()
                if self.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if t > 0:
                W = torch.from_numpy(topology.round_at(t - 1).matrix())
                for together in zip(*(model.parameters() for model in models), strict=True):
                    mixed = torch.tensordot(W, torch.stack([p.detach() for p in together]), 1)
                    for p, x in zip(together, mixed, strict=True):
                        p.data = x
            for optimizer in optimizers:
                optimizer.step()
        return torch.stack([nn.utils.parameters_to_vector(model.parameters()).detach() for model in models])

    def run(self, rank: int) -> Tensor:
        """The library's run; parameters of this worker."""
        draw = random.Random(f"{self.seed} {rank}")
        communicator = DelayedCommunicator((lambda: draw.uniform(0, 0.05)) if self.delays else 0.0)
        model = DecentralizedDataParallel(
            self.network(),
            OPTIMIZERS[self.optimizer],
            topology=self.topology,
            grad_clip_norm=self.clip,
            param_as_bucket_view=self.as_view,
            bucket_size_in_mb=self.bucket_bytes / 2**20,
            workers_per_node=self.workers_per_node,
            communicator=communicator,
        )
        for t in range(self.num_steps):
            batches = self.batches(t, rank)
            for x, head in batches[:-1]:
                with model.no_sync():
                    model(x, head).backward()
            for x, head in batches[-1:]:
                model(x, head).backward()
            if not batches:
                model.finish_window()
        model.synchronize()
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Network(nn.Module):
    """A body of tanh layers and heads."""

    def __init__(self, widths: list[int], num_heads: int) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.heads = nn.ModuleList(nn.Linear(widths[-1], 1) for _ in range(num_heads))

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Return a loss."""
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.heads[head](x).square().mean()


def soak(rank: int, num_workers: int, seed: int, num_trials: int, seconds: float) -> int:
    """Run trials in the default process group until their number or the time is used up; returns how many.

    Raises:
        AssertionError: Naming the seed of the trial that differs.
    """
    assert num_workers == NUM_WORKERS
    begin, count = time.monotonic(), 0
    while count < num_trials:
        enough = torch.tensor([float(time.monotonic() - begin > seconds)])
        dist.broadcast(enough, 0)
        if enough.item():
            break
        trial = Trial(seed + count)
        mine = trial.run(rank)
        replicas = [torch.empty_like(mine) for _ in range(num_workers)]
        dist.all_gather(replicas, mine)
        worst = (torch.stack(replicas) - trial.replay()).abs().max().item()
        if not worst <= TOLERANCE:
            raise AssertionError(f"seed {trial.seed}: a replica is off by {worst}: {vars(trial)}")
        count += 1
    return count


def _worker(rank: int, folder: str, seed: int, seconds: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS, timeout=timedelta(seconds=60))
    count = soak(rank, NUM_WORKERS, seed, 10**9, seconds)
    if rank == 0:
        print(f"{count} runs equal the dense recursion to {TOLERANCE}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first run (default: random)")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, options.seed, 60 * options.minutes), nprocs=NUM_WORKERS)


if __name__ == "__main__":
    main()
