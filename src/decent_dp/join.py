"""Uneven work: a worker that has left its loop answers exchanges until all have left theirs.

Nobody counts workers while they train. A worker that leaves says so on a board that all can read and write, and then
takes steps without gradients: finish, mix, no update, start. They keep pace with the others by themselves, since
finishing a round waits for those it was played with. What has to be agreed on is the last step:

- before each such step a worker notes how far it is about to go, *then* reads how many have left;
- the one who leaves last reads all notes and writes the largest as the final step;
- whoever reads that all have left takes no step of its own accord, but goes on until the final one.

A step that was noted before all had left is therefore always in what the last one reads, and all end at the same step.
"""

from __future__ import annotations

import time

import torch

from decent_dp.comm.protocol import Communicator
from decent_dp.engine.replica import Replica

_POLL_S = 0.01


@torch.no_grad()
def answer_until_all_left(replica: Replica, communicator: Communicator, name: str) -> None:
    """Take steps without gradients until every worker has left and all are at the same step.

    Args:
        replica: Of this worker.
        communicator: Of this worker; its board carries the notes.
        name: Of this occasion, equal on all workers.
    """
    board, n = communicator.board, communicator.num_workers
    note = f"{name}/progress/{communicator.rank}"
    board.write(note, replica.t)
    if board.add(f"{name}/left", 1) == n:
        final = max(board.read(f"{name}/progress/{rank}") or 0 for rank in range(n))
        board.write(f"{name}/final", final)
    while True:
        replica.wait()  # the others are here, so nobody runs ahead by more than a cycle
        board.write(note, replica.t + 1)
        if board.add(f"{name}/left", 0) == n:
            break
        replica.finish_window()
    while (last := board.read(f"{name}/final")) is None:
        time.sleep(_POLL_S)
    while replica.t < last:
        replica.finish_window()
