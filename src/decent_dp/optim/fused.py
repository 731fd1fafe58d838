"""Which parameters torch's fused Adam kernel can serve.

The fused kernel walks the memory of its tensors from the first element to the last. So it needs a device and
a dtype that torch has the kernel for, and tensors that fill their memory without gaps or overlaps and all in
one order.
"""

import functools

import torch
from torch import Tensor
from torch.optim.adam import adam


def supports_fused(parameter: Tensor) -> bool:
    """Whether the fused Adam kernel gives the right answer for this parameter and its dense gradient.

    Args:
        parameter: Of any shape, dtype, device and layout.

    Returns:
        False for complex and sparse tensors, tensor subclasses, strided views with gaps, and dtypes or
        devices that this build of torch has no kernel for.

    Example:
        >>> supports_fused(torch.zeros(3, 2)), supports_fused(torch.zeros(3, dtype=torch.complex64))
        (True, False)
        >>> supports_fused(torch.zeros(3, 4)[:, ::2])
        False
    """
    return (
        parameter.is_floating_point()
        and is_plain(parameter)
        and is_dense(parameter)
        and _has_kernel(parameter.device, parameter.dtype)
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided tensor of torch itself, not a subclass with rules of its own."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Ask torch itself, with one element: its list of devices and dtypes grows from release to release."""
    with torch.no_grad():
        x, g, m, v = ([torch.zeros(1, device=device, dtype=dtype)] for _ in range(4))
        step = [torch.zeros((), device=device, dtype=torch.float32)]
        try:
            adam(
                x, g, m, v, [], step,
                fused=True, amsgrad=False, maximize=False,
                beta1=0.9, beta2=0.999, lr=0.0, weight_decay=0.0, eps=1.0,
            )  # fmt: skip
        except RuntimeError:
            return False
    return True
