"""What cannot be wrapped, and what must not happen to a wrapped model: every message says so."""

import copy
import gc
import pickle
import re
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import (
    ConfigurationError,
    DecentralizedDataParallel,
    Layout,
    MismatchError,
    ModelChangedError,
    TopologyError,
    topology,
)
from decent_dp.comm import InProcessWorld
from virtual import stack, wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wrap(model, optim_fn=SGD, *args, n=1, **options):
    return DecentralizedDataParallel(model, optim_fn, *args, communicator=InProcessWorld(n).communicator(0), **options)


def frozen():
    return net().requires_grad_(False)


def one_on_meta():
    model = net()
    model[1].weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    return model


def sharing():
    model = net()
    model[1] = nn.Linear(4, 4)
    model[1].weight.data = model[0].weight.data
    return model


class Sam(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "optim_fn", "options", "error", "message"),
    [
        (net, SGD, {"topology": "rings"}, TopologyError, r"'rings'.*'ring'.*complete"),
        (net, SGD, {"topology": "alternating-exp-ring", "n": 6, "workers_per_node": 2}, TopologyError, r"3 nodes"),
        (net, SGD, {"topology": 3}, ConfigurationError, r"topology is int.*name"),
        (net, SGD, {"topology": topology.ring(Layout(4, 4)), "n": 3}, ConfigurationError, r"'ring' is for 4 .*are 3"),
        (net, SGD, {"n": 4, "workers_per_node": 3}, ConfigurationError, r"4.*3"),
        (frozen, SGD, {}, ConfigurationError, r"Sequential has no parameter that requires a gradient"),
        (one_on_meta, SGD, {}, ConfigurationError, r"'1.weight' is on meta.*cpu"),
        (sharing, SGD, {}, ConfigurationError, r"'(0|1).weight' and '(0|1).weight' share memory"),
        (lambda: nn.LazyLinear(2), SGD, {}, ConfigurationError, r"'weight' is not initialised"),
        (net, torch.optim.LBFGS, {}, ConfigurationError, r"LBFGS.step needs a closure"),
        (net, partial(Sam, lr=1), {}, ConfigurationError, r"Sam.step needs a closure"),
        (net, lambda named: None, {}, ConfigurationError, r"optim_fn returned NoneType"),
        (net, torch.optim.SGD([torch.zeros(1)], lr=1), {}, ConfigurationError, r"optim_fn is SGD.*function"),
        (net, SGD, {"lr_scheduler_fn": 3}, ConfigurationError, r"lr_scheduler_fn is int"),
        (
            net,
            SGD,
            {"lr_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau},
            ConfigurationError,
            r"ReduceLROnPlateau steps on a metric",
        ),
        (net, SGD, {"grad_clip_norm": -1}, ConfigurationError, r"grad_clip_norm.*-1"),
        (net, SGD, {"grad_clip_norm": float("nan")}, ConfigurationError, r"grad_clip_norm.*nan"),
        (net, SGD, {"bucket_size_in_mb": 0}, ConfigurationError, r"bucket_size_in_mb.*0"),
        (net, SGD, {"wire_dtype": torch.int8}, ConfigurationError, r"wire_dtype.*int8"),
    ],
)
def test_what_cannot_be_wrapped(make, optim_fn, options, error, message):
    with pytest.raises(error, match=message):
        wrap(make(), optim_fn, **options)


def test_no_process_group():
    with pytest.raises(ConfigurationError, match=r"no process group.*initialize_dist.*torchrun"):
        DecentralizedDataParallel(net(), SGD)


