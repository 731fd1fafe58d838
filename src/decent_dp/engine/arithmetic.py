"""Passes over flat tensors that mix dtypes: on a CPU in pieces that stay in its cache, and without allocating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 2**17  # elements


def cast(flat: Tensor, out: Tensor) -> Tensor:
    """Round to the dtype of ``out``; what is out of its range becomes its largest number."""
    largest = torch.finfo(out.dtype).max
    if torch.finfo(flat.dtype).max <= largest * 1.01:
        return out.copy_(flat)
    for scratch, x, o in chunks(flat, out):
        o.copy_(torch.clamp(x, -largest, largest, out=scratch))
    return out


def mean(tensors: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> Tensor:
    """``sum(w x) / sum(w)``; the first tensor may be ``out``. Equal tensors give exactly the same again."""
    for position, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
        share = weight / sum(weights[: position + 1])
        if position == 0:
            if tensor is not out and (len(tensors) == 1 or not tensors[0].dtype == tensors[1].dtype == out.dtype):
                out.copy_(tensor)
        elif tensor.dtype != out.dtype:
            for scratch, o, x in chunks(out, tensor):
                o.lerp_(scratch.copy_(x), share)
        elif position == 1 and tensors[0].dtype == out.dtype:
            torch.lerp(tensors[0], tensor, share, out=out)
        else:
            out.lerp_(tensor, share)
    return out


def add_difference(x: Tensor, a: Tensor, b: Tensor, weight: float) -> None:
    """``x += weight * (a - b)``, in at least the dtype of ``x``; equal ``a`` and ``b`` leave ``x`` as it is."""
    for scratch, x_part, a_part, b_part in chunks(x, a, b):
        x_part.add_(scratch.copy_(a_part).sub_(b_part), alpha=weight)


def mix_wide(x: Tensor, received: Tensor, weight: float) -> None:
    """``x <- (1 - weight) x + weight * received``, rounded to the dtype of ``x`` once."""
    for scratch, x_part, r_part in chunks(x, received):
        x_part.copy_(scratch.copy_(x_part).lerp_(r_part.to(scratch.dtype), weight))


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk along flat tensors of one length: scratch of the wider dtype of the first two, and a part of each."""
    first = tensors[0]
    length = _CHUNK if first.device.type == "cpu" else max(first.numel(), 1)
    wide = torch.promote_types(first.dtype, tensors[1].dtype)
    scratch = torch.empty(min(length, first.numel()), dtype=wide, device=first.device)
    for begin in range(0, first.numel(), length):
        end = min(begin + length, first.numel())
        yield (scratch[: end - begin], *(tensor[begin:end] for tensor in tensors))
