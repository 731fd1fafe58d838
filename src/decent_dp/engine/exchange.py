"""A round of one bucket in flight, and how what arrives is mixed.

What travels is the bucket's flat tensor, or a narrower copy of it. Three ways to move it:

- a `Swap` sends the parameters themselves, point to point;
- an `Average` sums a scaled copy over the clique, in place;
- an `Average` in 16 bits, or in a wire dtype narrower than the parameters, gathers the members' copies and averages
  them locally in at least float32, since a narrow sum overflows and forgets small differences.

With a narrower wire dtype the *difference of what both sides sent* is mixed: what one worker gains the others lose,
to the last bit of the wider dtype, and replicas that agree stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decent_dp.comm.protocol import Communicator, Handle, WorkerLost, name_ranks
from decent_dp.errors import ExchangeError
from decent_dp.topology import Average, Plan, Swap

if TYPE_CHECKING:
    from decent_dp.engine.bucket import Bucket

# Averages carry the step in one extra element: collectives match by order alone, so a worker that is one step off would
# otherwise be averaged without a word. Modulo 128 it is exact in every floating dtype.
_STEP_MODULUS = 128

_CHUNK = 2**17  # elements that conversions on a CPU work on at a time, so that they stay in its cache


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was started at one step and is finished at the next.

    Attributes:
        step: The step that started it.
        plan: What this worker does in the round.
        weight: Mixing weight: ``x <- (1 - weight) x + weight * received``; the mixing strength is in it.
        handle: Finishes the transfer.
        sent: What left, in the wire dtype; None when the parameters themselves travel.
        buffers: Where what others sent arrives.
        rank: This worker.
        where: How messages call the bucket.
    """

    step: int
    plan: Average | Swap
    weight: float
    handle: Handle
    sent: Tensor | None
    buffers: tuple[Tensor, ...]
    rank: int
    where: str

    def wait(self) -> None:
        """Return when nothing travels any more; mixes nothing."""
        try:
            self.handle.wait()
        except WorkerLost as failure:
            raise self.error(failure) from failure

    def error(self, failure: WorkerLost) -> ExchangeError:
        """Say which worker did not do its part of this exchange."""
        return _error(self.rank, self.step, self.where, failure)


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
        sent: What this worker sent, where that is narrower than its parameters.
    """

    step: int
    plan: Average | Swap
    received: Tensor
    weight: float
    sent: Tensor | None

    def wait(self) -> None:
        """Nothing travels any more."""


def start(bucket: Bucket, step: int, plan: Plan, communicator: Communicator, strength: float) -> Exchange | None:
    """Start one round of a bucket; None when this worker idles."""
    if not isinstance(plan, (Average, Swap)):
        return None
    bucket.storage.pack()
    bucket.check_finite(f"rank {communicator.rank}, step {step}")
    try:
        if isinstance(plan, Swap):
            weight = sum(plan.receive_from.values())
            handle, sent, buffers = _start_swap(bucket, step, plan, communicator)
        else:
            weight = plan.weight
            start_average = _start_gather if bucket.is_narrowed or bucket.wire_dtype.itemsize <= 2 else _start_sum
            handle, sent, buffers = start_average(bucket, step, plan, communicator)
    except WorkerLost as failure:
        raise _error(communicator.rank, step, bucket.description, failure) from failure
    return Exchange(step, plan, strength * weight, handle, sent, buffers, communicator.rank, bucket.description)


Started = tuple[Handle, Tensor | None, tuple[Tensor, ...]]


def _start_swap(bucket: Bucket, step: int, plan: Swap, communicator: Communicator) -> Started:
    payload, sent = bucket.storage.flat, None
    if bucket.is_narrowed:
        payload = sent = cast(payload, bucket.state("sent", payload.numel(), bucket.wire_dtype))
    senders = tuple(plan.receive_from)
    buffers = tuple(bucket.state(f"received {k}", payload.numel(), payload.dtype) for k in range(len(senders)))
    tag = step % 2**14 << 16 | bucket.index % 2**16
    return communicator.start_swap(payload, plan.send_to, senders, buffers, tag), sent, buffers


def _start_gather(bucket: Bucket, step: int, plan: Average, communicator: Communicator) -> Started:
    length = bucket.storage.flat.numel() + 1
    payload = bucket.state("sent", length, bucket.wire_dtype)
    sent = cast(bucket.storage.flat, payload[:-1])
    payload[-1] = step % _STEP_MODULUS
    buffers = tuple(bucket.state(f"received {k}", length, bucket.wire_dtype) for k in range(len(plan.ranks)))
    handle = communicator.start_gather(payload, buffers, plan.ranks)
    return handle, sent if bucket.is_narrowed else None, buffers


def _start_sum(bucket: Bucket, step: int, plan: Average, communicator: Communicator) -> Started:
    flat, k = bucket.storage.flat, len(plan.ranks)
    buffer = bucket.state("received 0", flat.numel() + 1, flat.dtype)
    torch.mul(flat, 1 / k, out=buffer[:-1])
    buffer[-1] = (step % _STEP_MODULUS) / k
    return communicator.start_sum(buffer, plan.ranks), None, (buffer,)


def finish(bucket: Bucket) -> Arrived | None:
    """Wait for the exchange of a bucket and take it out; None when there is none, or this worker only sent."""
    exchange, bucket.exchange = bucket.exchange, None
    if exchange is None or isinstance(exchange, Arrived):
        return exchange
    exchange.wait()
    if isinstance(exchange.plan, Average):
        _check_step(exchange)
    if not exchange.buffers:
        return None
    flat, buffers = bucket.storage.flat, exchange.buffers
    if isinstance(exchange.plan, Swap):
        received = _mean(buffers, tuple(exchange.plan.receive_from.values()), bucket, flat.dtype)
    elif len(buffers) > 1:
        members = tuple(buffer[:-1] for buffer in buffers)
        received = _mean(members, (1.0,) * len(members), bucket, torch.promote_types(flat.dtype, torch.float32))
    else:
        received = buffers[0][:-1]
    return Arrived(exchange.step, exchange.plan, received, exchange.weight, exchange.sent)


def mix(bucket: Bucket, arrived: Arrived) -> None:
    """``x <- (1 - weight) x + weight * received``, in one pass where sent and mixed dtype agree."""
    bucket.storage.pack()
    flat, received = bucket.storage.flat, arrived.received
    if arrived.sent is None and received.dtype == flat.dtype:
        flat.lerp_(received, arrived.weight)
    else:
        for scratch, x, r, s in _chunks(flat, received, arrived.sent):
            if s is not None:
                x.add_(scratch.copy_(r).sub_(s), alpha=arrived.weight)
            else:
                x.copy_(scratch.copy_(x).lerp_(r.to(scratch.dtype), arrived.weight))
    bucket.storage.unpack()


def _mean(tensors: tuple[Tensor, ...], weights: tuple[float, ...], bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """Return sum(w x) / sum(w): a single tensor as it is, several of the right dtype in the first of them."""
    if len(tensors) == 1:
        return tensors[0]
    mean = tensors[0] if tensors[0].dtype == dtype else bucket.state("mean", tensors[0].numel(), dtype)
    for position, tensor in enumerate(tensors):
        share = weights[position] / sum(weights[: position + 1])
        for scratch, m, x, _ in _chunks(mean, tensor, None):
            if position == 0:
                m.copy_(x)
            elif x.dtype == dtype:
                m.lerp_(x, share)
            else:
                m.lerp_(scratch.copy_(x), share)
    return mean


def cast(flat: Tensor, out: Tensor) -> Tensor:
    """Round to the wire dtype; what is out of its range is sent as its largest number."""
    largest = torch.finfo(out.dtype).max
    if torch.finfo(flat.dtype).max <= largest * 1.01:
        return out.copy_(flat)
    for scratch, x, o, _ in _chunks(flat, out, None):
        o.copy_(torch.clamp(x, -largest, largest, out=scratch))
    return out


def _chunks(
    first: Tensor, second: Tensor, third: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Walk along flat tensors in pieces that stay in cache, each with a scratch tensor of the wider dtype."""
    length = _CHUNK if first.device.type == "cpu" else first.numel()
    wide = torch.promote_types(first.dtype, second.dtype)
    scratch = torch.empty(min(length, first.numel()), dtype=wide, device=first.device)
    for begin in range(0, first.numel(), length):
        end = min(begin + length, first.numel())
        piece = None if third is None else third[begin:end]
        yield scratch[: end - begin], first[begin:end], second[begin:end], piece


def _check_step(exchange: Exchange) -> None:
    """Refuse to average members at different steps. Not on accelerators, which reading the element would stall."""
    assert isinstance(exchange.plan, Average)
    if exchange.buffers[0].device.type != "cpu":
        return
    ranks, expected = exchange.plan.ranks, exchange.step % _STEP_MODULUS
    others = tuple(rank for rank in ranks if rank != exchange.rank)
    if len(exchange.buffers) > 1:
        late = tuple(
            rank for rank, buffer in zip(ranks, exchange.buffers, strict=True) if buffer[-1].item() != expected
        )
    else:
        late = others if abs(exchange.buffers[0][-1].item() - expected) * len(ranks) > 0.5 else ()
    if late:
        raise exchange.error(WorkerLost(late, "it is at another step"))
