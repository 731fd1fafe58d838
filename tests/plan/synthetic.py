"""Profiles with round numbers, for answers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

from decent_dp.plan import BucketTime, Compute, Network, Profile, Rate

MB = 10**6


def compute(
    n: int, forward_s: float = 0.1, backward_s: float = 0.2, buckets: int = 1, bucket_bytes: int = MB, **more: Any
) -> Compute:
    """Equal buckets that are ready at equal distances, the last one at the end of backward."""
    at = tuple(BucketTime(bucket_bytes, backward_s * (k + 1) / buckets) for k in range(buckets))
    more.setdefault("worker_factors", (1.0,) * n)
    return Compute(forward_s, backward_s, more.pop("update_s", 0.0), at, **more)


def network(
    n: int, L: int, across: float = MB, inside: float = 1e3 * MB, latency_s: float = 0.0, shared: bool = True
) -> Network:
    """One link out of each node, which all its flows share unless told otherwise; rates in bytes per second."""
    link, each = Rate(latency_s, float(across)), Rate(latency_s, across / L if shared else float(across))
    within = Rate(latency_s, float(inside))
    has_inside, has_across = L > 1, n > L
    return Network(
        within if has_inside else None,
        within if has_inside else None,
        link if has_across else None,
        each if has_across else None,
        within if has_inside else None,
        link if has_across else None,
        (link if has_across else within) if n > 1 else None,
    )


def profile(n: int = 4, L: int = 1, *, device: str = "cpu", net: dict[str, Any] | None = None, **more: Any) -> Profile:
    """A cluster of n workers, L a node, with 300 ms of compute and one bucket of a megabyte at 1 MB/s."""
    return Profile(n, L, device, 4, compute(n, **more), network(n, L, **(net or {})))
