"""Wrap n replicas of a model as virtual workers of one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import InProcessWorld


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
