"""Capture and restore, by name: the same run goes on bit for bit, with other buckets too."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, Layout
from decent_dp.engine.training_state import capture, restore
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.topology import catalog
from virtual import stack, wrap_virtual

from .oracle import BUCKET_MB, loss_of, make_network

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(optim_fn_adamw, lr=0.01),
    "accum-adamw": partial(optim_fn_accum_adamw, lr=0.01, accum_iter=4),
}
SCHEDULES = {
    "cosine": partial(lr_scheduler_fn_cosine_with_warmup, t_max=12, t_warmup=3),
    "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + t)),
    "one-cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=20),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 4),
            torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        ],
        [5],
    ),
}


def wrap(n, optimizer, schedule, topology, bucket_mb, wire_dtype=None, max_norm=0.0):
    return wrap_virtual(
        n,
        lambda rank: make_network(),
        OPTIMIZERS[optimizer],
        SCHEDULES[schedule],
        topology,
        bucket_size_in_mb=bucket_mb,
        wire_dtype=wire_dtype,
        grad_clip_norm=max_norm,
        workers_per_node=n,
    )


def run(models, first, last):
    for t in range(first, last):
        for rank, model in enumerate(models):
            loss_of(model, t, 0, rank, 1).backward()


RUNS = [
    *product(OPTIMIZERS, ["cosine"], ["ring", "complete"], [None]),
    *product(["adamw"], SCHEDULES, ["exp"], [None]),
    *product(["adamw"], ["cosine"], ["ring", "exp", "complete"], [torch.bfloat16]),
    *product(["adamw"], ["cosine"], ["hierarchical"], [None]),
]


@pytest.mark.parametrize(("optimizer", "schedule", "topology", "wire_dtype"), RUNS)
def test_a_run_goes_on_bit_for_bit_with_other_buckets(optimizer, schedule, topology, wire_dtype):
    straight = wrap(3, optimizer, schedule, topology, BUCKET_MB, wire_dtype)
    run(straight, 0, 12)
    first = wrap(3, optimizer, schedule, topology, BUCKET_MB, wire_dtype)
    run(first, 0, 6)
    saved = [(copy.deepcopy(model.state_dict()), capture(model._replica)) for model in first]
    for bucket_mb in (BUCKET_MB, 25, 10 / 2**20):
        second = wrap(3, optimizer, schedule, topology, bucket_mb, wire_dtype)
        for model, (weights, state) in zip(second, saved, strict=True):
            model.load_state_dict(weights)
            restore(model._replica, state)
        assert [m.get_lr() for m in second] == [m.get_lr() for m in first]
        run(second, 6, 12)
        if topology == "complete" and wire_dtype is not None and bucket_mb != BUCKET_MB:
            # Owners of parts keep what rounding took, and the parts depend on the buckets; the mean does not.
            torch.testing.assert_close(stack(second).mean(0), stack(straight).mean(0), rtol=0, atol=1e-3)
            torch.testing.assert_close(stack(second), stack(straight), rtol=0, atol=2e-2)
        else:
            assert torch.equal(stack(second), stack(straight))
        assert [m.get_lr() for m in second] == [m.get_lr() for m in straight]
    run(first, 6, 12)  # and capturing changes nothing
    assert torch.equal(stack(first), stack(straight))


def test_the_scaler_goes_on():
    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=4)
        (model,) = wrap_virtual(1, lambda rank: make_network().float(), OPTIMIZERS["adamw"], scaler=scaler)
        return model, scaler

    def go(model, scaler, first, last):
        for t in range(first, last):
            scaler.scale(model(torch.full((2, 3), float(t))).square().mean()).backward()

    straight, scaler = build()
    go(straight, scaler, 0, 6)
    model, first_scaler = build()
    go(model, first_scaler, 0, 3)
    second, second_scaler = build()
    second.load_state_dict(model.state_dict())
    restore(second._replica, capture(model._replica))
    go(second, second_scaler, 3, 6)
    assert second_scaler.get_scale() == scaler.get_scale() == 128
    assert torch.equal(stack([second]), stack([straight]))


class Frozen(nn.Module):
    """A backbone that is frozen at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_refresh_takes_in_thawed_parameters_and_keeps_the_rest(pool, topology):
    results = pool.run(thaw, 3, topology)
    expected = thaw_by_hand(3, topology)
    for rank, result in enumerate(results):
        torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), expected[rank], rtol=0, atol=1e-12)


