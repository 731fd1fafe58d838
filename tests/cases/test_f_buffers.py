"""Kind F: buffers are equal at the start, local in training, and averaged when asked for."""

import random
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import update_bn

from decent_dp import DecentralizedDataParallel
from virtual import wrap_virtual

from .replay import TINY, Replay, assert_equal, matrices, on_gloo, values

SGD = partial(torch.optim.SGD, lr=0.1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen |= True
        return self.net(x)


def data(t, rank, size=16):
    """Every worker has data around a mean of its own."""
    generator = torch.Generator().manual_seed(100 * t + rank)
    return torch.randn(size, 3, dtype=torch.float64, generator=generator) * (1 + rank) + 2 * rank


def learn(net, t, rank):
    net(data(t, rank)).square().mean().backward()


def drifted(rank, n, with_buffers):
    model = DecentralizedDataParallel(Normed(), SGD, topology="ring", sync_buffer_in_global_avg=with_buffers)
    for t in range(5):
        learn(model, t, rank)
    own = [b.clone() for b in model.buffers()]
    model.eval()
    with model.consensus(), torch.no_grad():
        shown = [b.clone() for b in model.buffers()]
        output = model(torch.ones(1, 3, dtype=torch.float64))
    restored = all(torch.equal(a, b) for a, b in zip(own, model.buffers(), strict=True))
    return own, shown, output, restored


@pytest.mark.parametrize("with_buffers", [True, False])
def test_f1_normalisation_statistics_drift_per_rank(pool, with_buffers):
    oracle = Replay([Normed() for _ in range(2)], SGD, matrices("ring", 2))
    for _ in range(5):
        oracle.step(learn)
    results = pool.run(drifted, 2, with_buffers)
    for rank, (own, _, _, restored) in enumerate(results):
        assert restored
        for mine, expected in zip(own, oracle.modules[rank].buffers(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)  # local in training
    outputs = [output for _, _, output, _ in results]
    assert torch.equal(outputs[0], outputs[1]) == with_buffers
    if with_buffers:
        for k, together in enumerate(zip(*(own for own, _, _, _ in results), strict=True)):
            mean = sum(together) / 2 if together[0].is_floating_point() else together[0]
            for _, shown, _, _ in results:
                torch.testing.assert_close(shown[k], mean)
        for module in oracle.modules:
            module.eval()
        with torch.no_grad():  # the same by hand
            for group in (zip(*(m.parameters() for m in oracle.modules), strict=True),
                          zip(*(m.buffers() for m in oracle.modules), strict=True)):  # fmt: skip
                for first, second in group:
                    first.copy_((first + second) / 2 if first.is_floating_point() else first)
            torch.testing.assert_close(outputs[0], oracle.modules[0](torch.ones(1, 3, dtype=torch.float64)))


# ---------------------------------------------------------------- averaged weights with old statistics


def target(x):
    return torch.stack([x.sum(-1).sin(), x.prod(-1).tanh()], -1)


def recalibrate(rank, n):
    """A high learning rate, so that replicas are far apart; the average of their statistics fits none of them."""
    model = DecentralizedDataParallel(
        Normed(), partial(torch.optim.SGD, lr=0.5), topology="ring", sync_buffer_in_global_avg=True
    )
    for t in range(30):
        x = data(t, rank, 64)
        nn.functional.mse_loss(model(x), target(x)).backward()
    everything = torch.cat([data(1000, r, 256) for r in range(n)])

    def loss():
        model.eval()
        with torch.no_grad():
            return nn.functional.mse_loss(model(everything), target(everything)).item()

    losses, own = [loss()], [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
    with model.consensus():
        losses.append(loss())
        variances = [model.module.net[1].running_var.min().item()]
        update_bn([data(2000 + k, r, 64) for k in range(4) for r in range(n)], model)  # the same data on every worker
        losses.append(loss())
        statistics = model.module.net[1].running_var.clone()
        # what update_bn must give: the mean over its batches of what the averaged network computes
        means = [model.module.net[0](data(2000 + k, r, 64)) for k in range(4) for r in range(n)]
        expected = torch.stack([y.var(0) for y in means]).mean(0)
        variances.append(statistics.min().item())
    now = [x.detach() for x in (*model.parameters(), *model.buffers())]
    return (
        losses,
        min(variances),
        statistics,
        expected.detach(),
        all(torch.equal(a, b) for a, b in zip(own, now, strict=True)),
    )


def test_f3_averaged_weights_are_recalibrated_with_update_bn(pool):
    results = pool.run(recalibrate, 4)
    for losses, smallest, statistics, expected, restored in results:
        assert smallest >= 0
        assert losses[2] < losses[1]  # recalibrated against merely averaged
        torch.testing.assert_close(statistics, expected)
        assert torch.equal(statistics, results[0][2])
        assert losses[1:] == results[0][0][1:]
        assert restored


def test_f3_recalibration_after_an_average_that_is_kept():
    """update_bn works on the wrapper and on the module, and training goes on from there."""
    (model,), plain = wrap_virtual(1, lambda rank: Normed(), SGD), Normed()
    local = SGD(plain.parameters())
    for t in range(6):
        learn(model, t, 0)
        learn(plain, t, 0)
        local.step()
        local.zero_grad()
        if t == 2:
            for net in (model, plain):
                update_bn([data(50, 0), data(51, 0)], net)
    assert_equal(values(model), values(plain), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


# ---------------------------------------------------------------- modules that communicate in forward


class _SumOverWorkers(torch.autograd.Function):
    """As SyncBatchNorm: one collective on the default group in forward and one in backward."""

    @staticmethod
    def forward(ctx, x):
        y = x.detach().clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Synchronised(nn.Module):
    """Subtracts the mean over all workers and all samples, which ``sum_over_workers`` finds out."""

    def __init__(self, n=1, sum_over_workers=_SumOverWorkers.apply):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.n, self.sum_over_workers = n, sum_over_workers

    def centre(self, y):
        return y - self.sum_over_workers(y.mean(0)) / self.n

    def forward(self, x):
        y = torch.tanh(self.centre(self.first(x)))
        return self.centre(self.second(y))


def interleaved(rank, n, topology):
    """Workers arrive at random times; user collectives before, inside and after the step."""
    model = DecentralizedDataParallel(Synchronised(n), SGD, topology=topology, bucket_size_in_mb=TINY)
    chance = random.Random(rank)
    for t in range(10):
        time.sleep(0.01 * chance.random())
        note = torch.tensor([float(100 * t + rank)])
        work = dist.all_reduce(note, async_op=True) if t % 2 else None
        learn(model, t, rank)
        if work is None:
            dist.all_reduce(note)
        else:
            work.wait()
        assert note.item() == 100 * t * n + n * (n - 1) / 2
    model.synchronize()
    return values(model)


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_f4_modules_that_communicate_in_forward(pool, topology):
    actual = torch.stack(pool.run(interleaved, 3, topology))
    assert_equal(actual, synchronised_by_hand(3, topology, 10))


def synchronised_by_hand(n, topology, steps):
    """All workers in one graph: the sum over workers is a sum of tensors."""
    modules = [Synchronised(n, lambda x: x) for _ in range(n)]
    oracle = Replay(modules, SGD, matrices(topology, n))
    for t in range(steps):
        ys = [m.first(data(t, rank)) for rank, m in enumerate(modules)]
        total = sum(y.mean(0) for y in ys)
        ys = [m.second(torch.tanh(y - total / n)) for m, y in zip(modules, ys, strict=True)]
        total = sum(y.mean(0) for y in ys)
        loss = sum((y - total / n).square().mean() for y in ys)
        parameters = [p for m in modules for p in m.parameters()]
        gradients = iter(torch.autograd.grad(loss, parameters))

        def assign(module, t, rank, gradients=gradients):
            for p in module.parameters():
                p.grad = next(gradients)

        oracle.step(assign)
    return oracle.values()


# ---------------------------------------------------------------- at wrap, and non-floating ones


def kinds(rank, n):
    """Integer and bool buffers take rank 0's value in an average; floating ones the mean, in at least float32."""
    module = nn.Linear(1, 1)
    module.register_buffer("narrow", torch.tensor([40000.0, 1.0], dtype=torch.float16))
    module.register_buffer("count", torch.tensor(2**40 + 1))
    module.register_buffer("flag", torch.tensor([True, False]), persistent=False)
    module.register_buffer("small", torch.tensor([200], dtype=torch.uint8))
    model = DecentralizedDataParallel(module, SGD, sync_buffer_in_global_avg=True)
    module.narrow[1] = 1.0 + rank
    module.count += rank
    module.flag ^= bool(rank)
    module.small += rank
    with model.consensus():
        shown = [b.tolist() for b in model.buffers()]
    return shown, [b.tolist() for b in model.buffers()]


def test_buffers_of_every_kind(pool):
    for rank, (shown, own) in enumerate(pool.run(kinds, 2)):
        assert shown == [[40000.0, 1.5], 2**40 + 1, [True, False], [200]]
        assert own == [[40000.0, 1.0 + rank], 2**40 + 1 + rank, [rank == 0, rank == 1], [200 + rank]]


class Teacher(nn.Module):
    """A moving average of its own weights, kept in a frozen copy: as in self-distillation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 2).double(), nn.Linear(3, 2).double().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
        return (self.student(x) - self.teacher(x).cos()).square()


def distil(net, t, rank):
    net(data(t, rank)).mean().backward()


def test_frozen_parameters_that_follow_by_hand_stay_local(pool):
    actual = on_gloo(pool, 2, Teacher, distil, SGD, 4, topology="ring")
    modules = [Teacher() for _ in range(2)]
    students = Replay([m.student for m in modules], SGD, matrices("ring", 2))
    for _ in range(4):
        students.step(lambda module, t, rank: distil(modules[rank], t, rank))
    assert_equal(actual, torch.stack([values(m) for m in modules]))
