"""Identities that hold exactly, or to rounding, whatever the topology."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import InProcessWorld
from decent_dp.topology import names
from virtual import names_for, stack, wrap_virtual

from .oracle import BUCKET_MB, loss_of, make_network

PLAIN = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def make_float_network(rank=0):
    return make_network().float()


@pytest.mark.parametrize("topology", names())
@pytest.mark.parametrize("optimizer", PLAIN)
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("bucket_mb", [BUCKET_MB, 25])
def test_one_worker_is_the_plain_optimizer_bit_for_bit(topology, optimizer, as_view, bucket_mb):
    plain = make_float_network()
    local = PLAIN[optimizer](plain.parameters())
    scheduler_fn = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    scheduler = scheduler_fn(local)
    (model,) = wrap_virtual(
        1,
        make_float_network,
        PLAIN[optimizer],
        scheduler_fn,
        topology,
        param_as_bucket_view=as_view,
        bucket_size_in_mb=bucket_mb,
    )
    for t in range(6):
        assert model.get_lr() == scheduler.get_last_lr()[0]
        for net in (plain, model):
            nn.functional.mse_loss(net(torch.ones(4, 3) * t), torch.ones(4, 2)).backward()
        local.step()
        scheduler.step()
        local.zero_grad()
        for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, actual)
            assert actual.grad is None


class Quadratic(nn.Module):
    """f(x) = (x - c)^T H (x - c) / 2, with a centre c for each worker and x cut into four parameters."""

    def __init__(self, rank, hessian):
        super().__init__()
        self.parts = nn.ParameterList([torch.full((2,), float(i), dtype=torch.float64) for i in range(4)])
        self.centre = torch.linspace(-1, 1, 8, dtype=torch.float64) * (rank + 1) + rank
        self.hessian = hessian

    def forward(self):
        error = torch.cat(list(self.parts)) - self.centre
        return error @ self.hessian @ error / 2


@pytest.mark.parametrize(("n", "topology"), [(n, name) for n in (1, 2, 3, 4, 5, 8) for name in names_for(n, n)])
def test_the_mean_follows_gradient_averaging_on_a_shared_quadratic(topology, n):
    root = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hessian = root @ root.T / 8
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    models = wrap_virtual(
        n,
        lambda rank: Quadratic(rank, hessian),
        sgd,
        topology=topology,
        bucket_size_in_mb=16 / 2**20,
        workers_per_node=n,
    )
    assert len(models[0].optimizers) == 4
    single = [Quadratic(rank, hessian) for rank in range(n)]
    x = single[0]
    local = sgd(x.parameters())
    for _ in range(20):
        for model in models:
            model().backward()
        for p in x.parameters():
            p.grad = torch.zeros_like(p)
        for other in single:
            other.load_state_dict(x.state_dict())
            gradients = torch.autograd.grad(other(), list(other.parameters()))
            for p, g in zip(x.parameters(), gradients, strict=True):
                p.grad += g / n
        local.step()
        mean = stack(models).mean(0)
        torch.testing.assert_close(mean, parameters_to_vector(x.parameters()).detach(), rtol=0, atol=1e-12)
    if n > 2:
        assert (stack(models) - stack(models).mean(0)).abs().max() > 1e-3  # replicas do differ


@pytest.mark.parametrize(("n", "topology"), [(n, name) for n in (2, 3, 4, 5, 8) for name in names_for(n, n)])
def test_without_learning_replicas_contract_to_the_mean_of_the_starts(topology, n):
    models = wrap_virtual(
        n, lambda rank: make_network(), partial(torch.optim.SGD, lr=0.0), topology=topology, workers_per_node=n
    )
    for rank, model in enumerate(models):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    start = stack(models)
    for t in range(60):
        for rank, model in enumerate(models):
            loss_of(model, t, 0, rank, 1).backward()
        torch.testing.assert_close(stack(models).mean(0), start.mean(0), rtol=0, atol=1e-13)
    torch.testing.assert_close(stack(models), start.mean(0).expand_as(start), rtol=0, atol=1e-5)


class Noise(torch.optim.Optimizer):
    """Adds lr times standard normal noise."""

    def __init__(self, named_parameters, lr, seed):
        super().__init__(named_parameters, {"lr": lr})
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=group["lr"])


@pytest.mark.parametrize(("topology", "stationary"), [("complete", 0.9375), ("exp", 1.6250), ("ring", 2.245)])
def test_stationary_noise_of_sixteen_workers(topology, stationary):
    n, coordinates, lr = 16, 8_000, 0.1
    seeds = iter(range(1_000))
    models = wrap_virtual(
        n,
        lambda rank: nn.ParameterList([torch.zeros(coordinates // 4) for _ in range(4)]),
        lambda named: Noise(named, lr, next(seeds)),
        topology=topology,
        bucket_size_in_mb=coordinates / 2**20,
    )
    assert len(models[0].optimizers) == 4
    squares = []
    for t in range(160):
        for model in models:
            sum((p * 0).sum() for p in model.parameters()).backward()
        if t >= 80:
            X = stack(models)
            squares.append((X - X.mean(0)).square().mean().item())
    assert sum(squares) / len(squares) / lr**2 == pytest.approx(stationary, rel=0.03)


class Seven(nn.Module):
    """Seven parameters with gradients of very different size."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList([torch.randn(5, generator=generator) for _ in range(7)])

    def forward(self, x):
        return sum((10.0**i * w * x).sin().sum() for i, w in enumerate(self.weights, start=-3))


