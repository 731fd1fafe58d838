"""Virtual workers: several replicas in one process, no threads.

What is started at step t is awaited at step t+1, so workers can take turns: each runs forward and backward of step t
before any runs step t+1.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from decent_dp.comm.protocol import Board, WorkerLost
from decent_dp.comm.tensors import write
from decent_dp.errors import ConfigurationError


class InProcessWorld:
    """The place where virtual workers meet.

    Args:
        num_workers: Number of virtual workers.

    Example:
        >>> world = InProcessWorld(2)
        >>> [world.communicator(rank).rank for rank in range(2)]
        [0, 1]
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ConfigurationError(f"num_workers must be at least 1, got {num_workers}")
        self.num_workers = num_workers
        self._parcels: dict[tuple[int, int, int], Tensor] = {}
        self._meetings: dict[tuple[Any, ...], _Meeting] = {}
        self._numbers: dict[str, int] = {}
        self._chains: list[_Chain] = []

    def communicator(self, rank: int) -> "InProcessCommunicator":
        """Return the communicator of one virtual worker."""
        if not 0 <= rank < self.num_workers:
            raise ConfigurationError(
                f"rank {rank} is not one of the {self.num_workers} workers 0..{self.num_workers - 1}"
            )
        return InProcessCommunicator(self, rank)


class _Numbers:
    """The board of virtual workers."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers

    def write(self, key: str, value: int) -> None:
        self._numbers[key] = value

    def read(self, key: str) -> int | None:
        return self._numbers.get(key)

    def delete(self, key: str) -> None:
        self._numbers.pop(key, None)

    def add(self, key: str, amount: int) -> int:
        self._numbers[key] = self._numbers.get(key, 0) + amount
        return self._numbers[key]


class _Meeting:
    """One collective call: what each member brought, and how many have left."""

    def __init__(self) -> None:
        self.brought: dict[int, Any] = {}
        self.total: Tensor | None = None
        self.num_left = 0


class InProcessCommunicator:
    """`decent_dp.comm.protocol.Communicator` of one virtual worker; made by `InProcessWorld.communicator`."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.rank = rank
        self.num_workers = world.num_workers
        self.timeout: timedelta | None = None
        self._world = world
        self._num_calls: dict[tuple[Any, ...], int] = {}
        self.board: Board = _Numbers(world._numbers)

    def prepare(self, cliques: Sequence[tuple[int, ...]], devices: Sequence[Any], workers_per_node: int = 1) -> None:
        """Nothing to set up."""

    def start_swap(
        self,
        payloads: Sequence[Tensor],
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
        *,
        in_turn: bool = False,
    ) -> "_Receive":
        """See `Communicator.start_swap`; payloads are copied at once."""
        copies = {id(payload): payload.clone() for payload in payloads}
        for payload, receiver in zip(payloads, send_to, strict=True):
            self._world._parcels[tag, self.rank, receiver] = copies[id(payload)]
        return _Receive(self._world, self.rank, tuple(receive_from), tuple(buffers), tag)

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> "_Sum":
        """See `Communicator.start_sum`."""
        members = tuple(range(self.num_workers)) if ranks is None else tuple(ranks)
        meeting, key = self._meet("sum" if ranks is not None else "sum of all", members)
        meeting.brought[self.rank] = buffer
        return _Sum(self._world, key, members, buffer)

    def start_chain(self, operations: Sequence[Callable[[], Any]], device: Any) -> "_Chain":
        """See `Communicator.start_chain`."""
        return _Chain(self._world, operations)

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int] | None = None) -> "_Gather":
        """See `Communicator.start_gather`; the payload is copied at once."""
        members = tuple(range(self.num_workers)) if ranks is None else tuple(ranks)
        meeting, key = self._meet("gather" if ranks is not None else "gather of all", members)
        meeting.brought[self.rank] = payload.clone()
        return _Gather(self._world, key, members, tuple(buffers))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """See `Communicator.broadcast`; rank 0 must be built first."""
        meeting, key = self._meet("broadcast", tuple(range(self.num_workers)))
        if self.rank == 0:
            meeting.brought[0] = [tensor.detach().clone() for tensor in tensors]
        if 0 not in meeting.brought:
            raise ConfigurationError(f"rank {self.rank} was built before rank 0; build virtual workers in rank order")
        for mine, first in zip(tensors, meeting.brought[0], strict=True):
            write(mine, first)
        _leave(self._world, key, self.num_workers)

    def gather(self, value: Any) -> list[Any]:
        """See `Communicator.gather`; returns the values of the workers built so far, in rank order."""
        meeting, key = self._meet("objects", tuple(range(self.num_workers)))
        meeting.brought[self.rank] = value
        values = [meeting.brought[rank] for rank in sorted(meeting.brought)]
        _leave(self._world, key, self.num_workers)
        return values

    def close(self) -> None:
        """Nothing to let go of."""

    def _meet(self, kind: str, members: tuple[int, ...]) -> tuple[_Meeting, tuple[Any, ...]]:
        """Return the meeting of this worker's next call of a kind with these members."""
        count = self._num_calls.get((kind, members), 0)
        self._num_calls[kind, members] = count + 1
        key = (kind, members, count)
        return self._world._meetings.setdefault(key, _Meeting()), key


