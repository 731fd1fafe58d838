"""Tensors of any stride, as bytes that can travel and back."""

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, in row-major order, as a flat uint8 tensor; a view where it can be."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, like: Tensor) -> Tensor:
    """Undo `to_bytes` for a tensor of the given dtype and shape."""
    return data.view(like.dtype).view(like.shape)


@torch.no_grad()
def write(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor; one that was expanded is written through to the memory behind it."""
    behind = tuple(
        slice(0, 1) if stride == 0 and size > 1 else slice(None)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    tensor[behind].copy_(value[behind])
