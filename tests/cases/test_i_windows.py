"""Kind I: accumulation windows end where they are said to, and nothing of them is lost or leaks."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.optim import optim_fn_accum_adamw
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, accumulating, assert_equal, matrices, on_gloo, replay, values

ADAM = partial(torch.optim.Adam, lr=0.1)


class Net(nn.Module):
    """Two branches, so that some micro-batches use only one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

    def forward(self, x, branch=None):
        y = torch.tanh(self.body(x))
        return self.a(y) + self.b(y) if branch is None else (self.a, self.b)[branch](y)


def micro_loss(net, epoch, k, rank):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) * (1 + rank + k) + epoch
    return net(x).square().mean() / 2


def windows(num_micro):
    """Windows of two over the micro-batches of an epoch; the last one may be incomplete, or empty."""
    return [range(first, min(first + 2, num_micro)) for first in range(0, 5, 2)]


def epochs(rank, n, counts, last):
    """Two epochs in windows of two; what is left over at the end counts, is dropped by name, or is forgotten."""
    model = DecentralizedDataParallel(Net(), ADAM, topology="ring", bucket_size_in_mb=TINY)
    told = 0
    for epoch in range(2):
        for k in range(counts[rank]):
            model.set_accumulate_grad(k % 2 == 0)
            micro_loss(model, epoch, k, rank).backward()
        model.set_accumulate_grad(False)
        if last == "finished":
            model.finish_window()
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.zero_grad()
            told += sum("discards 1 accumulated" in str(w.message) for w in caught)
    model.synchronize()
    return values(model), model.t, told, all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("counts", [(5, 5), (5, 4)], ids=["equal", "unequal"])
@pytest.mark.parametrize("last", ["finished", "dropped"])
def test_i1_last_incomplete_window(pool, counts, last):
    results = pool.run(epochs, 2, counts, last)
    oracle = Replay([Net() for _ in range(2)], ADAM, matrices("ring", 2))
    for epoch in range(2):
        for number, _ in enumerate(windows(5) if last == "finished" else windows(4)[:2]):

            def window(net, t, rank, epoch=epoch, number=number):
                for k in windows(counts[rank])[number]:
                    micro_loss(net, epoch, k, rank).backward()

            oracle.step(window)
    assert_equal(torch.stack([r[0] for r in results]), oracle.values())
    assert [r[1] for r in results] == [6 if last == "finished" else 4] * 2
    assert [r[2] for r in results] == [0 if last == "finished" else 2 * (count % 2) for count in counts]
    assert all(r[3] for r in results)


@pytest.mark.parametrize("way", ["before forward", "between", "around both", "around backward"])
def test_i2_the_state_at_backward_decides(pool, way):
    act = partial(switching, way)
    assert_equal(on_gloo(pool, 2, Net, act, ADAM, 3, topology="ring"), replay(2, Net, act, ADAM, 3))


def switching(way, net, t, rank):
    """Three micro-batches; the last one synchronises."""
    wrapped = isinstance(net, DecentralizedDataParallel)
    for k in range(3):
        accumulate = k < 2
        if way == "around both" and accumulate:
            with accumulating(net):
                micro_loss(net, t, k, rank).backward()
            continue
        if way == "before forward" and wrapped:
            net.set_accumulate_grad(accumulate)
        loss = micro_loss(net, t, k, rank)
        if way == "between" and wrapped:
            net.set_accumulate_grad(accumulate)
        if way == "around backward" and accumulate:
            with accumulating(net):
                loss.backward()
        else:
            loss.backward()


def branches_in_a_window(net, t, rank):
    """The last micro-batch uses one branch, an earlier one the other."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) * (1 + rank) + t
    with accumulating(net):
        net(x, 0).square().sum().backward()
    net(x, 1).square().sum().backward()


@pytest.mark.parametrize("options", [{}, {"grad_clip_norm": 0.5}], ids=["each bucket", "whole model"])
def test_parameters_of_early_micro_batches_are_updated_in_the_same_step(pool, options):
    actual = on_gloo(pool, 2, Net, branches_in_a_window, ADAM, 3, topology="ring", bucket_size_in_mb=TINY, **options)
    max_norm = options.get("grad_clip_norm", 0.0)
    assert_equal(actual, replay(2, Net, branches_in_a_window, ADAM, 3, max_norm=max_norm))


def random_windows(rank, n):
    """Every worker has windows of its own lengths; a step is a step."""
    lengths = [[1, 3, 2, 1, 4], [2, 1, 1, 3, 1], [1, 1, 1, 1, 1]][rank]
    model = DecentralizedDataParallel(Net(), ADAM, topology="ring", bucket_size_in_mb=TINY)
    for t, length in enumerate(lengths):
        for k in range(length):
            model.set_accumulate_grad(k < length - 1)
            micro_loss(model, t, k, rank).backward()
    model.synchronize()
    return values(model)


def test_windows_of_unequal_lengths(pool):
    actual = torch.stack(pool.run(random_windows, 3))
    lengths = [[1, 3, 2, 1, 4], [2, 1, 1, 3, 1], [1, 1, 1, 1, 1]]

    def window(net, t, rank):
        for k in range(lengths[rank][t]):
            micro_loss(net, t, k, rank).backward()

    assert_equal(actual, replay(3, Net, window, ADAM, 5, "ring"))


def test_consensus_and_evaluation_inside_of_a_window_leave_it_alone():
    (model,), plain = wrap_virtual(1, lambda rank: Net(), ADAM), Net()
    local = ADAM(plain.parameters())
    with model.no_sync():
        micro_loss(model, 0, 0, 0).backward()
    held = [p.grad.clone() for p in model.parameters()]
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.float64))
    with model.consensus():
        model(torch.ones(1, 3, dtype=torch.float64))
    model.train()
    assert all(torch.equal(g, p.grad) for g, p in zip(held, model.parameters(), strict=True))
    micro_loss(model, 0, 1, 0).backward()
    for k in range(2):
        micro_loss(plain, 0, k, 0).backward()
    local.step()
    assert torch.equal(stack([model]), stack([plain]))


def test_windows_of_backwards_and_windows_of_the_optimizer_are_two_things():
    """AccumAdam counts updates; an update may be several backwards."""
    optim_fn = partial(optim_fn_accum_adamw, lr=0.1, accum_iter=2)
    (model,), plain = wrap_virtual(1, lambda rank: Net(), optim_fn, bucket_size_in_mb=TINY), Net()
    local = optim_fn(list(plain.named_parameters()))
    for t in range(4):
        for k in range(3):
            model.set_accumulate_grad(k < 2)
            micro_loss(model, t, k, 0).backward()
            micro_loss(plain, t, k, 0).backward()
        local.step()
        local.zero_grad()
    torch.testing.assert_close(stack([model]), stack([plain]), rtol=0, atol=1e-12)
