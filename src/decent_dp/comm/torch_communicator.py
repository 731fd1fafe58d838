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

from decent_dp.comm.conveyor import Conveyor
from decent_dp.comm.handles import Closed, InFlight, Queued, Works
from decent_dp.comm.protocol import Board, Handle, WorkerLost, name_ranks
from decent_dp.comm.tensors import from_bytes, to_bytes, write
from decent_dp.errors import ConfigurationError, ExchangeError

# gloo sends a payload once the other side has said that it is ready to receive. Of the two connections between two
# workers one carries the payloads of the lower rank and the other those of the higher, so that this word never queues
# behind a payload that goes the same way.
_LANES = 2
# Workers of a node share its uplink unequally, and each waits for what the others brought, so for the one with the
# least of it. Without a limit the others would meanwhile send what is needed later, and take from its share.
_MOST_CHAINS = 4
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
        self.in_flight = InFlight()
        self._conveyor = Conveyor(_MOST_CHAINS)
        self._departures = Conveyor()  # of what is sent in turn: its thread sends, and waits until that has left
        self._lost: WorkerLost | None = None
        self._explaining = threading.Lock()
        self._pid = os.getpid()
        _ALIVE.add(self)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._known: set[tuple[tuple[int, ...] | None, str]] = set()  # on all workers, whether this one is in it or not

    def prepare(
        self, cliques: Sequence[tuple[int, ...]], devices: Sequence[torch.device], workers_per_node: int = 1
    ) -> None:
        """See `Communicator.prepare`: connect the groups, in the same order on every worker."""
        self._workers_per_node = workers_per_node
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
        payloads: Sequence[Tensor],
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
        *,
        in_turn: bool = False,
    ) -> Handle:
        """See `Communicator.start_swap`. Receives are posted first: a send waits for the receive of the other side."""
        works = Works(self, (*payloads, *buffers))
        if not send_to and not receive_from:
            return works
        device = (*payloads, *buffers)[0].device
        group = self._find(None, device)
        if device.type == "cuda":  # one kernel for all, or the two sides' sends wait for each other
            group._start_coalescing(device)
        for rank, buffer in zip(receive_from, buffers, strict=True):
            works.add((rank,), partial(group.recv, [buffer], rank, _LANES * tag + (rank < self.rank)))

        def send(works: Works) -> Works:
            group = self._find(None, device)  # it may have ended meanwhile
            for rank, payload in zip(send_to, payloads, strict=True):
                works.add((rank,), partial(group.send, [payload], rank, _LANES * tag + (self.rank < rank)))
            return works

        def send_and_wait() -> Works:
            send(Works(self, tuple(payloads))).wait()
            return works

        if device.type != "cuda" and in_turn and any(self._is_elsewhere(rank) for rank in send_to):
            return self._departures.start([lambda: Works(self, ()), send_and_wait])
        send(works)
        if device.type == "cuda":
            works = Works(self, (*payloads, *buffers))
            works.add(tuple({*receive_from, *send_to}), partial(group._end_coalescing, device))
        return works

    def start_chain(self, operations: Sequence[Callable[[], Handle]], device: torch.device) -> Handle:
        """See `Communicator.start_chain`."""
        if device.type != "cuda":
            return self._conveyor.start([*operations, lambda: Works(self, ())])  # its thread waits for the last one
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Queued(operations, self._streams[device])

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> "Works":
        """See `Communicator.start_sum`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        group = self._find(ranks, buffer.device)
        return Works(self, (buffer,)).add(self._others(ranks), partial(group.allreduce, [buffer], options))

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int] | None = None) -> "Works":
        """See `Communicator.start_gather`; travels as bytes, so that every dtype is served."""
        bytes_out = payload.view(torch.uint8)
        bytes_in = [buffer.view(torch.uint8) for buffer in buffers]
        group = self._find(ranks, payload.device)
        gather = partial(group.allgather, [bytes_in], [bytes_out])
        return Works(self, (payload, *buffers)).add(self._others(ranks), gather)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """See `Communicator.broadcast`; travels as contiguous bytes, so that every dtype and stride is served."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = [(tensor, to_bytes(tensor)) for tensor in tensors if tensor.numel() > 0]
        works = Works(self, ())
        for _, data in sent:
            group = self._find(None, data.device)
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
        if os.getpid() != self._pid:
            return  # in a forked child, which has none of the threads behind the groups
        held = self.in_flight.all()
        if (held or not self._has_started_all(time.monotonic())) and threading.main_thread().is_alive():
            threading.Thread(target=self._let_go, args=held).start()  # joined when the process ends
        else:
            self._let_go(*held)

    def _let_go(self, *_held: Any) -> None:
        self.linger()
        self._groups.clear()

    def linger(self) -> None:
        """A slower worker may still want what this one sent last, or hand it on: let it, for a while."""
        deadline = time.monotonic() + _LINGER_S
        if _has_ended_in_error() or not self._has_started_all(deadline):  # others should learn of an error
            self._abort()
        else:
            for works in self.in_flight.all():
                works.linger(deadline)
        self._conveyor.stop(timeout_s=1)
        self._departures.stop(timeout_s=1)

    def _has_started_all(self, deadline: float) -> bool:
        return self._conveyor.wait(deadline) and self._departures.wait(deadline)

    def _abort(self) -> None:
        """Release the threads of the conveyors: a wait that times out ends all operations of its group."""
        if self._conveyor.is_running or self._departures.is_running:
            other = (self.rank + 1) % self.num_workers
            with contextlib.suppress(RuntimeError):
                nothing = self._find(None, torch.device("cpu")).recv([torch.empty(1)], other, 2**31 - 1)
                nothing.wait(timedelta(milliseconds=1))

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
        with self._explaining:
            if self._lost is None:
                self._lost = self._explain(ranks, error)
            return self._lost.again()  # what fails after the first is a consequence

    def _explain(self, ranks: tuple[int, ...], error: RuntimeError) -> WorkerLost:
        notes: dict[int, tuple[int, ...]] = {}
        reader = threading.Thread(target=self._exchange_notes, args=(ranks, notes), daemon=True)
        reader.start()
        self._abort()
        self._groups.clear()
        for works in self.in_flight.all():
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

    def _find(self, ranks: Sequence[int] | None, device: torch.device) -> Any:
        """Return the group of a clique, or of all workers."""
        key = (None if ranks is None else tuple(ranks), device.type)
        return self._groups.get(key) or Closed()

    def _is_elsewhere(self, rank: int) -> bool:
        return rank // self._workers_per_node != self.rank // self._workers_per_node

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


_ALIVE: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()


def _has_ended_in_error() -> bool:
    return hasattr(sys, "last_type") and not threading.main_thread().is_alive()


@atexit.register
def _linger_at_exit() -> None:
    for communicator in list(_ALIVE):
        communicator.linger()
        if not _has_ended_in_error():
            communicator._groups.clear()  # joins threads of gloo, which would still let go of tensors while Python ends


# A forked process, such as a data worker, inherits the groups but not the threads behind them. Destroying them there
# would wait for these threads for ever, so it keeps them, and waits for nobody when it ends.
_INHERITED: list[Any] = []


def _before_fork() -> None:
    for communicator in list(_ALIVE):
        groups = [communicator._group, *communicator._groups.values()]
        _INHERITED.append((groups, [list(works._works) for works in communicator.in_flight.all()]))


os.register_at_fork(before=_before_fork, after_in_parent=_INHERITED.clear, after_in_child=_ALIVE.clear)


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
