"""Logistic regression: two classes, normal features, labels by a logistic model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from decent_dp.simulate.problems.problem import Problem, Vector, check_option, split_by_label

_SAMPLES_PER_WORKER = 64
_NUM_HELD_OUT = 2000
_BATCH = 8


class _Linear(Vector):
    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(features @ self.x, labels)


class Logistic(Problem):
    """Workers have 64 samples each and draw batches of 8 of them.

    Args:
        num_workers: Workers.
        seed: Of samples and batches.
        dimension: Features.
        heterogeneity: Share of a worker's samples that are sorted by class, 0 to 1.
    """

    name = "logistic"
    lr = 0.2

    def __init__(self, num_workers: int, seed: int = 0, dimension: int = 10, heterogeneity: float = 0.0) -> None:
        super().__init__(num_workers, seed)
        check_option("dimension", dimension, above=1)
        self.dimension = int(dimension)
        num_own = _SAMPLES_PER_WORKER * num_workers
        features = torch.randn(num_own + _NUM_HELD_OUT, self.dimension, generator=self.generator, dtype=torch.float64)
        truth = torch.randn(self.dimension, generator=self.generator, dtype=torch.float64)
        labels = torch.bernoulli(torch.sigmoid(features @ truth), generator=self.generator)
        self._features, self._labels = features, labels
        self._held_out = features[num_own:], labels[num_own:]
        self._own = torch.stack(split_by_label(labels[:num_own], num_workers, heterogeneity, self.generator))

    def make(self) -> nn.Module:
        """See `Problem.make`."""
        return _Linear(self.dimension)

    def draw(self) -> Sequence[tuple[Tensor, ...]]:
        """See `Problem.draw`."""
        places = torch.randint(self._own.shape[1], (self.num_workers, _BATCH), generator=self.generator)
        chosen = self._own.gather(1, places)
        return list(zip(self._features[chosen], self._labels[chosen], strict=True))

    def evaluate(self, X: Tensor) -> dict[str, Tensor]:
        """``loss`` and ``accuracy`` on 2,000 samples that no worker has."""
        features, labels = self._held_out
        logits = X @ features.T
        targets = labels.expand_as(logits)
        return {
            "loss": cross_entropy(logits, targets, reduction="none").mean(1),
            "accuracy": ((logits > 0) == (targets > 0.5)).double().mean(1),
        }
