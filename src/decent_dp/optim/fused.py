"""Torch's fused Adam kernel, and which parameters it can serve.

The fused kernel walks the memory of its tensors from the first element to the last. So it needs a device and
a dtype that torch has the kernel for, and tensors that fill their memory without gaps or overlaps and all in
one order.
"""

import functools

import torch
from torch import Tensor


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


def fused_adam(
    params: list[Tensor],
    grads: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
) -> None:
    """Run the kernel itself: torch.optim.adam.adam around it sorts its tensors first, which costs more than a batch.

    Args:
        params: Of one device and dtype, each with `supports_fused`; changed.
        grads: Read only. Like the moments, they lie in memory as `params` do.
        first_moments: Changed.
        second_moments: Changed.
        steps: For each parameter the number of this step, 1 for the first, as a float32 scalar on its device.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decoupled_weight_decay: AdamW instead of Adam.
    """
    kernel = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    kernel(
        params, grads, first_moments, second_moments, [], steps,
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip


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
        step = [torch.ones((), device=device, dtype=torch.float32)]
        try:
            fused_adam(
                x, g, m, v, step,
                lr=0.0, beta1=0.9, beta2=0.999, eps=1.0, weight_decay=0.0, decoupled_weight_decay=False,
            )  # fmt: skip
        except RuntimeError:
            return False
    return True
