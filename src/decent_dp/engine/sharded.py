"""Averages in shards: every member of a clique owns an equal part of a bucket.

    scatter   everyone sends each owner its part; the owner takes the mean of the clique
    across    owners of the same part on different nodes swap what they have, and mix   (two levels only)
    gather    the owner hands its part to everyone

What is sent is in the wire dtype, what an owner computes in at least float32. Owners keep what rounding takes away from
their part, so that the clique as a whole gains and loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle
from decent_dp.engine.arithmetic import add_difference, cast, chunks, dtype_of_rest, join, mean, split
from decent_dp.topology import Idle, Swap

if TYPE_CHECKING:
    from decent_dp.engine.bucket import Bucket


class ShardedExchange:
    """One round of one bucket in shards, as seen by one worker.

    Args:
        bucket: Whose parameters.
        ranks: The clique, ascending.
        across: What owners do between nodes.
        tag: Of the round and bucket; its two lowest bits are free.
        communicator: Moves the bytes.

    Attributes:
        received: The result, laid out like the bucket's flat tensor, in the wire dtype; once the chain is done.
    """

    def __init__(
        self,
        bucket: Bucket,
        ranks: tuple[int, ...],
        across: Swap | Idle,
        tag: int,
        communicator: Communicator,
    ) -> None:
        self._communicator, self._ranks, self._across, self._tag = communicator, ranks, across, tag
        self._me = ranks.index(communicator.rank)
        flat, dtype = bucket.storage.flat, bucket.wire_dtype
        self._length, self._size = flat.numel(), -(-flat.numel() // len(ranks))
        others = [j for j in range(len(ranks)) if j != self._me]
        self._others = {ranks[j]: j for j in others}
        if bucket.is_narrowed:  # results come to where the narrow copy was, once that has left
            self._payload = self.received = cast(flat, bucket.state("received 0", self._length, dtype))
            slots, places = bucket.state("slots", self._size * len(others), dtype), list(range(len(others)))
        else:  # results come to where the parts of mine were, once these are averaged
            slots, places = bucket.state("received 0", self._size * len(ranks), dtype), others
            self._payload, self.received = flat, slots[: self._length]
        self._part = self._part_of(self.received, self._me)
        num_mine = self._part.numel()
        self._slots = [slots[k * self._size : k * self._size + num_mine] for k in places]
        self._wide = torch.promote_types(flat.dtype, torch.float32)
        self._rest: Tensor | None = None  # what rounding to the wire dtype took from my part
        if self._wide != dtype:
            self._rest = bucket.state("rest", num_mine, dtype_of_rest(self._wide, dtype))
        senders = across.receive_from if isinstance(across, Swap) else {}
        more = range(len(self._slots), len(senders))
        self._arriving = (self._slots + [bucket.state(f"across {k}", num_mine, dtype) for k in more])[: len(senders)]

    def start(self) -> Handle:
        """Start it."""
        operations: list[Callable[[], Handle]] = [self._scatter, self._share]
        if isinstance(self._across, Swap):
            operations.insert(1, self._swap)
        return self._communicator.start_chain(operations, self._payload.device)

    def remainder(self) -> tuple[int, Tensor]:
        """What rounding took away from this worker's part, times the number of workers, and where the part begins."""
        assert self._rest is not None
        wide = join(self._part, self._rest, torch.empty_like(self._part, dtype=self._wide))
        return self._me * self._size, wide.sub_(self._part).mul_(len(self._ranks))

    def _part_of(self, flat: Tensor, j: int) -> Tensor:
        return flat[min(j * self._size, self._length) : min((j + 1) * self._size, self._length)]

    def _parts_of_others(self, flat: Tensor) -> dict[int, Tensor]:
        """The parts that are not empty, by owner."""
        parts = {rank: self._part_of(flat, j) for rank, j in self._others.items()}
        return {rank: part for rank, part in parts.items() if part.numel()}

    def _scatter(self) -> Handle:
        parts = self._parts_of_others(self._payload)
        senders = list(self._others) if self._part.numel() else []
        slots = self._slots[: len(senders)]
        return self._communicator.start_swap(list(parts.values()), list(parts), senders, slots, self._tag)

    def _average(self) -> None:
        mine = self._part_of(self._payload, self._me)
        members, weights = [*self._slots[: self._me], mine, *self._slots[self._me :]], [1.0] * len(self._ranks)
        if self._rest is None:
            mean(members, weights, out=self._part)
            return
        for wide, part, rest, *parts in chunks(self._wide, self._part, self._rest, *members):
            split(mean(parts, weights, out=wide), part, rest)

    def _swap(self) -> Handle:
        assert isinstance(self._across, Swap)
        self._average()
        if not self._part.numel():
            return self._communicator.start_swap([], [], [], [], self._tag | 1)
        send_to, receive_from = self._across.send_to, tuple(self._across.receive_from)
        return self._communicator.start_swap(
            [self._part] * len(send_to), send_to, receive_from, self._arriving, self._tag | 1, in_turn=True
        )

    def _share(self) -> Handle:
        if isinstance(self._across, Swap):
            self._mix(tuple(self._across.receive_from.values()))
        else:
            self._average()
        receivers = list(self._others) if self._part.numel() else []
        parts = self._parts_of_others(self.received)
        payloads = [self._part] * len(receivers)
        return self._communicator.start_swap(payloads, receivers, list(parts), list(parts.values()), self._tag | 2)

    def _mix(self, weights: tuple[float, ...]) -> None:
        if not self._part.numel():
            return
        if self._rest is None:
            # one after the other, so that each ends with its weight
            for k, (tensor, weight) in enumerate(zip(self._arriving, weights, strict=True)):
                self._part.lerp_(tensor, weight / (1 - sum(weights[k + 1 :])))
            return
        for wide, part, rest, *arriving in chunks(self._wide, self._part, self._rest, *self._arriving):
            join(part, rest, wide)
            for tensor, weight in zip(arriving, weights, strict=True):
                add_difference(wide, tensor, part, weight)
            split(wide, part, rest)
