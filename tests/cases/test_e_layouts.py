"""Kind E: strides and memory formats."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.optim import optim_fn_adam, optim_fn_adamw

from .replay import accumulating, assert_equal, inner, on_virtual, replay, values

SGD = partial(torch.optim.SGD, lr=0.1)
VIEWS = pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])


# ---------------------------------------------------------------- strides


class Strided(nn.Module):
    """A slice with gaps, a transposed parameter, and a buffer with gaps."""

    def __init__(self, start=0.0):
        super().__init__()
        self.big = torch.arange(32.0, dtype=torch.float64).view(4, 8)
        self.sliced = nn.Parameter(self.big[:, ::2])
        self.transposed = nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3).t())
        self.behind = torch.arange(12.0).view(2, 6)
        self.register_buffer("slice", self.behind[:, 1::3])
        with torch.no_grad():
            for tensor in (self.sliced, self.transposed, self.slice):
                tensor.add_(start)

    def forward(self, x):
        return (self.sliced * x).square().sum() + (self.transposed.t() * x).sum()


def stride_values(net, t, rank):
    net(1.0 + 0.1 * rank + 0.1 * t).backward()


def strided(rank, n, as_view, topology):
    module = Strided(start=100.0 * rank)
    gaps = [module.big[:, 1::2].clone(), module.behind[:, ::3].clone(), module.behind[:, 2::3].clone()]
    model = DecentralizedDataParallel(
        module, SGD, topology=topology, param_as_bucket_view=as_view, sync_buffer_in_global_avg=True
    )
    for t in range(3):
        stride_values(model, t, rank)
    module.slice.fill_(rank)
    end, shared = values(model), []
    with model.consensus():
        shared = [values(model), module.slice.clone()]
    same = torch.equal(values(model), end) and bool((module.slice == rank).all())
    now = [module.big[:, 1::2], module.behind[:, ::3], module.behind[:, 2::3]]
    return end, shared, same and all(torch.equal(a, b) for a, b in zip(gaps, now, strict=True))


@VIEWS
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_e5_parameters_that_are_not_dense_in_memory(pool, as_view, topology):
    results = pool.run(strided, 2, as_view, topology)
    actual = torch.stack([end for end, _, _ in results])
    assert_equal(actual, replay(2, Strided, stride_values, SGD, 3))
    for _, (average, buffer), untouched in results:
        assert untouched
        assert_equal(average, actual.mean(0))
        assert torch.equal(buffer, torch.full((2, 2), 0.5))


class Odd(nn.Module):
    """Buffers with a layout of their own."""

    def __init__(self, kind, rank):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        full = torch.eye(2) * (1 + rank)
        self.register_buffer("b", full[:1, :1].expand(3, 2) if kind == "expanded" else full.to_sparse())

    def forward(self, x):
        return (self.w * x).sum()


def odd_buffers(rank, n, kind):
    model = DecentralizedDataParallel(Odd(kind, rank), SGD, sync_buffer_in_global_avg=True)
    model(1.0).backward()
    with model.consensus():
        return model.module.b.to_dense().tolist()


@pytest.mark.parametrize("kind", ["expanded", "sparse"])
def test_expanded_buffers_are_served_and_sparse_ones_stay_local(pool, kind):
    from_rank_0, own = [[[1.0, 1.0]] * 3] * 2, [[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]]]
    assert pool.run(odd_buffers, 2, kind, group_timeout_s=5) == (from_rank_0 if kind == "expanded" else own)


# ---------------------------------------------------------------- memory formats


class Formats(nn.Module):
    """3x3 and 1x1 kernels, of which the second is the same in both formats, and a three-dimensional one."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 1))
        self.deep = nn.Conv3d(2, 3, 2)
        self.double()  # so that rounding is small against any other difference
        self.last = last
        if last:
            self.flat.to(memory_format=torch.channels_last)
            self.deep.to(memory_format=torch.channels_last_3d)

    def forward(self, x, y):
        if self.last:
            x = x.to(memory_format=torch.channels_last)
            y = y.to(memory_format=torch.channels_last_3d)
        return self.flat(x).square().mean() + self.deep(y).square().mean()


def images(t, rank):
    x = torch.linspace(-1, 1, 2 * 3 * 5 * 5, dtype=torch.float64).view(2, 3, 5, 5) * (1 + rank) + 0.1 * t
    y = torch.linspace(-1, 1, 2 * 2 * 27, dtype=torch.float64).view(2, 2, 3, 3, 3) * (1 + rank) - 0.1 * t
    return x, y


