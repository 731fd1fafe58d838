"""From a model on its workers to a `decent_dp.plan.Profile`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp.comm.protocol import Communicator
from decent_dp.engine.arithmetic import add_difference, cast
from decent_dp.engine.bucketing import plan_buckets
from decent_dp.errors import ConfigurationError
from decent_dp.plan.jitter import quantiles_of
from decent_dp.plan.patterns import measure_network
from decent_dp.plan.profile import BucketTime, Compute, Profile
from decent_dp.topology import Layout

OptimizerFactory = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
Say = Callable[[str], None]

_SIGNIFICANT = 3.0  # standard errors that a worker's mean must be away from that of all to count as its own speed
_PASSES = 5
_NUM_TRAVELLING = 4  # buckets


def measure(
    communicator: Communicator,
    workers_per_node: int,
    compute: Callable[[], tuple[Compute, int, torch.device]],
    notes: dict[str, str] | None = None,
    say: Say = lambda _: None,
) -> Profile:
    """Measure everything; a collective call of all workers.

    Args:
        communicator: Of all workers.
        workers_per_node: Workers on one machine.
        compute: Times the model: `time_model` or `assume_model` with their arguments.
        notes: Written into the profile.
        say: Told what is measured.

    Returns:
        The same on all workers.
    """
    layout = Layout(communicator.num_workers, workers_per_node)
    measured, element_bytes, device = compute()
    largest = max(bucket.bytes for bucket in measured.buckets)
    network = measure_network(communicator, layout, device, largest, len(measured.buckets), say)
    return Profile(
        layout.num_workers, layout.workers_per_node, device.type, element_bytes, measured, network, notes or {}
    )


def time_model(
    communicator: Communicator,
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    optim_fn: OptimizerFactory,
    *,
    bucket_size_in_mb: float = 25,
    num_steps: int = 20,
    num_warmup: int = 3,
    say: Say = lambda _: None,
) -> tuple[Compute, int, torch.device]:
    """Train a model on every worker for itself, and time it; a collective call.

    Args:
        communicator: Of all workers.
        model: Not wrapped.
        loss: Runs the forward of one step on a batch of its own; returns the loss.
        optim_fn: From names and parameters to an optimizer, as for `decent_dp.DecentralizedDataParallel`.
        bucket_size_in_mb: As for `decent_dp.DecentralizedDataParallel`.
        num_steps: Timed ones.
        num_warmup: Steps before them.
        say: Told what is measured.

    Returns:
        The times, the same on all workers; bytes of an element; the device.

    Raises:
        ConfigurationError: If there is nothing to train.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError("the model has no parameter that requires a gradient; there is nothing to train")
    say("compute: forward, backward, update")
    device = trained[0][1].device
    sizes = [p.numel() * p.element_size() for _, p in trained]
    kinds = [(p.dtype, p.device) for _, p in trained]
    buckets = plan_buckets(sizes, kinds, max(1, int(bucket_size_in_mb * 2**20)))
    optimizer, clock = optim_fn([*trained]), _Clock(device)
    ready: list[object] = [None] * len(trained)

    def note(index: int) -> Callable[[Tensor], None]:
        def fired(_: Tensor) -> None:
            ready[index] = clock.now()

        return fired

    hooks = [
        p.register_post_accumulate_grad_hook(note(index))  # type: ignore[no-untyped-call]
        for index, (_, p) in enumerate(trained)
    ]
    forwards, backwards, updates, readies = [], [], [], []
    communicator.gather(None)
    for step in range(num_warmup + num_steps):
        ready[:] = [None] * len(trained)
        begin = clock.now()
        value = loss(model)
        middle = clock.now()
        value.backward()  # type: ignore[no-untyped-call]
        end = clock.now()
        optimizer.step()
        done = clock.now()
        optimizer.zero_grad(set_to_none=True)
        clock.wait()
        if step < num_warmup:
            continue
        forwards.append(clock.between(begin, middle))
        backwards.append(clock.between(middle, end))
        updates.append(clock.between(end, done))
        at = [backwards[-1] if mark is None else clock.between(middle, mark) for mark in ready]
        readies.append([max(at[index] for index in members) / max(backwards[-1], 1e-12) for members in buckets])
    for hook in hooks:
        hook.remove()

    def train() -> None:
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad(set_to_none=True)

    copy = [torch.zeros(max(size // 4, 1), device=device) for size in _sizes(buckets, sizes)]
    travelling = _Travelling(communicator, copy, device)
    quiet_s = travelling.time(train, loaded=False)
    travel_s = fmean(communicator.gather(max(travelling.time(train) - quiet_s, 0.0)))
    shares = np.minimum(np.maximum.accumulate(np.median(np.array(readies), axis=0)), 1.0)
    mine = (fmean(forwards), fmean(backwards), median(updates), shares.tolist(), np.add(forwards, backwards).tolist())
    forward_s, backward_s, update_s, all_shares, samples = zip(*communicator.gather(mine), strict=True)
    factors, quantiles = speeds_of(samples)
    mean_backward_s = fmean(backward_s)
    bytes_of = _sizes(buckets, sizes)
    compute = Compute(
        fmean(forward_s),
        mean_backward_s,
        fmean(update_s),
        tuple(
            BucketTime(size, float(share) * mean_backward_s)
            for size, share in zip(bytes_of, np.mean(np.array(all_shares), axis=0), strict=True)
        ),
        travel_s=travel_s,
        worker_factors=factors,
        jitter_quantiles=quantiles,
    )
    largest = max(trained, key=lambda item: item[1].numel())[1]
    parameters = [p for _, p in trained]
    compute = _with_passes(communicator, compute, parameters, optimizer, largest.dtype, device, say)
    return compute, largest.element_size(), device


def assume_model(
    communicator: Communicator,
    num_parameters: int,
    compute_s: float,
    optim_fn: OptimizerFactory,
    device: torch.device,
    *,
    bucket_size_in_mb: float = 25,
    say: Say = lambda _: None,
) -> tuple[Compute, int, torch.device]:
    """Times of a model that is not there: a third of its compute is forward, gradients come evenly under backward.

    Optimizer and mixing are timed, on as many parameters in float32.

    Args:
        communicator: Of all workers.
        num_parameters: At least 1.
        compute_s: Seconds of forward and backward.
        optim_fn: From names and parameters to an optimizer.
        device: Where the parameters would be.
        bucket_size_in_mb: As for `decent_dp.DecentralizedDataParallel`.
        say: Told what is measured.

    Returns:
        As `time_model`.
    """
    if num_parameters < 1 or not compute_s >= 0 or not math.isfinite(compute_s):
        raise ConfigurationError(
            f"{num_parameters} parameters and {1000 * compute_s:g} ms of compute; give at least one parameter and a "
            "time of at least 0"
        )
    say("compute: update")
    capacity = max(1, int(bucket_size_in_mb * 2**20) // 4)
    numels = [min(capacity, num_parameters - begin) for begin in range(0, num_parameters, capacity)]
    parameters = [nn.Parameter(torch.zeros(numel, device=device)) for numel in numels]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optim_fn([(f"bucket{k}", p) for k, p in enumerate(parameters)])
    clock = _Clock(device)
    communicator.gather(None)
    update_s = median([clock.time(optimizer.step) for _ in range(_PASSES + 1)][1:])
    backward_s = compute_s * 2 / 3
    ends = np.cumsum(numels) / num_parameters
    compute = Compute(
        compute_s / 3,
        backward_s,
        fmean(communicator.gather(update_s)),
        tuple(BucketTime(4 * n, min(float(e), 1.0) * backward_s) for n, e in zip(numels, ends, strict=True)),
        worker_factors=(1.0,) * communicator.num_workers,
    )
    return _with_passes(communicator, compute, parameters, optimizer, torch.float32, device, say), 4, device


def _sizes(buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[index] for index in members) for members in buckets]


def speeds_of(samples: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Split times of steps into speeds of workers and jitter.

    A worker's mean counts as its own speed only if it is further from the mean of all than chance explains.

    Args:
        samples: For every worker its times of forward and backward.

    Returns:
        A factor for each worker, and quantiles of the time relative to the worker's mean.
    """
    times = np.array(samples, dtype=np.float64)
    overall = max(float(times.mean()), 1e-12)
    factors = times.mean(axis=1) / overall
    error = (times / overall).std(axis=1) / math.sqrt(times.shape[1])
    pooled = math.sqrt(float(np.mean(error**2)))
    factors = np.where(np.abs(factors - 1) > _SIGNIFICANT * pooled, factors, 1.0)
    relative = np.maximum(times / overall / np.maximum(factors, 1e-12)[:, None], 1e-6)
    return tuple(float(f) for f in np.maximum(factors, 1e-6)), quantiles_of(relative)


def _with_passes(
    communicator: Communicator,
    compute: Compute,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    device: torch.device,
    say: Say,
) -> Compute:
    """Time what mixing adds to the update while as much travels as in training, which takes memory and cores too."""
    say("compute: update and mixing while parameters travel")
    numels = [max(bucket.bytes // dtype.itemsize, 1) for bucket in compute.buckets]
    flats = [torch.zeros(numel, dtype=dtype, device=device) for numel in numels]
    received = [torch.zeros_like(flat) for flat in flats]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        optimizer.step()

    def mix() -> None:
        optimizer.step()
        for flat, other in zip(flats, received, strict=True):
            flat.lerp_(other, 0.5)

    def mix_narrow() -> None:
        optimizer.step()
        for flat, other in zip(flats, narrow, strict=True):
            add_difference(flat, other, cast(flat, other), 0.5)

    travelling = _Travelling(communicator, received[:_NUM_TRAVELLING], device)
    update_s = travelling.time(update, loaded=False)
    mix_s, narrow_s = max(travelling.time(mix) - update_s, 0.0), 0.0
    if dtype.itemsize > 2:
        narrow = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in numels]
        narrow_s = max(travelling.time(mix_narrow) - update_s - mix_s, 0.0)
    mix_s, narrow_s = (fmean(values) for values in zip(*communicator.gather((mix_s, narrow_s)), strict=True))
    return replace(compute, mix_s=mix_s, narrow_s=narrow_s)


class _Travelling:
    """Times work on this worker under the traffic of an exchange."""

    def __init__(self, communicator: Communicator, payloads: Sequence[Tensor], device: torch.device) -> None:
        self._communicator, self._payloads = communicator, payloads
        self._clock, self._buffers = _Clock(device), [torch.empty_like(p) for p in payloads]
        communicator.prepare([], [device])

    def time(self, work: Callable[[], object], *, loaded: bool = True) -> float:
        """Seconds, the median of a few; all workers do it at once."""
        n, rank, times = self._communicator.num_workers, self._communicator.rank, []
        for _ in range(_PASSES + 1):
            self._communicator.gather(None)
            handles = [
                self._communicator.start_swap([payload], [(rank + 1) % n], [(rank - 1) % n], [buffer], tag)
                for tag, (payload, buffer) in enumerate(zip(self._payloads, self._buffers, strict=True))
                if loaded and n > 1
            ]
            times.append(self._clock.time(work))
            for handle in handles:
                handle.wait()
        return median(times[1:])


class _Clock:
    """Marks in time: of the host, or on the stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda, self._device = device.type == "cuda", device

    def now(self) -> object:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)

    def between(self, begin: object, end: object) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000

    def time(self, work: Callable[[], object]) -> float:
        begin = self.now()
        work()
        end = self.now()
        self.wait()
        return self.between(begin, end)
