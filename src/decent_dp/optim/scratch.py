"""Scratch memory for copies of tensors, the same for one batch after another, so that it stays in the cache."""

from itertools import accumulate

import torch
from torch import Tensor

# In elements: a whole number of vectors for any dtype.
ALIGNMENT = 64


class Scratch:
    """Room for the copies of one list of dense tensors at a time."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors of one dtype and device; the copies before are lost.

        Args:
            tensors: Each fills its memory without gaps, in any order of dimensions.

        Returns:
            Copies that lie in memory as the originals do.
        """
        sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        *starts, end = accumulate(sizes, initial=0)
        if self._room is None or self._room.numel() < end:
            self._room = None  # before the new room is made: a device may not have memory for both
            self._room = torch.empty(end, dtype=tensors[0].dtype, device=tensors[0].device)
        room = self._room
        copies = [room.as_strided(t.shape, t.stride(), start) for t, start in zip(tensors, starts, strict=True)]
        torch._foreach_copy_(copies, tensors)
        return copies
