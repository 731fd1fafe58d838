"""Chains of operations on a CPU: threads start the next operation when the one before it has ended.

The engine starts a chain and comes back a step later. Nobody else would move it on: backends know single operations
only. So each position of a chain has a thread that waits for the operations at this position, in the order of the
chains, and starts the ones at the next. The last operation is waited for by whoever waits for the chain.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from decent_dp.comm.protocol import Handle, WorkerLost


class Conveyor:
    """Moves chains on; its threads start with the first chain.

    Args:
        limit: How many chains may be under way past their first operation; None is any number.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._places = None if limit is None else threading.Semaphore(limit)
        self._stages: list[tuple[queue.SimpleQueue[Chain | None], threading.Thread]] = []
        self._chains: list[Chain] = []
        self._error: BaseException | None = None
        self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether there are threads."""
        return bool(self._stages)

    def start(self, operations: Sequence[Callable[[], Handle]]) -> Chain:
        """Start a chain."""
        chain = Chain(operations)
        self._chains = [other for other in self._chains if not other.is_at_the_end.is_set()]
        self._chains.append(chain)
        self._put(chain, 0)
        return chain

    def wait(self, deadline: float) -> bool:
        """Whether the last operations of all chains have started before a time of the monotonic clock."""
        return all(chain.is_at_the_end.wait(max(deadline - time.monotonic(), 0)) for chain in self._chains)

    def stop(self, timeout_s: float) -> None:
        """End the threads, if they are not held by an operation for longer than some time."""
        self._is_stopped = True
        for waiting, _ in self._stages:
            waiting.put(None)
        for _, thread in self._stages:
            thread.join(timeout_s)
        self._chains.clear()  # they hold on to the communicator

    def _put(self, chain: Chain, position: int) -> None:
        if chain.is_at_the_end.is_set() or self._is_stopped:
            return
        if position == len(self._stages):
            waiting: queue.SimpleQueue[Chain | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(waiting, position), daemon=True)
            self._stages.append((waiting, thread))
            thread.start()
        self._stages[position][0].put(chain)

    def _run(self, waiting: queue.SimpleQueue[Chain | None], position: int) -> None:
        while (chain := waiting.get()) is not None:
            if position == 0 and self._places is not None:
                self._places.acquire()
            error = chain.advance(self._error)
            self._error = self._error or error  # another position may have failed meanwhile
            if chain.is_at_the_end.is_set() and self._places is not None:
                self._places.release()
            self._put(chain, position + 1)


class Chain:
    """Operations one after the other. One that fails ends its chain, and those that come after it on the conveyor."""

    def __init__(self, operations: Sequence[Callable[[], Handle]]) -> None:
        first, *self._rest = operations
        self._under_way = first()
        self._error: BaseException | None = None
        self.is_at_the_end = threading.Event()
        if not self._rest:
            self.is_at_the_end.set()

    def advance(self, error: BaseException | None) -> BaseException | None:
        """Start the next operation once the one under way has ended, unless there was an error; returns the error."""
        try:
            if error is None:
                self._under_way.wait()
                self._under_way = self._rest.pop(0)()
        except BaseException as failure:
            error = failure
        if error is not None or not self._rest:
            self._error = error
            self._rest.clear()  # they hold on to the bucket
            self.is_at_the_end.set()
        return error

    def wait(self) -> None:
        """See `Handle.wait`."""
        self.is_at_the_end.wait()
        if self._error is not None:
            raise self._error.again() if isinstance(self._error, WorkerLost) else self._error
        self._under_way.wait()
