"""A flat loss: what mixing alone makes of starts, of noise and of a constant pull.

Legend: x_i the replica of worker i, s the noise, h the heterogeneity, a the learning rate.

The gradient of worker i is ``s xi_i(t) + h b_i``, with xi standard normal and new in every step, b_i standard normal
and kept, the mean of all b being zero. With SGD, x_i(t+1) = sum_j W_t[i,j] x_j(t) - a (s xi_i(t) + h b_i): nothing
but the topology decides how far apart the replicas are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decent_dp.simulate.problems.problem import Problem, Vector, check_option


class _Slope(Vector):
    def forward(self, gradient: Tensor) -> Tensor:
        return self.x @ gradient


class Flat(Problem):
    """Replicas pushed about by gradients that do not depend on them.

    Args:
        name: What reports call it.
        num_workers: Workers.
        seed: Of starts, noise and pulls.
        dimension: Coordinates of x; each is an experiment of its own.
        noise: s.
        heterogeneity: h.
        spread: Standard deviation of the starts; 0 starts all from zero.
    """

    lr = 1.0
    is_flat = True

    def __init__(
        self, name: str, num_workers: int, seed: int, dimension: int, noise: float, heterogeneity: float, spread: float
    ) -> None:
        super().__init__(num_workers, seed)
        check_option("dimension", dimension, above=1)
        check_option("noise", noise)
        check_option("heterogeneity", heterogeneity)
        self.name, self.dimension, self.noise, self.heterogeneity = name, int(dimension), noise, heterogeneity
        if spread:
            self.starts = spread * self._normal()
        pulls = self._normal() if heterogeneity else torch.zeros(1, dtype=torch.float64)
        self._pulls = heterogeneity * (pulls - pulls.mean(0))

    def _normal(self) -> Tensor:
        return torch.randn(self.num_workers, self.dimension, generator=self.generator, dtype=torch.float64)

    def make(self) -> nn.Module:
        """See `Problem.make`."""
        return _Slope(self.dimension)

    def draw(self) -> Sequence[tuple[Tensor, ...]]:
        """See `Problem.draw`."""
        gradients = self._pulls + self.noise * self._normal() if self.noise else self._pulls
        return [(gradient,) for gradient in gradients.expand(self.num_workers, self.dimension)]

    def evaluate(self, X: Tensor) -> dict[str, Tensor]:
        """Nothing: the loss is flat."""
        return {}

    def factors(self, squared_distance: float, lr: float) -> dict[str, float]:
        """The squared distance per coordinate over ``(a s)^2`` or ``(a h)^2``, if just one of them is zero."""
        if bool(self.noise) == bool(self.heterogeneity):
            return {}
        name, size = ("noise factor", self.noise) if self.noise else ("heterogeneity factor", self.heterogeneity)
        scale = lr * size
        return {name: squared_distance / self.dimension / scale / scale} if scale > 0 else {}


def consensus(num_workers: int, seed: int = 0, dimension: int = 16) -> Flat:
    """Nothing but mixing: independent standard normal starts, no gradient."""
    return Flat("consensus", num_workers, seed, dimension, noise=0.0, heterogeneity=0.0, spread=1.0)


def noise(
    num_workers: int, seed: int = 0, dimension: int = 1024, noise: float | None = None, heterogeneity: float = 0.0
) -> Flat:
    """A flat loss with noise, with a constant pull of its own on every worker, or both.

    Args:
        num_workers: Workers.
        seed: Of all that is drawn.
        dimension: Coordinates; more make measured factors exacter.
        noise: Standard deviation of a gradient's noise, per coordinate; 1 when None, without heterogeneity.
        heterogeneity: Standard deviation over the workers of their constant gradients, per coordinate.
    """
    if noise is None:
        noise = 0.0 if heterogeneity else 1.0
    return Flat("noise", num_workers, seed, dimension, noise, heterogeneity, spread=0.0)