def batch(t, rank):
    return torch.full((2, 3), 0.1 * (1 + t) * (1 + rank), dtype=torch.float64) + torch.eye(3, dtype=torch.float64)[:2]


def thaw(rank, n, topology):
    torch.set_default_dtype(torch.float64)
    model = DecentralizedDataParallel(Frozen(), partial(torch.optim.Adam, lr=0.1), topology=topology)
    for t in range(2):
        model(batch(t, rank)).square().sum().backward()
    model.module.backbone.requires_grad_(True)
    model.refresh()
    for t in range(2, 6):
        model(batch(t, rank)).square().sum().backward()
    assert model.t == 6
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def thaw_by_hand(n, topology):
    torch.set_default_dtype(torch.float64)
    rounds = [r.matrix() for r in catalog.build(topology, Layout(n, n)).rounds]
    models = [Frozen() for _ in range(n)]
    optimizers = [torch.optim.Adam(m.head.parameters(), lr=0.1) for m in models]
    for t in range(6):
        if t == 2:
            for m, local in zip(models, optimizers, strict=True):
                m.backbone.requires_grad_(True)
                local.add_param_group({"params": list(m.backbone.parameters())})
        for rank, m in enumerate(models):
            m.zero_grad()
            m(batch(t, rank)).square().sum().backward()
        if t:
            W = torch.from_numpy(rounds[(t - 1) % len(rounds)])
            for together in zip(*(m.parameters() for m in models), strict=True):
                X = torch.stack([p.detach() for p in together])
                for p, x in zip(together, torch.tensordot(W, X, 1), strict=True):
                    p.data = x
        for local in optimizers:
            local.step()
    torch.set_default_dtype(torch.float32)
    return [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]


def test_refresh_after_replacing_and_converting():
    (model,) = wrap_virtual(1, lambda rank: make_network().float(), OPTIMIZERS["adamw"])
    model(torch.ones(1, 3)).sum().backward()
    model.module[4] = nn.Linear(4, 7)
    model.module[0].to(torch.float64)
    model.module[0].register_forward_pre_hook(lambda m, args: (args[0].double(),))
    model.module[0].register_forward_hook(lambda m, args, y: y.float())
    model.refresh()
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.float64}


class TwoDtypes(nn.Module):
    """One bucket travels narrowed, the other as it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(3, 3), nn.Linear(3, 2, dtype=torch.bfloat16)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)).bfloat16()).float().square().sum()


def test_buckets_that_travel_narrowed_and_as_they_are_go_on_together():
    runs = [
        wrap_virtual(2, lambda rank: TwoDtypes(), OPTIMIZERS["sgd"], wire_dtype=torch.bfloat16, topology="ring")
        for _ in range(2)
    ]
    first, second = runs
    for models in runs:
        for t in range(3):
            for rank, model in enumerate(models):
                model(torch.full((1, 3), 0.3 * (t + rank))).backward()
        if models is first:
            for model in models:
                restore(model._replica, capture(model._replica))
            for rank, model in enumerate(models):
                model(torch.ones(1, 3) * rank).backward()
    for rank, model in enumerate(second):
        model(torch.ones(1, 3) * rank).backward()
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class MasterSGD(torch.optim.Optimizer):
    """Keeps parameters and momenta in float32, whatever dtype the model has."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"master": p.detach().float(), "nested": [torch.zeros_like(p, dtype=torch.float32)]}
                state["nested"][0].mul_(0.9).add_(p.grad)
                state["master"].sub_(state["nested"][0], alpha=group["lr"])
                p.copy_(state["master"])


@pytest.mark.parametrize("bucket_mb", [BUCKET_MB, 3 * BUCKET_MB, 25])
def test_state_that_is_wider_than_its_parameters_stays_so(bucket_mb):
    def make(bucket_mb):
        return wrap_virtual(
            2,
            lambda rank: make_network().to(torch.bfloat16),
            MasterSGD,
            topology="ring",
            bucket_size_in_mb=bucket_mb,
            workers_per_node=2,
        )

    def steps(models, first, last):
        for t in range(first, last):
            for rank, model in enumerate(models):
                sum((p * (1 + 0.1 * t + rank) * p).sum() for p in model.parameters()).backward()

    whole, first, second = make(BUCKET_MB), make(BUCKET_MB), make(bucket_mb)
    steps(whole, 0, 7)
    steps(first, 0, 4)
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
        restore(new._replica, capture(old._replica))
    steps(second, 4, 7)
    assert torch.equal(stack(second), stack(whole))
