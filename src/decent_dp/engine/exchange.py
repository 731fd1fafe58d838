"""A round of one bucket in flight, and how what arrives is mixed.

What travels is the bucket's flat tensor, or a narrower copy of it. Three ways to move it:

- a `Swap` sends the parameters themselves, point to point;
- an `Average` sums a scaled copy over the clique, in place;
- a `Sharded` round averages in shards, on two levels. So does an `Average` in 16 bits, or in a wire dtype narrower than
  the parameters, since a narrow sum overflows and forgets small differences; and one on CPUs where that is no detour,
  since it saves a pass, and the bucket size cannot change the order of the sum.

With a narrower wire dtype the *difference of what both sides sent* is mixed: what one worker gains the others lose,
to the last bit of the wider dtype, and replicas that agree stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle, WorkerLost, name_ranks
from decent_dp.engine.arithmetic import add_difference, add_rounded_difference, cast, mean, mix_wide
from decent_dp.engine.sharded import ShardedExchange
from decent_dp.errors import ExchangeError
from decent_dp.topology import Average, Idle, Plan, Sharded, Swap

if TYPE_CHECKING:
    from decent_dp.engine.bucket import Bucket

# Averages carry the step in one extra element: collectives match by order alone, so a worker that is one step off would
# otherwise be averaged without a word. Modulo 128 it is exact in every floating dtype.
_STEP_MODULUS = 128


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was started at one step and is finished at the next.

    Attributes:
        step: The step that started it.
        plan: What this worker does in the round.
        weight: Mixing weight: ``x <- (1 - weight) x + weight * received``; the mixing strength is in it.
        handle: Finishes the transfer.
        sent: What left, in the wire dtype; None when the parameters themselves travel, or it is not kept.
        take: Returns what was received, once the transfer is finished; None when this worker only sent.
        remainder: Returns `Arrived.remainder`, once the transfer is finished; None when there is none.
        rank: This worker.
        where: How messages call the bucket.
    """

    step: int
    plan: Average | Swap | Sharded
    weight: float
    handle: Handle
    sent: Tensor | None
    take: Callable[[], Tensor | None]
    remainder: Callable[[], tuple[int, Tensor]] | None
    rank: int
    where: str

    def wait(self) -> None:
        """Return when nothing travels any more; mixes nothing."""
        try:
            self.handle.wait()
        except WorkerLost as failure:
            raise _error(self.rank, self.step, self.where, failure) from failure


