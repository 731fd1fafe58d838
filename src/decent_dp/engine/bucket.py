"""Parameters that travel together, with their optimizer and the exchange they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.engine.exchange import Exchange
from decent_dp.engine.storage import FlatStorage

OptimizerFactory = Callable[[list[tuple[str, Tensor]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class Bucket:
    """One bucket.

    Args:
        index: Position in release order.
        names: Name of each parameter in the model.
        parameters: The parameters, of one dtype and device.
        as_view: Whether the parameters become views of the bucket's flat tensor.
        wire_dtype: Real dtype the bucket travels in where it is narrower than that of the parameters.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        as_view: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.index = index
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.storage = FlatStorage(parameters, as_view=as_view)
        flat = self.storage.flat
        #: Whether a narrower copy travels instead of the parameters.
        self.is_narrowed = wire_dtype is not None and wire_dtype.itemsize < flat.element_size()
        self.wire_dtype = wire_dtype if self.is_narrowed and wire_dtype is not None else flat.dtype
        self.exchange: Exchange | None = None
        self.optimizer: Optimizer
        self.scheduler: LRScheduler | None = None
        self._state: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def attach(self, optim_fn: OptimizerFactory, lr_scheduler_fn: SchedulerFactory | None) -> None:
        """Build the optimizer and the scheduler."""
        self.optimizer = optim_fn(list(zip(self.names, self.parameters, strict=True)))
        if lr_scheduler_fn is not None:
            self.scheduler = lr_scheduler_fn(self.optimizer)

    def state(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a named tensor of this bucket, made once and kept."""
        key = (name, numel, dtype)
        if key not in self._state:
            self._state[key] = torch.empty(numel, dtype=dtype, device=self.storage.flat.device)
        return self._state[key]

    def drop_gradients(self) -> None:
        """Consume the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def description(self) -> str:
        """How messages call this bucket."""
        return f"bucket {self.index} (first parameter '{self.names[0]}')"
