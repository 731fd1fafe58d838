"""What shares a link leaves one after the other, in the order it was started."""

import threading
import time

import pytest
import torch

from decent_dp.comm import TorchCommunicator
from decent_dp.comm.conveyor import Conveyor


def overtakes(rank: int, n: int, in_turn: bool, workers_per_node: int, patience_s: float) -> bool:
    """Worker 0 sends to 1, which is not ready, and then to 2, which is: whether 1 sees 2 receive before it is ready."""
    communicator = TorchCommunicator()
    communicator.prepare([], [torch.device("cpu")], workers_per_node)
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


@pytest.mark.parametrize(
    ("in_turn", "workers_per_node", "waits"), [(True, 1, True), (False, 1, False), (True, 3, False)]
)
def test_a_later_swap_to_another_node_waits_for_the_one_before(pool, in_turn, workers_per_node, waits):
    patience_s = 1.0 if waits else 30.0
    assert pool.run(overtakes, 3, in_turn, workers_per_node, patience_s)[1] is not waits


class Gate:
    """An operation that ends when it is told to."""

    def __init__(self) -> None:
        self.has_started, self.may_end, self.error = threading.Event(), threading.Event(), None

    def start(self) -> "Gate":
        self.has_started.set()
        return self

    def wait(self) -> None:
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error


def test_no_more_chains_than_the_limit_are_past_their_first_operation():
    conveyor = Conveyor(limit=2)
    chains = [[Gate() for _ in range(3)] for _ in range(5)]
    handles = [conveyor.start([gate.start for gate in gates]) for gates in chains]
    assert all(first.has_started.is_set() for first, *_ in chains)
    for first, *_ in chains:
        first.may_end.set()
    for k in (0, 1):
        assert chains[k][1].has_started.wait(30)
    assert not chains[2][1].has_started.wait(0.2)
    chains[0][1].may_end.set()  # its last operation starts: it is handed over to whoever waits
    assert chains[2][1].has_started.wait(30)
    assert not chains[3][1].has_started.wait(0.2)
    for gates in chains:
        for gate in gates:
            gate.may_end.set()
    for handle in handles:
        handle.wait()
    conveyor.stop(timeout_s=30)


def test_an_error_lets_chains_go_that_wait_for_a_place():
    conveyor = Conveyor(limit=1)
    chains = [[Gate() for _ in range(3)] for _ in range(3)]
    handles = [conveyor.start([gate.start for gate in gates]) for gates in chains]
    chains[0][1].error = RuntimeError("lost")
    for gates in chains:
        for gate in gates:
            gate.may_end.set()
    for handle in handles:
        with pytest.raises(RuntimeError, match="lost"):
            handle.wait()
    assert not chains[1][1].has_started.is_set()
    conveyor.stop(timeout_s=30)
