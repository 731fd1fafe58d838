"""What the factories put into groups, and what they refuse."""

import functools
import inspect

import pytest
import torch
from torch import nn

from decent_dp import optim
from decent_dp.errors import ConfigurationError

FACTORIES = [optim.optim_fn_adam, optim.optim_fn_adamw, optim.optim_fn_accum_adam, optim.optim_fn_accum_adamw]
ALL = pytest.mark.parametrize("optim_fn", FACTORIES, ids=lambda fn: fn.__name__)


class Model(nn.Module):
    """Layers of every kind, and names that lie about what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.embedding = nn.Embedding(5, 3)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.LayerNorm(4)
        self.batch = nn.BatchNorm2d(3)
        self.bias_matrix = nn.Parameter(torch.ones(2, 2))
        self.weight_vector = nn.Parameter(torch.ones(2))
        self.temperature_weight = nn.Parameter(torch.ones(()))


DECAYED = {"linear.weight", "embedding.weight", "conv.weight", "bias_matrix"}


def decay_of(optimizer) -> dict[str, float]:
    return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}


@ALL
def test_matrices_decay_and_nothing_else(optim_fn):
    named = list(Model().named_parameters())
    decay = decay_of(optim_fn(named, weight_decay=0.25))
    assert decay == {name: 0.25 if name in DECAYED else 0.0 for name, _ in named}


@ALL
@pytest.mark.parametrize("part", ["matrices", "vectors"])
def test_bucket_with_one_kind_has_one_group(optim_fn, part):
    named = [(n, p) for n, p in Model().named_parameters() if (n in DECAYED) == (part == "matrices")]
    (group,) = optim_fn(named).param_groups
    assert group["param_names"] == [name for name, _ in named]


def test_defaults_and_order_of_arguments():
    for optim_fn in FACTORIES:
        parameters = inspect.signature(optim_fn).parameters
        accumulated = "accum" in optim_fn.__name__
        decay = 0.1 if optim_fn.__name__.endswith("w") else 1 / 32768
        expected = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999}
        if accumulated:
            expected |= {"eps": 1e-8, "weight_decay": decay, "accum_iter": 4}
        else:  # the other way round, as in the original package
            expected |= {"weight_decay": decay, "eps": 1e-8}
        positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in positional] == ["params", *expected]
        assert {p.name: p.default for p in positional[1:]} == expected


@ALL
def test_partial_and_hyperparameters_arrive(optim_fn):
    optimizer = functools.partial(optim_fn, lr=3e-4)(list(Model().named_parameters()), beta1=0.5, beta2=0.6, eps=1e-3)
    for group in optimizer.param_groups:
        assert (group["lr"], tuple(group["betas"]), group["eps"]) == (3e-4, (0.5, 0.6), 1e-3)


@ALL
def test_names_are_in_the_state_dict(optim_fn):
    named = list(Model().named_parameters())
    groups = optim_fn(named).state_dict()["param_groups"]
    assert {name for group in groups for name in group["param_names"]} == {name for name, _ in named}


@pytest.mark.parametrize("optim_fn", FACTORIES[:2], ids=lambda fn: fn.__name__)
def test_fused_wherever_torch_has_it(optim_fn):
    def fused(parameter: torch.Tensor, **options) -> object:
        return optim_fn([("p", nn.Parameter(parameter))], **options).param_groups[0]["fused"]

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert fused(torch.zeros(3, 2, dtype=dtype)) is True
    assert fused(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)) is True
    assert fused(torch.zeros(3, 2), fused=False) is None
    assert fused(torch.zeros(3, 2, dtype=torch.complex64)) is None
    assert fused(torch.zeros(3, 4)[:, ::2]) is None


@ALL
def test_parameter_with_gaps_in_memory_moves_as_any_other(optim_fn):
    """The fused kernel would walk its memory as if it were contiguous."""
    x = torch.arange(24.0).reshape(4, 6)
    ends = []
    for parameter in (nn.Parameter(x.clone()[:, ::2]), nn.Parameter(x.clone()[:, ::2].contiguous())):
        optimizer = optim_fn([("p", parameter)], lr=0.1)
        for step in range(5):
            parameter.grad = torch.linspace(-1, 2, 12).reshape(4, 3) * (step + 1)
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


@ALL
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0: it must be a finite number >= 0; pass for example lr=0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": torch.tensor(0.1)}, "lr is tensor"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"weight_decay": -1}, "weight_decay is -1"),
    ],
    ids=str,
)
def test_wrong_hyperparameters_are_named(optim_fn, arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        optim_fn([("w", nn.Parameter(torch.zeros(2, 2)))], **arguments)
    assert words in str(caught.value)


@ALL
def test_wrong_parameters_are_named(optim_fn):
    with pytest.raises(ConfigurationError, match="no parameters were given"):
        optim_fn([])
    with pytest.raises(ConfigurationError, match=r"item of type Parameter.*named_parameters"):
        optim_fn([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigurationError, match=r"fused=True with parameter 'z'.*fused=None"):
        optim_fn([("z", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))], fused=True)


def test_public_names():
    assert optim.__all__ == sorted(optim.__all__)
    assert all(hasattr(optim, name) for name in optim.__all__)
