"""Virtual workers: n replicas in one process that take the library's own step in turns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp.comm import InProcessWorld
from decent_dp.ddp import OPTIM_FN_TYPE, DecentralizedDataParallel
from decent_dp.simulate.plans import share_plans
from decent_dp.topology import AnyTopology, Layout, build


class VirtualWorkers:
    """One wrapped model for each worker of a topology.

    Each is a `DecentralizedDataParallel` on a `decent_dp.comm.InProcessWorld`: what mixes and updates the replicas is
    the code that trains on a cluster.

    Args:
        make: Makes one replica, whose forward returns a loss; all start from the values of the first.
        topology: Who mixes with whom, for as many workers as it has.
        optim_fn: As for the wrapper.

    Example:
        >>> from functools import partial
        >>> from decent_dp.topology import Layout, build
        >>> class Slope(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.x = nn.Parameter(torch.zeros(1))
        ...     def forward(self, slope):
        ...         return slope * self.x.sum()
        >>> workers = VirtualWorkers(Slope, build("exp", Layout(2, 1)), partial(torch.optim.SGD, lr=1.0))
        >>> workers.step([(1.0,), (3.0,)])
        >>> workers.parameters().tolist()
        [[-1.0], [-3.0]]
        >>> workers.step([(0.0,), (0.0,)])
        >>> workers.parameters().tolist()
        [[-2.0], [-2.0]]
    """

    def __init__(self, make: Callable[[], nn.Module], topology: AnyTopology, optim_fn: OPTIM_FN_TYPE) -> None:
        layout, shared = topology.layout, share_plans(topology)
        world = InProcessWorld(layout.num_workers)
        self.models = [
            DecentralizedDataParallel(
                make(),
                optim_fn,
                topology=shared,
                communicator=world.communicator(rank),
                workers_per_node=layout.workers_per_node,
            )
            for rank in range(layout.num_workers)
        ]
        self._parameters = [list(model.module.parameters()) for model in self.models]

    def step(self, batches: Sequence[tuple[Any, ...]]) -> None:
        """Forward and backward of every worker on its batch, in rank order: one step."""
        for model, batch in zip(self.models, batches, strict=True):
            model(*batch).backward()

    def parameters(self) -> Tensor:
        """The replicas after the last update, shape (workers, parameters), copied."""
        with torch.no_grad():
            return torch.stack([torch.cat([p.flatten() for p in own]) for own in self._parameters])

    @torch.no_grad()
    def overwrite(self, X: Tensor) -> None:
        """Give every worker a row of ``X`` as its replica, and forget what is in flight."""
        for model, own, x in zip(self.models, self._parameters, X, strict=True):
            model.synchronize(drop=True)
            begin = 0
            for p in own:
                p.copy_(x[begin : begin + p.numel()].view_as(p))
                begin += p.numel()


class AllReduced(VirtualWorkers):
    """What torch's DistributedDataParallel would compute: one replica, updated with the mean of all gradients.

    The replicas of all workers are equal, so one stands for them: a window of accumulation over everybody's batches.

    Args:
        make: As for `VirtualWorkers`.
        optim_fn: As for the wrapper.
    """

    def __init__(self, make: Callable[[], nn.Module], optim_fn: OPTIM_FN_TYPE) -> None:
        super().__init__(make, build("complete", Layout(1, 1)), optim_fn)

    def step(self, batches: Sequence[tuple[Any, ...]]) -> None:
        """One update with the mean gradient of all batches."""
        (model,) = self.models
        *others, last = batches
        with model.no_sync():
            for batch in others:
                (model(*batch) / len(batches)).backward()
        (model(*last) / len(batches)).backward()

    def overwrite(self, X: Tensor) -> None:
        """Start from the mean of the rows of ``X``."""
        super().overwrite(X.mean(0, keepdim=True))
