"""A narrower wire dtype: the mean is kept, and replicas that agree stay where they are."""

from functools import partial

import pytest
import torch
from torch import nn

from virtual import stack, wrap_virtual

NARROW = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32),
          (torch.float64, torch.bfloat16), (torch.complex64, torch.bfloat16)]  # fmt: skip


def replicas(n, topology, dtype, wire, spread=1.0, **options):
    """Without learning; starts differ by rank."""
    models = wrap_virtual(
        n,
        lambda rank: nn.ParameterList([torch.zeros(50, dtype=dtype) for _ in range(3)]),
        partial(torch.optim.SGD, lr=0.0),
        topology=topology,
        wire_dtype=wire,
        bucket_size_in_mb=1e-4,
        workers_per_node=n,
        **options,
    )
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed(rank)
        for p in model.parameters():
            p.data.copy_(5 + spread * torch.randn(50, generator=generator, dtype=dtype))
    return models


def run(models, steps):
    for _ in range(steps):
        for model in models:
            sum((p * 0).abs().sum() for p in model.parameters()).backward()
    return stack(models)


@pytest.mark.parametrize(("dtype", "wire"), NARROW)
@pytest.mark.parametrize("topology", ["ring", "exp", "complete", "alternating-exp-ring"])
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_mean_is_kept_to_rounding_of_the_parameters(dtype, wire, topology, as_view, n):
    models = replicas(n, topology, dtype, wire, param_as_bucket_view=as_view)
    start = stack(models)
    end = run(models, 30)
    half_ulp = 4 * torch.finfo(dtype).eps  # of numbers between 4 and 8
    torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=30 * half_ulp)
    floor = 8 * 5 * torch.finfo(wire).eps
    assert (end - end.mean(0)).abs().max() < floor + (1 if topology == "ring" and n == 5 else 0) * 0.1
    assert end.dtype == dtype


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_replicas_that_agree_stay_put_bit_for_bit(wire, topology):
    models = replicas(3, topology, torch.float32, wire, spread=0.0)
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.add_(0.123456)
    start = stack(models)
    assert torch.equal(run(models, 10), start)


def test_what_float16_cannot_hold_is_sent_as_its_largest_number():
    models = replicas(2, "ring", torch.float32, torch.float16)
    with torch.no_grad():
        for rank, model in enumerate(models):
            for p in model.parameters():
                p.fill_(1e6 if rank else 0.0)
    end = run(models, 2)
    assert end.isfinite().all()
    assert end.mean().item() == 5e5


def test_parameters_narrower_than_the_wire_travel_as_they_are():
    wide, own = (replicas(3, "ring", torch.bfloat16, wire) for wire in (torch.float32, None))
    assert torch.equal(run(wide, 5), run(own, 5))
