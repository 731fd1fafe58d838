"""What a problem is to the simulator."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decent_dp.errors import ConfigurationError


class Problem(ABC):
    """A loss for each worker, and measures of any replica. All that is random follows from the seed.

    Attributes:
        name: What reports call it.
        num_workers: Workers that share it.
        lr: A learning rate that works.
        is_flat: Whether the loss has no minimum, so that distances alone are of interest.
        starts: First replicas, shape (workers, parameters); None if all start from what `make` gives.
    """

    name: str
    lr: float = 0.1
    is_flat: bool = False
    starts: Tensor | None = None

    def __init__(self, num_workers: int, seed: int) -> None:
        if num_workers < 1:
            raise ConfigurationError(f"num_workers={num_workers}: give at least 1")
        self.num_workers = num_workers
        self.generator = torch.Generator().manual_seed(seed)

    @abstractmethod
    def make(self) -> nn.Module:
        """One replica; its forward takes a batch of `draw` and returns the loss."""

    @abstractmethod
    def draw(self) -> Sequence[tuple[Tensor, ...]]:
        """The batch of every worker for the next step."""

    @abstractmethod
    def evaluate(self, X: Tensor) -> dict[str, Tensor]:
        """Measures of replicas on everybody's data.

        Args:
            X: Shape (replicas, parameters).

        Returns:
            ``loss``, and ``accuracy`` if there are classes, each of shape (replicas,).
        """

    @property
    def num_parameters(self) -> int:
        """Parameters of a replica."""
        return sum(p.numel() for p in self.make().parameters())

    def factors(self, squared_distance: float, lr: float) -> dict[str, float]:
        """What a stationary squared consensus distance says of the topology alone, if anything."""
        return {}


class Vector(nn.Module):
    """Replicas that are one vector ``x`` of zeros."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))


def check_option(name: str, value: float, *, above: float = 0.0, up_to: float = math.inf) -> None:
    """Raise `ConfigurationError` unless the value lies between the bounds, which count."""
    if not above <= value <= up_to:
        bounds = f"{above:g} or more" if up_to == math.inf else f"between {above:g} and {up_to:g}"
        raise ConfigurationError(f"{name}={value}: give a number, {bounds}")


def split_by_label(labels: Tensor, num_workers: int, heterogeneity: float, generator: torch.Generator) -> list[Tensor]:
    """Deal samples to workers, equally many to each; a rest goes to nobody.

    Args:
        labels: Class of each sample, shape (samples,).
        num_workers: Workers.
        heterogeneity: Share of a worker's samples that come sorted by class, between 0 (all are drawn alike) and 1
            (a worker sees as few classes as can be).
        generator: Draws.

    Returns:
        Indices of the samples of each worker.

    Raises:
        ConfigurationError: There are fewer samples than workers.
    """
    check_option("heterogeneity", heterogeneity, up_to=1.0)
    each = len(labels) // num_workers
    if each < 1:
        raise ConfigurationError(f"{len(labels)} samples for {num_workers} workers: give at most {len(labels)} workers")
    shuffled = torch.randperm(len(labels), generator=generator)
    num_sorted = round(each * heterogeneity)
    by_class = shuffled[: num_sorted * num_workers]
    by_class = by_class[torch.argsort(labels[by_class], stable=True)]
    rest = shuffled[num_sorted * num_workers :]
    return [
        torch.cat(
            [
                by_class[rank * num_sorted : (rank + 1) * num_sorted],
                rest[rank * (each - num_sorted) : (rank + 1) * (each - num_sorted)],
            ]
        )
        for rank in range(num_workers)
    ]
