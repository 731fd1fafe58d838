"""What must not change under a wrapped model, and what cannot be wrapped at all."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from decent_dp.engine.bucket import Bucket
from decent_dp.engine.hooks import is_hooked
from decent_dp.errors import ConfigurationError, ModelChangedError

_MIXABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_module(module: nn.Module, *, as_view: bool, scaled: bool, wrapped_before: bool) -> None:
    """Refuse models that cannot be wrapped.

    Args:
        module: The model.
        as_view: Whether parameters will become views of buckets.
        scaled: Whether a loss scaler will unscale the gradients.
        wrapped_before: Whether it is wrapped already, by the wrapper that asks.

    Raises:
        ConfigurationError: No trainable parameter, one not initialised, of a dtype that cannot be averaged, on another
            device than the rest, sharing memory with another tensor, or trained by another wrapper.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigurationError(
                f"'{name}' is not initialised yet; run one batch through the lazy module before wrapping it"
            )
    if not trainable:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient; there is nothing to train, so call it "
            "unwrapped"
        )
    expected = next((p.device for _, p in trainable if p.device.type != "meta"), trainable[0][1].device)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_parameter = isinstance(tensor, nn.Parameter)
        if tensor.device.type == "meta" or (is_parameter and tensor.device.type != expected.type):
            raise ConfigurationError(
                f"{'parameter' if is_parameter else 'buffer'} '{name}' is on {tensor.device} and others are on "
                f"{expected}; move the whole model to the device of this worker (model.to(device)) before wrapping it"
            )
    for name, parameter in trainable:
        _check_parameter(name, parameter, as_view=as_view, scaled=scaled)
        if not wrapped_before and is_hooked(parameter):
            raise ConfigurationError(
                f"parameter '{name}' is trained by another DecentralizedDataParallel already; delete that one "
                "first, or "
                "call its refresh() after changing the model"
            )
    _check_memory(module, as_view=as_view)


def _check_parameter(name: str, parameter: nn.Parameter, *, as_view: bool, scaled: bool) -> None:
    if parameter.dtype not in _MIXABLE or parameter.layout != torch.strided:
        what = parameter.dtype if parameter.layout == torch.strided else parameter.layout
        raise ConfigurationError(
            f"parameter '{name}' is {what}, which cannot be averaged; freeze it, or make it dense and one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _MIXABLE)}"
        )
    if scaled and (parameter.dtype == torch.float16 or parameter.is_complex()):
        raise ConfigurationError(
            f"parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}, whose gradients a GradScaler does "
            "not unscale; keep parameters in float32 and run the forward under torch.autocast"
        )
    expanded = any(n > 1 and s == 0 for n, s in zip(parameter.shape, parameter.stride(), strict=True))
    if expanded and not as_view:
        raise ConfigurationError(
            f"parameter '{name}' is expanded, so that several of its elements are one number in memory; pass "
            "param_as_bucket_view=True, or clone it before wrapping"
        )


def _check_memory(module: nn.Module, *, as_view: bool) -> None:
    """Refuse different tensors that share memory, where moving or updating one would silently part or change them."""
    tensors: list[tuple[str, Tensor, bool]] = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
    tensors += [(name, b, False) for name, b in module.named_buffers() if b.layout == torch.strided]
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t) * t.element_size(), name, trained)
        for name, t, trained in tensors
        if t.numel() and t.layout == torch.strided
    )
    reach: dict[bool, tuple[int, str]] = {True: (0, ""), False: (0, "")}  # furthest end so far, trained or not
    for begin, end, name, trained in spans:
        for other_trained, (other_end, other) in reach.items():
            matters = (trained and other_trained) or (as_view and (trained or other_trained))
            if begin < other_end and matters:
                raise ConfigurationError(
                    f"'{other}' and '{name}' share memory but are different tensors, so training would part them; tie "
                    "parameters by assigning the same Parameter (b.weight = a.weight), and clone() what should not "
                    "follow"
                )
        reach[trained] = max(reach[trained], (end, name))


