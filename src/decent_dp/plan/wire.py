"""From measured patterns to the time of any traffic: seconds per byte.

The patterns are a few, the rounds many. In between stands one assumption: what leaves a node leaves over one link, so
that k flows at once take as long as k points on a line through what one flow and what L flows at once were measured to
take, and more than L flows share what L flows get.
"""

from __future__ import annotations

from decent_dp.errors import ConfigurationError
from decent_dp.plan.profile import Profile, Rate
from decent_dp.topology import Layout

_WHERE = {
    "pair_inside": "two workers a node",
    "shards_inside": "two workers a node",
    "clique_of_node": "two workers a node",
    "pair_across": "two nodes",
    "all_pairs_across": "two nodes",
    "clique_of_two_nodes": "two nodes",
    "all_reduce": "two workers",
}


class Wire:
    """Times of traffic between the workers of a layout.

    Args:
        profile: The patterns; of these workers, or of others on the same machines.
        layout: The workers.
    """

    def __init__(self, profile: Profile, layout: Layout) -> None:
        self._network, self._measured, self._layout = profile.network, profile.layout, layout

    def rate(self, pattern: str) -> Rate:
        """What was measured of a pattern.

        Raises:
            ConfigurationError: If it was not measured.
        """
        rate: Rate | None = getattr(self._network, pattern)
        if rate is None:
            raise ConfigurationError(
                f"the profile has no {pattern}, which {self._layout.num_workers} workers on {self._layout.num_nodes} "
                f"nodes need: it was measured with {self._measured.num_workers} workers on {self._measured.num_nodes}; "
                f"measure on at least {_WHERE[pattern]}"
            )
        return rate

    def inside(self, *, in_shards: bool = False) -> float:
        """Seconds per byte that a worker sends to others of its node."""
        return 1 / self.rate("shards_inside" if in_shards else "pair_inside").bytes_per_s

    def across(self, num_flows: float) -> float:
        """Seconds per byte of each of the flows that leave a node, or enter it, at once; grows with their number."""
        one = 1 / self.rate("pair_across").bytes_per_s
        every, L = 1 / self.rate("all_pairs_across").bytes_per_s, self._measured.workers_per_node
        if L == 1:
            return one * max(num_flows, 1.0)
        every = max(every, one)
        if num_flows <= L:
            return one + (every - one) * max(num_flows - 1, 0.0) / (L - 1)
        return every * num_flows / L

    def collective(self, num_members: int, num_nodes: int) -> tuple[float, float]:
        """A sum over members on some nodes: its latency in seconds, and its seconds per byte of the tensor."""
        k, measured = num_members, self._measured
        if num_nodes == 1:
            pattern, num_measured = "clique_of_node", measured.workers_per_node
        elif num_nodes == 2 and self._layout.num_nodes > 2 and self._network.clique_of_two_nodes is not None:
            pattern, num_measured = "clique_of_two_nodes", 2 * measured.workers_per_node
        else:
            pattern, num_measured = "all_reduce", measured.num_workers
            self.rate("pair_across")  # or it was measured inside of a node
        rate = self.rate(pattern)
        latency_s = rate.latency_s * (k - 1) / max(num_measured - 1, 1)
        return latency_s, 2 * (k - 1) / k / rate.bytes_per_s
