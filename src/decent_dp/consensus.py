"""The average of all replicas, for a while or for good.

Buffers, where asked for: floating ones are averaged; integer and bool ones take the values of rank 0, since a mean of
counters or flags means nothing. Non-persistent buffers are treated alike; sparse ones stay local.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle, WorkerLost
from decent_dp.comm.tensors import write
from decent_dp.engine.replica import Replica
from decent_dp.errors import ExchangeError, TrainingError

#: Returns the buffers that a module has at the moment; it may replace them.
Buffers = Callable[[], Sequence[Tensor]]

_CALLS = {1: "consensus() or global_avg()", 2: "global_avg(will_revert=False)", 3: "consensus_distance()"}


class Average:
    """The mean of all replicas, being computed: `start`, `agree`, `finish` are one collective call of all workers.

    Waits first until nothing travels from the parameters; exchanges in flight keep what arrived and stay valid. Before
    anything is summed the workers compare what they are doing, since sums of different things pass without a word.

    Args:
        call: Key of the call, so that different calls do not meet.
        replica: The parameters, and their step.
        buffers: Returns the buffers to average as well, those that the module has now.
        communicator: Of all workers.
    """

    def __init__(self, call: int, replica: Replica, buffers: Buffers, communicator: Communicator) -> None:
        self._call, self._replica, self._communicator = call, replica, communicator
        self._buckets, self._buffers = replica.buckets, buffers
        self._headers: list[Tensor] = []
        self._handle: Handle
        self._pending: list[tuple[Tensor, Callable[[], None]]] = []
        self._means: list[Tensor] = []
        self._saved: list[Tensor] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start comparing."""
        self._replica.wait()
        for bucket in self._buckets:
            bucket.storage.pack()
        sizes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in self._tensors()]
        fingerprint = zlib.crc32(repr(sizes).encode())
        header = torch.tensor([self._call, self._replica.t, fingerprint], device=self._buckets[0].storage.flat.device)
        self._headers = [torch.empty_like(header) for _ in range(self._communicator.num_workers)]
        self._handle = self._communicator.start_gather(header, self._headers)

    @torch.no_grad()
    def agree(self) -> None:
        """Compare, and start the sums.

        Raises:
            ExchangeError: On all workers, if they call different things, are at different steps, or have buffers of
                different shapes.
        """
        _wait(self._handle, self._communicator.rank)
        headers = [header.tolist() for header in self._headers]
        for rank, header in enumerate(headers):
            if header != headers[0]:
                theirs, first = (f"{_CALLS.get(h[0], h[0])} at step {h[1]}" for h in (header, headers[0]))
                if theirs == first:
                    theirs, first = "buffers of other shapes", "its own"
                raise ExchangeError(
                    f"{self._replica.here}: the workers do not average the same thing: rank 0 has {first}, rank {rank} "
                    f"has {theirs}; every worker must make the same calls after the same number of updates (see join())"
                )
        self._pending = [_start_mean(tensor, self._communicator) for tensor in self._tensors()]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means; parameters stay as they are."""
        for _, finish in self._pending:
            finish()
        self._means = [mean for mean, _ in self._pending]
        self._pending = []

    @torch.no_grad()
    def distance_to_mean(self) -> float:
        """L2 distance of this worker's parameters to their mean; call it between `finish` and `apply`."""
        squares = 0.0
        for bucket, mean in zip(self._buckets, self._means, strict=False):
            squares += float((bucket.storage.flat.to(mean.dtype) - mean).double().square().sum())
        return math.sqrt(squares)

    @torch.no_grad()
    def apply(self, *, keep: bool) -> None:
        """Replace parameters (and buffers) by their mean; with ``keep`` remember what they were."""
        if keep:
            self._saved = [tensor.detach().clone() for tensor in self._tensors()]
        self._write(self._means)
        self._means = []

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `apply` replaced, bit for bit."""
        self._write(self._saved)
        self._saved = []

    def _tensors(self) -> list[Tensor]:
        return [*(bucket.storage.flat for bucket in self._buckets), *self._buffers()]

    def _write(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            write(tensor, value)
        for bucket in self._buckets:
            bucket.storage.unpack()


class Averager:
    """Replaces a replica by the average of all, and puts it back.

    Args:
        replica: Of this worker.
        communicator: Of all workers.
    """

    def __init__(self, replica: Replica, communicator: Communicator) -> None:
        self._replica, self._communicator = replica, communicator
        self._applied: Average | None = None

    def refuse_applied(self) -> None:
        """Raise while the replica is replaced by the average."""
        if self._applied is not None:
            raise TrainingError(
                f"{self._replica.here}: the replicas are replaced by their average; leave consensus() or call "
                "revert_global_avg() first"
            )

    def replace(self, buffers: Buffers, *, will_revert: bool, return_distance: bool) -> float | None:
        """Replace the replica (and buffers) by the average; see `DecentralizedDataParallel.global_avg`."""
        average = self._compute(1 if will_revert else 2, buffers)
        distance = average.distance_to_mean() if return_distance else None
        average.apply(keep=will_revert)
        if will_revert:
            self._applied = average
            self._replica.paused = (
                "an update while replicas are replaced by their average; leave consensus() or call revert_global_avg() "
                "before training goes on (global_avg(will_revert=False) keeps the average)"
            )
        else:
            self._replica.drop_exchanges()
        return distance

    def revert(self) -> None:
        """Put the replica back."""
        if self._applied is None:
            raise TrainingError(
                f"{self._replica.here}: revert_global_avg() without global_avg(will_revert=True) before it"
            )
        self._applied.restore()
        self._applied = None
        self._replica.paused = None

    def distance(self) -> float:
        """Root mean square over workers of the L2 distance to their mean."""
        average = self._compute(3, list)
        device = self._replica.buckets[0].storage.flat.device
        with self._replica.fails_on_error():
            return math.sqrt(mean_over_workers(average.distance_to_mean() ** 2, device, self._communicator)())

    def _compute(self, call: int, buffers: Buffers) -> Average:
        self._replica.check_usable()
        self.refuse_applied()
        average = Average(call, self._replica, buffers, self._communicator)
        with self._replica.fails_on_error():
            average.start()
            average.agree()
            average.finish()
        return average


def mean_over_workers(value: float, device: torch.device, communicator: Communicator) -> Callable[[], float]:
    """Start averaging one number over all workers; the returned function finishes it."""
    share = torch.tensor([value / communicator.num_workers], dtype=torch.float64, device=device)
    handle = communicator.start_sum(share)

    def finish() -> float:
        _wait(handle, communicator.rank)
        return share.item()

    return finish


def _start_mean(tensor: Tensor, communicator: Communicator) -> tuple[Tensor, Callable[[], None]]:
    """Start averaging a tensor over all workers, in at least float32; rank 0's value if it is integer or bool."""
    if tensor.is_floating_point() or tensor.is_complex():
        is_wide = tensor.is_complex() or tensor.dtype.itemsize >= 4  # float8 has no promotion
        wide = torch.promote_types(tensor.dtype, torch.float32) if is_wide else torch.float32
        mean = tensor.detach().to(wide).div(communicator.num_workers).contiguous()
    else:
        mean = tensor.detach().to(torch.int64, copy=True).contiguous()
        if communicator.rank != 0:
            mean.zero_()
    if mean.numel() == 0:
        return mean, lambda: None
    handle = communicator.start_sum(torch.view_as_real(mean) if mean.is_complex() else mean)
    return mean, lambda: _wait(handle, communicator.rank)


def _wait(handle: Handle, rank: int) -> None:
    try:
        handle.wait()
    except WorkerLost as failure:
        raise ExchangeError(
            f"rank {rank}: averaging over all workers failed, waiting for {list(failure.ranks)}: "
            f"{failure.reason}. Every worker must call consensus(), global_avg() or consensus_distance() at the "
            "same point of its loop; evaluating the local replica needs none of them. This model cannot go on; "
            "restart from a checkpoint"
        ) from failure
