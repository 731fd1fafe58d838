"""The user's quick start, its pseudocode filled in, under the launchers a user would take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spawn import spawn_script

# As the user wrote it, but for the loop over the topologies and what the test wants to see.
QUICK_START = """
import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from decent_dp.ddp import DecentralizedDataParallel as DecentDP
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)


def batches(seed, n):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(16, 4, generator=generator)
        yield x, x.sum(1, keepdim=True)


def train(topology, device, num_epochs=4):
    # Initialize model (move to device before wrapping with DecentralizedDataParallel)
    torch.manual_seed(dist.get_rank())
    model = Model()
    model = model.to(device)

    # Wrap model with DecentDP
    model = DecentDP(model,
                     optim_fn=partial(optim_fn_adamw, lr=3e-2),
                     lr_scheduler_fn=partial(lr_scheduler_fn_cosine_with_warmup, t_max=40, t_warmup=5),
                     **topology)

    losses = []
    # Training loop
    for epoch in range(num_epochs):
        model.train()
        for batch in batches(1000 * epoch + dist.get_rank(), 10):
            loss = model(batch)
            model.zero_grad()
            loss.backward()
            # no need for optimizer.step() as it is handled by DecentDP

        model.eval()
        for batch in batches(-1, 1):
            with torch.no_grad():
                loss = model(batch)
        losses.append(loss.item())
    return losses, [p.norm().item() for p in model.parameters()]


torch.set_num_threads(1)
# Initialize process group
dist.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo', init_method='env://')
for topology in json.loads(sys.argv[1]):
    try:
        print(json.dumps([topology, *train(topology, "cpu")]), flush=True)
    except ValueError as error:
        print(json.dumps([topology, str(error)]), flush=True)
"""
# How one worker starts without torchrun.
PLAIN = QUICK_START.replace(
    "dist.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo', init_method='env://')",
    "from decent_dp.utils import initialize_dist; assert initialize_dist() == (0, 1)",
)
NO_LAUNCHER = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
TOPOLOGIES = [{"topology": name} for name in ("ring", "exp", "complete", "alternating-exp-ring")]


def run_cleanly(n: int, topologies: list[Any], **options: Any) -> list[list[list[Any]]]:
    """What every rank printed, line by line, once nothing is wrong with how they ended."""
    code: str = options.pop("code", QUICK_START)
    run = spawn_script(code, n, args=[json.dumps(topologies)], timeout_s=100, **options)
    assert [rank.stderr for rank in run.ranks] == [""] * n
    # Nothing in the quick start destroys the process group.
    assert {process.code for process in (run.ranks if run.launcher is None else [run.launcher])} == {0}
    assert run.leftovers == []
    return [[json.loads(line) for line in rank.stdout.splitlines()] for rank in run.ranks]


def check_learnt(ranks: list[list[list[Any]]], topologies: list[Any]) -> None:
    for index, topology in enumerate(topologies):
        results = [lines[index] for lines in ranks]
        for given, losses, norms in results:
            assert given == topology
            assert losses[-1] < 0.3 * losses[0], (topology, losses)
            # Replicas differ by their last updates, which the schedule has made small; unmixed ones by ten times more.
            assert norms == pytest.approx(results[0][2], abs=4e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_quick_start_under_torchrun(n: int) -> None:
    # On one node, and as if every node had one or two workers, where that is a power of two of nodes.
    per_node = [k for k in (1, 2) if n in (2 * k, 4 * k, 8 * k)]
    several_nodes = [{"topology": "alternating-exp-ring", "_local_world_size": k} for k in per_node]
    topologies = [*TOPOLOGIES, *several_nodes]
    if n != 3:
        check_learnt(run_cleanly(n, topologies, torchrun=True), topologies)
        return
    # With three workers also what cannot be served; the process group is as good as before.
    three_nodes = {"topology": "alternating-exp-ring", "_local_world_size": 1}
    two_a_node = {"topology": "ring", "_local_world_size": 2}
    misspelt = {"topology": "alternating-ring"}
    ranks = run_cleanly(n, [three_nodes, two_a_node, misspelt, *topologies], torchrun=True)
    check_learnt([lines[3:] for lines in ranks], topologies)
    for lines in ranks:
        nodes, layout, name = (message for _, message in lines[:3])
        assert "needs a power of two of nodes: 1, 2, 4, 8, 16, ... with any number of workers a node" in nodes
        assert "got 3 nodes of 1 workers (3 in all). 'exp', 'complete' and 'ring' serve this layout" in nodes
        assert "3 workers with 2 a node" in layout
        assert "did you mean 'alternating-exp-ring'?" in name


def test_quick_start_on_one_worker_without_torchrun() -> None:
    check_learnt(run_cleanly(1, TOPOLOGIES, code=PLAIN, env=NO_LAUNCHER), TOPOLOGIES)


FAILS_ON_RANK_1 = QUICK_START.replace(
    "            loss = model(batch)\n            model.zero_grad()",
    "            assert dist.get_rank() != 1 or epoch != 1, 'data is gone'\n"
    "            loss = model(batch)\n            model.zero_grad()",
)


def test_exception_on_one_rank_ends_all() -> None:
    assert FAILS_ON_RANK_1 != QUICK_START
    run = spawn_script(FAILS_ON_RANK_1, 3, args=[json.dumps([{"topology": "exp"}])], torchrun=True)
    assert run.launcher is not None
    assert run.launcher.code == 1
    assert "AssertionError: data is gone" in run.ranks[1].stderr
    assert run.leftovers == []
