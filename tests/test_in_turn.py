"""Swaps in turn leave one after the other, in the order they were started."""

import time

import pytest
import torch

from decent_dp.comm import TorchCommunicator


def overtakes(rank: int, n: int, in_turn: bool, patience_s: float) -> bool:
    """Worker 0 sends to 1, which is not ready, and then to 2, which is: whether 1 sees 2 receive before it is ready."""
    communicator = TorchCommunicator()
    communicator.prepare([], [torch.device("cpu")])
    has_overtaken = False
    if rank == 1:
        deadline = time.monotonic() + patience_s
        while not has_overtaken and time.monotonic() < deadline:
            has_overtaken = communicator.board.read("received") is not None
            time.sleep(0.01)
    handles, received = [], {}
    for tag, other in [(4, 1), (8, 2)]:
        if rank in (0, other):
            partner = other if rank == 0 else 0
            received[partner] = torch.empty(1000)
            payload = torch.full((1000,), float(10 * rank + partner))
            handles.append(
                communicator.start_swap([payload], [partner], [partner], [received[partner]], tag, in_turn=in_turn)
            )
    for handle in handles:
        handle.wait()
    if rank == 2:
        communicator.board.write("received", 1)
    assert all((buffer == 10 * partner + rank).all() for partner, buffer in received.items())
    communicator.close()
    return has_overtaken


@pytest.mark.parametrize(("in_turn", "patience_s"), [(True, 1.0), (False, 30.0)])
def test_a_later_swap_waits_for_the_one_before(pool, in_turn, patience_s):
    assert pool.run(overtakes, 3, in_turn, patience_s)[1] is not in_turn
