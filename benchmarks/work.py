"""What a training step computes, the same for every side.

`Emulated` stands for an accelerator: its layers sleep for a set time, forward and backward, and leave the CPU to
others, while gradients, optimizer and bytes are real. `Transformer` is real and keeps the CPU busy.

Sleeps begin when a layer does, so CPU work between layers (hooks, optimizer) adds to the step, as kernels would.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_BYTES = 4  # of a parameter


class Sleeper:
    """Sleeps for set times; what one sleep overshoots, the next makes up for."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Release the CPU for that long."""
        begin = time.perf_counter()
        left = seconds - self._late_s
        if left > 0:
            time.sleep(left)
        self._late_s += time.perf_counter() - begin - seconds


class _Sleep(torch.autograd.Function):
    """Passes a tensor through; its backward makes a gradient of the weight, as of 1/2 ||weight||^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        layer.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        layer.sleep(layer.backward_s)
        return grads[0], layer.weight.detach() * 0.01, None


class SleepingLayer(nn.Module):
    """One matrix, and the time that computing with it takes."""

    def __init__(self, numel: int, compute_s: float, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel) / 100)
        self.forward_s, self.backward_s = compute_s / 3, compute_s * 2 / 3
        self._clock = clock

    def sleep(self, seconds: float) -> None:
        """Take the time, as long as this step makes it."""
        if seconds:
            self._clock.sleeper.sleep(seconds * self._clock.factor)

    def forward(self, x: Tensor) -> Tensor:
        """Take a third of the time; backward takes the rest."""
        return _Sleep.apply(x, self.weight, self)  # type: ignore[no-any-return]


@dataclass
class Clock:
    """How fast the emulated accelerator is in this step."""

    factor: float = 1.0
    sleeper: Sleeper = field(default_factory=Sleeper)


class Emulated:
    """Layers that sleep.

    Args:
        parameters_mib: Size of all parameters, float32.
        num_layers: Equal layers.
        compute_s: Time of all forwards and backwards of a step: one third, two thirds.
        jitter: Range (a, b) of U in compute_s * (1 + U[a, b]), drawn for every step and worker.
        seed: Of the jitter, which does not depend on the side.
    """

    def __init__(
        self,
        parameters_mib: float = 20,
        num_layers: int = 20,
        compute_s: float = 0.3,
        jitter: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        self.num_layers, self.compute_s = num_layers, compute_s
        self.numel = int(parameters_mib * 2**20 / _BYTES / num_layers)
        self.jitter, self.seed = tuple(jitter), seed
        self._clock = Clock()

    def network(self) -> nn.Module:
        """A new replica, equal on all workers."""
        torch.manual_seed(0)
        each_s = self.compute_s / self.num_layers
        return nn.Sequential(*(SleepingLayer(self.numel, each_s, self._clock) for _ in range(self.num_layers)))

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """The loss of one step; takes the time of the forward."""
        self._clock.sleeper = Sleeper()  # no step makes up for what one before it, of the warm-up perhaps, overshot
        self._clock.factor = 1 + random.Random(f"{self.seed} {step} {rank}").uniform(*self.jitter)
        return model(torch.zeros(1)).sum()  # type: ignore[no-any-return]


class Transformer:
    """A transformer encoder on random inputs.

    Args:
        width: Of its activations.
        num_layers: Of the encoder.
        batch: Sequences in a batch.
        length: Of a sequence.
        seed: Of the inputs.
    """

    def __init__(self, width: int = 256, num_layers: int = 6, batch: int = 4, length: int = 64, seed: int = 0) -> None:
        self.width, self.num_layers, self.batch, self.length, self.seed = width, num_layers, batch, length, seed

    def network(self) -> nn.Module:
        """A new replica, equal on all workers."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(self.width, self.width // 64, 4 * self.width, 0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, self.num_layers, enable_nested_tensor=False)
        return nn.Sequential(encoder, nn.Linear(self.width, self.width))

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """The loss of one step on inputs of its own."""
        generator = torch.Generator().manual_seed(1000 * step + rank + self.seed)
        x = torch.randn(self.batch, self.length, self.width, generator=generator)
        return (model(x) - x.roll(1, 1)).square().mean()


Work = Emulated | Transformer
_KINDS: dict[str, type[Work]] = {"emulated": Emulated, "transformer": Transformer}


def make(kind: str, **arguments: Any) -> Work:
    """Make the work of that kind: emulated or transformer."""
    return _KINDS[kind](**arguments)


def num_parameter_bytes(kind: str, **arguments: Any) -> int:
    """Bytes of all parameters, counted without making them."""
    with torch.device("meta"):
        network = make(kind, **arguments).network()
    return sum(p.numel() * p.element_size() for p in network.parameters())
