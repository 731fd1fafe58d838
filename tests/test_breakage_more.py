"""More ways in which a model could go on wrongly without a word: refresh, interrupted windows, hooks of the user."""

from functools import partial

import pytest
import torch
from torch import nn

from broken import Fragile
from decent_dp import ConfigurationError, DecentralizedDataParallel, ModelChangedError, TrainingError
from virtual import stack, wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)
X = torch.ones(1, 3)
TINY = 20 / 2**20


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def one(make=net, optim_fn=SGD, *args, **options):
    (model,) = wrap_virtual(1, lambda rank: make(), optim_fn, *args, **options)
    return model


def inserted(rank, n, topology):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[1].weight, 100.0)
    wrapped = DecentralizedDataParallel(model, partial(torch.optim.SGD, lr=0.0, momentum=0.9), topology=topology)
    wrapped(X).sum().backward()
    momentum = {id(p): s["momentum_buffer"].clone() for o in wrapped.optimizers for p, s in o.state.items()}
    kept = [model[0].weight, model[1].weight]
    model.insert(0, nn.Linear(3, 3, bias=False))
    wrapped.refresh()
    for parameter in kept:
        (held,) = [o.state[parameter] for o in wrapped.optimizers if parameter in o.state]
        assert torch.equal(held["momentum_buffer"], momentum[id(parameter)])
    wrapped(X).sum().backward()
    return [p.mean().item() for p in kept]


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_refresh_follows_parameters_and_not_names(pool, topology):
    for values in pool.run(inserted, 3, topology):
        assert values == pytest.approx([1.0, 100.0], rel=1e-6)


def test_refresh_inside_of_a_window_keeps_the_window():
    model = one()
    with model.no_sync():
        model(X).sum().backward()
        model.refresh()
        model(X).sum().backward()
        assert model.t == 0
    with pytest.warns(UserWarning, match="discards 2"):
        model.zero_grad()


def test_refresh_refuses_to_merge_different_rates():
    model = one(bucket_size_in_mb=TINY)
    for rate, optimizer in enumerate(model.optimizers, start=1):
        optimizer.param_groups[0]["lr"] = 0.1 * rate
    model.refresh()
    model._settings = type(model._settings)(**{**vars(model._settings), "bucket_size_in_mb": 25})
    with pytest.raises(TrainingError, match="their lr differs"):
        model.refresh()


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_thawed_parameters_are_not_changed_by_the_wire(pool, wire, topology):
    values = pool.run(thawed, 3, wire, topology)
    assert values == [values[0]] * 3
    assert values[0] == [torch.tensor(v).item() for v in (1.2345678, 1e5)]


def thawed(rank, n, wire, topology):
    model = nn.ParameterDict({"a": torch.tensor([1.2345678]), "b": torch.tensor([1e5]), "c": torch.tensor([1.0])})
    model["a"].requires_grad_(False)
    model["b"].requires_grad_(False)
    wrapped = DecentralizedDataParallel(model, partial(torch.optim.SGD, lr=0.0), topology=topology, wire_dtype=wire)
    wrapped.module["c"].sum().backward()
    model["a"].requires_grad_(True)
    model["b"].requires_grad_(True)
    wrapped.refresh()
    for _ in range(3):
        sum(p.sum() for p in model.values()).backward()
    return [model["a"].item(), model["b"].item()]


def test_assigning_to_the_wrapper_is_noticed():
    model = one()
    model.module = net()
    with pytest.raises(ModelChangedError, match=r"refresh\(\)"):
        model(X)
    model.refresh()
    before = stack([model])
    model(X).sum().backward()
    assert not torch.equal(before, stack([model]))
    model.head = nn.Linear(1, 1)
    with pytest.raises(ModelChangedError, match="wrapper itself"):
        model(X)


def test_a_tensor_learning_rate_ticks_once_whatever_the_buckets():
    rates = []
    for size in (25, TINY):
        model = one(
            net,
            partial(torch.optim.SGD, lr=torch.tensor(0.1)),
            partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
            bucket_size_in_mb=size,
        )
        for _ in range(2):
            model(X).sum().backward()
        rates.append(model.get_lr())
    assert rates == pytest.approx([0.025, 0.025])


@pytest.mark.parametrize("size", [25, TINY])
def test_hooks_of_the_user_see_every_gradient(size):
    model = one(bucket_size_in_mb=size)
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad is not None)))
    before = stack([model])
    model(X).sum().backward()
    assert sorted(seen) == [(name, True) for name, _ in sorted(model.named_parameters())]
    assert not torch.equal(before, stack([model]))


def test_a_window_with_a_broken_backward_must_be_repeated():
    model, clean = one(Fragile), one(Fragile)
    with model.no_sync():
        model(X).sum().backward()
        model.module.position = "middle"
        with pytest.raises(ValueError, match="boom"):
            model(X).sum().backward()
        model.module.position = None
    with pytest.raises(TrainingError, match=r"left a part of its gradients.*zero_grad\(\)"):
        model(X).sum().backward()
    with pytest.warns(UserWarning, match="discards"):
        model.zero_grad()
    for each in (model, clean):
        each(X).sum().backward()
    assert torch.equal(stack([model]), stack([clean]))


def test_finishing_a_window_after_a_broken_backward_only_mixes():
    model = one(Fragile)
    before = stack([model])
    model.module.position = "middle"
    with pytest.raises(ValueError, match="boom"):
        model(X).sum().backward()
    model.finish_window()
    assert model.t == 1
    assert torch.equal(before, stack([model]))


def nested_join(rank, n):
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    with pytest.raises(TrainingError, match="inside of another join"), model.join(), model.join():
        raise AssertionError


def test_joins_of_one_model_do_not_nest(pool):
    pool.run(nested_join, 2)


def test_buffers_that_a_module_replaces_are_restored():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y

    model = one(Running, SGD, sync_buffer_in_global_avg=True)
    model(X).sum().backward()
    before = model.module.mean.clone()
    with model.consensus():
        model(5 * X)
    assert torch.equal(model.module.mean, before)


@pytest.mark.parametrize("drop", [False, True])
def test_synchronize_can_drop_what_has_arrived(drop):
    models = wrap_virtual(2, lambda rank: net(), partial(torch.optim.SGD, lr=0.0))
    before = stack(models)
    for model in models:
        model(X).sum().backward()
    for model in models:
        model.synchronize(drop=drop)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    for model in models:
        model(X).sum().backward()
    assert torch.equal(stack(models), torch.zeros_like(before) if drop else before / 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: {"buffer": weight.data.diagonal()},
        lambda weight: {"frozen": nn.Parameter(weight.data[:, :2], requires_grad=False)},
        lambda weight: {"trained": nn.Parameter(weight.data[1:])},
    ],
)
def test_overlapping_memory_is_refused(make):
    def sharing():
        module = net()
        for name, tensor in make(module[0].weight).items():
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
        return module

    with pytest.raises(ConfigurationError, match="share memory"):
        one(sharing)


def test_losses_in_distributions_are_watched():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.layer(x))

    model = one(Policy)
    stale = -model(X).log_prob(torch.tensor([1])).sum()
    (-model(X).log_prob(torch.tensor([1])).sum()).backward()
    with pytest.raises(TrainingError, match="computed before"):
        stale.backward()