def _extent(tensor: Tensor) -> int:
    """Number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def check_optimizer(bucket: Bucket) -> None:
    """Refuse what `optim_fn` or `lr_scheduler_fn` returned if it does not serve exactly this bucket."""
    optimizer: Any = bucket.optimizer
    scheduler: Any = bucket.scheduler
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optim_fn returned {type(optimizer).__name__}; it takes a list of (name, tensor) pairs and returns a "
            "torch.optim.Optimizer, for example functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step needs a closure that evaluates the loss again, which cannot happen "
            "inside backward; use an optimizer whose step() takes no closure (SGD, AdamW, ...)"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in zip(bucket.names, bucket.parameters, strict=True) if id(p) not in held]
    if missing or len(held) != len(bucket.parameters):
        problem = f"leaves out '{missing[0]}'" if missing else "holds parameters that it was not given"
        raise ConfigurationError(
            f"the optimizer that optim_fn returned for {bucket.description} {problem}; optim_fn is called once "
            "per bucket and "
            "must put exactly the parameters of its argument into a new optimizer (freeze what should not be trained)"
        )
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau steps on a metric, which differs from worker to worker; use a scheduler that depends on "
            "the step alone, or set param_group['lr'] of every optimizer in model.optimizers from a metric that all "
            "workers share"
        )
    if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
        what = type(scheduler).__name__
        raise ConfigurationError(
            f"lr_scheduler_fn returned "
            f"{what}{' of another optimizer' if isinstance(scheduler, LRScheduler) else ''}; it "
            "must return a torch.optim.lr_scheduler.LRScheduler of the optimizer it is given"
        )


class ParameterWatch:
    """Notices parameters that were replaced, added, converted or thawed after wrapping.

    Args:
        module: The wrapped module.
        trained: Parameters the wrapper updates.
        as_view: Whether they live in buckets, so that their memory must stay where it is.
    """

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], *, as_view: bool) -> None:
        self._module = module
        names = {id(p): name for name, p in module.named_parameters()}
        self._ids = {id(p) for p in trained}
        in_order = [p for p in module.parameters() if id(p) in self._ids]
        self._trained = [(names[id(p)], p, p.dtype, p.stride(), p.data_ptr() if as_view else None) for p in in_order]
        self._remember()

    def _remember(self) -> None:
        """Note who holds whom, so that later checks need not walk the tree by name."""
        self._holders = [
            (held, tuple(held.values()))
            for owner in self._module.modules()
            for held in (owner._modules, owner._parameters)
        ]
        self._frozen = [(name, p) for name, p in self._module.named_parameters() if id(p) not in self._ids]

    def check(self) -> None:
        """Raise `ModelChangedError` naming the first parameter that is not what it was."""
        for held, before in self._holders:
            if len(held) != len(before) or not all(map(operator.is_, held.values(), before)):
                self._check_tree()
                self._remember()
                break
        for name, parameter, dtype, strides, data_ptr in self._trained:
            if parameter.dtype != dtype:
                raise _changed(name, f"was {dtype} and is {parameter.dtype} now")
            if parameter.stride() != strides:
                raise _changed(name, "was converted to another memory format")
            if data_ptr is not None and parameter.data_ptr() != data_ptr:
                raise _changed(name, "was moved to other memory, for example by .to() or by assigning to .data")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise _changed(name, "was frozen and requires a gradient now")

    def _check_tree(self) -> None:
        present = {id(p) for p in self._module.parameters()}
        for name, parameter, *_ in self._trained:
            if id(parameter) not in present:
                raise _changed(name, "was replaced or removed")
        known = self._ids | {id(p) for _, p in self._frozen}
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in known and parameter.requires_grad:
                raise _changed(name, "was added")


def _changed(name: str, what: str) -> ModelChangedError:
    return ModelChangedError(
        f"parameter '{name}' {what}, after the model was wrapped, so it would no longer be trained together "
        "with the other "
        "workers. Call refresh() on all workers after such a change; load weights with load_state_dict (without "
        "assign=True)"
    )


class Refusal:
    """Raises when an optimizer that is not the wrapper's steps one of its parameters, until `remove` is called.

    Args:
        names: Names of the parameters, by id.
        own: The optimizers that may.
    """

    # one hook for all models: with one for each, many virtual workers would look at every step of every other
    _in_force: ClassVar[list[Refusal]] = []
    _own: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
    _hook: ClassVar[RemovableHandle | None] = None

    def __init__(self, names: dict[int, str], own: Sequence[Optimizer]) -> None:
        self._names = names
        self._own.update(own)
        self._in_force.append(self)
        if Refusal._hook is None:
            Refusal._hook = register_optimizer_step_pre_hook(Refusal._check)

    def remove(self) -> None:
        """Let others step the parameters again."""
        if self in self._in_force:
            self._in_force.remove(self)
        if not self._in_force and Refusal._hook is not None:
            Refusal._hook.remove()
            Refusal._hook = None

    @staticmethod
    def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in Refusal._own:
            return
        given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for refusal in list(Refusal._in_force):
            name = next((refusal._names[key] for key in given if key in refusal._names), None)
            if name is not None:
                raise ModelChangedError(
                    f"{type(optimizer).__name__}.step() was called with parameter '{name}', which "
                    "DecentralizedDataParallel updates inside backward(); remove the call and pass the "
                    "optimizer as optim_fn"
                )
