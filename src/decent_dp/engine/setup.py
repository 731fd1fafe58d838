"""From a module and settings to buckets that are equal on all workers."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.comm.protocol import Communicator
from decent_dp.engine.agree import Facts, agree
from decent_dp.engine.bucket import Bucket
from decent_dp.engine.bucketing import plan_buckets
from decent_dp.engine.guards import check_module, check_optimizer
from decent_dp.engine.settings import Settings
from decent_dp.engine.storage import dense_strides
from decent_dp.topology import AnyTopology, Layout


def set_up(
    model: nn.Module,
    settings: Settings,
    workers_per_node: int,
    communicator: Communicator,
    trained_before: Collection[int] | None = None,
) -> tuple[AnyTopology, tuple[Bucket, ...]]:
    """Build topology, groups, buckets and optimizers; a collective call of all workers.

    Args:
        model: The module; its parameters may become views of buckets.
        settings: What the user chose.
        workers_per_node: Workers on one machine.
        communicator: Of all workers.
        trained_before: Ids of parameters that were trained already and keep their values; the others start from those
            of rank 0. All parameters and buffers do when None.

    Returns:
        The topology, and the buckets in release order.

    Raises:
        ConfigurationError: On all workers; `MismatchError` on those where nothing is wrong.
    """

    def plan() -> tuple[Facts, tuple[AnyTopology, list[list[str]]]]:
        """Everything that changes nothing."""
        settings.check()
        check_module(
            model,
            as_view=settings.param_as_bucket_view,
            scaled=settings.active_scaler is not None,
            wrapped_before=trained_before is not None,
        )
        layout = Layout(communicator.num_workers, workers_per_node)
        topology = settings.build_topology(layout)
        names = _name_buckets(model, settings.bucket_bytes)
        return _facts(model, layout, topology, names, settings), (topology, names)

    topology, names = agree(communicator, plan)
    parameters = dict(model.named_parameters())
    devices = {tensor.device for tensor in [*parameters.values(), *model.buffers()]}
    is_on_cpu = all(device.type == "cpu" for device in devices)
    cliques = [c for c in topology.cliques() if not (is_on_cpu and topology.layout.are_apart_or_together(c))]
    communicator.prepare(cliques, sorted(devices, key=str), workers_per_node)
    buckets = tuple(
        Bucket(index, members, [parameters[name] for name in members], settings) for index, members in enumerate(names)
    )
    communicator.broadcast(_to_copy(model, buckets, trained_before))
    for bucket in buckets:
        bucket.storage.unpack()

    def build() -> tuple[Facts, None]:
        """The optimizers: the user's code may fail or differ on one worker only."""
        for bucket in buckets:
            bucket.attach(settings.optim_fn, settings.lr_scheduler_fn)
            check_optimizer(bucket)
        facts = [(f"the optimizer of {b.description}", _describe(b.optimizer, b.scheduler)) for b in buckets]
        return facts, None

    agree(communicator, build)
    return topology, buckets


def _to_copy(model: nn.Module, buckets: tuple[Bucket, ...], trained_before: Collection[int] | None) -> list[Tensor]:
    if trained_before is not None:
        trained = (p for bucket in buckets for p in bucket.parameters)
        return [p for p in trained if id(p) not in trained_before]
    bucketed = {id(p) for bucket in buckets for p in bucket.parameters}
    frozen = [p for p in model.parameters() if id(p) not in bucketed]
    buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
    return [*(bucket.storage.flat for bucket in buckets), *frozen, *buffers]


def _name_buckets(model: nn.Module, capacity_bytes: int) -> list[list[str]]:
    """Plan the buckets and return the names of their parameters, in release order."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sizes = [p.numel() * p.element_size() for _, p in trainable]
    kinds = [(p.dtype, p.device) for _, p in trainable]
    return [[trainable[index][0] for index in members] for members in plan_buckets(sizes, kinds, capacity_bytes)]


def _facts(
    model: nn.Module, layout: Layout, topology: AnyTopology, names: list[list[str]], settings: Settings
) -> Facts:
    """What must be equal on all workers, in the order in which a difference is best explained."""
    return [
        ("the layout", f"{layout.num_workers} workers, {layout.workers_per_node} a node"),
        ("the topology", f"'{topology.name}' ({topology.fingerprint()})"),
        ("wire_dtype", str(settings.wire_dtype)),
        ("param_as_bucket_view", str(settings.param_as_bucket_view)),
        ("sync_buffer_in_global_avg", str(settings.sync_buffer_in_global_avg)),
        *(
            (f"parameter {number}", f"'{name}' {_shape(p)}{'' if p.requires_grad else ', frozen'}")
            for number, (name, p) in enumerate(model.named_parameters())
        ),
        *((f"buffer {number}", f"'{name}' {_shape(b)}") for number, (name, b) in enumerate(model.named_buffers())),
        ("the number of buckets", str(len(names))),
    ]


def _shape(tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"{list(tensor.shape)} {str(tensor.layout).removeprefix('torch.')}"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, strides {list(dense_strides(tensor))}"


def _describe(optimizer: Optimizer, scheduler: LRScheduler | None) -> str:
    return type(optimizer).__name__ + ("" if scheduler is None else f" with {type(scheduler).__name__}")
