"""State, checks and habits of AccumAdam and AccumAdamW as torch optimizers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from decent_dp.errors import ConfigurationError
from decent_dp.optim import AccumAdam, AccumAdamW

BOTH = pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])


def model_and(cls, seed: int = 0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    model.to(memory_format=torch.channels_last)
    options = {"lr": 0.02, "accum_iter": 4, "weight_decay": 0.1, **options}
    return model, cls(model.named_parameters(), **options)


def train(model, optimizer, steps):
    for t in steps:
        x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def assert_same(model, optimizer, other_model, other_optimizer):
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            other = other_optimizer.state[q][name]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other


@BOTH
@pytest.mark.parametrize("done", [3, 4, 6])
def test_state_round_trip_goes_on_bit_equal(cls, done):
    model, optimizer = model_and(cls)
    train(model, optimizer, range(done))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    other_model, other = model_and(cls, seed=9, lr=0.5, accum_iter=2)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other_model.load_state_dict(weights)
    other.load_state_dict(state)
    assert_same(model, optimizer, other_model, other)
    train(model, optimizer, range(done, done + 6))
    train(other_model, other, range(done, done + 6))
    assert_same(model, optimizer, other_model, other)


@BOTH
def test_loaded_state_is_a_copy(cls):
    """Stepping one optimizer leaves the other alone, also without a file between them."""
    model, optimizer = model_and(cls)
    train(model, optimizer, range(3))
    twin, other = model_and(cls)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(twin, other, range(3, 9))
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_bit_equal(cls, copier):
    model, optimizer = model_and(cls)
    train(model, optimizer, range(6))
    other_model, other = copier((model, optimizer))
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(model, optimizer, range(6, 11))
    train(other_model, other, range(6, 11))
    assert_same(model, optimizer, other_model, other)


@BOTH
def test_memory_format_may_change_between_steps(cls):
    model, optimizer = model_and(cls)
    twin, other = model_and(cls)
    train(model, optimizer, range(3))
    train(twin, other, range(3))
    twin.to(memory_format=torch.contiguous_format)
    train(model, optimizer, range(3, 9))
    train(twin, other, range(3, 9))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@BOTH
def test_gradient_in_another_memory_format_means_the_same(cls):
    torch.manual_seed(0)
    value, gradient = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        w = nn.Parameter(value.clone(memory_format=torch.channels_last))
        w.grad = gradient.clone(memory_format=layout)
        optimizer = cls([w], lr=0.1)
        optimizer.step()
        ends.append(w.detach())
    assert torch.equal(*ends)


def test_parameter_without_gradient_is_left_alone():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AccumAdamW([used, unused], weight_decay=0.5)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state
    assert optimizer.state[used]["step"] == 1


def test_window_boundaries_of_the_state():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AccumAdam([w], betas=(0.5, 0.75), accum_iter=3)
    state = optimizer.state[w]
    for step, (b, M, V) in enumerate([(1, 0, 0), (3, 0, 0), (0, 3, 9), (1, 3, 9)], start=1):
        w.grad = torch.full((1,), [3.0, 6.0, 9.0, 3.0][step - 1], dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[w]
        assert state["step"] == step
        assert state["gradient_mean"].item() == pytest.approx(b, abs=1e-14)
        assert state["first_moment"].item() == pytest.approx(M if step < 3 else 0.5 * 6, abs=1e-14)
        assert state["second_moment"].item() == pytest.approx(V if step < 3 else 0.25 * 36, abs=1e-14)


@BOTH
def test_closure(cls):
    model, optimizer = model_and(cls)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2, 4, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_groups_with_their_own_options():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AccumAdam([{"params": [a], "lr": 0.5, "accum_iter": 1}, {"params": [b]}], lr=0.25, accum_iter=2)
    a.grad = b.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(a, torch.full((2,), 0.5))
    assert torch.allclose(b, torch.full((2,), 0.75))
    assert optimizer.state[a]["gradient_mean"].abs().sum() == 0
    with pytest.raises(ConfigurationError, match="accum_iter is 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "accum_iter": 0})
    assert len(optimizer.param_groups) == 2


def test_learning_rate_schedulers_of_torch_work():
    w = nn.Parameter(torch.ones(1))
    optimizer = AccumAdamW([w], lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for expected in (0.0, -0.5):
        w.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert w.item() == pytest.approx(expected, abs=1e-6)


@BOTH
def test_refusals(cls):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError, match=r"accum_iter is 0: .*accum_iter=4"):
        cls([w], accum_iter=0)
    with pytest.raises(ConfigurationError, match=r"accum_iter is 2.5"):
        cls([w], accum_iter=2.5)
    with pytest.raises(ConfigurationError, match=r"betas is 0.9: it must be a pair"):
        cls([w], betas=0.9)
    with pytest.raises(ConfigurationError, match=r"fused=True with parameter number 0 of its group"):
        cls([nn.Parameter(torch.ones(2, dtype=torch.complex64))], fused=True)


@BOTH
def test_sparse_gradient_is_refused_before_anything_moves(cls):
    model = nn.ModuleDict({"linear": nn.Linear(3, 1), "words": nn.Embedding(4, 3, sparse=True)})
    optimizer = cls(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    model["linear"](model["words"](torch.tensor([1]))).sum().backward()
    with pytest.raises(ConfigurationError, match=r"parameter 'words.weight' .*sparse=False"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state


@BOTH
def test_foreign_state_is_refused(cls):
    model, optimizer = model_and(cls)
    foreign = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigurationError, match="another kind of optimizer"):
        optimizer.load_state_dict(foreign.state_dict())
    w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
    writer, reader = cls([v]), cls([w])
    v.grad = torch.ones(1)
    writer.step()
    with pytest.raises(ConfigurationError, match=r"\(1,\).*\(3,\)"):
        reader.load_state_dict(writer.state_dict())
