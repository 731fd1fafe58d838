"""Parameters that travel together, with their optimizer and the exchange they are in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.engine.exchange import Arrived, Exchange
from decent_dp.engine.settings import OptimizerFactory, SchedulerFactory, Settings
from decent_dp.engine.storage import FlatStorage, has_strides
from decent_dp.errors import ConfigurationError, TrainingError
from decent_dp.topology import Average


class Bucket:
    """One bucket.

    Args:
        index: Position in release order.
        names: Name of each parameter in the model.
        parameters: The parameters, of one dtype and device.
        settings: What the user chose.

    Attributes:
        exchange: The round in flight, or what came out of it and is not mixed yet.
    """

    def __init__(
        self, index: int, names: Sequence[str], parameters: Sequence[nn.Parameter], settings: Settings
    ) -> None:
        self.index = index
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.storage = FlatStorage(parameters, as_view=settings.param_as_bucket_view)
        flat, wire_dtype = self.storage.flat, settings.wire_dtype
        #: Whether a narrower copy travels instead of the parameters.
        self.is_narrowed = wire_dtype is not None and wire_dtype.itemsize < flat.element_size()
        self.wire_dtype = wire_dtype if self.is_narrowed and wire_dtype is not None else flat.dtype
        self.exchange: Exchange | Arrived | None = None
        self.optimizer: Optimizer
        self.scheduler: LRScheduler | None = None
        self._check_finite = settings.check_finite
        self._state: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def attach(self, optim_fn: OptimizerFactory, lr_scheduler_fn: SchedulerFactory | None) -> None:
        """Build the optimizer and the scheduler."""
        self.optimizer = optim_fn(list(zip(self.names, self.parameters, strict=True)))
        for group in getattr(self.optimizer, "param_groups", []):
            for key, value in group.items():
                if isinstance(value, Tensor):  # such as a learning rate, which schedulers change in place
                    group[key] = value.clone()
        if lr_scheduler_fn is not None:
            self.scheduler = lr_scheduler_fn(self.optimizer)
            if self.scheduler is None:
                raise ConfigurationError("lr_scheduler_fn returned None; it must return the scheduler it makes")

    def state(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a named tensor of this bucket, made once and kept."""
        key = (name, numel, dtype)
        if key not in self._state:
            self._state[key] = torch.empty(numel, dtype=dtype, device=self.storage.flat.device)
        return self._state[key]

    def sums_in_shards(self, plan: Average) -> bool:
        """Whether members average a part each, or one collective sums the whole."""
        is_narrow = self.is_narrowed or self.wire_dtype.itemsize <= 2
        return is_narrow or (plan.in_shards and self.storage.flat.device.type == "cpu")

    def update(self) -> None:
        """Let the optimizer use the gradients, and consume them.

        Raises:
            TrainingError: If the optimizer does not take a sparse gradient; names the parameter.
        """
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is not None and grad.layout == torch.strided and not has_strides(grad, parameter.stride()):
                # fused kernels walk along memory and would pair the wrong elements
                parameter.grad = torch.empty_like(parameter).copy_(grad)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            for name, parameter in zip(self.names, self.parameters, strict=True):
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise TrainingError(
                        f"parameter '{name}' has a sparse gradient, which {type(self.optimizer).__name__} does not "
                        "take; use sparse=False in its module, or an optimizer that takes sparse gradients, such as "
                        "torch.optim.SGD without momentum or torch.optim.SparseAdam"
                    ) from error
            raise
        for parameter in self.parameters:
            parameter.grad = None

    def check_finite(self, here: str) -> None:
        """Refuse to send numbers that are not finite, if the user asked for the check."""
        if self._check_finite and not self.storage.flat.isfinite().all():
            names = [n for n, p in zip(self.names, self.parameters, strict=True) if not p.isfinite().all()]
            raise TrainingError(
                f"{here}: parameter '{names[0]}' is not finite after the update, and mixing would spread it to other "
                "workers; look at this worker's loss and learning rate, and restart from a checkpoint"
            )

    @property
    def description(self) -> str:
        """How messages call this bucket."""
        return f"bucket {self.index} (first parameter '{self.names[0]}')"
