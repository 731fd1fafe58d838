"""Faults injected from outside: the library is not changed for them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from decent_dp.comm import Handle, TorchCommunicator


class DelayedHandle:
    """Completes some time after the handle that it wraps."""

    def __init__(self, inner: Handle, delay_s: float) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

        def wait() -> None:
            try:
                inner.wait()
                time.sleep(delay_s)
            except BaseException as error:
                self._error = error
            self._done.set()

        threading.Thread(target=wait, daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return once the inner handle has completed and the delay is over; raise what the inner one raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class DelayedCommunicator(TorchCommunicator):
    """Every exchange (swap, sum, gather) completes ``delay`` seconds after its bytes have arrived.

    Args:
        delay: Seconds, or a function that returns them for the next exchange (for random delays).
        process_group: As of `TorchCommunicator`.
        timeout: As of `TorchCommunicator`; the delay does not count.

    Attributes:
        handles: The last hundred handles, in the order in which their exchanges were started.
    """

    def __init__(
        self,
        delay: float | Callable[[], float],
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(process_group, timeout)
        self._delay = delay
        self.handles: deque[DelayedHandle] = deque(maxlen=100)

    def start_swap(
        self,
        payloads: Sequence[Tensor],
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
        *,
        in_turn: bool = False,
    ) -> Any:
        """Start the exchange; its end is late."""
        return self._late(super().start_swap(payloads, send_to, receive_from, buffers, tag, in_turn=in_turn))

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> Any:
        """Start the sum; its end is late."""
        return self._late(super().start_sum(buffer, ranks))

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int] | None = None) -> Any:
        """Start gathering; its end is late."""
        return self._late(super().start_gather(payload, buffers, ranks))

    def _late(self, inner: Handle) -> DelayedHandle:
        delay_s = self._delay() if callable(self._delay) else self._delay
        self.handles.append(DelayedHandle(inner, delay_s))
        return self.handles[-1]
