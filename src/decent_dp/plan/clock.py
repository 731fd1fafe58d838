"""When every worker ends every step: the max-plus recursion, bucket by bucket.

For worker i, step t and bucket b, with c the relative speed of this step:

    ready      r = end_i(t-1) + c F + c r_b, later by what earlier buckets have had to wait
    finish     max(r, arrival_ib(t-1))
    start      s_ib(t) = finish + mix + update
    exchange   arrival_ib(t) = max over the members j of (s_jb(t), their ways being free) + bytes seconds + latency

Nothing but maxima and sums, which is why one step of slack hides what varies from step to step, and why nothing hides a
worker that is always slow. An all-reduce is the same with the slack taken away: step t ends when its own sums arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decent_dp.plan.carried import Carried

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker does in a step whose relative speed is 1; seconds and bytes.

    Attributes:
        forward_s: Before the first bucket.
        gaps_s: Backward up to each bucket, counted from the one before.
        tail_s: Backward after the last bucket.
        update_s: Of the whole model.
        mix_s: One pass of mixing over the whole model.
        narrow_s: Rounding to a narrow wire dtype, and back.
        wire_bytes: What travels of each bucket.
        travel_s: What transfers take from forward and backward in a step.
    """

    forward_s: float
    gaps_s: tuple[float, ...]
    tail_s: float
    update_s: float
    mix_s: float
    narrow_s: float
    wire_bytes: tuple[float, ...]
    travel_s: float = 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Part of the model that each bucket has."""
        total = sum(self.wire_bytes)
        return tuple(size / total for size in self.wire_bytes)


def decentralized(work: Work, round_at: Callable[[int], Carried], speeds: Floats) -> Floats:
    """Ends of all steps.

    Args:
        work: Of a worker.
        round_at: The round of each step.
        speeds: Time of forward and backward relative to ``work``, shape (steps, workers).

    Returns:
        Seconds, of the same shape.
    """
    num_steps, n = speeds.shape
    shares = work.shares
    end, ends = np.zeros(n), np.empty_like(speeds)
    arrivals = [np.zeros(n) for _ in shares]
    free_inside, free_across = np.zeros(n), np.zeros(n)
    passes = np.zeros(n)
    for t in range(num_steps):
        speed, round = speeds[t], round_at(t)
        busy = work.update_s + work.mix_s * passes + np.where(passes > 0, work.narrow_s + work.travel_s, 0.0)
        uses_inside, uses_across = round.inside_s_per_byte > 0, round.across_s_per_byte > 0
        now = end + work.forward_s * speed
        for b, share in enumerate(shares):
            now = np.maximum(now + work.gaps_s[b] * speed, arrivals[b]) + busy * share
            moved = now
            waits = np.where(uses_inside, np.maximum(moved, free_inside), moved)
            moved = round.first.latest(waits) + work.wire_bytes[b] * round.inside_s_per_byte
            free_inside = np.where(uses_inside, moved, free_inside)
            waits = np.where(uses_across, np.maximum(moved, free_across), moved)
            moved = round.then.latest(waits) + work.wire_bytes[b] * round.across_s_per_byte
            free_across = np.where(uses_across, moved, free_across)
            arrivals[b] = np.where(round.takes_part, round.last.latest(moved) + round.latency_s, 0.0)
        end = now + work.tail_s * speed
        ends[t] = end
        passes = round.num_passes
    return ends


def all_reduced(work: Work, latency_s: float, s_per_byte: float, speeds: Floats) -> Floats:
    """Ends of all steps with gradients that all workers sum, bucket by bucket under the rest of backward.

    Args:
        work: Of a worker; nothing is mixed.
        latency_s: Of a sum.
        s_per_byte: Of a byte of a bucket.
        speeds: As for `decentralized`.

    Returns:
        Seconds, shape (steps, workers).
    """
    num_steps, n = speeds.shape
    end, ends = np.zeros(n), np.empty_like(speeds)
    for t in range(num_steps):
        speed = speeds[t]
        now, free, last = end + work.forward_s * speed, 0.0, 0.0
        for share, gap_s, wire_bytes in zip(work.shares, work.gaps_s, work.wire_bytes, strict=True):
            now = now + gap_s * speed + work.narrow_s * share
            free = max(free, float(now.max())) + wire_bytes * s_per_byte
            last = free + latency_s
        end = np.maximum(now + work.tail_s * speed, last) + work.update_s
        ends[t] = end
    return ends


def step_s(ends: Floats, first: int) -> float:
    """Mean time of the steps from ``first`` on, over all workers."""
    before = ends[first - 1].mean() if first else 0.0
    return float((ends[-1].mean() - before) / (len(ends) - first))
