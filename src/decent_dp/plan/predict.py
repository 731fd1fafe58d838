"""Seconds per step of a topology on a measured cluster, and what bounds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from decent_dp.errors import ConfigurationError
from decent_dp.plan.carried import Carried, Floats, carry
from decent_dp.plan.clock import Work, all_reduced, decentralized, step_s
from decent_dp.plan.jitter import draw_speeds
from decent_dp.plan.profile import Compute, Profile
from decent_dp.plan.wire import Wire
from decent_dp.topology import AnyTopology, FunctionOfTime, Layout, Topology, catalog

ALL_REDUCE = "all-reduce"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NEAR = 0.05  # what a step may take longer than compute and still count as bound by it
_STEADY = 0.01  # coefficient of variation below which steps count as equal
_WARM_STEPS = 16
_NUM_ENDLESS = 64  # steps of a topology without a cycle, without jitter


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step in numbers; seconds.

    Attributes:
        topology: Its name, or ``all-reduce``.
        wire_dtype: What travels; None: the parameters (or gradients) as they are.
        step_s: Mean step of all workers.
        compute_s: Step of the slowest worker if nothing had to be waited for: the bound that no topology passes.
        wire_s: What waiting for the network adds, with every step as long as the mean of its worker.
        jitter_s: What the variation of the steps adds to that.
        bound: What mostly decides: ``compute`` if the step is within 5 % of it, else ``wire`` or ``jitter``.
    """

    topology: str
    wire_dtype: str | None
    step_s: float
    compute_s: float
    wire_s: float
    jitter_s: float
    bound: str


