"""What a worker is about to set up, checked and put into words that workers can compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.engine.agree import Facts
from decent_dp.engine.bucketing import plan_buckets
from decent_dp.engine.storage import dense_strides
from decent_dp.errors import ConfigurationError
from decent_dp.topology import Layout, Topology, catalog


def check_arguments(
    optim_fn: Any,
    lr_scheduler_fn: Any,
    grad_clip_norm: float,
    bucket_size_in_mb: float,
    wire_dtype: torch.dtype | None,
) -> None:
    if not callable(optim_fn):
        raise ConfigurationError(
            f"optim_fn is {type(optim_fn).__name__}; it must be a function that takes (name, tensor) pairs and "
            "returns an optimizer, for example functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    if lr_scheduler_fn is not None and not callable(lr_scheduler_fn):
        raise ConfigurationError(
            f"lr_scheduler_fn is {type(lr_scheduler_fn).__name__}; it must be a function that takes an "
            "optimizer and returns a scheduler, or None"
        )
    if not grad_clip_norm >= 0:
        raise ConfigurationError(f"grad_clip_norm must be 0 (no clipping) or a positive norm, got {grad_clip_norm}")
    if not bucket_size_in_mb > 0:
        raise ConfigurationError(f"bucket_size_in_mb must be positive, got {bucket_size_in_mb}")
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise ConfigurationError(
            f"wire_dtype must be a floating dtype such as torch.bfloat16, or None, got {wire_dtype}"
        )


def name_buckets(model: nn.Module, capacity_bytes: int) -> list[list[str]]:
    """Plan the buckets and return the names of their parameters, in release order."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sizes = [p.numel() * p.element_size() for _, p in trainable]
    kinds = [(p.dtype, p.device) for _, p in trainable]
    return [
        [trainable[index][0] for index in members] for members in plan_buckets(sizes, kinds, max(capacity_bytes, 1))
    ]


def describe_model(
    model: nn.Module,
    layout: Layout,
    topology: Any,
    names: list[list[str]],
    wire_dtype: torch.dtype | None,
    as_view: bool,
    average_buffers: bool,
) -> Facts:
    """What must be equal on all workers, in the order in which a difference is best explained."""
    if not isinstance(topology, Topology):
        raise ConfigurationError(
            f"topology is {type(topology).__name__}; it must be a name ({', '.join(catalog.names())}) or a "
            "decent_dp.Topology"
        )
    if topology.layout.num_workers != layout.num_workers:
        raise ConfigurationError(
            f"the topology '{topology.name}' is for {topology.layout.num_workers} workers and there are "
            f"{layout.num_workers}; build it for the number of workers of the process group"
        )
    return [
        ("the layout", f"{layout.num_workers} workers, {layout.workers_per_node} a node"),
        ("the topology", f"'{topology.name}' ({topology.fingerprint()})"),
        ("the wire dtype", str(wire_dtype)),
        ("param_as_bucket_view", str(as_view)),
        ("sync_buffer_in_global_avg", str(average_buffers)),
        *(
            (f"parameter {number}", f"'{name}' {_shape(p)}{'' if p.requires_grad else ', frozen'}")
            for number, (name, p) in enumerate(model.named_parameters())
        ),
        *((f"buffer {number}", f"'{name}' {_shape(b)}") for number, (name, b) in enumerate(model.named_buffers())),
        ("the number of buckets", str(len(names))),
    ]


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, strides {list(dense_strides(tensor))}"


def describe_optimizer(optimizer: Optimizer, scheduler: LRScheduler | None) -> str:
    return type(optimizer).__name__ + ("" if scheduler is None else f" with {type(scheduler).__name__}")
