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
    for scratch, x, o in chunks(flat.dtype, flat, out):
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
            for scratch, o, x in chunks(out.dtype, out, tensor):
                o.lerp_(scratch.copy_(x), share)
        elif position == 1 and tensors[0].dtype == out.dtype:
            torch.lerp(tensors[0], tensor, share, out=out)
        else:
            out.lerp_(tensor, share)
    return out


def add_difference(x: Tensor, a: Tensor, b: Tensor, weight: float) -> None:
    """``x += weight * (a - b)``, in at least the dtype of ``x``; equal ``a`` and ``b`` leave ``x`` as it is."""
    wide = torch.promote_types(x.dtype, a.dtype)
    for scratch, x_part, a_part, b_part in chunks(wide, x, a, b):
        x_part.add_(scratch.copy_(a_part).sub_(b_part), alpha=weight)


def add_rounded_difference(x: Tensor, a: Tensor, weight: float) -> None:
    """The same where ``b`` is ``x``, rounded to the dtype of ``a``."""
    for scratch, x_part, a_part in chunks(x.dtype, x, a):
        rounded = cast(x_part, torch.empty_like(a_part))
        x_part.add_(scratch.copy_(a_part).sub_(rounded), alpha=weight)


def mix_wide(x: Tensor, received: Tensor, weight: float) -> None:
    """``x <- (1 - weight) x + weight * received``, rounded to the dtype of ``x`` once."""
    for scratch, x_part, r_part in chunks(received.dtype, x, received):
        x_part.copy_(scratch.copy_(x_part).lerp_(r_part.to(scratch.dtype), weight))


def dtype_of_rest(wide: torch.dtype, narrow: torch.dtype) -> torch.dtype:
    """The dtype `split` needs for what rounding takes away."""
    return torch.int16 if (wide, narrow) == (torch.float32, torch.bfloat16) else wide


def split(wide: Tensor, rounded: Tensor, rest: Tensor) -> None:
    """Round, and keep what that takes away: `join` has the number again, to the last bit. Spoils ``wide``."""
    if rest.dtype == torch.int16:  # bfloat16 is the upper half of a float32; the lower half becomes its distance
        bits = wide.view(torch.int32)
        upper = (bits + 2**15) >> 16
        rounded.view(torch.int16).copy_(upper)
        rest.copy_(bits.sub_(upper << 16))
    else:
        torch.sub(wide, cast(wide, rounded), out=rest)


def join(rounded: Tensor, rest: Tensor, out: Tensor) -> Tensor:
    """Undo `split`."""
    if rest.dtype == torch.int16:
        out.view(torch.int32).copy_(rounded.view(torch.int16)).mul_(2**16).add_(rest)
    else:
        torch.add(rest, rounded, out=out)
    return out


def chunks(wide: torch.dtype, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk along flat tensors of one length: scratch of a dtype, and a part of each."""
    numel, device = tensors[0].numel(), tensors[0].device
    length = _CHUNK if device.type == "cpu" else max(numel, 1)
    scratch = torch.empty(min(length, numel), dtype=wide, device=device)
    for begin in range(0, numel, length):
        end = min(begin + length, numel)
        yield (scratch[: end - begin], *(tensor[begin:end] for tensor in tensors))
