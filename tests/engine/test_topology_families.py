"""Every name of the catalog, carried out by the engine, against the dense recursion x <- W_t x + update."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp import DecentralizedDataParallel
from decent_dp.errors import TopologyError
from decent_dp.topology import AnyTopology, Layout, build, from_function, names, random_matching
from virtual import stack, wrap_virtual

STEPS = 20
LR = 0.1
NUM_PARAMETERS = 7


class Pulled(nn.Module):
    """Pulled to a place of its own at every step and worker; four parameters, hence buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in (1, 3, 1, 2)])

    def forward(self, t: int, rank: int) -> Tensor:
        error = torch.cat(list(self.parts)) - goal(t, rank)
        return error @ error / 2


def goal(t: int, rank: int) -> Tensor:
    return torch.sin(torch.arange(1, NUM_PARAMETERS + 1, dtype=torch.float64) * (rank + 1) + t) * (rank + 1)


def built(name: str, n: int, local: int) -> AnyTopology | None:
    try:
        return build(name, Layout(n, local))
    except TopologyError:
        return None


def dense(topology: AnyTopology, steps: int = STEPS) -> Tensor:
    """The parameters of all workers after some steps; what step t shows is mixed t times."""
    n = topology.layout.num_workers
    X = torch.zeros(n, NUM_PARAMETERS, dtype=torch.float64)
    for t in range(steps):
        gradients = X - torch.stack([goal(t, rank) for rank in range(n)])
        if t > 0:
            X = torch.from_numpy(topology.round_at(t - 1).matrix()) @ X
        X = X - LR * gradients
    return X


OPTIONS = {"optim_fn": partial(torch.optim.SGD, lr=LR), "bucket_size_in_mb": 1e-6}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 3), (7, 1), (8, 2), (9, 3), (12, 4), (15, 1), (16, 4), (25, 5)]
CASES = [(name, n, local) for name in names() for n, local in LAYOUTS if built(name, n, local)]


def run_virtual(topology: str | AnyTopology, n: int, local: int, steps: int = STEPS) -> Tensor:
    options = OPTIONS | {"topology": topology, "workers_per_node": local}
    models = wrap_virtual(n, lambda rank: Pulled(), **options)
    assert len(models[0].optimizers) == 4
    for t in range(steps):
        for rank, model in enumerate(models):
            model(t, rank).backward()
    return stack(models)


@pytest.mark.parametrize(("name", "n", "local"), CASES)
def test_virtual_workers_follow_the_dense_recursion(name: str, n: int, local: int) -> None:
    topology = built(name, n, local)
    assert topology is not None
    torch.testing.assert_close(run_virtual(name, n, local), dense(topology), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [5, 8])
def test_a_seed_of_ones_own(n: int) -> None:
    topology = random_matching(Layout(n, 1), seed=7)
    X = run_virtual(topology, n, 1)
    torch.testing.assert_close(X, dense(topology), rtol=0, atol=1e-12)
    assert (X - dense(random_matching(Layout(n, 1)))).abs().max() > 1e-3


def test_named_cliques_of_a_function_of_time() -> None:
    cycle = build("base-3", Layout(6, 3))
    topology = from_function("mine", cycle.layout, cycle.round_at, cliques=cycle.cliques())
    torch.testing.assert_close(run_virtual(topology, 6, 3), dense(cycle), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [5, 7, 12])
def test_without_learning_one_cycle_of_a_base_graph_leaves_the_mean(n: int) -> None:
    topology = build("base-2", Layout(n, 1))
    X = np.eye(n)
    for t in range(topology.num_rounds or 0):
        X = topology.round_at(t).matrix() @ X
    assert np.abs(X - 1 / n).max() < 1e-14
    models = wrap_virtual(n, lambda rank: Pulled(), partial(torch.optim.SGD, lr=0.0), topology="base-2")
    for rank, model in enumerate(models):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank**2)
    start = stack(models)
    for t in range((topology.num_rounds or 0) + 1):
        for rank, model in enumerate(models):
            model(t, rank).backward()
    torch.testing.assert_close(stack(models), start.mean(0).expand(n, -1), rtol=0, atol=1e-12)


def run_on_gloo(rank: int, n: int, cases: list[tuple[str, int]]) -> list[list[float]]:
    """All names of one world, in one case."""
    results = []
    for name, local in cases:
        model = DecentralizedDataParallel(Pulled(), topology=name, workers_per_node=local, **OPTIONS)
        for t in range(STEPS):
            model(t, rank).backward()
        model.synchronize()
        results.append(torch.cat([p.detach() for p in model.parameters()]).tolist())
    return results


@pytest.mark.parametrize(("n", "locals"), [(3, (1,)), (4, (1, 2)), (5, (1,))])
def test_gloo_workers_follow_the_dense_recursion(pool, n: int, locals: tuple[int, ...]) -> None:
    cases = [(name, local) for name in names() for local in locals if built(name, n, local)]
    per_rank = pool.run(run_on_gloo, n, cases, timeout_s=100)
    for number, (name, local) in enumerate(cases):
        X = torch.tensor([results[number] for results in per_rank], dtype=torch.float64)
        torch.testing.assert_close(X, dense(build(name, Layout(n, local))), rtol=0, atol=1e-12)