def different(rank, n, kind):
    """One worker differs; all must say so within the timeout."""
    torch.manual_seed(0)
    model, optim_fn, options = net(), SGD, {"topology": "ring"}
    odd = rank == n - 1
    if kind == "extra layer" and odd:
        model.append(nn.Linear(2, 2))
    if kind == "shape" and odd:
        model[1] = nn.Linear(4, 3)
    if kind == "dtype" and odd:
        model[1].double()
    if kind == "order":
        names = ("a", "b") if odd else ("b", "a")
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    if kind == "frozen" and odd:
        model[0].bias.requires_grad_(False)
    if kind == "topology":
        options["topology"] = "exp" if odd else "ring"
    if kind == "unknown topology":
        options["topology"] = "rings" if odd else "ring"
    if kind == "bucket size":
        options["bucket_size_in_mb"] = 1e-5 if odd else 25
    if kind == "wire dtype":
        options["wire_dtype"] = torch.bfloat16 if odd else None
    if kind == "optimizer" and odd:
        optim_fn = partial(torch.optim.Adam, lr=0.1)
    if kind == "failing optimizer" and odd:
        optim_fn = fail
    begin = time.monotonic()
    try:
        DecentralizedDataParallel(model, optim_fn, **options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def fail(named):
    raise ValueError("no such optimizer")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("extra layer", r"parameter 4: rank 0 has nothing, rank 2 has '2.weight' \[2, 2\]"),
        ("shape", r"parameter 2: rank 0 has '1.weight' \[2, 4\].*rank 2 has '1.weight' \[3, 4\]"),
        ("dtype", r"parameter 2: .*float32.*float64"),
        ("order", r"parameter 0: rank 0 has 'b.weight'.*rank 2 has 'a.weight'"),
        ("frozen", r"parameter 1: .*frozen"),
        ("topology", r"the topology: rank 0 has 'ring'.*rank 2 has 'exp'"),
        ("unknown topology", r"rank 2 could not set up its model: TopologyError|'rings'"),
        ("bucket size", r"number of buckets: rank 0 has 1, rank 2 has 4"),
        ("wire dtype", r"wire_dtype: rank 0 has None, rank 2 has torch.bfloat16"),
        ("optimizer", r"optimizer of bucket 0.*rank 0 has SGD, rank 2 has Adam"),
        ("failing optimizer", r"rank 2 could not set up its model: ValueError: no such optimizer|no such optimizer"),
    ],
)
def test_workers_that_differ_all_raise(pool, kind, message):
    results = pool.run(different, 3, kind)
    for rank, (name, text, seconds) in enumerate(results):
        assert seconds < 5
        if kind not in ("unknown topology", "failing optimizer") or rank != 2:
            assert name == MismatchError.__name__
            assert text.startswith(f"rank {rank}: ")
        assert re.search(message, text), text


def assign_new(model):
    model.module[0].weight = nn.Parameter(torch.zeros(4, 4))


def load_assign_inside(model):
    model.module.load_state_dict(net().state_dict(), assign=True)


def thaw(model):
    model.module[1].bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (assign_new, r"'0.weight'.*replaced"),
        (load_assign_inside, r"'0.weight'.*replaced"),
        (lambda m: m.module.half(), r"'0.weight'.*float32 and is torch.float16"),
        (lambda m: m.double(), r"'0.weight'.*float32 and is torch.float64"),
        (lambda m: setattr(m.module[0].weight, "data", torch.zeros(4, 4)), r"'0.weight'.*other memory"),
        (thaw, r"'1.bias'.*frozen"),
    ],
)
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_changes_after_wrapping_are_refused_by_name(change, message, at):
    plain = net()
    plain[1].bias.requires_grad_(False)
    model = wrap(plain)
    model(torch.ones(1, 4)).sum().backward()
    if at == "backward":
        loss = model(torch.ones(1, 4)).sum()
    change(model)
    go_on = loss.backward if at == "backward" else partial(model, torch.ones(1, 4))
    with pytest.raises(ModelChangedError, match=message):
        go_on()


def test_moving_to_the_device_it_is_on_is_fine():
    model = wrap(net())
    model.to("cpu").cpu().float()
    model(torch.ones(1, 4)).sum().backward()


def test_an_optimizer_of_the_user_is_refused_by_name():
    model = wrap(net())
    local = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ModelChangedError, match=r"Adam.step\(\) was called with parameter '0.weight'.*optim_fn"):
        local.step()
    other = nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=1)
    other(torch.ones(1, 2)).sum().backward()
    foreign.step()  # of a model that is not wrapped
    del model
    local.step()  # the wrapper is gone


