"""When parameters move, and with which gradient: everything autograd can do to a wrapper."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from broken import Fragile
from decent_dp import TrainingError, UnusableError
from virtual import stack, wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)
TINY = 16 / 2**20


def network(rank=0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))


def wrap_one(make=network, optim_fn=ADAM, **options):
    (model,) = wrap_virtual(1, lambda rank: make(), optim_fn, bucket_size_in_mb=TINY, **options)
    return model


def test_the_first_backward_updates_before_it_returns_and_consumes_gradients():
    model = wrap_one()
    before = stack([model])
    model(torch.randn(4, 3)).sum().backward()
    assert not torch.equal(stack([model]), before)
    assert all(p.grad is None for p in model.parameters())


def test_forward_changes_nothing_in_train_or_eval_before_between_and_after_steps():
    models = wrap_virtual(3, network, ADAM, bucket_size_in_mb=TINY)
    for _ in range(3):
        for model in models:
            before = [p.detach().clone() for p in model.parameters()]
            for mode in (model.eval, model.train, model.eval, model.train):
                mode()
                with torch.no_grad():
                    model(torch.randn(4, 3))
                model(torch.randn(4, 3))
            assert model.t == models[-1].t or model is not models[-1]
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for model in models:
            model(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("where", ["top", "before backward", "after backward", "nowhere"])
def test_zero_grad_anywhere_outside_a_window_is_harmless(where):
    model, plain = wrap_one(Tied), Tied()
    local = ADAM(plain.parameters())
    for t in range(3):
        x = torch.full((2, 4), float(t))
        if where == "top":
            model.zero_grad()
        loss = model(x).square().sum()
        if where == "before backward":
            model.zero_grad()
        loss.backward()
        if where == "after backward":
            model.zero_grad()
        plain(x).square().sum().backward()
        local.step()
        local.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


class Branches(nn.Module):
    """Three heads, of which one is used at a time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x))).sum()


