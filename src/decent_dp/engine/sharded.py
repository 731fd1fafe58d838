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
from decent_dp.engine.arithmetic import add_difference, cast, mean
from decent_dp.topology import Idle, Swap

if TYPE_CHECKING:
    from decent_dp.engine.bucket import Bucket


class ShardedExchange:
    """One round of one bucket in shards, as seen by one worker.

    Args:
        bucket: Whose parameters.
        payload: What travels: the bucket's flat tensor, or a copy in the wire dtype.
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
        payload: Tensor,
        ranks: tuple[int, ...],
        across: Swap | Idle,
        tag: int,
        communicator: Communicator,
    ) -> None:
        self._communicator, self._ranks, self._across, self._tag = communicator, ranks, across, tag
        self._me = ranks.index(communicator.rank)
        flat = bucket.storage.flat
        self._length, self._size = flat.numel(), -(-flat.numel() // len(ranks))
        # one slot of full size for each member: parts of mine before they are averaged, the results of others after
        space = bucket.state("received 0", self._size * len(ranks), payload.dtype)
        self._payload, self.received = payload, space[: self._length]
        self._part = self._part_of(self.received, self._me)
        num_mine = self._part.numel()
        others = [j for j in range(len(ranks)) if j != self._me]
        self._others = {ranks[j]: j for j in others}
        self._slots = [space[j * self._size : j * self._size + num_mine] for j in others]
        wide = torch.promote_types(flat.dtype, torch.float32)
        self._own = self._part if wide == payload.dtype else bucket.state("shard", num_mine, wide)
        senders = across.receive_from if isinstance(across, Swap) else {}
        more = range(len(self._slots), len(senders))
        self._arriving = (self._slots + [bucket.state(f"across {k}", num_mine, payload.dtype) for k in more])[
            : len(senders)
        ]

    def start(self) -> Handle:
        """Start it."""
        operations: list[Callable[[], Handle]] = [self._scatter, self._share]
        if isinstance(self._across, Swap):
            operations.insert(1, self._swap)
        return self._communicator.start_chain(operations, self._payload.device)

    def remainder(self) -> tuple[int, Tensor]:
        """What rounding took away from this worker's part, times the number of workers, and where the part begins."""
        return self._me * self._size, self._own

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
        members = [*self._slots[: self._me], mine, *self._slots[self._me :]]
        mean(members, [1.0] * len(members), out=self._own)

    def _swap(self) -> Handle:
        assert isinstance(self._across, Swap)
        self._average()
        if self._own is not self._part:
            cast(self._own, self._part)
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
        if self._own is not self._part:
            cast(self._own, self._part)
            self._own.sub_(self._part).mul_(len(self._ranks))
        receivers = list(self._others) if self._part.numel() else []
        parts = self._parts_of_others(self.received)
        payloads = [self._part] * len(receivers)
        return self._communicator.start_swap(payloads, receivers, list(parts), list(parts.values()), self._tag | 2)

    def _mix(self, weights: tuple[float, ...]) -> None:
        if not self._part.numel():
            return
        if self._own is self._part:
            # one after the other, so that each ends with its weight
            for k, (tensor, weight) in enumerate(zip(self._arriving, weights, strict=True)):
                self._own.lerp_(tensor, weight / (1 - sum(weights[k + 1 :])))
        else:
            for tensor, weight in zip(self._arriving, weights, strict=True):
                add_difference(self._own, tensor, self._part, weight)
