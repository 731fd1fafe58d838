"""A small network on real handwritten digits, 8 x 8 pixels, those that scikit-learn carries."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from decent_dp.simulate.extras import load_extra
from decent_dp.simulate.problems.problem import Problem, split_by_label

_NUM_HELD_OUT = 360
_BATCH = 16
_NUM_HIDDEN = 32
_REPLICAS_AT_ONCE = 32


class _Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, _NUM_HIDDEN), nn.Tanh(), nn.Linear(_NUM_HIDDEN, 10))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.125, 0.125, generator=generator)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layers(images), labels)


class Digits(Problem):
    """A tanh network of 32 hidden units; 1,437 images are dealt to the workers, 360 are held out, batches of 16.

    Args:
        num_workers: Workers, at most 1,437.
        seed: Of the split, the first weights and the batches.
        heterogeneity: Share of a worker's images that are sorted by digit, 0 to 1.

    Raises:
        MissingPackageError: scikit-learn is not installed.
        ConfigurationError: There are more workers than images.
    """

    name = "digits"
    lr = 0.2

    def __init__(self, num_workers: int, seed: int = 0, heterogeneity: float = 0.0) -> None:
        super().__init__(num_workers, seed)
        datasets = load_extra("sklearn.datasets", "scikit-learn", "the problem 'digits'")
        images, labels = datasets.load_digits(return_X_y=True)
        images = torch.from_numpy(images).float() / 16
        labels = torch.from_numpy(labels).long()
        order = torch.randperm(len(labels), generator=self.generator)
        held_out, own = order[:_NUM_HELD_OUT], order[_NUM_HELD_OUT:]
        self._held_out = images[held_out], labels[held_out]
        self._trained = images[own], labels[own]
        self._own = torch.stack(split_by_label(labels[own], num_workers, heterogeneity, self.generator))
        self._seed = seed

    def make(self) -> nn.Module:
        """See `Problem.make`."""
        return _Network(self._seed)

    def draw(self) -> Sequence[tuple[Tensor, ...]]:
        """See `Problem.draw`."""
        places = torch.randint(self._own.shape[1], (self.num_workers, _BATCH), generator=self.generator)
        chosen = self._own.gather(1, places)
        images, labels = self._trained
        return list(zip(images[chosen], labels[chosen], strict=True))

    def evaluate(self, X: Tensor) -> dict[str, Tensor]:
        """``loss`` on the images of all workers, ``accuracy`` on those held out."""
        losses, accuracies = [], []
        for begin in range(0, len(X), _REPLICAS_AT_ONCE):
            some = X[begin : begin + _REPLICAS_AT_ONCE]
            images, labels = self._trained
            logits = self._logits(some, images)
            losses.append(cross_entropy(logits.mT, labels.expand(len(some), -1), reduction="none").mean(1))
            images, labels = self._held_out
            accuracies.append((self._logits(some, images).argmax(2) == labels).float().mean(1))
        return {"loss": torch.cat(losses).double(), "accuracy": torch.cat(accuracies).double()}

    def _logits(self, X: Tensor, images: Tensor) -> Tensor:
        """Of several replicas at once, shape (replicas, images, classes)."""
        sizes = [p.numel() for p in self.make().parameters()]
        W1, b1, W2, b2 = torch.split(X, sizes, dim=1)
        hidden: Tensor = torch.tanh(images @ W1.view(len(X), _NUM_HIDDEN, 64).mT + b1.unsqueeze(1))
        logits: Tensor = hidden @ W2.view(len(X), 10, _NUM_HIDDEN).mT + b2.unsqueeze(1)
        return logits
