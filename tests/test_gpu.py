"""What only a GPU shows: streams, and that a step never waits for the device. Virtual workers share one."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import ConfigurationError
from spawn import spawn_script
from virtual import stack, wrap_virtual

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPTIONS = {"bucket_size_in_mb": 64 / 2**20, "workers_per_node": 2}
ROUNDS = [
    ("ring", None),
    ("exp", torch.bfloat16),
    ("complete", None),
    ("complete", torch.float16),
    ("hierarchical", None),
    ("hierarchical", torch.bfloat16),
    ("alternating-exp-ring", None),
]


def network(device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)


def train(models, device, steps):
    inputs = torch.linspace(-1, 1, 12, device=device).reshape(4, 3)
    for t in range(steps):
        for rank, model in enumerate(models):
            model(inputs * (1 + t + rank)).square().mean().backward()


@pytest.mark.parametrize(("topology", "wire_dtype"), ROUNDS)
def test_virtual_workers_give_what_they_give_on_the_cpu(topology, wire_dtype):
    results = []
    for device in ("cpu", "cuda"):
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        models = wrap_virtual(
            4, lambda rank, d=device: network(d), optimizer, topology=topology, wire_dtype=wire_dtype, **OPTIONS
        )
        train(models, device, 6)
        results.append(stack(models).cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5 if wire_dtype is None else 2e-2)


@pytest.mark.parametrize(("topology", "wire_dtype"), ROUNDS)
def test_a_step_never_waits_for_the_device(topology, wire_dtype):
    models = wrap_virtual(
        4,
        lambda rank: network("cuda"),
        partial(torch.optim.AdamW, lr=0.01, fused=True),
        topology=topology,
        wire_dtype=wire_dtype,
        **OPTIONS,
    )
    train(models, "cuda", 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(models, "cuda", 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_o10_half_on_the_cpu_is_refused():
    cuda_model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("cuda")
    cuda_model[1].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"parameter '1.bias' is on cpu and others are on cuda:0"):
        wrap_virtual(1, lambda rank: cuda_model, partial(torch.optim.SGD, lr=0.1))


NCCL = """
import json, sys
from functools import partial
import torch, torch.distributed as dist
from torch import nn
from decent_dp import DecentralizedDataParallel

rank = int(__import__("os").environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
results = {}
for topology, wire_dtype in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).cuda()
    model = DecentralizedDataParallel(
        model,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        topology=topology,
        wire_dtype=wire_dtype and getattr(torch, wire_dtype),
        bucket_size_in_mb=64 / 2**20,
        workers_per_node=2 if dist.get_world_size() % 2 == 0 else 1,
    )
    inputs = torch.linspace(-1, 1, 12, device="cuda").reshape(4, 3)
    for t in range(6):
        model(inputs * (1 + t + rank)).square().mean().backward()
    model.synchronize()
    results[f"{topology} {wire_dtype}"] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
print(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_processes_over_nccl_give_what_virtual_workers_give():
    n = 4 if torch.cuda.device_count() >= 4 else 2
    cases = [(topology, wire and str(wire).removeprefix("torch.")) for topology, wire in ROUNDS]
    run = spawn_script(NCCL, n, args=[json.dumps(cases)], timeout_s=120)
    assert [rank.code for rank in run.ranks] == [0] * n, run.ranks[0].stderr
    printed = [json.loads(rank.stdout) for rank in run.ranks]
    for topology, wire_dtype in ROUNDS:
        models = wrap_virtual(
            n,
            lambda rank: network("cuda"),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            topology=topology,
            wire_dtype=wire_dtype,
            **OPTIONS,
        )
        train(models, "cuda", 6)
        name = f"{topology} {wire_dtype and str(wire_dtype).removeprefix('torch.')}"
        actual = torch.tensor([one[name] for one in printed])
        atol = 1e-5 if wire_dtype is None else 2e-2
        torch.testing.assert_close(actual, stack(models).cpu(), rtol=0, atol=atol)
