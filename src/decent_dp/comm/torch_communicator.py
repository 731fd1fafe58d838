"""The communicator between processes, over the backends of torch.distributed.

A model owns its groups: one for all point-to-point traffic (also used for broadcasts and whole-world sums) and one for
each distinct clique this worker is in. They are made on the store of the user's process group but never used by anybody
else, so they cannot pair up with the user's collectives, and they end with the model.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.comm.protocol import Board, WorkerLost, name_ranks
from decent_dp.comm.tensors import from_bytes, to_bytes, write
from decent_dp.errors import ConfigurationError, ExchangeError

# gloo sends a payload once the other side has said that it is ready to receive. Of the two connections between two
# workers one carries the payloads of the lower rank and the other those of the higher, so that this word never queues
# behind a payload that goes the same way.
_LANES = 2
_LINGER_S = 5.0  # how long a process that ends waits for others to take its last exchange
_NOTES_S = 2.0  # how long to wait for the notes of workers that fail at about the same time

logger = logging.getLogger("decent_dp")


class TorchCommunicator:
    """`decent_dp.comm.protocol.Communicator` over gloo (CPU tensors) and nccl (CUDA tensors).

    Args:
        process_group: The user's group; its ranks are the workers. The default group when None.
        timeout: How long an exchange may take before the other worker counts as lost; that of the group when None.

    Raises:
        ConfigurationError: If there is no process group, or this process is not in it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "there is no process group: call decent_dp.utils.initialize_dist() (or "
                "torch.distributed.init_process_group) before wrapping the model, and start the script with "
                "'torchrun --nproc-per-node N script.py'; initialize_dist() also serves one worker without torchrun"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(
                f"process_group is {process_group!r}: this process is not in that group; wrap the model only "
                "on its members"
            )
        self.rank = group.rank()
        self.num_workers = group.size()
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ConfigurationError(f"timeout is {timeout!r}; it must be a datetime.timedelta or None")
        self.board: Board
        self._group = group
        self.timeout = timeout or _timeout_of(group)
        self._groups: dict[tuple[tuple[int, ...] | None, str], Any] = {}
        self._in_flight: weakref.WeakSet[_Works] = weakref.WeakSet()
        _ALIVE.add(self)
        self._known: set[tuple[tuple[int, ...] | None, str]] = set()  # on all workers, whether this one is in it or not

    def prepare(self, cliques: Sequence[tuple[int, ...]], devices: Sequence[torch.device]) -> None:
        """See `Communicator.prepare`: connect the groups, in the same order on every worker."""
        everyone = tuple(range(self.num_workers))
        kinds = sorted({device.type for device in devices})
        wanted: list[tuple[tuple[int, ...] | None, str]] = [(None, kind) for kind in kinds]
        wanted += [(clique, kind) for kind in kinds for clique in cliques]
        missing = [key for key in wanted if key not in self._known]
        if not missing:
            return
        namespace = self.gather(uuid.uuid4().hex)[0]
        self._store = dist.distributed_c10d.PrefixStore(f"decent_dp/{namespace}", self._group.get_group_store())
        self.board = _Numbers(self._store)
        for number, (clique, kind) in enumerate(missing):
            members = everyone if clique is None else clique
            if self.rank in members:
                self._groups[clique, kind] = self._connect(members, kind, f"group/{number}")
        self._known.update(missing)
        logger.debug("rank %d: %d groups for %d workers", self.rank, len(self._groups), self.num_workers)

    def start_swap(
        self,
        payload: Tensor,
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
    ) -> "_Works":
        """See `Communicator.start_swap`. Receives are posted first: a send waits for the receive of the other side."""
        kind = payload.device.type
        group = self._groups[None, kind]
        works = _Works(self, (payload, *buffers))
        if kind == "cuda":  # one kernel for all, or the two sides' sends wait for each other
            group._start_coalescing(payload.device)
        for rank, buffer in zip(receive_from, buffers, strict=True):
            works.add((rank,), partial(group.recv, [buffer], rank, _LANES * tag + (rank < self.rank)))
        for rank in send_to:
            works.add((rank,), partial(group.send, [payload], rank, _LANES * tag + (self.rank < rank)))
        if kind == "cuda":
            works = _Works(self, (payload, *buffers))
            works.add(tuple({*receive_from, *send_to}), partial(group._end_coalescing, payload.device))
        return works

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> "_Works":
        """See `Communicator.start_sum`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        group = self._groups[_key(ranks), buffer.device.type]
        return _Works(self, (buffer,)).add(self._others(ranks), partial(group.allreduce, [buffer], options))

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int] | None = None) -> "_Works":
        """See `Communicator.start_gather`; travels as bytes, so that every dtype is served."""
        bytes_out = payload.view(torch.uint8)
        bytes_in = [buffer.view(torch.uint8) for buffer in buffers]
        group = self._groups[_key(ranks), payload.device.type]
        gather = partial(group.allgather, [bytes_in], [bytes_out])
        return _Works(self, (payload, *buffers)).add(self._others(ranks), gather)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """See `Communicator.broadcast`; travels as contiguous bytes, so that every dtype and stride is served."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = [(tensor, to_bytes(tensor)) for tensor in tensors if tensor.numel() > 0]
        works = _Works(self, ())
        for _, data in sent:
            group = self._groups[None, data.device.type]
            works.add(self._others(None), partial(group.broadcast, [data], options))
        try:
            works.wait()
        except WorkerLost as failure:
            raise ExchangeError(
                f"rank {self.rank}: lost {name_ranks(failure.ranks)} while parameters were copied from rank 0: "
                f"{failure.reason}; look at the log of {name_ranks(failure.ranks)}"
            ) from failure
        if self.rank:
            for tensor, data in sent:
                write(tensor, from_bytes(data, tensor))

    def gather(self, value: Any) -> list[Any]:
        """See `Communicator.gather`; uses the user's group, in program order."""
        values: list[Any] = [None] * self.num_workers
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: the other workers did not answer while the model was set up "
                f"({_first_line(error)}); every worker of the process group must wrap the model, and look at the "
                "log of the worker that ended first"
            ) from error
        return values

    def close(self) -> None:
        """See `Communicator.close`: the groups end when others have taken what is in flight, in the background."""
        self._groups.clear()
        works = list(self._in_flight)
        if works and threading.main_thread().is_alive():
            threading.Thread(target=_linger, args=(works,)).start()  # joined when the process ends
        else:
            _linger(works)

    def _connect(self, ranks: tuple[int, ...], kind: str, name: str) -> Any:
        """Make a group of some workers for one kind of device."""
        users: Any = None
        with contextlib.suppress(RuntimeError):
            users = self._group._get_backend(torch.device(kind))
        backend = users.name() if users is not None else "no backend"
        if (kind, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
            raise ConfigurationError(
                f"the parameters are on {kind} and the process group has {backend} for {kind}; it must be gloo "
                "for cpu and nccl for cuda: pass backend='cpu:gloo,cuda:nccl' to init_process_group"
            )
        store = dist.distributed_c10d.PrefixStore(name, self._store)
        rank = ranks.index(self.rank)
        try:
            if kind == "cpu":
                gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout, gloo._threads = self.timeout, users.options._threads
                gloo._devices = list(users.options._devices) * _LANES
                return dist.ProcessGroupGloo(store, rank, len(ranks), gloo)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: could not connect to the workers {list(ranks)} ({_first_line(error)}); "
                "look at the log of the worker that ended first"
            ) from error

    def explain(self, ranks: tuple[int, ...], error: RuntimeError) -> WorkerLost:
        """Turn a backend's error into the workers that are lost and what happened to them.

        A worker that fails leaves a note in the store of whom it lost, and closes its connections, so that those who
        wait for it fail too. Of several suspects the ones without a note are the cause; if all have left one, somebody
        else is, whom their notes name.
        """
        notes: dict[int, tuple[int, ...]] = {}
        reader = threading.Thread(target=self._exchange_notes, args=(ranks, notes), daemon=True)
        reader.start()
        self._groups.clear()
        for works in list(self._in_flight):
            works.abandon()  # they hold on to the connections
        reader.join(_NOTES_S + 1)  # the store may have died with its host
        silent = tuple(rank for rank in ranks if rank not in notes)
        reason = _reason(error)
        if silent:
            return WorkerLost(silent, reason)
        causes = sorted({lost for rank in ranks for lost in notes[rank]} - set(ranks) - {self.rank})
        lost = "".join(f"; rank {rank} itself had lost {name_ranks(notes[rank])}" for rank in ranks)
        return WorkerLost(ranks, reason + lost, tuple(causes) or ranks)

    def _exchange_notes(self, ranks: tuple[int, ...], notes: dict[int, tuple[int, ...]]) -> None:
        """Leave a note of whom this worker lost, and collect those of the workers it waited for."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"lost/{self.rank}", ",".join(map(str, ranks)))
            deadline = time.monotonic() + _NOTES_S
            while len(notes) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    if rank not in notes and self._store.check([f"lost/{rank}"]):
                        notes[rank] = tuple(map(int, self._store.get(f"lost/{rank}").decode().split(",")))
                time.sleep(0.05)

    def _others(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        return tuple(rank for rank in (range(self.num_workers) if ranks is None else ranks) if rank != self.rank)


class _Numbers:
    """The board of processes: numbers in the store of the process group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def write(self, key: str, value: int) -> None:
        self._store.set(f"board/{key}", str(value))

    def read(self, key: str) -> int | None:
        return int(self._store.get(f"board/{key}")) if self._store.check([f"board/{key}"]) else None

    def delete(self, key: str) -> None:
        self._store.delete_key(f"board/{key}")
        self._store.delete_key(f"count/{key}")

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(f"count/{key}", amount))


