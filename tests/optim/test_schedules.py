"""The warm-up and cosine schedule, against torch's composition of the same."""

import functools
import pickle
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from decent_dp.errors import ConfigurationError
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup as schedule


def make_optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.3,)])


def learning_rates(optimizer, scheduler, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == rates[-1]
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("t_max", "t_warmup"), [(50, 10), (7, 6), (1000, 1), (30, 29)])
@pytest.mark.parametrize(("eta_min", "decay"), [(1e-6, 0.01), (0.0, 1.0), (0.02, 0.5)])
def test_equals_the_composition_of_torch(t_max, t_warmup, eta_min, decay):
    mine = make_optimizer(0.3, 0.001)
    rates = learning_rates(mine, schedule(mine, t_max, t_warmup, eta_min, decay), t_max + 1)
    other = make_optimizer(0.3, 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composed = SequentialLR(
            other,
            [
                LinearLR(other, start_factor=decay, total_iters=t_warmup),
                CosineAnnealingLR(other, t_max - t_warmup, eta_min),
            ],
            [t_warmup],
        )
        for t in range(t_max + 1):
            for i, group in enumerate(other.param_groups):
                assert rates[t][i] == pytest.approx(group["lr"], rel=0, abs=1e-12)
            other.step()
            composed.step()


def test_no_warmup_is_a_cosine_from_the_start():
    mine, other = make_optimizer(), make_optimizer()
    rates = learning_rates(mine, schedule(mine, 20, 0), 21)
    expected = learning_rates(other, CosineAnnealingLR(other, 20, 1e-6), 21)
    assert rates[0] == [0.3]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected), rtol=0, atol=1e-12)


def test_constant_after_the_end():
    optimizer = make_optimizer()
    rates = learning_rates(optimizer, schedule(optimizer, 5, 2, cosine_eta_min=0.125), 20)
    assert rates[5:] == [[0.125]] * 15


@pytest.mark.parametrize("done", [0, 3, 10, 25, 60])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resumes_with_the_same_numbers(done, optimizer_first):
    optimizer = make_optimizer(0.3, 0.1)
    scheduler = schedule(optimizer, 40, 10)
    learning_rates(optimizer, scheduler, done)
    states = pickle.loads(pickle.dumps((optimizer.state_dict(), scheduler.state_dict())))
    resumed = make_optimizer(0.3, 0.1)
    if optimizer_first:
        resumed.load_state_dict(states[0])
        new = schedule(resumed, 40, 10)
    else:
        new = schedule(resumed, 40, 10)
        resumed.load_state_dict(states[0])
    new.load_state_dict(states[1])
    assert learning_rates(resumed, new, 50) == learning_rates(optimizer, scheduler, 50)


def test_ticking_without_an_update_is_silent():
    """A worker that skips its first update because of an overflow keeps the learning rate of the others."""
    optimizer = make_optimizer()
    scheduler = schedule(optimizer, 10, 4)
    scheduler.step()
    optimizer.step()
    scheduler.step()
    reference = make_optimizer()
    expected = learning_rates(reference, schedule(reference, 10, 4), 3)
    assert scheduler.get_last_lr() == expected[2]


def test_is_a_torch_scheduler_and_a_partial_works():
    optimizer = make_optimizer()
    scheduler = functools.partial(schedule, t_max=10, t_warmup=2)(optimizer)
    assert isinstance(scheduler, LRScheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"t_max": 5, "t_warmup": 5}, "t_max is 5 with t_warmup=5"),
        ({"t_max": 2.5, "t_warmup": 1}, "t_max is 2.5"),
        ({"t_max": 5, "t_warmup": -1}, "t_warmup is -1"),
        ({"t_max": 5, "t_warmup": 0.5}, "t_warmup is 0.5"),
        ({"t_max": 5, "t_warmup": 1, "cosine_eta_min": -1e-6}, "cosine_eta_min is -1e-06"),
        ({"t_max": 5, "t_warmup": 1, "warmup_decay": 1.5}, "warmup_decay is 1.5"),
        ({"t_max": 5, "t_warmup": 1, "warmup_decay": "x"}, "warmup_decay is 'x'"),
        ({"optimizer": None, "t_max": 5, "t_warmup": 1}, "optimizer is of type NoneType"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        schedule(**{"optimizer": make_optimizer(), **arguments})
    assert words in str(caught.value)
