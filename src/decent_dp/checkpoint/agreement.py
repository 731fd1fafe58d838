"""All workers go on, or all raise: with what went wrong, and where."""

from __future__ import annotations

from typing import Any

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, ConfigurationError, DecentDPError, ExchangeError


class Report:
    """What one worker has done of a call of all: its result, or what went wrong.

    Use as a context manager around the work, and `share` afterwards.

    Args:
        model: Of this worker.
        doing: What is done, as messages say it after *could not*.

    Raises:
        ConfigurationError: It is no wrapped model.
    """

    def __init__(self, model: DecentralizedDataParallel, doing: str) -> None:
        if not isinstance(model, DecentralizedDataParallel):
            raise ConfigurationError(
                f"model is {type(model).__name__}; checkpoints are of a DecentralizedDataParallel: pass the wrapped "
                "model, or use torch.save for a plain one"
            )
        self._communicator, self._here, self._doing = model._communicator, model._replica.here, doing
        self.result: Any = None
        self.error: Exception | None = None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, ExchangeError) or not isinstance(error, Exception):
            return False  # the others cannot be asked any more
        self.error = error
        return True

    def share(self) -> list[Any]:
        """Return the results of all workers, in rank order.

        Raises:
            CheckpointError: On all workers, if any has met an error; the message names rank, step and file.
        """
        here = self._here
        try:
            reports = self._communicator.gather((self.result, _words(self.error)))
        except ExchangeError as error:
            raise ExchangeError(
                f"{here}: another worker ended while all were to {self._doing}; look at the log of the worker that "
                "ended first, and restart from a checkpoint"
            ) from error
        if isinstance(self.error, DecentDPError) and not isinstance(self.error, CheckpointError):
            raise self.error
        failed = [(rank, words) for rank, (_, words) in enumerate(reports) if words is not None]
        if failed:
            rank, words = failed[0]
            raise CheckpointError(f"{here}: could not {self._doing}: rank {rank}: {words}") from self.error
        return [result for result, _ in reports]


def _words(error: Exception | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, DecentDPError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"