def predict(
    profile: Profile,
    topology: str | AnyTopology,
    wire_dtype: Any = None,
    *,
    layout: Layout | None = None,
    num_steps: int = 400,
    seed: int = 0,
) -> Prediction:
    """Predict the time of a step.

    The max-plus recursion of `decent_dp.plan.clock` is run with the times of the profile: without jitter over some
    cycles of the topology, and with it over ``num_steps`` steps.

    Args:
        profile: The cluster and the model.
        topology: A name, a topology, or ``all-reduce``: torch's DistributedDataParallel with equal buckets.
        wire_dtype: What travels instead of the parameters, or with ``all-reduce`` of the gradients, by name or as a
            torch dtype; None: what they are.
        layout: The workers, if others than were measured; factors of single workers are then left out.
        num_steps: Simulated steps with jitter.
        seed: Of the jitter; one seed gives one answer.

    Raises:
        TopologyError: If the topology is unknown, cannot serve these workers, or is for others.
        ConfigurationError: If the dtype is unknown, or the profile lacks a pattern of traffic that is needed.

    Example:
        >>> from decent_dp.plan import BucketTime, Compute, Network, Rate
        >>> compute = Compute(0.1, 0.2, 0.0, (BucketTime(10**6, 0.2),), worker_factors=(1.0, 1.0))
        >>> rate = Rate(latency_s=0.0, bytes_per_s=2e6)
        >>> network = Network(pair_across=rate, all_pairs_across=rate, clique_of_two_nodes=rate, all_reduce=rate)
        >>> profile = Profile(2, 1, "cpu", 4, compute, network)
        >>> for topology in ("all-reduce", "ring"):
        ...     prediction = predict(profile, topology)
        ...     print(topology, round(prediction.step_s, 3), prediction.bound)
        all-reduce 0.8 wire
        ring 0.5 wire
    """
    if isinstance(topology, (Topology, FunctionOfTime)) and layout is None and topology.layout != profile.layout:
        layout = topology.layout
    layout = layout or profile.layout
    dtype = narrow_dtype(profile, wire_dtype)
    factors = factors_of(profile.compute, layout)
    wire = Wire(profile, layout)
    work = work_of(profile, dtype)
    if isinstance(topology, str) and topology == ALL_REDUCE:
        name, cycle = ALL_REDUCE, 1
        ends_of = _all_reduce(work, layout, wire)
        passes = 0.0
    else:
        built = catalog.build(topology, layout) if isinstance(topology, str) else topology
        if built.layout != layout:
            raise ConfigurationError(f"the topology {built.name!r} is for {built.layout}, and asked for is {layout}")
        name = topology if isinstance(topology, str) else built.name
        cycle = built.num_rounds or _NUM_ENDLESS
        rounds = Rounds(built, profile, wire, dtype)
        passes = max(float(rounds(t).num_passes.max()) for t in range(min(cycle, _NUM_ENDLESS)))

        def ends_of(speeds: Floats) -> Floats:
            return decentralized(work, rounds, speeds)

    compute = profile.compute
    mixing = (compute.mix_s + work.travel_s if passes else 0.0) + (
        work.narrow_s if passes or name == ALL_REDUCE else 0.0
    )
    alone_s = max(factors) * (compute.forward_s + compute.backward_s) + compute.update_s + mixing
    cycles = max(-(-_WARM_STEPS // cycle), 2)
    steady = step_s(ends_of(np.tile(np.asarray(factors), (2 * cycles * cycle, 1))), cycles * cycle)
    total = steady
    if np.std(compute.jitter_quantiles) > _STEADY:
        speeds = draw_speeds(num_steps + _WARM_STEPS, factors, compute.jitter_quantiles, seed)
        total = step_s(ends_of(speeds), _WARM_STEPS)
    wire_s, jitter_s = max(steady - alone_s, 0.0), max(total - steady, 0.0)
    bound = "wire" if wire_s >= jitter_s else "jitter"
    if total <= (1 + _NEAR) * alone_s:
        bound = "compute"
    return Prediction(name, dtype, total, alone_s, wire_s, jitter_s, bound)


def narrow_dtype(profile: Profile, wire_dtype: Any) -> str | None:
    """The name of a wire dtype; None if it is not narrower than the parameters.

    Raises:
        ConfigurationError: If it is unknown.
    """
    if wire_dtype is None:
        return None
    name = str(wire_dtype).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in _BYTES:
        raise ConfigurationError(f"wire_dtype is {wire_dtype!r}; it must be None or one of {', '.join(_BYTES)}")
    return name if _BYTES[name] < profile.element_bytes else None


class Rounds:
    """Rounds as the clock needs them, made once each; the first 64 in turn of a topology without a cycle.

    Args:
        topology: Has the rounds.
        profile: Says where the parameters are, and how wide.
        wire: Times of traffic.
        dtype: What travels; None: the parameters as they are.
    """

    def __init__(self, topology: AnyTopology, profile: Profile, wire: Wire, dtype: str | None = None) -> None:
        self._topology, self._wire, self._on_cpu = topology, wire, profile.device == "cpu"
        self._is_narrow = (profile.element_bytes if dtype is None else _BYTES[dtype]) <= 2
        self._made: dict[int, Carried] = {}

    def __call__(self, t: int) -> Carried:
        index = t % (self._topology.num_rounds or _NUM_ENDLESS)
        if index not in self._made:
            self._made[index] = carry(
                self._topology,
                index,
                self._topology.layout,
                self._wire,
                always_in_shards=self._is_narrow,
                on_cpu=self._on_cpu,
            )
        return self._made[index]


def factors_of(compute: Compute, layout: Layout) -> tuple[float, ...]:
    """The factor of each worker; what was measured of single workers says nothing of others."""
    same = len(compute.worker_factors) == layout.num_workers
    return compute.worker_factors if same else (1.0,) * layout.num_workers


def work_of(profile: Profile, dtype: str | None = None) -> Work:
    """A step of a worker whose relative speed is 1; what travels has this dtype, or None: is as the parameters are."""
    compute = profile.compute
    ready = [bucket.ready_s for bucket in compute.buckets]
    scale = 1.0 if dtype is None else _BYTES[dtype] / profile.element_bytes
    return Work(
        compute.forward_s,
        tuple(after - before for before, after in zip([0.0, *ready], ready, strict=False)),
        compute.backward_s - ready[-1],
        compute.update_s,
        compute.mix_s,
        0.0 if dtype is None else compute.narrow_s,
        tuple(bucket.bytes * scale for bucket in compute.buckets),
        compute.travel_s * scale,
    )


def _all_reduce(work: Work, layout: Layout, wire: Wire) -> Callable[[Floats], Floats]:
    latency_s, s_per_byte = 0.0, 0.0
    if layout.num_workers > 1:
        latency_s, s_per_byte = wire.collective(layout.num_workers, layout.num_nodes)
    return lambda speeds: all_reduced(work, latency_s, s_per_byte, speeds)
