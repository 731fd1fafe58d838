"""Uneven work: a worker that has left its loop answers exchanges until all have left theirs.

Inside of a join every worker notes on a board that all can read which steps it has taken. A worker that has left its
loop takes a step without gradients (finish, mix, no update, start) for every step that somebody has noted, and is done
when all have left and nobody has noted a further step. So all end at the step of the worker with the most work,
whatever their speed, and where the work is even nothing is added.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from decent_dp.comm.protocol import Board, Communicator
from decent_dp.engine.replica import Replica
from decent_dp.errors import ConfigurationError, ExchangeError, TrainingError

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _Occasion:
    """One join of one model that this worker is in."""

    replica: Replica
    board: Board
    name: str

    def note(self, t: int) -> None:
        """Say that this worker has taken step t."""
        self.board.write(f"{self.name}/step/{t}", 1)

    def answer(self) -> bool:
        """Take a step without a gradient if somebody has taken the one this replica is at."""
        if self.board.read(f"{self.name}/step/{self.replica.t}") is None:
            return False
        self.replica.finish_window()
        return True


#: Those that this process is in; a worker that waits in one answers in all, or two models could wait for each other.
_OCCASIONS: list[_Occasion] = []


class Joins:
    """The joins of one model.

    Args:
        communicator: Of this worker; its board carries the notes.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._board, self._timeout = communicator.board, communicator.timeout
        self._rank, self._num_workers = communicator.rank, communicator.num_workers
        self._number = 0
        self._used: list[str] = []  # keys of the join before, which every worker has left

    @contextmanager
    def enter(self, replica: Replica) -> Iterator[None]:
        """Let workers take unequal numbers of steps inside.

        Args:
            replica: Of this worker.

        Raises:
            ConfigurationError: For virtual workers, which take turns and cannot wait for each other.
            ExchangeError: If a worker neither steps nor leaves within the timeout.
        """
        if self._timeout is None:
            raise ConfigurationError(
                "virtual workers take turns, so none can answer in the background; call finish_window() on those "
                "without a batch instead of join()"
            )
        if replica.after_step is not None:
            raise TrainingError(f"{replica.here}: join() inside of another join() of the same model; one is enough")
        self._number += 1
        first, occasion = replica.t, _Occasion(replica, self._board, f"join {self._number}")
        replica.after_step = occasion.note
        _OCCASIONS.append(occasion)
        try:
            yield
            self._answer_until_all_left(occasion, self._timeout.total_seconds())
        finally:
            _OCCASIONS.remove(occasion)
            replica.after_step = None
        for key in self._used:
            self._board.delete(key)
        mine = range(first + (self._rank - first) % self._num_workers, replica.t, self._num_workers)
        self._used = [f"{occasion.name}/left"] if self._rank == 0 else []
        self._used += [f"{occasion.name}/left/{self._rank}", *(f"{occasion.name}/step/{t}" for t in mine)]

    @torch.no_grad()
    def _answer_until_all_left(self, occasion: _Occasion, timeout_s: float) -> None:
        board, name = self._board, occasion.name
        board.write(f"{name}/left/{self._rank}", 1)
        board.add(f"{name}/left", 1)
        deadline = time.monotonic() + timeout_s
        while True:
            all_left = board.add(f"{name}/left", 0) == self._num_workers  # read before the notes of steps
            answered = [each.answer() for each in _OCCASIONS]
            if any(answered):
                deadline = time.monotonic() + timeout_s
            elif all_left:
                return
            elif time.monotonic() > deadline:
                inside = [rank for rank in range(self._num_workers) if board.read(f"{name}/left/{rank}") is None]
                raise ExchangeError(
                    f"{occasion.replica.here}: ranks {inside} neither took a step nor left join() within the timeout "
                    "(consensus() must not be called inside of uneven work); look at the logs of these workers"
                )
            else:
                time.sleep(_POLL_S)
