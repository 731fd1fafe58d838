"""Kind A: parameters that get no gradient are mixed, not updated, and never stop anybody."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, ExchangeError
from virtual import wrap_virtual

from .replay import TINY, assert_equal, inner, on_gloo, on_virtual, replay

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3)


class WithDead(nn.Module):
    """Two layers, and one between them that never takes part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l1, self.dead, self.l2 = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        return self.l2(torch.tanh(self.l1(x)))


def use_two(net, t, rank):
    if t == 0:  # so that mixing shows
        with torch.no_grad():
            inner(net).dead.weight.add_(rank)
    net(torch.full((2, 4), 0.1 * (1 + t + rank), dtype=torch.float64)).square().sum().backward()


@pytest.mark.parametrize("optim_fn", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("bucket", [25, TINY], ids=["one bucket", "a bucket each"])
def test_a1_unused_parameter(pool, optim_fn, bucket):
    actual = on_gloo(pool, 2, WithDead, use_two, optim_fn, 5, topology="ring", bucket_size_in_mb=bucket)
    assert_equal(actual, replay(2, WithDead, use_two, optim_fn, 5))
    start = WithDead().dead.weight.detach().flatten()
    torch.testing.assert_close(actual[:, 20:36].real, (start + 0.5).expand(2, 16))  # mixed alike, without a step


class Heads(nn.Module):
    """One of three heads at a time, or none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(3))

    def forward(self, x, head):
        y = torch.tanh(self.body(x))
        return y.sum() if head is None else self.heads[head](y).sum()


def rotating(net, t, rank):
    net(torch.full((2, 3), 0.2 * (1 + rank + t), dtype=torch.float64), (rank + t) % 3).backward()


def some_without_head(net, t, rank):
    net(torch.full((2, 3), 0.2 * (1 + rank + t), dtype=torch.float64), (None, 0, 2)[(rank + t) % 3]).backward()


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
@pytest.mark.parametrize("act", [rotating, some_without_head])
def test_a2_branch_differs_per_rank_and_step(pool, topology, act):
    actual = on_gloo(pool, 3, Heads, act, ADAMW, 9, topology=topology, bucket_size_in_mb=TINY)
    assert_equal(actual, replay(3, Heads, act, ADAMW, 9, topology))


@pytest.mark.parametrize("act", [rotating, some_without_head])
def test_clipping_counts_the_gradients_there_are(act):
    actual = on_virtual(3, Heads, act, SGD, 9, bucket_size_in_mb=TINY, grad_clip_norm=0.05)
    assert_equal(actual, replay(3, Heads, act, SGD, 9, max_norm=0.05))


def all_unused_on_one_rank(rank, n):
    """One rank's branch has no parameters, so its backward is no step: the others must not hang."""
    model = DecentralizedDataParallel(Heads(), SGD, topology="ring")
    try:
        for t in range(4):
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            (x.sum() if rank == 1 and t == 1 else model(x, 0)).backward()
        model.synchronize()
    except ExchangeError as error:
        return str(error)
    return None


def test_a_backward_that_reaches_no_parameter_is_noticed_as_a_missing_step(pool):
    told = [text for text in pool.run(all_unused_on_one_rank, 2, group_timeout_s=2) if text]
    assert any("rank 1" in text and "step " in text for text in told)


def unused_everywhere(net, t, rank):
    """A worker without anything to learn takes its step by name."""
    if rank == 1 and t == 1:
        if hasattr(net, "finish_window"):
            net.finish_window()
        return
    rotating(net, t, rank)


def test_a_step_without_any_gradient_only_mixes(pool):
    actual = on_gloo(pool, 3, Heads, unused_everywhere, ADAMW, 4, bucket_size_in_mb=TINY)
    assert_equal(actual, replay(3, Heads, unused_everywhere, ADAMW, 4))


def test_unused_parameters_get_no_optimizer_state():
    (model,) = wrap_virtual(1, lambda rank: WithDead(), ADAMW, bucket_size_in_mb=TINY)
    use_two(model, 0, 0)
    held = {id(p) for optimizer in model.optimizers for p in optimizer.state}
    dead = {id(p) for p in model.module.dead.parameters()}
    assert not held & dead
    assert len(held) == 4
