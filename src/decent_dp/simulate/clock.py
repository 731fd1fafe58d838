"""When the simulated workers end their steps.

The recursion and the costs are those of `decent_dp.plan`. Here they are run for any number of workers: the plans of a
round are made in one pass (`decent_dp.simulate.plans`), a round is an index array with an entry a message, and a step
is a few vectorised passes over it, so that time and memory grow as the workers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decent_dp.plan import Profile
from decent_dp.plan.carried import Carried, carry
from decent_dp.plan.clock import Work, all_reduced, decentralized
from decent_dp.plan.jitter import draw_speeds
from decent_dp.plan.wire import Wire
from decent_dp.simulate.plans import share_plans
from decent_dp.topology import AnyTopology, Layout

Floats = NDArray[np.float64]

_NUM_ENDLESS = 64
"""Rounds of a topology without a cycle that are played in turn: their costs differ little."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a clock shows.

    Attributes:
        last_s: When the last worker has taken step t, shape (steps,).
        mean_s: When the workers have on average.
        compute_s: Mean step of a worker that waits for nobody.
    """

    last_s: Floats
    mean_s: Floats
    compute_s: float

    @property
    def step_s(self) -> float:
        """Mean time of a step, without the first quarter of them."""
        first = len(self.mean_s) // 4
        before = self.mean_s[first - 1] if first else 0.0
        return float((self.mean_s[-1] - before) / (len(self.mean_s) - first))


def run_clock(
    topology: AnyTopology | None, profile: Profile, num_steps: int, *, seed: int = 0, layout: Layout
) -> Times:
    """Let all workers take some steps.

    Args:
        topology: Who waits for whom; None: all for all, as in torch's DistributedDataParallel.
        profile: Compute and network; see `decent_dp.simulate.cluster` for one of plain numbers.
        num_steps: How many, at least 1.
        seed: Of the jitter; one seed gives one answer.
        layout: The workers; those of the topology.
    """
    compute = profile.compute
    speeds = draw_speeds(num_steps, compute.worker_factors, compute.jitter_quantiles, seed)
    wire, work = Wire(profile, layout), _work(profile)
    if topology is None:
        latency_s, s_per_byte = (
            wire.collective(layout.num_workers, layout.num_nodes) if layout.num_workers > 1 else (0.0, 0.0)
        )
        ends = all_reduced(work, latency_s, s_per_byte, speeds)
    else:
        ends = decentralized(work, _rounds(topology, wire, on_cpu=profile.device == "cpu"), speeds)
    alone_s = float(speeds.mean()) * (compute.forward_s + compute.backward_s) + compute.update_s
    return Times(ends.max(1), ends.mean(1), alone_s)


def _rounds(topology: AnyTopology, wire: Wire, *, on_cpu: bool) -> Callable[[int], Carried]:
    """The rounds as the recursion needs them, made once each."""
    shared = share_plans(topology, in_process=False)
    num_rounds = topology.num_rounds or _NUM_ENDLESS
    made: dict[int, Carried] = {}

    def round_at(t: int) -> Carried:
        index = t % num_rounds
        if index not in made:
            made[index] = carry(shared, index, topology.layout, wire, always_in_shards=False, on_cpu=on_cpu)
        return made[index]

    return round_at


def _work(profile: Profile) -> Work:
    """A step of a worker whose relative speed is 1, parameters travelling as they are."""
    compute = profile.compute
    ready = [bucket.ready_s for bucket in compute.buckets]
    return Work(
        forward_s=compute.forward_s,
        gaps_s=tuple(after - before for before, after in zip([0.0, *ready], ready, strict=False)),
        tail_s=compute.backward_s - ready[-1],
        update_s=compute.update_s,
        mix_s=compute.mix_s,
        narrow_s=0.0,
        wire_bytes=tuple(float(bucket.bytes) for bucket in compute.buckets),
    )
