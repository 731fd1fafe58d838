"""Measuring on real workers: what is measured is plausible, complete, and the same on all of them."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp.comm import InProcessWorld, TorchCommunicator
from decent_dp.errors import ConfigurationError
from decent_dp.plan import Profile, predict, recommend
from decent_dp.plan.measure import assume_model, measure, speeds_of, time_model
from decent_dp.plan.profile import needed_patterns
from pool import Pool

SGD = partial(torch.optim.SGD, lr=0.1)


def measured(rank: int, n: int, workers_per_node: int) -> str:
    communicator = TorchCommunicator()
    compute = partial(assume_model, communicator, 40_000, 0.03, SGD, torch.device("cpu"), bucket_size_in_mb=0.05)
    profile = measure(communicator, workers_per_node, compute, {"model": "none"})
    communicator.close()
    return profile.to_json()


@pytest.mark.parametrize(("n", "L"), [(4, 2), (3, 1), (2, 2)])
def test_every_pattern_of_the_layout_is_measured(pool: Pool, n: int, L: int) -> None:
    first, *others = pool.run(measured, n, L)
    assert others == [first] * (n - 1)
    profile = Profile.from_json(first)
    assert (profile.num_workers, profile.workers_per_node, profile.device) == (n, L, "cpu")
    for name in profile.network.__dataclass_fields__:
        rate = getattr(profile.network, name)
        assert (rate is not None) == (name in needed_patterns(profile.layout)), name
        assert rate is None or (0 < rate.latency_s < 5 and 1e3 < rate.bytes_per_s < 1e12)
    compute = profile.compute
    assert profile.num_bytes == 160_000
    assert [bucket.bytes for bucket in compute.buckets] == [52428, 52428, 52428, 2716]
    assert compute.buckets[-1].ready_s == pytest.approx(0.02)
    assert compute.buckets[0].ready_s == pytest.approx(0.02 * 52428 / 160_000)
    assert (compute.forward_s, compute.backward_s) == pytest.approx((0.01, 0.02))
    assert compute.update_s > 0
    assert compute.mix_s >= 0
    assert compute.narrow_s >= 0
    assert recommend(profile).predictions


class Slow(nn.Module):
    """Its forward and its backward take set times."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(50, 50, bias=False) for _ in range(4))
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            time.sleep(self.forward_s / 4)
            x.register_hook(lambda _: time.sleep(self.backward_s / 4))
        return x


def timed(rank: int, n: int, factors: list[float]) -> tuple[object, int]:
    communicator = TorchCommunicator()
    model = Slow(0.02 * factors[rank], 0.04 * factors[rank])
    compute, element_bytes, _ = time_model(
        communicator, model, lambda m: m(torch.ones(1, 50)).sum(), SGD,
        bucket_size_in_mb=0.01, num_steps=6, num_warmup=2,
    )  # fmt: skip
    return compute, element_bytes


def test_a_model_is_timed_bucket_by_bucket(pool: Pool) -> None:
    (compute, element_bytes), other = pool.run(timed, 2, [1.0, 2.0])
    assert other[0] == compute
    assert element_bytes == 4
    # 1.5 times the times of the fast one, on average; sleeping never takes less
    assert 0.03 <= compute.forward_s < 0.06
    assert 0.06 <= compute.backward_s < 0.12
    assert [bucket.bytes for bucket in compute.buckets] == [10_000] * 3 + [10_012]
    ready = [bucket.ready_s / compute.backward_s for bucket in compute.buckets]
    assert ready[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.1)
    assert ready[3] == pytest.approx(1.0, abs=0.05)  # holds the parameter that got no gradient
    assert compute.worker_factors == pytest.approx((2 / 3, 4 / 3), abs=0.15)


def test_one_worker_needs_no_process_group() -> None:
    communicator = InProcessWorld(1).communicator(0)
    model = nn.Linear(4, 1)
    compute = partial(time_model, communicator, model, lambda m: m(torch.ones(2, 4)).sum(), SGD, num_steps=2)
    profile = measure(communicator, 1, compute)
    assert profile.network.all_reduce is None
    prediction = predict(profile, "ring")
    assert prediction.step_s == pytest.approx(prediction.compute_s, rel=0.3)  # two steps of microseconds


def test_nothing_to_measure() -> None:
    communicator = InProcessWorld(1).communicator(0)
    with pytest.raises(ConfigurationError, match="no parameter that requires a gradient"):
        time_model(communicator, nn.ReLU(), lambda m: m(torch.ones(1)).sum(), SGD)
    with pytest.raises(ConfigurationError, match="at least one parameter"):
        assume_model(communicator, 0, 0.1, SGD, torch.device("cpu"))


def test_speeds_of_workers_are_told_from_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.1 * torch.randn(8, 20, generator=generator, dtype=torch.float64)
    factors, quantiles = speeds_of(noise.tolist())
    assert factors == (1.0,) * 8
    assert len(quantiles) == 101
    assert 0.6 < quantiles[0] < 0.8 < 1.2 < quantiles[-1] < 1.4
    noise[3] *= 1.3
    factors, _ = speeds_of(noise.tolist())
    assert factors[3] / factors[0] == pytest.approx(1.3, rel=0.05)
    assert factors.count(factors[0]) == 7 or len(set(factors)) > 2