class _Works:
    """Several operations of a backend, each with the workers it depends on, and the tensors they use."""

    def __init__(self, communicator: TorchCommunicator, tensors: tuple[Tensor, ...]) -> None:
        self._communicator = communicator
        self._tensors = tensors  # a backend writes to their memory until wait returns
        self._works: list[tuple[tuple[int, ...], Any]] = []
        communicator._in_flight.add(self)

    def add(self, ranks: tuple[int, ...], start: Callable[[], Any]) -> "_Works":
        """Start an operation that depends on some workers."""
        try:
            self._works.append((ranks, start()))
        except RuntimeError as error:  # of a worker that has ended: matters only if somebody waits for it
            self._works.append((ranks, _Failed(error)))
        return self

    def wait(self) -> None:
        while self._works:
            ranks, work = self._works[0]
            try:
                work.wait()
            except RuntimeError as error:
                del work
                raise self._communicator.explain(ranks, error) from error
            self._works.pop(0)
        self._tensors = ()
        self._communicator._in_flight.discard(self)

    def linger(self, deadline: float) -> None:
        """Wait until a time of the monotonic clock, and drop everything."""
        works, self._works = self._works, []  # of two who wait for one operation, gloo would wake only one
        for _, work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        self._tensors = ()

    def abandon(self) -> None:
        """Give up; whoever waits later is told so."""
        lost = RuntimeError("Connection closed after an earlier error")
        self._works = [(ranks, _Failed(lost)) for ranks, _ in self._works]


