"""The dense recursion every run is compared with: plain torch, one matrix product per round, float64.

    x_i(t+1) = sum_j W[i, j] x_j(t) + update_i(g_i(x_i(t)))

where W is the round that was started with x(t), that is round t - 1, and the identity at t = 0.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from decent_dp.optim import optim_fn_accum_adamw

STEPS = 20
BUCKET_MB = 150 / 2**20  # bytes; four or more buckets for the network below


def make_network(seed: int = 0) -> nn.Module:
    """Tanh between layers, so that gradients depend on every parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_batch(t: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Different for every step, micro-batch and worker."""
    generator = torch.Generator().manual_seed(10_000 * t + 100 * micro + rank)
    return (
        torch.randn(4, 3, dtype=torch.float64, generator=generator) + 0.3 * rank,
        torch.randn(4, 2, dtype=torch.float64, generator=generator),
    )


def loss_of(model: Callable[[Tensor], Tensor], t: int, micro: int, rank: int, accumulation: int) -> Tensor:
    """The loss of one micro-batch."""
    x, y = make_batch(t, micro, rank)
    return nn.functional.mse_loss(model(x), y) / accumulation


class DenseAccumAdamW:
    """REFERENCE formulas, one parameter after the other."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, decay: float, s: int) -> None:
        self.parameters, self.lr, self.decay, self.s = list(parameters), lr, decay, s
        self.M, self.V, self.b = ([torch.zeros_like(p) for p in self.parameters] for _ in range(3))
        self.count = 0

    def step(self) -> None:
        b1, b2, eps = 0.9, 0.999, 1e-8
        self.count += 1
        k = -(-self.count // self.s)
        for i, p in enumerate(self.parameters):
            g = p.grad
            m = b1 * self.M[i] + (1 - b1) * g
            v = b2 * self.V[i] + (1 - b2) * g * g
            if p.ndim >= 2:
                p.data = p.data * (1 - self.lr * self.decay)
            p.data = p.data - self.lr * (m / (1 - b1**k)) / ((v / (1 - b2**k)).sqrt() + eps)
            self.b[i] = self.b[i] + g / self.s
            if self.count % self.s == 0:
                self.M[i] = b1 * self.M[i] + (1 - b1) * self.b[i]
                self.V[i] = b2 * self.V[i] + (1 - b2) * self.b[i] ** 2
                self.b[i] = torch.zeros_like(p)


#: What the library gets, and the same by other means.
OPTIMIZERS = {
    "sgd": (
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    ),
    "adamw": (
        partial(torch.optim.AdamW, lr=0.01, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    ),
    "accum-adamw": (
        partial(optim_fn_accum_adamw, lr=0.01, weight_decay=0.1, accum_iter=3),
        partial(DenseAccumAdamW, lr=0.01, decay=0.1, s=3),
    ),
}


def run_dense(matrices: Sequence[np.ndarray], optimizer: str, accumulation: int, steps: int = STEPS) -> Tensor:
    """Return the parameters of all workers after some steps, shape (workers, parameters)."""
    n = len(matrices[0])
    models = [make_network() for _ in range(n)]
    optimizers = [OPTIMIZERS[optimizer][1](list(model.parameters())) for model in models]
    for t in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            for micro in range(accumulation):
                loss_of(model, t, micro, rank, accumulation).backward()
        if t > 0:
            X = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
            X = torch.from_numpy(matrices[(t - 1) % len(matrices)]) @ X
            for x, model in zip(X, models, strict=True):
                vector_to_parameters(x, model.parameters())
        for local in optimizers:
            local.step()
    return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
