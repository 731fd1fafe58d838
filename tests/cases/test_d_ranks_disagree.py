"""Kind D: workers that built different things are told so; the order of exchanges is never a matter of luck."""

import re
import time
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, MismatchError

from .replay import TINY, Replay, assert_equal, inner, matrices, on_gloo

STILL = partial(torch.optim.SGD, lr=0.0)


class TwoBranches(nn.Module):
    """Equal shapes in buckets of their own; in which order the branches run is the caller's choice."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, x, order):
        for k in order:
            x = torch.tanh(self.branches[k](x))
        return x


def opposite(net, t, rank):
    """Fill with 100 k + rank at first, learn nothing, and run the branches in another order on every rank and step."""
    if t == 0:
        with torch.no_grad():
            for k, branch in enumerate(inner(net).branches):
                branch.weight.fill_(100 * k + rank)
                branch.bias.fill_(100 * k + 50 + rank)
    order = [(k + t) % 4 for k in range(4)]
    net(torch.ones(1, 3, dtype=torch.float64), order[::-1] if rank % 2 else order).sum().backward()


@pytest.mark.parametrize(("n", "topology"), [(2, "ring"), (2, "complete"), (3, "complete"), (4, "exp")])
@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["each bucket", "whole model"])
def test_d2_branches_executed_in_opposite_order(pool, n, topology, clip):
    actual = on_gloo(
        pool, n, TwoBranches, opposite, STILL, 4, topology=topology, bucket_size_in_mb=TINY, grad_clip_norm=clip
    )
    oracle = Replay([TwoBranches() for _ in range(n)], STILL, matrices(topology, n))
    for _ in range(4):
        oracle.step(opposite)
    assert_equal(actual, oracle.values())
    if n < 4:  # mean of the ranks after one round: every tensor was averaged with itself
        branch = [[100 * k + (n - 1) / 2] * 9 + [100 * k + 50 + (n - 1) / 2] * 3 for k in range(4)]
        expected = torch.tensor(branch, dtype=torch.complex128).flatten().expand(n, -1)
        torch.testing.assert_close(actual, expected)


def built_from_a_set(rank, n):
    """Registration in another order on each rank; equal shapes, so that nothing else would tell."""
    names = ["a", "b", "c"][rank:] + ["a", "b", "c"][:rank]
    begin = time.monotonic()
    with pytest.raises(
        MismatchError, match=rf"rank {rank}: the workers disagree on parameter 0: .*'a.weight'.*b.weight"
    ):
        DecentralizedDataParallel(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}), STILL)
    return time.monotonic() - begin


def test_d2_same_parameters_in_another_order(pool):
    assert max(pool.run(built_from_a_set, 2)) < 5


def unlike(rank, n, kind):
    """Differences that are no fault of the parameters."""
    odd = rank == n - 1
    model, options = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {}
    if kind == "buffer":
        model.register_buffer("mask", torch.ones(3 if odd else 2))
    if kind == "memory format":
        model[0].weight = nn.Parameter(torch.zeros(4, 4).t() if odd else torch.zeros(4, 4))
    if kind == "scheduler":
        options["lr_scheduler_fn"] = partial(torch.optim.lr_scheduler.StepLR, step_size=1) if odd else None
    if kind == "view":
        options["param_as_bucket_view"] = odd
    if kind == "tied" and odd:
        model.append(nn.Linear(4, 4))
        model[2].weight = model[0].weight
    if kind == "one worker is short of memory" and odd:
        model = nn.Linear(4, 4, device="meta")
    try:
        DecentralizedDataParallel(model, STILL, **options)
    except ValueError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("buffer", r"buffer 0: rank 0 has 'mask' \[2\].*rank 2 has 'mask' \[3\]"),
        ("memory format", r"parameter 0: .*strides \[4, 1\].*strides \[1, 4\]"),
        ("scheduler", r"optimizer of bucket 0.*rank 0 has SGD, rank 2 has SGD with StepLR"),
        ("view", r"param_as_bucket_view: rank 0 has False, rank 2 has True"),
        ("tied", r"parameter 4: rank 0 has nothing, rank 2 has '2.bias'"),
        ("one worker is short of memory", r"rank 2 could not set up its model.*meta|is on meta"),
    ],
)
def test_other_differences_raise_on_all_workers(pool, kind, message):
    for result in pool.run(unlike, 3, kind):
        assert result is not None
        assert re.search(message, result[1]), result[1]
