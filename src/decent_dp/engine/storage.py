"""One contiguous tensor for the parameters of a bucket."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decent_dp.engine.bucketing import plan_offsets

_ALIGN_BYTES = 64  # as torch's own CPU allocations, so kernels take the same path as without bucket views


class FlatStorage:
    """Parameters of one dtype and device in one flat tensor.

    With ``as_view`` the parameters *are* views of the flat tensor, so sending and mixing touch memory once. Without it
    they stay where they are, and `pack` and `unpack` copy. Views keep the strides of the parameter where these are
    dense (channels_last stays channels_last).

    Args:
        parameters: Tensors of one dtype and device.
        as_view: Whether to move the parameters into the flat tensor.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, as_view: bool) -> None:
        first = parameters[0]
        offsets, total = plan_offsets([p.numel() for p in parameters], _ALIGN_BYTES // first.element_size())
        storage = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.parameters = tuple(parameters)
        self.as_view = as_view
        self._is_complex = first.is_complex()
        self._places = [(p.shape, dense_strides(p), offset) for p, offset in zip(parameters, offsets, strict=True)]
        self._views = self._cut(storage)
        #: Real-valued view of everything: complex numbers travel and mix as pairs of reals.
        self.flat = torch.view_as_real(storage).flatten() if storage.is_complex() else storage
        self._pack()
        if as_view:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor laid out like `flat` (any dtype) into one view per parameter."""
        if self._is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return self._cut(flat)

    def pack(self) -> None:
        """Make `flat` hold the parameters."""
        if not self.as_view:
            self._pack()

    def unpack(self) -> None:
        """Make the parameters hold `flat`, and let autograd know that they changed."""
        if not self.as_view:
            with torch.no_grad():
                for parameter, view in zip(self.parameters, self._views, strict=True):
                    parameter.copy_(view)
        else:
            torch.autograd.graph.increment_version(self.parameters)

    def _pack(self) -> None:
        with torch.no_grad():
            for view, parameter in zip(self._views, self.parameters, strict=True):
                view.copy_(parameter)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        start = flat.storage_offset()
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._places]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of a tensor: its own where they are dense, else contiguous ones."""
    return torch.empty_like(tensor, device="meta").stride()


def has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether elements lie in memory as the strides say; those of dimensions of size 1 do not matter."""
    own = tensor.stride()
    return own == strides or all(n <= 1 or a == b for n, a, b in zip(tensor.shape, own, strides, strict=True))
