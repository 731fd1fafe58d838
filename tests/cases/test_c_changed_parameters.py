"""Kind C: parameters that are frozen, thawed, replaced, converted or added after wrapping."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as pruning

from decent_dp import DecentralizedDataParallel, MismatchError, ModelChangedError
from decent_dp.optim import optim_fn_adamw
from faults import DelayedCommunicator
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, assert_equal, inner, matrices, on_gloo, on_virtual, replay, values

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l1, self.l2 = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.l2(torch.tanh(self.l1(x)))


def batch(t, rank):
    return torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) * (1 + rank) + 0.1 * t


def learn(net, t, rank):
    net(batch(t, rank)).square().sum().backward()


# ---------------------------------------------------------------- frozen and thawed


def freeze_and_thaw(net, t, rank):
    """Frozen for two steps in mid-training: mixed but not updated, and back without a call."""
    inner(net).l1.requires_grad_(t not in (2, 3))
    learn(net, t, rank)


def test_frozen_after_wrapping_is_mixed_and_not_updated(pool):
    actual = on_gloo(pool, 3, Net, freeze_and_thaw, ADAM, 6, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(3, Net, freeze_and_thaw, ADAM, 6, "ring"))


def thaw_on_one_rank(rank, n):
    net = Net()
    net.l1.requires_grad_(False)
    model = DecentralizedDataParallel(net, SGD)
    learn(model, 0, rank)
    net.l1.bias.requires_grad_(rank == 1)
    try:
        model.refresh()
    except MismatchError as error:
        return str(error)
    return None


def test_refresh_compares_the_workers_again(pool):
    for text in pool.run(thaw_on_one_rank, 2):
        assert "'l1.bias' [4] float64, strides [1], frozen" in text


# ---------------------------------------------------------------- replaced


def assign_parameter(net):
    net.l1.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))


def load_with_assign(net):
    net.load_state_dict(Net().state_dict(), assign=True)


def assign_module(net):
    net.l2 = nn.Linear(4, 2).double()


def add_parameter(net):
    net.register_parameter("extra", nn.Parameter(torch.zeros(2)))


def add_adapter(net):
    net.l2 = nn.Sequential(net.l2, nn.Linear(2, 2).double())


def delete_module(net):
    net.l2 = nn.Identity()


def prune(net):
    pruning.identity(net.l1, "weight")


def normalise(net):
    torch.nn.utils.parametrizations.weight_norm(net.l1)


REPLACED = {
    "C3 parameter": assign_parameter,
    "C3 load assign": load_with_assign,
    "module replaced": assign_module,
    "parameter added": add_parameter,
    "module added": add_adapter,
    "weight_norm": normalise,
    "module removed": delete_module,
    "pruning": prune,  # gives the same Parameter another name
}


@pytest.mark.parametrize("change", [*REPLACED.values()][:-1], ids=[*REPLACED][:-1])
@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])
def test_c3_replaced_or_late_parameters_are_refused_by_name(change, at, as_view):
    models = wrap_virtual(2, lambda rank: Net(), ADAM, param_as_bucket_view=as_view)
    for rank, model in enumerate(models):
        learn(model, 0, rank)
    for model in models:
        loss = model(batch(1, 0)).square().sum()
        change(model.module)
        go_on = partial(learn, model, 1, 0) if at == "forward" else loss.backward
        with pytest.raises(ModelChangedError, match=r"(parameter|module) '.*(l1|l2|extra).*refresh\(\)"):
            go_on()


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_refresh_takes_over_what_was_replaced_or_added(change):
    models, plain = wrap_virtual(1, lambda rank: Net(), SGD), Net()
    (model,) = models
    for net in (plain, model.module):
        torch.manual_seed(1)
        change(net)
    model.refresh()
    before = values(model)
    local = SGD(plain.parameters())
    for t in range(2):
        learn(model, t, 0)
        learn(plain, t, 0)
        local.step()
        local.zero_grad()
    assert_equal(values(model), values(plain))
    assert not torch.equal(values(model), before)


def pruned(net, t, rank):
    if t == 2:
        pruning.l1_unstructured(inner(net).l2, "weight", 0.5)
    learn(net, t, rank)


def test_a_parameter_under_another_name_is_the_same_parameter():
    actual = on_virtual(2, Net, pruned, SGD, 4, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, Net, pruned, SGD, 4))


# ---------------------------------------------------------------- converted


class Images(nn.Module):
    """Convolutions, for memory formats; dtypes follow the parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.c2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.c2(torch.tanh(self.c1(x.to(self.c1.weight.dtype)))).float()


def pictures(t, rank):
    return torch.linspace(-1, 1, 150).view(2, 3, 5, 5) * (1 + rank) + 0.1 * t


def look(net, t, rank):
    net(pictures(t, rank)).square().mean().backward()


