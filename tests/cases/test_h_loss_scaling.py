"""Kind H: one scaler decides once for the whole model, and every worker for itself."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import ConfigurationError, DecentralizedDataParallel
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, assert_equal, inner, matrices, values

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def data(t, rank):
    return torch.linspace(-1, 1, 6).view(2, 3) * (1 + rank) + 0.1 * t


def loss_of(net, t, rank, overflow):
    """With an infinite gradient of the first layer alone, whose bucket is the last to be ready."""
    first = inner(net).layers[0].weight
    spoil = first.register_hook(lambda g: g * float("inf")) if overflow else None
    return net(data(t, rank)).square().sum(), spoil


def act(net, scaler, t, rank, overflow):
    loss, spoil = loss_of(net, t, rank, overflow)
    scaler.scale(loss).backward()
    if spoil is not None:
        spoil.remove()


OVERFLOWS = {"none": (), "at first": (0,), "in the middle": (2,), "twice": (1, 2)}


@pytest.mark.parametrize("overflows", OVERFLOWS)
@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("bucket", [25, TINY], ids=["one bucket", "three buckets"])
def test_h2_overflow_in_the_last_bucket_skips_the_whole_model(overflows, clip, bucket):
    """As the usual loop of plain torch with one optimizer."""
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2))
    (model,) = wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler, grad_clip_norm=clip, bucket_size_in_mb=bucket)
    plain = Net()
    local = SGD(plain.parameters())
    scales = []
    for t in range(6):
        before = stack([model])
        for net, used in ((model, scaler), (plain, reference)):
            act(net, used, t, 0, t in OVERFLOWS[overflows])
        if clip:
            reference.unscale_(local)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        reference.step(local)
        reference.update()
        local.zero_grad()
        assert torch.equal(stack([model]), stack([plain]))
        assert torch.equal(stack([model]), before) == (t in OVERFLOWS[overflows])
        assert scaler.state_dict() == reference.state_dict()
        scales.append(scaler.get_scale())
        assert all(p.grad is None for p in model.parameters())
        assert model.t == t + 1
    if overflows == "in the middle":
        assert scales == [1024, 1024, 512, 512, 512, 1024]


def per_worker(rank, n):
    """Overflows at different steps on different workers; nobody waits, rates and rounds stay in step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = DecentralizedDataParallel(Net(), SGD, HALVING, "ring", scaler, bucket_size_in_mb=TINY)
    for t in range(5):
        act(model, scaler, t, rank, (t, rank) in ((1, 1), (2, 0), (2, 2)))
    model.synchronize()
    return values(model), scaler.get_scale(), model.get_lr(), model.t


def test_h2_each_worker_skips_for_itself_and_stays_in_the_round(pool):
    results = pool.run(per_worker, 3)
    oracle = Replay([Net() for _ in range(3)], SGD, matrices("ring", 3))
    for t in range(5):

        def usual(net, t, rank):
            if (t, rank) not in ((1, 1), (2, 0), (2, 2)):
                net(data(t, rank)).square().sum().backward()

        oracle.step(usual)
        for optimizer in oracle.optimizers:
            optimizer.param_groups[0]["lr"] /= 2
    assert_equal(torch.stack([r[0] for r in results]), oracle.values(), 1e-5)
    assert [r[1:] for r in results] == [(512.0, 0.1 / 32, 5)] * 3


@pytest.mark.parametrize("micro", [1, 3])
def test_a_scaler_in_windows_decides_once_per_window(micro):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    (model,), plain = wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler, bucket_size_in_mb=TINY), Net()
    local = SGD(plain.parameters())
    for t in range(4):
        for k in range(micro):
            model.set_accumulate_grad(k < micro - 1)
            scaler.scale(model(data(t, k)).square().sum()).backward()
            plain(data(t, k)).square().sum().backward()
        local.step()
        local.zero_grad()
    assert scaler.get_scale() == 32.0
    assert_equal(values(model), values(plain), 1e-6)


def test_overflow_in_an_early_micro_batch_drops_the_window():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (model,) = wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler, bucket_size_in_mb=TINY)
    before = stack([model])
    with model.no_sync():
        act(model, scaler, 0, 0, overflow=True)
    act(model, scaler, 1, 0, overflow=False)
    assert torch.equal(stack([model]), before)
    assert scaler.get_scale() == 4.0
    act(model, scaler, 2, 0, overflow=False)
    assert not torch.equal(stack([model]), before)


def autocast_act(net, t, rank, scaler=None):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(data(t, rank)).float().square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def test_float16_autocast_with_a_scaler():
    """Bit-equal to the usual loop: a power of two changes no digit."""
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    (model,), plain = wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler, bucket_size_in_mb=TINY), Net()
    local = SGD(plain.parameters())
    for t in range(4):
        autocast_act(model, t, 0, scaler)
        autocast_act(plain, t, 0, reference)
        reference.step(local)
        reference.update()
        local.zero_grad()
    assert torch.equal(stack([model]), stack([plain]))


def wrap_two(scaler):
    """Two models with one scaler; None when that is refused by name."""
    try:
        return [wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler, bucket_size_in_mb=TINY)[0] for _ in range(2)]
    except ConfigurationError as error:
        return None if "scaler" in str(error) else pytest.fail(str(error))


@pytest.mark.parametrize("joint", [True, False], ids=["one backward", "two backwards"])
def test_h2_one_scaler_for_two_models_is_right_or_refused_by_name(joint):
    """Both losses are scaled before either model steps; the scale must be one for both, and move once."""
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2))
    wrapped, plain = wrap_two(scaler), [Net(), Net()]
    if wrapped is None:
        return
    optimizers = [SGD(net.parameters()) for net in plain]
    for t in range(3):
        for nets, used in ((wrapped, scaler), (plain, reference)):
            losses = [used.scale(net(data(t, k)).square().sum()) for k, net in enumerate(nets)]
            for loss in [sum(losses)] if joint else losses:
                loss.backward()
        for local in optimizers:
            reference.step(local)
            local.zero_grad()
        reference.update()
    assert_equal(torch.stack([values(m) for m in wrapped]), torch.stack([values(m) for m in plain]), 1e-5)
    assert scaler.get_scale() == reference.get_scale()


def unscale_and_step(scaler, local):
    scaler.unscale_(local)
    scaler.step(local)


CALLS = {
    "update": lambda scaler, local: scaler.update(),
    "step": torch.amp.GradScaler.step,
    "unscale": unscale_and_step,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_of_the_usual_loop_are_loud_where_they_would_come_twice(call):
    """The wrapper has unscaled, stepped and updated; a loop that goes on to do so is told."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (model,) = wrap_virtual(1, lambda rank: Net(), SGD, scaler=scaler)
    act(model, scaler, 0, 0, overflow=False)
    after = stack([model])
    local = SGD(model.parameters())
    with pytest.raises((AssertionError, RuntimeError), match=r"No inf checks|SGD"):
        call(scaler, local)
    assert torch.equal(stack([model]), after)
    assert scaler.get_scale() == 8.0


def test_a_disabled_scaler_is_none():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    disabled, without = (wrap_virtual(1, lambda rank: Net(), SGD, scaler=s)[0] for s in (scaler, None))
    for t in range(3):
        act(disabled, scaler, t, 0, overflow=False)
        loss_of(without, t, 0, overflow=False)[0].backward()
    assert torch.equal(stack([disabled]), stack([without]))