class _Failed:
    """An operation that could not be started."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self._error


_ALIVE: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()


def _linger(all_works: list[_Works]) -> None:
    """A slower worker may still want what this one sent last: let it, for a while."""
    deadline = time.monotonic() + _LINGER_S
    while all_works and not (hasattr(sys, "last_type") and not threading.main_thread().is_alive()):
        all_works.pop().linger(deadline)  # but others should learn of a process that ends in an error


@atexit.register
def _linger_at_exit() -> None:
    for communicator in list(_ALIVE):
        _linger(list(communicator._in_flight))


# A forked process, such as a data worker, inherits the groups but not the threads behind them. Destroying them there
# would wait for these threads for ever, so it keeps them, and waits for nobody when it ends.
_INHERITED: list[Any] = []


def _before_fork() -> None:
    for communicator in list(_ALIVE):
        _INHERITED.append((list(communicator._groups.values()), [list(w._works) for w in communicator._in_flight]))


os.register_at_fork(before=_before_fork, after_in_parent=_INHERITED.clear, after_in_child=_ALIVE.clear)


def _key(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout the user gave the group."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def _reason(error: RuntimeError) -> str:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return "no answer within the timeout"
    if "Connection closed" in text or "Connection reset" in text or "Broken pipe" in text:
        return "the connection closed: its process, or its model, has ended"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    """Shorten a backend's message to what happened, without its source position."""
    return (str(error).splitlines() or [type(error).__name__])[0].rpartition("] ")[2].split(". This is")[0]