def _error(rank: int, step: int, where: str, failure: WorkerLost) -> ExchangeError:
    who, cause, reason = name_ranks(failure.ranks), name_ranks(failure.causes), failure.reason
    return ExchangeError(
        f"rank {rank}, step {step}: the exchange of {where} with {who} failed: {reason}. All workers must run the same "
        f"updates; look at the log of {cause}. This model cannot go on; restart from a checkpoint"
    )


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came out of an exchange: ``received`` is the other's parameters, or the clique's mean.

    Attributes:
        step: The step that started it.
        plan: What this worker did in the round.
        received: Laid out like the bucket's flat tensor; may be of a wider dtype.
        weight: Mixing weight.
        sent: What this worker sent, where that is narrower than its parameters and was kept.
        remainder: What this worker gains besides, ``weight * remainder`` from a position on, because rounding took it
            from what it received and all others in its clique did.
    """

    step: int
    plan: Average | Swap | Sharded
    received: Tensor
    weight: float
    sent: Tensor | None
    remainder: tuple[int, Tensor] | None = None

    def wait(self) -> None:
        """Nothing travels any more."""


def start(bucket: Bucket, step: int, plan: Plan, communicator: Communicator, strength: float) -> Exchange | None:
    """Start one round of a bucket; None when this worker idles."""
    if isinstance(plan, Idle):
        return None
    bucket.storage.pack()
    bucket.check_finite(f"rank {communicator.rank}, step {step}")
    tag = step % 2**10 << 18 | bucket.index % 2**16 << 2
    try:
        if isinstance(plan, Swap):
            weight, started = sum(plan.receive_from.values()), _start_swap(bucket, plan, tag, communicator)
        elif isinstance(plan, Sharded):
            weight, started = 1.0, _start_sharded(bucket, plan.ranks, plan.across, tag, communicator)
        elif bucket.sums_in_shards(plan):
            weight, started = plan.weight, _start_sharded(bucket, plan.ranks, Idle(), tag, communicator)
        else:
            weight, started = plan.weight, _start_sum(bucket, step, plan, communicator)
    except WorkerLost as failure:
        raise _error(communicator.rank, step, bucket.description, failure) from failure
    return Exchange(step, plan, strength * weight, *started, communicator.rank, bucket.description)


Started = tuple[Handle, Tensor | None, Callable[[], Tensor | None], Callable[[], tuple[int, Tensor]] | None]


def _start_swap(bucket: Bucket, plan: Swap, tag: int, communicator: Communicator) -> Started:
    flat = bucket.storage.flat
    sent = cast(flat, bucket.state("sent", flat.numel(), bucket.wire_dtype)) if bucket.is_narrowed else None
    payload = flat if sent is None else sent
    senders, weights = tuple(plan.receive_from), tuple(plan.receive_from.values())
    buffers = tuple(bucket.state(f"received {k}", payload.numel(), payload.dtype) for k in range(len(senders)))
    handle = communicator.start_swap([payload] * len(plan.send_to), plan.send_to, senders, buffers, tag, in_turn=True)

    def take() -> Tensor | None:
        if len(buffers) < 2:
            return buffers[0] if buffers else None
        dtype = bucket.storage.flat.dtype
        out = buffers[0] if payload.dtype == dtype else bucket.state("mean", payload.numel(), dtype)
        return mean(buffers, weights, out)

    return handle, sent, take, None


def _start_sharded(
    bucket: Bucket, ranks: tuple[int, ...], across: Swap | Idle, tag: int, communicator: Communicator
) -> Started:
    exchange = ShardedExchange(bucket, ranks, across, tag, communicator)
    return exchange.start(), None, lambda: exchange.received, exchange.remainder if bucket.is_narrowed else None


def _start_sum(bucket: Bucket, step: int, plan: Average, communicator: Communicator) -> Started:
    flat, k = bucket.storage.flat, len(plan.ranks)
    buffer = bucket.state("received 0", flat.numel() + 1, flat.dtype)
    torch.mul(flat, 1 / k, out=buffer[:-1])
    buffer[-1] = (step % _STEP_MODULUS) / k
    handle = communicator.start_sum(buffer, plan.ranks)
    return handle, None, partial(_take_sum, buffer, step, plan, communicator.rank), None


def _take_sum(buffer: Tensor, step: int, plan: Average, rank: int) -> Tensor:
    """Refuse an average over members at different steps. Not on accelerators, which reading the element would stall."""
    k = len(plan.ranks)
    if buffer.device.type == "cpu" and abs(buffer[-1].item() - step % _STEP_MODULUS) * k > 0.5:
        raise WorkerLost([other for other in plan.ranks if other != rank], "it is at another step")
    return buffer[:-1]


def finish(bucket: Bucket) -> Arrived | None:
    """Wait for the exchange of a bucket and take it out; None when there is none, or this worker only sent."""
    exchange, bucket.exchange = bucket.exchange, None
    if exchange is None or isinstance(exchange, Arrived):
        return exchange
    exchange.wait()
    try:
        received = exchange.take()
    except WorkerLost as failure:
        raise _error(exchange.rank, exchange.step, exchange.where, failure) from failure
    if received is None:
        return None
    remainder = None if exchange.remainder is None else exchange.remainder()
    return Arrived(exchange.step, exchange.plan, received, exchange.weight, exchange.sent, remainder)


def sent_by(bucket: Bucket, arrived: Arrived) -> Tensor | None:
    """What this worker sent, where that is narrower than its parameters, which nobody has changed since."""
    flat, received = bucket.storage.flat, arrived.received
    if arrived.sent is None and received.dtype.itemsize < flat.dtype.itemsize:
        return cast(flat, torch.empty_like(received))
    return arrived.sent


def mix(bucket: Bucket, arrived: Arrived) -> None:
    """``x <- (1 - weight) x + weight * received``, in one pass where sent and mixed dtype agree."""
    bucket.storage.pack()
    flat, received = bucket.storage.flat, arrived.received
    if arrived.sent is not None:
        add_difference(flat, received, arrived.sent, arrived.weight)
    elif received.dtype == flat.dtype:
        flat.lerp_(received, arrived.weight)
    elif received.dtype.itemsize < flat.dtype.itemsize:
        add_rounded_difference(flat, received, arrived.weight)
    else:
        mix_wide(flat, received, arrived.weight)
    if arrived.remainder is not None:
        begin, remainder = arrived.remainder
        flat[begin : begin + remainder.numel()].add_(remainder, alpha=arrived.weight)
    bucket.storage.unpack()