def test_names_and_loading_go_both_ways():
    plain = net()
    model = wrap(net())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    result = model.load_state_dict(plain.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    result = model.load_state_dict({"nonsense": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["nonsense"]
    assert result.missing_keys == list(plain.state_dict())
    model(torch.ones(1, 4)).sum().backward()
    plain.load_state_dict(model.state_dict())
    with pytest.raises(ConfigurationError, match="assign"):
        model.load_state_dict(plain.state_dict(), assign=True)


def test_names_inside_of_another_module():
    outer = nn.ModuleDict({"g": wrap(net()), "d": net()})
    state = {name: value + 1 for name, value in outer.state_dict().items()}
    assert sorted(state) == sorted(nn.ModuleDict({"g": net(), "d": net()}).state_dict())
    outer.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in outer.state_dict().items())


def test_loading_drops_what_was_in_flight():
    models = wrap_virtual(2, lambda rank: net(), SGD, topology="ring")
    for rank, model in enumerate(models):
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    zeros = {name: torch.zeros_like(value) for name, value in models[0].state_dict().items()}
    for model in models:
        model.load_state_dict(zeros)
    for model in models:
        (model(torch.ones(1, 4)) * 0).sum().backward()
    assert not stack(models).any()


def test_a_wrapper_is_not_copied_or_pickled():
    model = wrap(net())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"model.module"):
            attempt(model)
    copy.deepcopy(model.module)


def test_layouts_and_kinds_survive():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        nn.Linear(4, 4, dtype=torch.bfloat16),
        nn.Linear(4, 4, dtype=torch.complex64),
    )
    big = torch.arange(32.0).view(4, 8)
    model.strided = nn.Parameter(big[:, ::2])
    model.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.scalar, model.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    strides = {name: p.stride() for name, p in model.named_parameters()}
    wrapped = wrap(model)
    for name, p in wrapped.named_parameters():
        assert torch.equal(p, before[name])
        assert p.dtype == before[name].dtype
        assert p.stride() == (strides[name] if name != "strided" else (4, 1))
    with torch.no_grad():
        model.strided.zero_()
    assert torch.equal(big, torch.arange(32.0).view(4, 8))


def test_wrapping_leaves_the_random_state_alone():
    model = net()
    state = torch.get_rng_state()
    wrap(model, partial(torch.optim.AdamW, lr=0.1))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_start_from_rank_0_frozen_parameters_and_buffers_included(pool):
    assert pool.run(start_values, 3) == [[0.0, 0.0, 0.0, 0, True]] * 3


def start_values(rank, n):
    model = nn.BatchNorm1d(1)
    nn.init.constant_(model.weight, rank)
    nn.init.constant_(model.bias, rank).requires_grad_(False)
    model.running_mean.fill_(rank)
    model.num_batches_tracked.fill_(rank)
    model.register_buffer("flag", torch.tensor(rank == 0), persistent=False)
    model.register_buffer("sliced", torch.full((2, 4), float(rank))[:, ::2])
    wrapped = DecentralizedDataParallel(model, SGD)
    assert not model.sliced.any()
    return [p.item() for p in wrapped.parameters()] + [
        model.running_mean.item(),
        model.num_batches_tracked.item(),
        model.flag.item(),
    ]


def test_lr_is_true_from_the_start_and_ticks_once_per_update():
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    model = wrap(net(), SGD, schedule, bucket_size_in_mb=1e-5)
    assert model.get_lr() == 0.1
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    assert model.get_lr() == 0.1
    model(torch.ones(1, 4)).sum().backward()
    assert [s.get_last_lr() for s in model.lr_schedulers] == [[0.05]] * 4
    assert model.get_lr() == 0.05


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_mixing_strength(strength):
    models = wrap_virtual(3, lambda rank: nn.ParameterList([torch.zeros(1)]), partial(torch.optim.SGD, lr=0.0))
    for rank, model in enumerate(models):
        model.set_adaptive_factor(strength)
        with torch.no_grad():
            next(model.parameters()).fill_(rank)
    for _ in range(2):
        for model in models:
            next(model.parameters()).sum().backward()
    expected = [[rank + strength * (1 - rank)] for rank in range(3)]
    torch.testing.assert_close(stack(models), torch.tensor(expected))
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        models[0].set_adaptive_factor(1.5)


def test_hooks_and_memory_go_with_the_wrapper():
    module = net()
    model = wrap(module)
    model(torch.ones(1, 4)).sum().backward()
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    module(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
