"""Wrap n replicas of a model as virtual workers of one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import InProcessWorld
from decent_dp.errors import TopologyError
from decent_dp.topology import Layout, build, names


def wrap_virtual(
    n: int, make: Callable[[int], nn.Module], optim_fn: Any, *args: Any, **options: Any
) -> list[DecentralizedDataParallel]:
    """Build one wrapper per virtual worker; ``make`` gets the rank."""
    world = InProcessWorld(n)
    return [
        DecentralizedDataParallel(make(rank), optim_fn, *args, communicator=world.communicator(rank), **options)
        for rank in range(n)
    ]


def stack(models: list[DecentralizedDataParallel]) -> Tensor:
    """Parameters of all workers, shape (workers, parameters)."""
    return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])


def names_for(n: int, workers_per_node: int) -> list[str]:
    """The names of the topologies that serve a layout."""

    def serves(name: str) -> bool:
        try:
            build(name, Layout(n, workers_per_node))
        except TopologyError:
            return False
        return True

    return [name for name in names() if serves(name)]