def test_unused_parameters_are_mixed_but_not_updated():
    n = 3
    models = wrap_virtual(n, lambda rank: Branches(), ADAM, topology="complete", bucket_size_in_mb=TINY)
    copies = [Branches() for _ in range(n)]
    optimizers = [ADAM(module.parameters()) for module in copies]
    for t in range(9):
        gradients = []
        for rank, (model, module) in enumerate(zip(models, copies, strict=True)):
            x, head = torch.full((2, 3), 1.0 + rank + t, dtype=torch.float64), (rank + t) % 3
            model(x, head).backward()
            module.zero_grad()
            module(x, head).backward()
            gradients.append([p.grad for p in module.parameters()])
        if t:
            for together in zip(*(module.parameters() for module in copies), strict=True):
                mean = torch.stack([p.detach() for p in together]).mean(0)
                for p in together:
                    p.data = mean.clone()
        for module, local, kept in zip(copies, optimizers, gradients, strict=True):
            for p, g in zip(module.parameters(), kept, strict=True):
                p.grad = g
            local.step()
    for model, module in zip(models, copies, strict=True):
        for a, b in zip(model.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Tied(nn.Module):
    """One Parameter under two names, and a layer that is called twice."""

    def __init__(self, mode=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.mode = mode

    def segment(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        for _ in range(2):
            x = self.segment(x) if self.mode is None else checkpoint(self.segment, x, use_reentrant=self.mode)
        return x


@pytest.mark.parametrize("mode", [None, False, True])
def test_tied_parameters_take_one_step_with_and_without_checkpointing(mode):
    plain = Tied()
    local = ADAM(plain.parameters())
    model = wrap_one(lambda: Tied(mode))
    assert sum(len(group["params"]) for opt in model.optimizers for group in opt.param_groups) == 3
    for _ in range(3):
        for net in (plain, model):
            x = torch.linspace(0, 1, 8).view(2, 4).requires_grad_()
            net(x).square().sum().backward()
        local.step()
        local.zero_grad()
    assert model.module.first.weight is model.module.second.weight
    assert list(model.state_dict()) == list(plain.state_dict())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_reentrant_checkpointing_past_the_wrapper_is_refused_before_anything_moves():
    model = wrap_one(lambda: Tied(True))
    before = stack([model])
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(TrainingError, match=r"nested backward.*use_reentrant=False"):
        model.module(x).sum().backward()
    assert torch.equal(stack([model]), before)


class HeadOutside(nn.Module):
    """A weight used inside and outside of a reentrant checkpoint."""

    def __init__(self, reentrant, head_last):
        super().__init__()
        torch.manual_seed(0)
        if not head_last:
            self.head = nn.Linear(4, 4, bias=False)
        self.body = nn.Linear(4, 4)
        if head_last:
            self.head = nn.Linear(4, 4, bias=False)
        self.reentrant = reentrant

    def segment(self, x):
        return torch.tanh(self.head(torch.tanh(self.body(x))))

    def forward(self, x):
        return self.head(checkpoint(self.segment, x, use_reentrant=self.reentrant))


def test_a_parameter_inside_and_outside_of_a_reentrant_checkpoint():
    """Right while its bucket waits for others, refused by name when it was updated before the second gradient came."""
    x = torch.ones(2, 4, requires_grad=True)
    right, reentrant = (wrap_one(lambda mode=mode: HeadOutside(mode, head_last=False)) for mode in (False, True))
    for model in (right, reentrant):
        for _ in range(2):
            model(x).square().sum().backward()
    assert torch.equal(stack([right]), stack([reentrant]))
    late = wrap_one(lambda: HeadOutside(True, head_last=True))
    with pytest.raises(UnusableError, match=r"head.weight.*use_reentrant=False"):
        late(x).square().sum().backward()


def test_calling_the_module_past_the_wrapper_trains_the_same():
    through, past = wrap_one(Tied), wrap_one(Tied)
    for _ in range(3):
        through(torch.ones(2, 4)).sum().backward()
        past.module.segment(past.module.segment(torch.ones(2, 4))).sum().backward()
    assert torch.equal(stack([through]), stack([past]))


def test_several_forwards_before_one_backward_are_one_step():
    model = wrap_one()
    loss = -model(torch.randn(4, 3)).mean() + model(torch.randn(4, 3)).mean()
    loss.backward()
    assert model.t == 1


def test_a_loss_from_before_an_update_is_refused():
    model = wrap_one(lambda: nn.Linear(3, 2))
    first, second = model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()
    first.backward()
    with pytest.raises(TrainingError, match=r"rank 0, step 1: this loss was computed before .*no_sync"):
        second.backward()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()  # nothing was changed, so training goes on
    assert model.t == 2


def test_two_losses_of_one_graph_accumulate_under_no_sync():
    model, plain = wrap_one(Tied), Tied()
    local = ADAM(plain.parameters())
    for net in (model, plain):
        y = net(torch.ones(2, 4))
        if net is model:
            with model.no_sync():
                y.sum().backward(retain_graph=True)
        else:
            y.sum().backward(retain_graph=True)
        y.square().sum().backward()
    local.step()
    assert model.t == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_autograd_grad_and_gradient_penalties_take_no_extra_step():
    model, plain = wrap_one(Tied), Tied()
    local = ADAM(plain.parameters())
    for net in (model, plain):
        x = torch.linspace(0, 1, 8).view(2, 4).requires_grad_()
        y = net(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (y + g.square().sum()).backward()
    local.step()
    assert model.t == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("switch", ["before forward", "between"])
def test_the_state_during_backward_decides_about_accumulation(switch):
    model, plain = wrap_one(Tied), Tied()
    local = ADAM(plain.parameters())
    for micro in range(4):
        if switch == "before forward":
            model.set_accumulate_grad(micro < 3)
        loss = model(torch.full((2, 4), float(micro))).sum() / 4
        if switch == "between":
            model.set_accumulate_grad(micro < 3)
        loss.backward()
        (plain(torch.full((2, 4), float(micro))).sum() / 4).backward()
    local.step()
    assert model.t == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_parameters_used_only_in_early_micro_batches_are_updated():
    model = wrap_one(Branches, SGD)
    x = torch.ones(2, 3, dtype=torch.float64)
    before = [head.weight.detach().clone() for head in model.module.heads]
    with model.no_sync():
        model(x, 0).backward()
    model(x, 1).backward()
    moved = [not torch.equal(a, head.weight) for a, head in zip(before, model.module.heads, strict=True)]
    assert moved == [True, True, False]
    assert all(p.grad is None for p in model.parameters())


def test_a_backward_that_failed_before_any_update_can_be_repeated():
    model = wrap_one(Fragile, SGD)
    model.module.position = "start"
    with pytest.raises(ValueError, match="boom"):
        model(torch.ones(1, 3)).sum().backward()
    model.module.position = None
    model(torch.ones(1, 3)).sum().backward()
    assert model.t == 1


def test_a_backward_that_failed_after_an_update_leaves_the_model_unusable():
    model = wrap_one(Fragile, SGD)
    model.module.position = "middle"
    with pytest.raises(ValueError, match="boom"):
        model(torch.ones(1, 3)).sum().backward()
    model.module.position = None
    with pytest.raises(UnusableError, match=r"rank 0, step 0: .*interrupted after 2 buckets .*checkpoint"):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UnusableError):
        model(torch.ones(1, 3))


def test_reading_right_after_backward_sees_the_updated_replica():
    models = wrap_virtual(2, lambda rank: Tied(), ADAM, bucket_size_in_mb=TINY)
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 4)).sum().backward()
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
            copied = copy.deepcopy(model.module)
            state = {name: p.clone() for name, p in model.state_dict().items()}
            model.synchronize() if model is models[1] else None
            assert all(torch.equal(values[name], p) for name, p in copied.named_parameters())
            assert all(torch.equal(value, state[name]) for name, value in values.items())
