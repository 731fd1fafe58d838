"""Real runs against the dense recursion."""

from functools import cache
from itertools import product

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import InProcessWorld
from decent_dp.topology import Layout, catalog

from .oracle import BUCKET_MB, OPTIMIZERS, STEPS, loss_of, make_network, run_dense

# alternating-exp-ring needs a power of two of nodes; for odd worlds all workers share one
WORKERS_PER_NODE = {1: 1, 2: 1, 3: 3, 4: 2, 5: 5, 8: 2}
WORLDS = list(product(["ring", "exp", "complete", "alternating-exp-ring"], WORKERS_PER_NODE))
RUNS = list(product(OPTIMIZERS, [1, 3]))


def wrap(rank, topology, optimizer, n, **options):
    return DecentralizedDataParallel(
        make_network(seed=rank),  # replaced by that of rank 0
        OPTIMIZERS[optimizer][0],
        topology=topology,
        bucket_size_in_mb=BUCKET_MB,
        workers_per_node=WORKERS_PER_NODE[n],
        **options,
    )


def train(model, t, rank, accumulation):
    for micro in range(accumulation - 1):
        with model.no_sync():
            loss_of(model, t, micro, rank, accumulation).backward()
    loss_of(model, t, accumulation - 1, rank, accumulation).backward()


@cache
def expected(topology, n, optimizer, accumulation):
    rounds = catalog.build(topology, Layout(n, WORKERS_PER_NODE[n])).rounds
    return run_dense([round_.matrix() for round_ in rounds], optimizer, accumulation)


@pytest.mark.parametrize(("topology", "n"), WORLDS)
@pytest.mark.parametrize(("optimizer", "accumulation"), RUNS)
def test_virtual_workers_follow_the_dense_recursion(topology, n, optimizer, accumulation):
    world = InProcessWorld(n)
    models = [wrap(rank, topology, optimizer, n, communicator=world.communicator(rank)) for rank in range(n)]
    assert len(models[0].optimizers) >= 3
    for t in range(STEPS):
        for rank, model in enumerate(models):
            train(model, t, rank, accumulation)
    X = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
    torch.testing.assert_close(X, expected(topology, n, optimizer, accumulation), rtol=0, atol=1e-12)


def run_on_gloo(rank, n, topology):
    """All optimizers and accumulations of one world, in one case."""
    results = []
    for optimizer, accumulation in RUNS:
        model = wrap(rank, topology, optimizer, n)
        for t in range(STEPS):
            train(model, t, rank, accumulation)
        model.synchronize()
        results.append(parameters_to_vector(model.parameters()).detach().tolist())
    return results


@pytest.mark.parametrize(("topology", "n"), WORLDS)
def test_gloo_workers_follow_the_dense_recursion(pool, topology, n):
    per_rank = pool.run(run_on_gloo, n, topology, timeout_s=60)
    for number, (optimizer, accumulation) in enumerate(RUNS):
        X = torch.tensor([results[number] for results in per_rank], dtype=torch.float64)
        torch.testing.assert_close(X, expected(topology, n, optimizer, accumulation), rtol=0, atol=1e-12)