def look(net, t, rank):
    net(*images(t, rank)).backward()


def strides_of(model):
    return [p.stride() for p in model.parameters()]


def formats(rank, n, as_view, optim_fn):
    """Warnings are errors here as everywhere."""
    module = Formats(last=True)
    expected, seen = strides_of(module), []
    model = DecentralizedDataParallel(module, optim_fn, topology="ring", param_as_bucket_view=as_view)
    seen.append(strides_of(model))
    for t in range(3):
        look(model, t, rank)
        seen.append(strides_of(model))
    end = values(model)
    with model.consensus():
        seen.append(strides_of(model))
    model.load_state_dict({name: value.contiguous() for name, value in model.state_dict().items()})
    seen.append(strides_of(model))
    return end, all(strides == expected for strides in seen)


ADAMS = {"sgd": SGD, "adam": partial(optim_fn_adam, lr=0.01), "adamw": partial(optim_fn_adamw, lr=0.01)}


@VIEWS
@pytest.mark.parametrize("optimizer", ADAMS)
def test_e6_channels_last(pool, as_view, optimizer):
    results = pool.run(formats, 2, as_view, ADAMS[optimizer])
    assert all(kept for _, kept in results)
    plain = replay(2, partial(Formats, last=False), look, _unfused(ADAMS[optimizer]), 3)
    assert_equal(torch.stack([end for end, _ in results]), plain, 1e-9)


def _unfused(optim_fn):
    return optim_fn if optim_fn is SGD else partial(optim_fn, fused=False)


def assign_before(net, t, rank):
    """A gradient made by hand, as manual gradient surgery does; the backward adds to it in place."""
    loss, weight = net(*images(t, rank)), inner(net).deep.weight
    weight.grad = torch.arange(48, dtype=torch.float64).sin().view(weight.shape)
    loss.backward()


def replace_in_window(net, t, rank):
    with accumulating(net):
        look(net, t, rank)
    for p in net.parameters():
        p.grad = p.grad.clone(memory_format=torch.contiguous_format).mul_(2)
    look(net, t + 1, rank)


def gradient_hook(net, t, rank):
    handles = [p.register_hook(lambda g: g.sin().contiguous()) for p in net.parameters()]
    look(net, t, rank)
    for handle in handles:
        handle.remove()


def create_graph(net, t, rank):
    with accumulating(net), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the cycle that create_graph makes
        net(*images(t, rank)).backward(create_graph=True)
    look(net, t + 1, rank)


def transposed_use(net, t, rank):
    """The gradient arrives in another order of dimensions than the parameter has."""
    deep = inner(net).deep.weight
    weights = torch.arange(48, dtype=torch.float64).view(2, 3, 2, 2, 2)
    (net(*images(t, rank)) + (deep.transpose(0, 1).contiguous() * weights).sum().sin()).backward()


class HookedBefore(Formats):
    """A hook that the user registered before wrapping runs before ours, and may replace the gradient."""

    def __init__(self, last):
        super().__init__(last)
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(_contiguous_gradient)


def _contiguous_gradient(p):
    p.grad = p.grad.sin().clone(memory_format=torch.contiguous_format)


STRIDES = {
    "assigned by hand before backward": (Formats, assign_before),
    "replaced in an accumulation window": (Formats, replace_in_window),
    "from a tensor hook": (Formats, gradient_hook),
    "from a hook after accumulation": (HookedBefore, look),
    "with create_graph": (Formats, create_graph),
    "of a transposed use": (Formats, transposed_use),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("case", STRIDES)
@pytest.mark.parametrize("optimizer", ADAMS)
@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["each bucket", "whole model"])
def test_e6_gradients_in_another_memory_format_give_the_same_update(case, optimizer, clip):
    """Torch's fused Adam walks memory, and pairs the wrong elements when strides differ, without a word."""
    make, act = STRIDES[case]
    optim_fn = ADAMS[optimizer]
    actual = on_virtual(2, partial(make, last=True), act, optim_fn, 3, topology="ring", grad_clip_norm=clip)
    plain = replay(2, partial(make, last=False), act, _unfused(optim_fn), 3, max_norm=clip)
    assert_equal(actual, plain, 1e-8)
