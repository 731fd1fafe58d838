"""The average of all replicas: right, restored bit for bit, and without effect on what is in flight."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from decent_dp import DecentralizedDataParallel, ExchangeError, TrainingError

SGD = partial(torch.optim.SGD, lr=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()


def batch(value):
    return torch.full((2, 3), float(value), dtype=torch.float64) + torch.eye(3, dtype=torch.float64)[:2]


def alone(rank, n):
    model = DecentralizedDataParallel(network(), SGD)
    model(batch(0)).sum().backward()
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(ExchangeError, match=r"rank 0: averaging over all workers failed.*Every worker must call"):
            model.consensus_distance()
        return time.monotonic() - begin
    time.sleep(5.5)
    return 0.0


def test_consensus_on_one_rank_alone_fails_in_time(pool):
    assert 1.9 < pool.run(alone, 2, group_timeout_s=2)[0] < 7


def averages(rank, n, topology_name):
    """Consensus, global_avg and distances, with exchanges in flight."""
    model = DecentralizedDataParallel(
        network(),
        SGD,
        topology=topology_name,
        bucket_size_in_mb=1e-5,
        sync_buffer_in_global_avg=True,
    )
    for t in range(3):
        model(
            torch.full((2, 3), rank + t, dtype=torch.float64) + torch.eye(3, dtype=torch.float64)[:2]
        ).sum().backward()
    tensors = [*model.parameters(), *model.buffers()]
    before = [x.detach().clone() for x in tensors]
    everyone: list = [None] * n
    dist.all_gather_object(everyone, before)
    with model.consensus():
        for index, x in enumerate(tensors):
            mean = sum(one[index] for one in everyone) / n
            expected = mean if x.is_floating_point() else everyone[0][index]
            torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-14)
        with pytest.raises(TrainingError, match="replaced by their average"):
            model(batch(0)).sum().backward()
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    parameters = range(len(list(model.parameters())))
    squares = [
        sum(float((one[i] - sum(o[i] for o in everyone) / n).square().sum()) for i in parameters) for one in everyone
    ]
    assert model.consensus_distance() == pytest.approx((sum(squares) / n) ** 0.5, rel=1e-12)
    assert model.global_avg(return_d2c=True) == pytest.approx(squares[rank] ** 0.5, rel=1e-12)
    model.revert_global_avg()
    assert model.global_avg() is None
    model.revert_global_avg()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    with pytest.raises(TrainingError, match="without global_avg"):
        model.revert_global_avg()
    model(batch(rank)).sum().backward()
    return [x.tolist() for x in model.parameters()]


@pytest.mark.parametrize("topology_name", ["ring", "complete"])
def test_averages_leave_the_run_as_it_was(pool, topology_name):
    assert pool.run(averages, 3, topology_name) == pool.run(undisturbed, 3, topology_name)


def undisturbed(rank, n, topology_name):
    model = DecentralizedDataParallel(network(), SGD, topology=topology_name, bucket_size_in_mb=1e-5)
    for t in range(3):
        model(
            torch.full((2, 3), rank + t, dtype=torch.float64) + torch.eye(3, dtype=torch.float64)[:2]
        ).sum().backward()
    model(batch(rank)).sum().backward()
    return [x.tolist() for x in model.parameters()]


def halves(rank, n):
    """Weights equal to the rank; after the average everything that shows them shows 0.5."""
    model = DecentralizedDataParallel(nn.Linear(2, 1, bias=False), SGD)
    with torch.no_grad():
        model.module.weight.fill_(rank)
    model.global_avg(will_revert=False)
    held = model.optimizers[0].param_groups[0]["params"][0]
    return [
        model.module.weight[0, 0].item(),
        model.state_dict()["weight"][0, 0].item(),
        held[0, 0].item(),
        model(torch.ones(1, 2)).item() / 2,
    ]


def test_the_average_goes_to_the_model_and_not_to_a_copy(pool):
    assert pool.run(halves, 2) == [[0.5] * 4] * 2


def keep_average(rank, n):
    """After global_avg(will_revert=False) nothing old is mixed in."""
    model = DecentralizedDataParallel(nn.Linear(1, 1, bias=False), partial(torch.optim.SGD, lr=0.0), topology="ring")
    with torch.no_grad():
        model.module.weight.fill_(rank)
    model(torch.ones(1, 1)).sum().backward()
    model.global_avg(will_revert=False)
    values = []
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        values.append(model.module.weight.item())
    return values


def test_an_average_that_is_kept_drops_what_was_in_flight(pool):
    assert pool.run(keep_average, 3) == [[1.0] * 3] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_averages_neither_overflow_nor_drift(pool, dtype):
    for n in (2, 4):
        assert pool.run(large, n, dtype) == [[40000.0 if dtype == torch.float16 else 39936.0] * 3] * n


def large(rank, n, dtype):
    model = DecentralizedDataParallel(
        nn.ParameterList([torch.full((3,), 40000.0, dtype=dtype)]), partial(torch.optim.SGD, lr=0.0)
    )
    for _ in range(3):
        sum(p.sum() * 0 for p in model.parameters()).backward()
    values = [next(model.parameters()).max().item()]
    with model.consensus():
        values.append(next(model.parameters()).max().item())
    return [*values, next(model.parameters()).min().item()]


def small_floats(rank, n):
    module = nn.Linear(2, 1, bias=False)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        module.register_buffer(f"small_{dtype.itemsize}", torch.zeros(2, dtype=dtype))
    model = DecentralizedDataParallel(module, SGD, sync_buffer_in_global_avg=True)
    for buffer in module.buffers():
        buffer.copy_(torch.full((2,), 1.0 + rank))
    with model.consensus():
        return [buffer.float().tolist() for buffer in module.buffers()]


def test_buffers_of_8_and_16_bits_are_averaged(pool):
    assert pool.run(small_floats, 2) == [[[1.5, 1.5]] * 2] * 2
