"""What is in flight over the backends of torch.distributed: operations that were started together."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decent_dp.comm.protocol import Handle

if TYPE_CHECKING:
    from decent_dp.comm.torch_communicator import TorchCommunicator


class InFlight:
    """The `Works` that nobody has finished; several threads may add to them."""

    def __init__(self) -> None:
        self._works: weakref.WeakSet[Works] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, works: Works) -> None:
        with self._lock:
            self._works.add(works)

    def discard(self, works: Works) -> None:
        with self._lock:
            self._works.discard(works)

    def all(self) -> list[Works]:
        with self._lock:
            return list(self._works)


class Works:
    """Several operations of a backend, each with the workers it depends on, and the tensors they use."""

    def __init__(self, communicator: TorchCommunicator, tensors: tuple[Tensor, ...]) -> None:
        self._communicator = communicator
        self._tensors = tensors  # a backend writes to their memory until wait returns
        self._works: list[tuple[tuple[int, ...], Any]] = []
        communicator.in_flight.add(self)

    def add(self, ranks: tuple[int, ...], start: Callable[[], Any]) -> Works:
        """Start an operation that depends on some workers."""
        try:
            self._works.append((ranks, start()))
        except RuntimeError as error:  # of a worker that has ended: matters only if somebody waits for it
            self._works.append((ranks, Failed(error)))
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
        self._finished()

    def _finished(self) -> None:
        self._tensors = ()
        self._communicator.in_flight.discard(self)

    def linger(self, deadline: float) -> None:
        """Wait until a time of the monotonic clock, and drop everything."""
        works, self._works = self._works, []  # of two who wait for one operation, gloo would wake only one
        for _, work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        self._finished()

    def abandon(self) -> None:
        """Give up; whoever waits later is told so."""
        lost = RuntimeError("Connection closed after an earlier error")
        self._works = [(ranks, Failed(lost)) for ranks, _ in self._works]


class Failed:
    """An operation that could not be started."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self._error


class Queued:
    """Operations queued on a stream of their own."""

    def __init__(self, operations: Sequence[Callable[[], Handle]], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for start in operations:
                start().wait()
            self._end = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)


class Closed:
    """Stands for a group that has ended."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._refuse

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("Connection closed after an earlier error")