CONVERSIONS = {
    "C4 half": lambda m: m.half(),
    "C4 double": lambda m: m.double(),
    "C4 channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "bfloat16": lambda m: m.bfloat16(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_c4_conversion_is_refused_at_the_next_forward_or_backward(convert):
    for model in wrap_virtual(2, lambda rank: Images(), SGD):
        look(model, 0, 0)
        convert(model.module)
        with pytest.raises(ModelChangedError, match=r"'c1.weight'.*refresh\(\)"):
            look(model, 1, 0)
        with pytest.raises(ModelChangedError, match=r"'c1\.weight'"):
            model.module(pictures(0, 0)).sum().backward()
        with pytest.raises(ModelChangedError, match=r"'c1\.weight'"):
            model.consensus_distance()


TO_HERE = [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.load_state_dict(m.state_dict())]


def to_the_same(net, t, rank):
    TO_HERE[t % len(TO_HERE)](net)
    look(net, t, rank)


def test_c4_conversion_to_what_it_is_does_nothing(pool):
    actual = on_gloo(pool, 2, Images, to_the_same, SGD, 4, topology="ring")
    # loading drops what is in flight, so the last step does not mix
    oracle = Replay([Images() for _ in range(2)], SGD, matrices("ring", 2))
    for t in range(4):
        oracle.rounds = [torch.eye(2, dtype=torch.float64)] if t == 3 else matrices("ring", 2)
        oracle.step(look)
    assert_equal(actual, oracle.values(), 1e-6)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.05, fused=False),
    "adamw, fused where it exists": partial(optim_fn_adamw, lr=0.05),
}


@pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2])
def test_c4_channels_last_after_wrapping_then_refresh_changes_no_number(n, optimizer, as_view):
    optim_fn = OPTIMIZERS[optimizer]
    models = wrap_virtual(n, lambda rank: Images(), optim_fn, topology="ring", param_as_bucket_view=as_view)
    oracle = Replay([Images() for _ in range(n)], optim_fn, matrices("ring", n) if n > 1 else [torch.eye(1)])
    for t in range(5):
        if t == 2:
            for model in models:
                model.module.to(memory_format=torch.channels_last)
            for model in models:
                model.refresh()
        for rank, model in enumerate(models):
            look(model, t, rank)
        oracle.step(look)
    torch.testing.assert_close(torch.stack([values(m) for m in models]), oracle.values(), rtol=0, atol=1e-5)
    assert models[0].module.c1.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c4_channels_last_without_bucket_views_is_right_or_refused(optimizer):
    models = wrap_virtual(2, lambda rank: Images(), OPTIMIZERS[optimizer], topology="ring", param_as_bucket_view=False)
    oracle = Replay([Images() for _ in range(2)], OPTIMIZERS[optimizer], matrices("ring", 2))
    try:
        for t in range(5):
            for rank, model in enumerate(models):
                if t == 2:
                    model.module.to(memory_format=torch.channels_last)
                look(model, t, rank)
            oracle.step(look)
    except ModelChangedError:
        return
    torch.testing.assert_close(torch.stack([values(m) for m in models]), oracle.values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_c4_another_dtype_after_wrapping_then_refresh_goes_on(dtype):
    models = wrap_virtual(2, lambda rank: Images(), OPTIMIZERS["sgd"], topology="ring")
    oracle = Replay([Images() for _ in range(2)], OPTIMIZERS["sgd"], matrices("ring", 2))
    for t in range(4):
        if t == 2:
            for model in models:
                model.module.to(dtype)
            for model in models:
                model.refresh()
        for rank, model in enumerate(models):
            look(model, t, rank)
        oracle.step(look)
    assert {p.dtype for p in models[0].parameters()} == {dtype}
    tolerance = 1e-5 if dtype == torch.float64 else 0.01
    torch.testing.assert_close(torch.stack([values(m) for m in models]), oracle.values(), rtol=0, atol=tolerance)


# ---------------------------------------------------------------- called past the wrapper


def past_the_wrapper(rank, n, past):
    communicator = DelayedCommunicator(0.1)
    model = DecentralizedDataParallel(Net(), ADAM, topology="ring", bucket_size_in_mb=TINY, communicator=communicator)
    for t in range(4):
        if rank == 1:
            time.sleep(0.03)
        (model.module.encode if past else model)(batch(t, rank)).square().sum().backward()
    return values(model)


def test_c6_inner_module_called_past_the_wrapper_with_a_slow_exchange(pool):
    expected = replay(2, Net, learn, ADAM, 4)
    for past in (False, True):
        assert_equal(torch.stack(pool.run(past_the_wrapper, 2, past)), expected)


# ---------------------------------------------------------------- not plain parameters from the start


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2)).double()
        self.net(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, x):
        return self.net(x)


class Parametrized(nn.Module):
    """weight_norm, spectral_norm and orthogonal: what is trained is what stands behind the weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        nn.utils.parametrizations.weight_norm(self.net[0])
        nn.utils.parametrizations.spectral_norm(self.net[2])
        nn.utils.parametrizations.orthogonal(self.net[4])

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("make", [Lazy, Parametrized])
def test_lazy_and_parametrized_modules(pool, make):
    actual = on_gloo(pool, 2, make, learn, SGD, 4, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, make, learn, SGD, 4), 1e-9)


def test_parametrized_weights_under_caching():
    (model,), plain = wrap_virtual(1, lambda rank: Parametrized(), SGD, bucket_size_in_mb=TINY), Parametrized()
    local = SGD(plain.parameters())
    for t in range(3):
        for net in (model, plain):
            with nn.utils.parametrize.cached():
                (net(batch(t, 0)) * net(batch(t + 1, 0))).sum().backward()
        local.step()
        local.zero_grad()
    assert torch.equal(stack([model]), stack([plain]))
