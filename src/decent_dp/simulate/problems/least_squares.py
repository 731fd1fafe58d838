"""Least squares in which every worker has its own solution.

    f_i(x) = 1/2 |A_i (x - x_i*)|^2,    x_i* = x* + h z_i

A_i has entries of variance 1/m, so that the Hessians are the identity on average and differ from worker to worker.
Gradients carry noise of standard deviation s per coordinate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decent_dp.simulate.problems.problem import Problem, Vector, check_option


class _Quadratic(Vector):
    def forward(self, A: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        return 0.5 * (A @ self.x - y).square().sum() + self.x @ noise


class LeastSquares(Problem):
    """See the module.

    Args:
        num_workers: Workers.
        seed: Of the data and the noise.
        dimension: Coordinates of x; a worker has twice as many equations.
        noise: s.
        heterogeneity: h; 0 gives all workers one solution.
    """

    name = "least-squares"
    lr = 0.05

    def __init__(
        self,
        num_workers: int,
        seed: int = 0,
        dimension: int = 20,
        noise: float = 0.0,
        heterogeneity: float = 1.0,
    ) -> None:
        super().__init__(num_workers, seed)
        check_option("dimension", dimension, above=1)
        check_option("noise", noise)
        check_option("heterogeneity", heterogeneity)
        self.dimension, self.noise = int(dimension), noise
        d, m = self.dimension, 2 * self.dimension
        self._A = self._normal(num_workers, m, d) / m**0.5
        solutions = self._normal(1, d) + heterogeneity * self._normal(num_workers, d)
        self._y = (self._A @ solutions.unsqueeze(2)).squeeze(2)
        self._hessian = torch.einsum("nmi,nmj->ij", self._A, self._A) / num_workers
        slope = torch.einsum("nmi,nm->i", self._A, self._y) / num_workers
        self.solution = torch.linalg.solve(self._hessian, slope)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def make(self) -> nn.Module:
        """See `Problem.make`."""
        return _Quadratic(self.dimension)

    def draw(self) -> Sequence[tuple[Tensor, ...]]:
        """See `Problem.draw`."""
        return list(zip(self._A, self._y, self.noise * self._normal(self.num_workers, self.dimension), strict=True))

    def evaluate(self, X: Tensor) -> dict[str, Tensor]:
        """``loss``: mean of all f_i, less its smallest value."""
        away = X - self.solution
        return {"loss": 0.5 * ((away @ self._hessian) * away).sum(1)}
