"""Ctrl+C as a wish that all workers hear at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from decent_dp.consensus import mean_over_workers
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import ConfigurationError


class StopSignal:
    """Lets a training loop end after a step, the same one on all workers, when any of them was interrupted.

    Inside of the context the first Ctrl+C only notes the wish; the second one interrupts at once, as ever. Workers ask
    each other every few steps, which costs one small message of all to all. torchrun hands Ctrl+C on to its workers
    and gives them half a minute to end (``--shutdown-timeout``).

    Args:
        model: The wrapped model.
        every: Steps between two questions; the same on all workers.
        signals: What counts as a wish.

    Example:
        >>> def train(model, batches, directory):
        ...     with StopSignal(model) as stop:
        ...         for batch in batches:
        ...             model(batch).sum().backward()
        ...             if stop.requested():
        ...                 save(model, directory)
        ...                 break
    """

    def __init__(
        self, model: DecentralizedDataParallel, *, every: int = 10, signals: Sequence[signal.Signals] = (signal.SIGINT,)
    ) -> None:
        if every < 1:
            raise ConfigurationError(f"every must be at least 1 step, got {every}")
        self._model, self._every, self._signals = model, every, tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._heard = False
        self._all_heard = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("StopSignal is entered on another thread; Python hears signals on the main thread")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def requested(self) -> bool:
        """Whether to end now; every worker must ask after each of its steps."""
        replica = self._model._replica
        if replica.t % self._every == 0 and not self._all_heard:
            device = replica.buckets[0].storage.flat.device
            with replica.fails_on_error():
                self._all_heard = mean_over_workers(float(self._heard), device, self._model._communicator)() > 0
        return self._all_heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        self._restore()  # the next one is the user's own

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
