"""What the user chose for a wrapped model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.errors import ConfigurationError
from decent_dp.topology import AnyTopology, FunctionOfTime, Layout, Topology, catalog

OptimizerFactory = Callable[[list[tuple[str, Tensor]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


#: Which wrapper's settings each scaler belongs to.
_OWNERS: weakref.WeakKeyDictionary[GradScaler, weakref.ref[Settings]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Settings:
    """Arguments of `decent_dp.ddp.DecentralizedDataParallel`, which explains them."""

    optim_fn: OptimizerFactory
    lr_scheduler_fn: SchedulerFactory | None
    topology: str | AnyTopology
    scaler: GradScaler | None
    grad_clip_norm: float
    param_as_bucket_view: bool
    sync_buffer_in_global_avg: bool
    bucket_size_in_mb: float
    wire_dtype: torch.dtype | None
    check_finite: bool

    def check(self) -> None:
        """Refuse what cannot work, whatever the model.

        Raises:
            ConfigurationError: Naming the argument.
        """
        if not callable(self.optim_fn):
            raise ConfigurationError(
                f"optim_fn is {type(self.optim_fn).__name__}; it must be a function that takes (name, tensor) "
                "pairs and "
                "returns an optimizer, for example functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        if self.lr_scheduler_fn is not None and not callable(self.lr_scheduler_fn):
            raise ConfigurationError(
                f"lr_scheduler_fn is {type(self.lr_scheduler_fn).__name__}; it must be a function that takes an "
                "optimizer and returns a scheduler, or None"
            )
        if not isinstance(self.topology, (str, Topology, FunctionOfTime)):
            raise ConfigurationError(
                f"topology is {type(self.topology).__name__}; it must be a name ({', '.join(catalog.names())}) or a "
                "decent_dp.Topology"
            )
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise ConfigurationError(
                f"scaler is {type(self.scaler).__name__}; it must be a torch.amp.GradScaler or None"
            )
        if self.scaler is not None:
            owner = _OWNERS.get(self.scaler)
            if owner is not None and owner() not in (None, self):
                raise ConfigurationError(
                    "scaler is used by another DecentralizedDataParallel, and each updates its scale once per step; "
                    "give every wrapped model a GradScaler of its own"
                )
            _OWNERS[self.scaler] = weakref.ref(self)
        if not (isinstance(self.grad_clip_norm, Real) and self.grad_clip_norm >= 0):
            raise ConfigurationError(
                f"grad_clip_norm must be 0 (no clipping) or a positive norm, got {self.grad_clip_norm}"
            )
        if not (isinstance(self.bucket_size_in_mb, Real) and self.bucket_size_in_mb > 0):
            raise ConfigurationError(f"bucket_size_in_mb must be positive, got {self.bucket_size_in_mb}")
        wire = self.wire_dtype
        if wire is not None and not (isinstance(wire, torch.dtype) and wire.is_floating_point and wire.itemsize >= 2):
            raise ConfigurationError(
                f"wire_dtype must be a floating dtype of 16 bits or more, such as torch.bfloat16, or None; got {wire}"
            )

    @property
    def bucket_bytes(self) -> int:
        """Capacity of a bucket in bytes."""
        return max(1, int(min(self.bucket_size_in_mb, 2**40) * 2**20))

    @property
    def active_scaler(self) -> GradScaler | None:
        """The scaler, unless it is disabled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def build_topology(self, layout: Layout) -> AnyTopology:
        """Return the topology for a layout.

        Raises:
            TopologyError: If the name is unknown or cannot serve the layout.
            ConfigurationError: If a `Topology` value is for another number of workers.
        """
        if isinstance(self.topology, str):
            return catalog.build(self.topology, layout)
        if self.topology.layout.num_workers != layout.num_workers:
            raise ConfigurationError(
                f"the topology '{self.topology.name}' is for {self.topology.layout.num_workers} workers and there are "
                f"{layout.num_workers}; build it for the number of workers of the process group"
            )
        return self.topology