@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_clipping_is_global_and_does_not_depend_on_the_buckets(max_norm):
    plain = Seven()
    local = torch.optim.Adam(plain.parameters(), lr=0.01)
    runs = {}
    for bucket_bytes, num_buckets in ((1000, 1), (3 * 20, 3), (20, 7)):
        models = wrap_virtual(
            3,
            lambda rank: Seven(),
            partial(torch.optim.Adam, lr=0.01),
            topology="ring",
            grad_clip_norm=max_norm,
            bucket_size_in_mb=bucket_bytes / 2**20,
        )
        assert len(models[0].optimizers) == num_buckets
        (alone,) = wrap_virtual(
            1,
            lambda rank: Seven(),
            partial(torch.optim.Adam, lr=0.01),
            grad_clip_norm=max_norm,
            bucket_size_in_mb=bucket_bytes / 2**20,
        )
        for t in range(5):
            for rank, model in enumerate(models):
                model(torch.tensor(1.0 + rank + t)).backward()
            alone(torch.tensor(1.0 + t)).backward()
        runs[num_buckets] = stack([*models, alone])
    for t in range(5):
        plain(torch.tensor(1.0 + t)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        local.step()
        local.zero_grad()
    assert torch.equal(runs[1], runs[3])
    assert torch.equal(runs[1], runs[7])
    assert torch.equal(runs[1][-1], parameters_to_vector(plain.parameters()))


def test_clipping_by_hand():
    """Gradients (3, 4) and (6, 8) have the norm sqrt(125)."""
    (model,) = wrap_virtual(
        1,
        lambda rank: nn.ParameterList([torch.zeros(2), torch.zeros(2)]),
        partial(torch.optim.SGD, lr=1.0),
        grad_clip_norm=1.0,
        bucket_size_in_mb=8 / 2**20,
    )
    first, second = model.parameters()
    (first @ torch.tensor([3.0, 4.0]) + second @ torch.tensor([6.0, 8.0])).backward()
    torch.testing.assert_close(first.detach(), -torch.tensor([0.268328, 0.357771]))
    torch.testing.assert_close(second.detach(), -torch.tensor([0.536656, 0.715542]))


def test_scaler_unscales_once_and_clips_after():
    def train(scaler, **options):
        (model,) = wrap_virtual(
            1, make_float_network, partial(torch.optim.SGD, lr=0.1), scaler=scaler, grad_clip_norm=0.01, **options
        )
        for t in range(4):
            loss = nn.functional.mse_loss(model(torch.ones(4, 3) * t), torch.ones(4, 2))
            (loss if scaler is None else scaler.scale(loss)).backward()
        return stack([model])

    scaled = train(torch.amp.GradScaler("cpu", init_scale=1024), bucket_size_in_mb=BUCKET_MB)
    assert torch.equal(scaled, train(None))


def test_overflow_skips_the_update_of_the_whole_model_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    (model,) = wrap_virtual(
        1,
        make_float_network,
        partial(torch.optim.SGD, lr=0.1),
        schedule,
        scaler=scaler,
        bucket_size_in_mb=BUCKET_MB,
    )
    before = stack([model])
    model.module[0].weight.register_hook(lambda g: g * float("inf"))
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    assert torch.equal(stack([model]), before)
    assert scaler.get_scale() == 512
    assert model.get_lr() == 0.05  # schedules stay in step with those of other workers
    assert model.t == 1


def test_a_worker_that_overflows_still_mixes():
    scalers = [torch.amp.GradScaler("cpu", init_scale=8) for _ in range(3)]
    world = InProcessWorld(3)
    models = [
        DecentralizedDataParallel(
            nn.ParameterList([torch.zeros(2)]),
            partial(torch.optim.SGD, lr=1.0),
            scaler=scaler,
            communicator=world.communicator(rank),
        )
        for rank, scaler in enumerate(scalers)
    ]
    for t in range(2):
        for rank, model in enumerate(models):
            (p,) = model.parameters()
            factor = float("inf") if (rank, t) == (1, 1) else 1.0
            scalers[rank].scale((p * factor * (rank + 1)).sum()).backward()
    # step 0: -1, -2, -3; step 1: mean -2, then -1 and -3 for ranks 0 and 2, nothing for rank 1
    assert stack(models).tolist() == [[-3.0, -3.0], [-2.0, -2.0], [-5.0, -5.0]]
