"""A module whose backward raises in the middle, on demand."""

import torch
from torch import Tensor, nn


class Boom(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        raise ValueError("boom")


class Fragile(nn.Module):
    """Two layers; backward raises where `position` says: at the "start", in the "middle", or not at all (None)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.position: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(Boom.apply(x) if self.position == "middle" else x)
        return Boom.apply(x) if self.position == "start" else x
