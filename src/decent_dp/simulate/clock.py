"""When the simulated workers end their steps.

The recursion and the costs are those of `decent_dp.plan`. Here they are run for any number of workers: the plans of a
round are made in one pass (`decent_dp.simulate.plans`), a round is an index array with an entry a message, and a step
is a few vectorised passes over it, so that time and memory grow as the workers do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decent_dp.plan import Profile
from decent_dp.plan.clock import all_reduced, decentralized
from decent_dp.plan.jitter import draw_speeds
from decent_dp.plan.predict import Rounds, factors_of, work_of
from decent_dp.plan.wire import Wire
from decent_dp.simulate.plans import share_plans
from decent_dp.topology import AnyTopology, Layout

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """What a clock shows.

    Attributes:
        last_s: When the last worker has taken step t, shape (steps,).
        mean_s: When the workers have on average.
    """

    last_s: Floats
    mean_s: Floats

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
        profile: Compute and network, of these workers or others; see `decent_dp.simulate.cluster` for one of plain
            numbers.
        num_steps: How many, at least 1.
        seed: Of the jitter; one seed gives one answer.
        layout: The workers; those of the topology.
    """
    compute = profile.compute
    speeds = draw_speeds(num_steps, factors_of(compute, layout), compute.jitter_quantiles, seed)
    wire, work = Wire(profile, layout), work_of(profile)
    if topology is None:
        latency_s, s_per_byte = (
            wire.collective(layout.num_workers, layout.num_nodes) if layout.num_workers > 1 else (0.0, 0.0)
        )
        ends = all_reduced(work, latency_s, s_per_byte, speeds)
    else:
        rounds = Rounds(share_plans(topology, in_process=False), profile, wire)
        ends = decentralized(work, rounds, speeds)
    return Times(ends.max(1), ends.mean(1))
