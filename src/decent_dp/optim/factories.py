"""Optimizers of the Adam family for one bucket: plain functions from named parameters to an optimizer.

Weight decay is decided by shape, not by name: matrices (2 dimensions or more: linear, convolution and
embedding weights) are decayed, vectors and scalars (biases, norms) are not. A bucket may hold only one of the
two.

The order of ``weight_decay`` and ``eps`` differs between the two pairs of factories, as in the original package, whose
scripts may pass them by position; new code names them.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from decent_dp.errors import ConfigurationError
from decent_dp.optim.accum_adam import AccumAdam, AccumAdamW
from decent_dp.optim.fused import supports_fused
from decent_dp.optim.hyperparameters import check_hyperparameters


def optim_fn_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
    *,
    fused: bool | None = None,
) -> Optimizer:
    """Make a torch.optim.Adam for one bucket, with L2 weight decay on matrices.

    Args:
        params: Named parameters of one bucket.
        lr: Learning rate, >= 0.
        beta1: Decay of the first moment per step, in [0, 1).
        beta2: Decay of the second moment per step, in [0, 1).
        weight_decay: λ of g ← g + λ x, >= 0, for parameters of 2 dimensions or more.
        eps: Added to the square root of the second moment, >= 0.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Returns:
        The optimizer, with at most two groups: decayed, not decayed. The groups keep the names.

    Raises:
        ConfigurationError: No parameters, parameters without names, or a hyperparameter that breaks its rule.

    Example:
        >>> import functools, torch
        >>> optim_fn = functools.partial(optim_fn_adam, lr=3e-4)
        >>> optimizer = optim_fn(list(torch.nn.Linear(3, 2).named_parameters()))
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 3.0517578125e-05), (['bias'], 0.0)]

    References:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, arXiv:1412.6980, Algorithm 1.
    """
    check_hyperparameters(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return Adam(_groups_for_torch(params, weight_decay, fused), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    *,
    fused: bool | None = None,
) -> Optimizer:
    """Make a torch.optim.AdamW for one bucket, with decoupled weight decay on matrices.

    Args:
        params: Named parameters of one bucket.
        lr: Learning rate, >= 0.
        beta1: Decay of the first moment per step, in [0, 1).
        beta2: Decay of the second moment per step, in [0, 1).
        weight_decay: λ of x ← (1 - lr λ) x, >= 0, for parameters of 2 dimensions or more.
        eps: Added to the square root of the second moment, >= 0.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Returns:
        The optimizer, with at most two groups: decayed, not decayed. The groups keep the names.

    Raises:
        ConfigurationError: No parameters, parameters without names, or a hyperparameter that breaks its rule.

    Example:
        >>> import functools, torch
        >>> optim_fn = functools.partial(optim_fn_adamw, lr=3e-4)
        >>> optimizer = optim_fn(list(torch.nn.Linear(3, 2).named_parameters()))
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 0.1), (['bias'], 0.0)]

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101,
        Algorithm 2.
    """
    check_hyperparameters(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return AdamW(_groups_for_torch(params, weight_decay, fused), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_accum_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
    *,
    fused: bool | None = None,
) -> Optimizer:
    """Make an `AccumAdam` for one bucket, with L2 weight decay on matrices.

    Args:
        params: Named parameters of one bucket.
        lr: Learning rate, >= 0.
        beta1: Decay of the first moment per window, in [0, 1).
        beta2: Decay of the second moment per window, in [0, 1).
        eps: Added to the square root of the second moment, >= 0.
        weight_decay: λ of g ← g + λ x, >= 0, for parameters of 2 dimensions or more.
        accum_iter: Steps in a window, >= 1: 4 for 4 or 8 workers, 8 for 16 or 32.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Returns:
        The optimizer, with at most two groups: decayed, not decayed. The groups keep the names.

    Raises:
        ConfigurationError: No parameters, parameters without names, or a hyperparameter that breaks its rule.

    Example:
        >>> import torch
        >>> optimizer = optim_fn_accum_adam(list(torch.nn.Linear(3, 2).named_parameters()), accum_iter=8)
        >>> [(group["param_names"], group["accum_iter"]) for group in optimizer.param_groups]
        [(['weight'], 8), (['bias'], 8)]

    References:
        Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025,
        arXiv:2410.11998, appendix.
    """
    groups = _decay_groups(params, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter, fused=fused)


def optim_fn_accum_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
    *,
    fused: bool | None = None,
) -> Optimizer:
    """Make an `AccumAdamW` for one bucket, with decoupled weight decay on matrices.

    Args:
        params: Named parameters of one bucket.
        lr: Learning rate, >= 0.
        beta1: Decay of the first moment per window, in [0, 1).
        beta2: Decay of the second moment per window, in [0, 1).
        eps: Added to the square root of the second moment, >= 0.
        weight_decay: λ of x ← (1 - lr λ) x, >= 0, for parameters of 2 dimensions or more.
        accum_iter: Steps in a window, >= 1: 4 for 4 or 8 workers, 8 for 16 or 32.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Returns:
        The optimizer, with at most two groups: decayed, not decayed. The groups keep the names.

    Raises:
        ConfigurationError: No parameters, parameters without names, or a hyperparameter that breaks its rule.

    Example:
        >>> import torch
        >>> optimizer = optim_fn_accum_adamw(list(torch.nn.Linear(3, 2).named_parameters()), lr=3e-4)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 0.1), (['bias'], 0.0)]

    References:
        Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025,
        arXiv:2410.11998, appendix.
    """
    groups = _decay_groups(params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter, fused=fused)


def _decay_groups(params: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Split named parameters into decayed matrices and the rest, in order, leaving out what is empty."""
    named = list(params)
    if not named:
        raise ConfigurationError(
            "no parameters were given: an optimizer needs one or more; pass list(model.named_parameters())"
        )
    for entry in named:
        if not (
            isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Tensor)
        ):
            raise ConfigurationError(
                f"the parameters contain an item of type {type(entry).__name__}: each must be a pair of name "
                "and tensor; pass list(model.named_parameters())"
            )
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    others = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    groups = ({"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _groups_for_torch(
    params: Iterable[tuple[str, Tensor]], weight_decay: float, fused: bool | None
) -> list[dict[str, Any]]:
    """Groups for torch's own optimizers, which must be told where the fused kernel works."""
    groups = _decay_groups(params, weight_decay)
    for group in groups:
        unsupported = [name for name, parameter in group["params"] if not supports_fused(parameter)]
        if fused and unsupported:
            raise ConfigurationError(
                f"fused=True with parameter {unsupported[0]!r}: torch has no fused Adam kernel for it; pass "
                "fused=None to use the kernel only where it exists"
            )
        # None leaves the choice between its other two kernels to torch.
        group["fused"] = None if fused is False or unsupported else True
    return groups
