"""The only file that knows autograd: when gradients are ready, and when a backward ends.

[Note: two signals] A hook on each parameter fires after its gradient was accumulated. Parameters outside the loss never
fire, so the first hook of a backward also queues a callback at the end of that backward. Both run inside
``backward()``, so the first one already updates the parameters before it returns.

[Note: nested backward] A backward may start another one: activation checkpointing with ``use_reentrant=True``, or a
custom function. The inner one ends while the outer goes on, and a parameter used in several segments fires once in
each. Gradients of inner backwards are therefore complete only when the outermost ends. Its end can be awaited only from
inside it: from one of its own parameter hooks, or from a hook on the model's output, which every outermost backward
passes first.

[Note: stale graph] A loss computed before an update must not be differentiated after it: the saved activations
belong to the old parameters. The hook on the output remembers the step it was made at.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction


class BackwardListener(Protocol):
    """Who wants to know what a backward does."""

    t: int

    def backward_started(self, computed_at: int) -> None:
        """The first gradient of a backward has come, from an output computed at a step.

        The backward before may have been interrupted.
        """

    def gradient_ready(self, index: int) -> None:
        """Gradient number ``index`` is complete."""

    def gradient_growing(self, index: int) -> None:
        """Gradient number ``index`` may change until the outermost backward ends, or a later hook wants to see it."""

    def backward_finished(self) -> None:
        """No gradient will follow in this backward."""

    def nested_backward(self, index: int) -> None:
        """Gradient number ``index`` came from a nested backward whose outermost one is unknown."""


class _Reference(weakref.ref["BackwardHooks"]):
    """What the hooks on parameters hold on to."""


class BackwardHooks:
    """Hooks on parameters; they keep neither the listener nor this object alive.

    Args:
        parameters: Numbered in this order.
        listener: Held weakly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], listener: BackwardListener) -> None:
        self._listener = weakref.ref(listener)
        self._task: int | None = None  # the outermost backward under way
        self._any_gradient = False  # whether it reached one of the parameters
        self._computed_at: int | None = None  # step of the oldest output it came through
        # a compiler that follows a backward into the hooks would trace the library
        self._call = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
        me = _Reference(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._call, me, BackwardHooks._fired, index)
            )
            for index, parameter in enumerate(parameters)
        ]

    def remove(self) -> None:
        """Remove every hook; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()

    def watch_output(self, output: Any) -> None:
        """Notice backwards that start from a model's output. See [Note: nested backward] and [Note: stale graph]."""
        listener = self._listener()
        for tensor in _tensors(output):
            if listener is not None and tensor.grad_fn is not None:
                passed = partial(self._call, _Reference(self), BackwardHooks._passed_output, listener.t)
                tensor.register_hook(passed)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forget a backward that was interrupted."""
        self._task = None

    def _passed_output(self, t: int, _gradient: Tensor) -> None:
        if self._enter() and (self._computed_at is None or t < self._computed_at):
            self._computed_at = t

    def _enter(self) -> bool:
        """Note the outermost backward of the current thread; False inside a nested one."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return True
        if _is_nested():
            return False
        self._task, self._any_gradient, self._computed_at = task, False, None
        torch.autograd.Variable._execution_engine.queue_callback(
            partial(self._call, _Reference(self), BackwardHooks._finished, task)
        )
        return True

    def _fired(self, index: int, parameter: Tensor) -> None:
        listener = self._listener()
        if listener is None:
            return
        outermost = self._enter()
        if self._task is None:
            listener.nested_backward(index)
        if not self._any_gradient:
            self._any_gradient = True
            listener.backward_started(listener.t if self._computed_at is None else self._computed_at)
        # a hook of the user that was registered after ours still wants to see the gradient
        is_last = next(reversed(parameter._post_accumulate_grad_hooks)) == self._handles[index].id
        if outermost and is_last:
            listener.gradient_ready(index)
        else:
            listener.gradient_growing(index)

    def _finished(self, task: int) -> None:
        if task != self._task:
            return
        self._task = None
        listener = self._listener()
        if listener is not None and self._any_gradient:
            listener.backward_finished()


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def is_hooked(parameter: Tensor) -> bool:
    """Whether a living `BackwardHooks` listens to a parameter."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(h, partial) and isinstance(h.args[0], _Reference) and h.args[0]() for h in hooks.values())


def _tensors(output: Any, depth: int = 5) -> Iterator[Tensor]:
    """Find the tensors in what a module returned: in containers, dataclasses and plain objects."""
    if isinstance(output, Tensor):
        yield output
    elif depth > 0 and not isinstance(output, (nn.Module, type, str, int, float, type(None))):
        inside: Iterable[Any] = ()
        if isinstance(output, Mapping):
            inside = output.values()
        elif isinstance(output, (list, tuple, set)):
            inside = output
        elif hasattr(output, "__dict__") or hasattr(output, "__slots__"):
            names = [*getattr(output, "__dict__", ()), *getattr(output, "__slots__", ())]
            inside = [getattr(output, name, None) for name in names]
        for value in inside:
            yield from _tensors(value, depth - 1)


def _call(hooks: weakref.ref[BackwardHooks], method: Callable[..., None], argument: int, *rest: Tensor) -> None:
    alive = hooks()
    if alive is not None:
        method(alive, argument, *rest)


def _is_nested() -> bool:
    """Whether a custom function's backward is on the stack, and with it an outer backward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