def _leave(world: InProcessWorld, key: tuple[Any, ...], num_members: int) -> None:
    meeting = world._meetings[key]
    meeting.num_left += 1
    if meeting.num_left == num_members:
        del world._meetings[key]


def _check_all_came(meeting: _Meeting, members: tuple[int, ...]) -> None:
    absent = [rank for rank in members if rank not in meeting.brought]
    if absent:
        raise WorkerLost(absent, "they have not started the same call: virtual workers take turns, one step each")


class _Receive:
    def __init__(
        self,
        world: InProcessWorld,
        rank: int,
        senders: tuple[int, ...],
        buffers: tuple[Tensor, ...],
        tag: int,
    ) -> None:
        self._world, self._rank, self._senders, self._buffers, self._tag = world, rank, senders, buffers, tag
        self._done = False

    def _absent(self) -> list[int]:
        keys = [(self._tag, sender, self._rank) for sender in self._senders]
        return [key[1] for key in keys if key not in self._world._parcels]

    def is_ready(self) -> bool:
        return self._done or not self._absent()

    def wait(self) -> None:
        if self._done:
            return
        keys = [(self._tag, sender, self._rank) for sender in self._senders]
        absent = self._absent()
        if absent:
            raise WorkerLost(absent, "they have not sent: virtual workers take turns, one step each")
        for key, buffer in zip(keys, self._buffers, strict=True):
            buffer.copy_(self._world._parcels.pop(key))
        self._done = True


class _Sum:
    def __init__(self, world: InProcessWorld, key: tuple[Any, ...], members: tuple[int, ...], buffer: Tensor) -> None:
        self._world, self._key, self._members, self._buffer = world, key, members, buffer
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        meeting = self._world._meetings[self._key]
        _check_all_came(meeting, self._members)
        if meeting.total is None:  # the first to leave adds up, before any buffer is overwritten
            meeting.total = meeting.brought[self._members[0]].clone()
            for rank in self._members[1:]:
                meeting.total += meeting.brought[rank]
        self._buffer.copy_(meeting.total)
        _leave(self._world, self._key, len(self._members))
        self._done = True


class _Gather:
    def __init__(
        self,
        world: InProcessWorld,
        key: tuple[Any, ...],
        members: tuple[int, ...],
        buffers: tuple[Tensor, ...],
    ) -> None:
        self._world, self._key, self._members, self._buffers = world, key, members, buffers
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        meeting = self._world._meetings[self._key]
        _check_all_came(meeting, self._members)
        for rank, buffer in zip(self._members, self._buffers, strict=True):
            buffer.copy_(meeting.brought[rank])
        _leave(self._world, self._key, len(self._members))
        self._done = True


class _Chain:
    def __init__(self, world: InProcessWorld, operations: Sequence[Callable[[], Any]]) -> None:
        self._world = world
        first, *self._rest = operations
        self._under_way = first()
        world._chains.append(self)

    def wait(self) -> None:
        while self in self._world._chains:
            # all of them: what another worker hands on may be what this one waits for
            moved = [chain._move() for chain in list(self._world._chains)]
            if not any(moved):
                self._under_way.wait()  # says who has not come

    def _move(self) -> bool:
        if not self._under_way.is_ready():
            return False
        self._under_way.wait()
        if self._rest:
            self._under_way = self._rest.pop(0)()
        else:
            self._world._chains.remove(self)
        return True
