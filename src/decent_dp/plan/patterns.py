"""What each pattern of traffic gets, measured on the workers themselves through the communicator that trains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle
from decent_dp.plan.profile import Network, Rate, needed_patterns
from decent_dp.topology import Layout

_PROBE_S = 0.5  # about how long one timed transfer may take
_NUM_TINY, _NUM_LARGE = 9, 5  # repetitions
_MOST_BYTES, _MOST_AT_ONCE = 256 * 2**20, 32  # in flight
_TAGS = 2**28

Start = Callable[[Tensor], "Handle | None"]


def measure_network(
    communicator: Communicator,
    layout: Layout,
    device: torch.device,
    bucket_bytes: int,
    num_buckets: int,
    say: Callable[[str], None] = lambda _: None,
) -> Network:
    """Measure every pattern that these workers have; a collective call.

    All workers of a pattern transfer at once. The latency is the time of one number, the rate that of up to as many
    buckets at once as the model has.

    Args:
        communicator: Of all workers.
        layout: Workers and nodes.
        device: Where what travels is.
        bucket_bytes: Size of a transfer.
        num_buckets: How many travel at once at most.
        say: Told what is measured.

    Returns:
        The same on all workers.
    """
    patterns = _Patterns(communicator, layout, device)
    found: dict[str, Rate] = {}
    numel = max(bucket_bytes // 4, 1)
    num_at_once = max(1, min(num_buckets, _MOST_BYTES // max(bucket_bytes, 1), _MOST_AT_ONCE))
    for name in needed_patterns(layout):
        twin = _twin_of(name, layout)
        if twin is not None:
            found[name] = found[twin]
            continue
        say(f"network: {name}")
        start, copies = patterns.of(name)
        tiny = [torch.zeros(layout.num_workers, device=device)]
        latency_s = median([patterns.time(start, tiny) for _ in range(_NUM_TINY)][1:])
        tensors = [torch.zeros(numel, device=device) for _ in range(num_at_once)]
        once_s = patterns.time(start, tensors[:1])
        tensors = tensors[: max(1, min(num_at_once, int(_PROBE_S / once_s)))]
        taken_s = median(patterns.time(start, tensors) for _ in range(_NUM_LARGE))
        sent_bytes = 4.0 * numel * len(tensors) * copies
        found[name] = Rate(latency_s, sent_bytes / max(taken_s - latency_s, 0.1 * taken_s, 1e-9))
    return Network(**found)


def _twin_of(name: str, layout: Layout) -> str | None:
    """The pattern measured before that is the same one with these workers."""
    if name == "all_pairs_across" and layout.workers_per_node == 1:
        return "pair_across"
    if name == "all_reduce" and layout.num_nodes <= 2:
        return "clique_of_node" if layout.num_nodes == 1 else "clique_of_two_nodes"
    return None


class _Patterns:
    """Starts transfers of every pattern on this worker."""

    def __init__(self, communicator: Communicator, layout: Layout, device: torch.device) -> None:
        self._communicator, self._device, self._layout = communicator, device, layout
        self._rank, self._tags = communicator.rank, itertools.count()
        L = layout.workers_per_node
        self._nodes = [tuple(layout.ranks_of(node)) for node in range(layout.num_nodes)]
        pairs = [(*a, *b) for a, b in zip(self._nodes[::2], self._nodes[1::2], strict=False)]
        cliques = {members for members in (*self._nodes, *pairs) if 1 < len(members) < layout.num_workers}
        communicator.prepare(sorted(cliques), [device], L)
        self._mine = self._nodes[self._rank // L]
        self._pair = next((members for members in pairs if self._rank in members), None)
        self._tick = torch.zeros(1, device=device)
        self._received: dict[tuple[int, int], Tensor] = {}

    def of(self, name: str) -> tuple[Start, float]:
        """How to start a transfer, and how many copies of its tensor a worker sends."""
        L, n = self._layout.workers_per_node, self._layout.num_workers
        base = self._rank - self._rank % L
        if name == "pair_inside":
            return self._shift(lambda by: base + (self._rank - base + by) % L, True), 1.0
        if name == "shards_inside":
            return self._shards, (L - 1) / L
        if name in ("pair_across", "all_pairs_across"):
            takes_part = name == "all_pairs_across" or self._rank == base
            return self._shift(lambda by: (self._rank + by * L) % n, takes_part), 1.0
        members = {"clique_of_node": self._mine, "clique_of_two_nodes": self._pair, "all_reduce": tuple(range(n))}[name]
        k = {"clique_of_node": L, "clique_of_two_nodes": 2 * L, "all_reduce": n}[name]
        return self._sum(members), 2 * (k - 1) / k

    def time(self, start: Start, tensors: Sequence[Tensor]) -> float:
        """Seconds from a common start until the last worker has all transfers behind it."""
        self._communicator.start_sum(self._tick).wait()
        self._wait_for_device()
        begin = time.perf_counter()
        for handle in [start(tensor) for tensor in tensors]:
            if handle is not None:
                handle.wait()
        self._wait_for_device()
        return float(max(self._communicator.gather(time.perf_counter() - begin)))

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _shift(self, other: Callable[[int], int], takes_part: bool) -> Start:
        """Everybody sends to the next one and receives from the one before: as many flows each way as pairs have."""
        send_to, receive_from = other(1), other(-1)

        def start(tensor: Tensor) -> Handle | None:
            tag = next(self._tags) % _TAGS
            if not takes_part:
                return None
            buffer = self._buffer(tag, tensor)
            return self._communicator.start_swap([tensor], [send_to], [receive_from], [buffer], tag)

        return start

    def _shards(self, tensor: Tensor) -> Handle:
        tag, L = next(self._tags) % _TAGS, len(self._mine)
        others = [rank for rank in self._mine if rank != self._rank]
        size = max(tensor.numel() // L, 1)
        buffer = self._buffer(tag, tensor)
        parts = [tensor[k * size : (k + 1) * size] for k in range(L - 1)]
        into = [buffer[k * size : (k + 1) * size] for k in range(L - 1)]
        return self._communicator.start_swap(parts, others, others, into, tag)

    def _sum(self, members: tuple[int, ...] | None) -> Start:
        def start(tensor: Tensor) -> Handle | None:
            if members is None or len(members) < 2:
                return None
            everyone = len(members) == self._layout.num_workers
            return self._communicator.start_sum(tensor, None if everyone else members)

        return start

    def _buffer(self, tag: int, like: Tensor) -> Tensor:
        """Where a transfer arrives; as many as travel at once are kept."""
        key = (like.numel(), tag % _MOST_AT_ONCE)
        if key not in self._received:
            self._received[key] = torch.empty_like(like)
        return self._received[key]
