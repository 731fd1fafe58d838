"""What must not change under a wrapped model, and what cannot be wrapped at all."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from decent_dp.engine.storage import dense_strides
from decent_dp.errors import ConfigurationError, ModelChangedError

_MIXABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_module(module: nn.Module) -> None:
    """Refuse models that cannot be wrapped.

    Raises:
        ConfigurationError: No trainable parameter, one not initialised, of a dtype that cannot be averaged, on another
            device than the rest, or sharing memory with another one.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(parameter):
            raise ConfigurationError(
                f"'{name}' is not initialised yet; run one batch through the lazy module before wrapping it"
            )
    if not trainable:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient; there is nothing to train, so "
            "call it unwrapped"
        )
    expected = next((p.device for _, p in trainable if p.device.type != "meta"), trainable[0][1].device)
    for name, parameter in module.named_parameters():
        if parameter.device.type != expected.type or parameter.device.type == "meta":
            raise ConfigurationError(
                f"parameter '{name}' is on {parameter.device} and others are on {expected}; move the whole "
                "model to the device of this worker (model.to(device)) before wrapping it"
            )
    for name, parameter in trainable:
        if parameter.dtype not in _MIXABLE:
            raise ConfigurationError(
                f"parameter '{name}' is {parameter.dtype}, which cannot be averaged; freeze it or keep it in one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _MIXABLE)}"
            )
    _check_memory(trainable)


def _check_memory(trainable: Sequence[tuple[str, nn.Parameter]]) -> None:
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in trainable
        if p.numel() and p.stride() == dense_strides(p)
    )
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise ConfigurationError(
                f"parameters '{first}' and '{second}' share memory but are different Parameter objects, so "
                "they would drift apart; tie them by assigning the same Parameter (b.weight = a.weight)"
            )


def check_optimizer(optimizer: Any, scheduler: Any) -> None:
    """Refuse what `optim_fn` or `lr_scheduler_fn` returned if it cannot be stepped inside backward."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optim_fn returned {type(optimizer).__name__}; it takes a list of (name, tensor) pairs and returns a "
            "torch.optim.Optimizer, for example functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step needs a closure that evaluates the loss again, which cannot "
            "happen inside backward; use an optimizer whose step() takes no closure (SGD, AdamW, ...)"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau steps on a metric, which differs from worker to worker; use a scheduler that "
            "depends on the step alone, or set param_group['lr'] of every optimizer in model.optimizers from a "
            "metric that all workers share"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    module: nn.Module
    attribute: str
    name: str
    parameter: nn.Parameter
    frozen: bool
    data_ptr: int | None


class ParameterWatch:
    """Notices parameters that were replaced, converted or thawed after wrapping.

    Args:
        module: The wrapped module.
        trained: Parameters the wrapper updates.
        as_view: Whether they live in buckets, so that their memory must stay where it is.
    """

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], *, as_view: bool) -> None:
        known = {id(parameter) for parameter in trained}
        self._places = [
            _Place(owner, attribute, f"{prefix}.{attribute}" if prefix else attribute, parameter, id(parameter) not
            in known,
                   parameter.data_ptr() if as_view and id(parameter) in known else None)
            for prefix, owner in module.named_modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]  # fmt: skip
        self._dtypes = [place.parameter.dtype for place in self._places]

    def check(self) -> None:
        """Raise `ModelChangedError` naming the first parameter that is not what it was."""
        for place, dtype in zip(self._places, self._dtypes, strict=True):
            parameter = place.parameter
            if place.module._parameters.get(place.attribute) is not parameter:
                what = "was replaced by another Parameter"
            elif place.frozen:
                if not parameter.requires_grad:
                    continue
                what = "was frozen then and requires a gradient now"
            elif parameter.dtype != dtype:
                what = f"was {dtype} then and is {parameter.dtype} now"
            elif place.data_ptr is not None and parameter.data_ptr() != place.data_ptr:
                what = "was moved to other memory, for example by .to() or by assigning to .data"
            else:
                continue
            raise ModelChangedError(
                f"parameter '{place.name}' changed after the model was wrapped: it {what}, so it would no "
                "longer be trained together with the other workers. Call refresh() on all workers after such a change; "
                "load weights with load_state_dict (without assign=True)"
            )


def refuse_foreign_optimizers(names: dict[int, str], own: Sequence[Optimizer]) -> RemovableHandle:
    """Raise when an optimizer that is not the wrapper's steps one of its parameters.

    Args:
        names: Names of the parameters, by id.
        own: The optimizers that may.
    """
    allowed: weakref.WeakSet[Optimizer] = weakref.WeakSet(own)

    def check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in allowed:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    raise ModelChangedError(
                        f"{type(optimizer).__name__}.step() was called with parameter '{names[id(parameter)]}', which "
                        "DecentralizedDataParallel updates inside backward(); remove the call and pass the "
                        "optimizer as optim_fn"
                    )

    return register_optimizer_step_pre_hook(check)
