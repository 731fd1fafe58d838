"""The average of all replicas, for a while or for good.

Buffers, where asked for: floating ones are averaged; integer and bool ones take the values of rank 0, since a mean of
counters or flags means nothing. Non-persistent buffers are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle, PeerFailure
from decent_dp.engine.bucket import Bucket
from decent_dp.errors import ExchangeError


class Average:
    """The mean of all replicas, being computed; `start` and `finish` are one collective call of all workers.

    Waits first until nothing travels from the parameters; exchanges in flight keep what arrived and stay valid.

    Args:
        buckets: The parameters.
        buffers: Buffers of the module to average as well; empty when only parameters are.
        communicator: Of all workers.
    """

    def __init__(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], communicator: Communicator) -> None:
        self._buckets, self._buffers, self._communicator = tuple(buckets), tuple(buffers), communicator
        self._pending: list[tuple[Tensor, Callable[[], None]]] = []
        self._means: list[Tensor] = []
        self._saved: list[Tensor] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start the sums."""
        for bucket in self._buckets:
            if bucket.exchange is not None:
                bucket.exchange.wait()
            bucket.storage.pack()
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
        return [bucket.storage.flat for bucket in self._buckets] + list(self._buffers)

    def _write(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value)
        for bucket in self._buckets:
            bucket.storage.unpack()


def mean_over_workers(value: float, communicator: Communicator) -> Callable[[], float]:
    """Start averaging one number over all workers; the returned function finishes it."""
    share = torch.tensor([value / communicator.num_workers], dtype=torch.float64)
    handle = communicator.start_sum(share)

    def finish() -> float:
        _wait(handle, communicator.rank)
        return share.item()

    return finish


def _start_mean(tensor: Tensor, communicator: Communicator) -> tuple[Tensor, Callable[[], None]]:
    """Start averaging a tensor over all workers, in at least float32; rank 0's value if it is integer or bool."""
    if tensor.is_floating_point() or tensor.is_complex():
        wide = torch.promote_types(tensor.dtype, torch.float32)
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
    except PeerFailure as failure:
        raise ExchangeError(
            f"rank {rank}: averaging over all workers failed, waiting for {list(failure.ranks)}: "
            f"{failure.reason}. Every worker must call consensus(), global_avg() or consensus_distance() at the "
            "same point of its loop; evaluating the local replica needs none of them. This model cannot go on; "
            "restart from a checkpoint"
        ) from failure
