"""What the engine needs from whatever moves bytes.

Two implementations: `decent_dp.comm.TorchCommunicator` between processes, and `decent_dp.comm.InProcessWorld` for
virtual workers that share one process. Everything that takes time comes as a pair: a ``start_*`` method returns a
`Handle`, and ``wait`` finishes it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor


class WorkerLost(Exception):  # noqa: N818 - a report of the communicator, turned into an ExchangeError with step and bucket
    """Other workers did not answer.

    Args:
        ranks: The workers that were waited for.
        reason: What happened, in words.
        causes: The workers whose logs will tell why; ``ranks`` when None.
    """

    def __init__(self, ranks: Sequence[int], reason: str, causes: Sequence[int] | None = None) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)
        self.reason = reason
        self.causes = self.ranks if causes is None else tuple(causes)

    def again(self) -> "WorkerLost":
        """The same, to be raised by a communicator that keeps this one: a traceback would keep the model alive."""
        return WorkerLost(self.ranks, self.reason, self.causes)


def name_ranks(ranks: Sequence[int]) -> str:
    """How messages call one worker, or several of which one is meant."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {list(ranks)}"


class Handle(Protocol):
    """Something in flight."""

    def wait(self) -> None:
        """Return once buffers are filled and payloads may be overwritten; calling it again does nothing.

        On an accelerator the wait is on the current stream, not on the host.

        Raises:
            WorkerLost: If a worker died, hung, or is not at the same step.
        """


class Board(Protocol):
    """Numbers that all workers of a model can read and write, for agreements outside of the step."""

    def write(self, key: str, value: int) -> None:
        """Set a number."""

    def read(self, key: str) -> int | None:
        """Return a number, None when nobody has written it."""

    def delete(self, key: str) -> None:
        """Forget a number, if there is one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0, and return the sum, in one indivisible operation."""


class Communicator(Protocol):
    """Moves tensors between the workers of one model.

    Payloads and buffers belong to the communicator from start until wait returns: nobody writes a payload, nobody reads
    a buffer.
    """

    rank: int
    num_workers: int

    @property
    def timeout(self) -> timedelta | None:
        """How long a worker may be silent; None if workers take turns, so that nobody can wait for another."""

    @property
    def board(self) -> Board:
        """Shared by the workers of this communicator alone; to be used after `prepare`."""

    def prepare(self, cliques: Sequence[tuple[int, ...]], devices: Sequence[Any], workers_per_node: int = 1) -> None:
        """Set up what the given cliques need, on all workers in the same order; nothing where it is there already.

        Args:
            cliques: Every distinct set of workers that will be summed or gathered over, sorted.
            devices: Devices of the tensors that will travel.
            workers_per_node: Workers on one machine, which reach each other without its network.
        """

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
        """Send a tensor to each of some workers and receive one from each of some others.

        Args:
            payloads: What this worker sends, contiguous, for each rank of ``send_to``; may be the same tensor.
            send_to: Ranks that receive it.
            receive_from: Ranks that send to this worker.
            buffers: One tensor like what is sent for each rank of ``receive_from``.
            tag: Equal on both sides, below 2**30; tells exchanges of different steps and buckets apart.
            in_turn: Whether what this worker sends to other nodes leaves after what it sent there in turn before.
                Several at a time would share a link unequally, and this step could come to wait for a bucket while
                those of the next are sent.
        """

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> Handle:
        """Replace a tensor by its sum over a clique (over all workers without ``ranks``), in place."""

    def start_chain(self, operations: Sequence[Callable[[], Handle]], device: Any) -> Handle:
        """Start operations one after the other, each when the one before it is finished.

        They go on by themselves; those of virtual workers when one of them waits.

        Args:
            operations: Each starts one, with what earlier ones have brought. May be called on another thread.
            device: Where their tensors are.
        """

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int] | None = None) -> Handle:
        """Collect the payload of every member of a clique (of all workers without ``ranks``), in rank order."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""

    def gather(self, value: Any) -> list[Any]:
        """Return what every worker passed, in rank order (small objects; used while a model is set up).

        Virtual workers are built one after the other and get the values of those built so far.
        """

    def close(self) -> None:
        """Let go of connections. Waits for nothing."""
