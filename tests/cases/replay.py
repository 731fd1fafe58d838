"""What a run must give: n plain modules, plain optimizers and a dense mixing matrix.

    x_i(t+1) = sum_j W[i, j] x_j(t) + update_i(g_i(x_i(t)))          W is the identity at t = 0

A scenario is a pair of functions at the top of a module: ``make()`` returns a module, and ``act(net, t, rank)`` runs
the forwards and backwards of one step, on a wrapper or on a plain module.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp import DecentralizedDataParallel
from pool import Pool
from virtual import wrap_virtual

Make = Callable[[], nn.Module]
Act = Callable[[nn.Module, int, int], None]

TINY = 1 / 2**20  # MiB: one parameter a bucket


def matrices(topology: str, n: int) -> list[Tensor]:
    """The rounds of a topology, written down once more by hand."""
    if topology == "complete" or n == 2:
        return [torch.full((n, n), 1 / n, dtype=torch.float64)]
    if topology == "ring" and n % 2 == 0:
        return [_pairs(n, first) for first in (0, 1)]
    if topology == "ring":
        return [_pairs(n, first) for first in range(n)]  # the last in line idles
    if topology == "exp":
        rounds = []
        for k in range(math.ceil(math.log2(n))):
            i = torch.arange(n)
            source = i ^ 2**k if n & (n - 1) == 0 else (i - 2**k) % n
            W = torch.eye(n, dtype=torch.float64) / 2
            W[i, source] += 0.5
            rounds.append(W)
        return rounds
    raise ValueError(topology)


def _pairs(n: int, first: int) -> Tensor:
    """Neighbours in pairs, going round from one of them."""
    W = torch.eye(n, dtype=torch.float64)
    for k in range(0, n - 1, 2):
        i, j = (first + k) % n, (first + k + 1) % n
        W[i, i] = W[i, j] = W[j, i] = W[j, j] = 0.5
    return W


def inner(net: nn.Module) -> nn.Module:
    """The module, wrapped or not."""
    return net.module if isinstance(net, DecentralizedDataParallel) else net


def accumulating(net: nn.Module) -> Any:
    """``no_sync()`` of a wrapper; nothing special for a plain module, which accumulates anyway."""
    return net.no_sync() if isinstance(net, DecentralizedDataParallel) else nullcontext()


def values(net: nn.Module) -> Tensor:
    """All parameters in one vector that is wide enough for every dtype."""
    return torch.cat([p.detach().to(torch.complex128).flatten() for p in net.parameters()])


class Replay:
    """n plain modules that take the steps of n workers together.

    Args:
        modules: One for each worker, equal at the start.
        optim_fn: As for the wrapper.
        rounds: The dense mixing matrices, which take turns.
        max_norm: Global norm that gradients are clipped to; 0 does not clip.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optim_fn: Any, rounds: Sequence[Tensor], max_norm: float = 0.0
    ) -> None:
        self.modules = list(modules)
        self.optimizers = [optim_fn(list(m.named_parameters())) for m in self.modules]
        self.rounds, self.max_norm, self.t = list(rounds), max_norm, 0

    def step(self, act: Callable[[nn.Module, int, int], None]) -> None:
        """One step of everybody."""
        for rank, module in enumerate(self.modules):
            module.zero_grad()
            act(module, self.t, rank)
            if self.max_norm:
                clip([p.grad for p in module.parameters() if p.grad is not None], self.max_norm)
        if self.t:
            self.mix()
        for optimizer in self.optimizers:
            optimizer.step()
        self.t += 1

    @torch.no_grad()
    def mix(self) -> None:
        """Replace every parameter by the weighted sum over workers, computed in double precision."""
        W = self.rounds[(self.t - 1) % len(self.rounds)]
        for together in zip(*(m.parameters() for m in self.modules), strict=True):
            wide = torch.complex128 if together[0].is_complex() else torch.float64
            X = torch.stack([p.to(wide) for p in together])
            for p, x in zip(together, torch.tensordot(W.to(wide), X, 1), strict=True):
                p.copy_(x)

    def values(self) -> Tensor:
        """Parameters of all workers, shape (workers, parameters)."""
        return torch.stack([values(m) for m in self.modules])


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale gradients so that the root of the sum of all |g|^2 is at most ``max_norm``."""
    gradients = [g.detach() for g in gradients]
    norm = math.sqrt(sum(float((g.conj() * g).real.double().sum()) for g in gradients))
    for g in gradients:
        g.mul_(min(1.0, max_norm / (norm + 1e-6)))


def replay(
    n: int, make: Make, act: Act, optim_fn: Any, steps: int, topology: str = "complete", max_norm: float = 0.0
) -> Tensor:
    """Parameters of all workers after some steps, by the dense recursion."""
    oracle = Replay([make() for _ in range(n)], optim_fn, matrices(topology, n), max_norm)
    for _ in range(steps):
        oracle.step(act)
    return oracle.values()


def on_virtual(n: int, make: Make, act: Act, optim_fn: Any, steps: int, **options: Any) -> Tensor:
    """The same, by virtual workers."""
    models = wrap_virtual(n, lambda rank: make(), optim_fn, **options)
    for t in range(steps):
        for rank, model in enumerate(models):
            act(model, t, rank)
            assert model.t == t + 1
    return torch.stack([values(model) for model in models])


def on_gloo(pool: Pool, n: int, make: Make, act: Act, optim_fn: Any, steps: int, **options: Any) -> Tensor:
    """The same, by processes."""
    return torch.stack(pool.run(_train, n, make, act, optim_fn, steps, options))


def _train(rank: int, n: int, make: Make, act: Act, optim_fn: Any, steps: int, options: dict[str, Any]) -> Tensor:
    model = DecentralizedDataParallel(make(), optim_fn, **options)
    for t in range(steps):
        act(model, t, rank)
        assert model.t == t + 1
    model.synchronize()
    return values(model)


def assert_equal(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    """Equal up to rounding, and not because nothing has moved."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    assert actual.isfinite().all()
