"""A profile from plain numbers, for clusters that nobody has measured."""

from __future__ import annotations

import math
from dataclasses import replace

from decent_dp.errors import ConfigurationError
from decent_dp.plan import BucketTime, Compute, Network, Profile, Rate, lognormal
from decent_dp.plan.predict import factors_of
from decent_dp.topology import Layout

_BUCKET_BYTES = 25 * 2**20
_FORWARD = 1 / 3
_INSIDE = 10.0  # how many times faster workers of one node are, unless given


def cluster(
    layout: Layout,
    *,
    compute_s: float,
    num_parameters: int,
    bytes_per_s: float,
    latency_s: float = 0.0,
    inside_bytes_per_s: float | None = None,
) -> Profile:
    """A cluster of equal workers and equal links; nothing is measured.

    A third of the compute is forward. Parameters are float32 in buckets of 25 MiB, whose gradients are ready at equal
    distances in backward. Workers of a node share its link; flows share it evenly.

    Args:
        layout: Workers and nodes.
        compute_s: Forward, backward and update of one step, seconds.
        num_parameters: Of the model.
        bytes_per_s: What a node's link carries, each way.
        latency_s: Of a message.
        inside_bytes_per_s: What a worker sends to others of its node; 10 times ``bytes_per_s`` when None.

    Raises:
        ConfigurationError: A number cannot be.

    Example:
        >>> profile = cluster(Layout(4, 2), compute_s=0.3, num_parameters=10**6, bytes_per_s=1e9)
        >>> profile.num_bytes, round(profile.compute.forward_s, 3), profile.network.all_pairs_across.bytes_per_s
        (4000000, 0.1, 500000000.0)
    """
    if inside_bytes_per_s is None:
        inside_bytes_per_s = _INSIDE * bytes_per_s
    for name, value in (
        ("compute_s", compute_s),
        ("num_parameters", num_parameters),
        ("bytes_per_s", bytes_per_s),
        ("inside_bytes_per_s", inside_bytes_per_s),
    ):
        if not (value > 0 and math.isfinite(value)):
            raise ConfigurationError(f"{name}={value}: give a number above 0")
    if not (latency_s >= 0 and math.isfinite(latency_s)):
        raise ConfigurationError(f"latency_s={latency_s}: give a number of seconds, 0 or more")
    L = layout.workers_per_node
    num_bytes = 4 * int(num_parameters)
    num_buckets = -(-num_bytes // _BUCKET_BYTES)
    backward_s = (1 - _FORWARD) * compute_s
    sizes = [
        4 * (num_parameters * (k + 1) // num_buckets - num_parameters * k // num_buckets) for k in range(num_buckets)
    ]
    buckets = tuple(BucketTime(size, backward_s * (k + 1) / num_buckets) for k, size in enumerate(sizes))
    inside = Rate(latency_s, inside_bytes_per_s)
    across = Rate(latency_s, bytes_per_s)
    several = layout.num_nodes > 1
    network = Network(
        pair_inside=inside if L > 1 else None,
        shards_inside=inside if L > 1 else None,
        pair_across=across if several else None,
        all_pairs_across=replace(across, bytes_per_s=bytes_per_s / L) if several else None,
        clique_of_node=_sum(inside, L) if L > 1 else None,
        clique_of_two_nodes=_sum(across, 2 * L) if several else None,
        all_reduce=_sum(across if several else inside, layout.num_workers) if layout.num_workers > 1 else None,
    )
    compute = Compute(_FORWARD * compute_s, backward_s, 0.0, buckets, worker_factors=(1.0,) * layout.num_workers)
    return Profile(layout.num_workers, L, "cpu", 4, compute, network, {"made": "of plain numbers"})


def _sum(rate: Rate, num_members: int) -> Rate:
    """A collective takes one message after the other, about twice the logarithm of its members."""
    return replace(rate, latency_s=2 * math.ceil(math.log2(num_members)) * rate.latency_s)


def with_stragglers(
    profile: Profile,
    *,
    jitter: float | None = None,
    slow_rank: int | None = None,
    slow_factor: float = 1.0,
    layout: Layout | None = None,
) -> Profile:
    """The profile with other variation of the compute times; what the network was measured with stays.

    Args:
        profile: Of a cluster.
        jitter: Coefficient of variation of the compute of a step, lognormal, independent over workers and steps; that
            of the profile when None.
        slow_rank: A worker that is slow in every step.
        slow_factor: How many times the compute of the others it takes.
        layout: The workers, if others than those of the profile; there are as many ``worker_factors`` as these.

    Raises:
        ConfigurationError: There is no such worker, or a number cannot be.
    """
    layout = layout or profile.layout
    compute, n = profile.compute, layout.num_workers
    compute = replace(compute, worker_factors=factors_of(compute, layout))
    if jitter is not None:
        compute = replace(compute, jitter_quantiles=lognormal(jitter))
    if slow_rank is not None:
        if not 0 <= slow_rank < n:
            raise ConfigurationError(f"slow worker {slow_rank}: the workers are 0 to {n - 1}")
        if not (slow_factor > 0 and math.isfinite(slow_factor)):
            raise ConfigurationError(f"slow_factor={slow_factor}: give a number above 0, such as 1.3")
        factors = list(compute.worker_factors)
        factors[slow_rank] *= slow_factor
        compute = replace(compute, worker_factors=tuple(factors))
    return replace(profile, compute=compute)
