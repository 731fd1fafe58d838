"""How much the time of a step varies, as quantiles: measured ones, or those of a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decent_dp.errors import ConfigurationError

_MOST = 101  # quantiles in a profile


def quantiles_of(samples: ArrayLike) -> tuple[float, ...]:
    """Equally spaced quantiles of samples, from the smallest to the largest, at most 101.

    Args:
        samples: Times relative to their mean; at least one.

    Example:
        >>> quantiles_of([1.5, 0.5, 1.0])
        (0.5, 1.0, 1.5)
    """
    values = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    levels = np.linspace(0, 1, min(len(values), _MOST))
    return tuple(float(value) for value in np.quantile(values, levels))


def lognormal(coefficient_of_variation: float, num_quantiles: int = 1001) -> tuple[float, ...]:
    """Quantiles of a lognormal distribution with mean 1.

    Args:
        coefficient_of_variation: Standard deviation over mean, at least 0.
        num_quantiles: How many; the outermost ones are cut where a sample of this size ends.

    Raises:
        ConfigurationError: If the coefficient of variation is negative or no number.

    Example:
        >>> lognormal(0.0)
        (1.0,)
    """
    cv = coefficient_of_variation
    if not (math.isfinite(cv) and cv >= 0):
        raise ConfigurationError(f"the coefficient of variation is {cv}; it must be a number of at least 0")
    if cv == 0:
        return (1.0,)
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    levels = ((k + 0.5) / num_quantiles for k in range(num_quantiles))
    return tuple(math.exp(sigma * normal.inv_cdf(level) - sigma * sigma / 2) for level in levels)


def draw_speeds(
    num_steps: int, worker_factors: Sequence[float], jitter_quantiles: Sequence[float], seed: int
) -> NDArray[np.float64]:
    """Times of forward and backward relative to the mean, shape (steps, workers); the same for the same seed."""
    n, quantiles = len(worker_factors), np.asarray(jitter_quantiles)
    drawn = np.ones((num_steps, n))
    if len(quantiles) > 1 and np.ptp(quantiles) > 0:
        levels = np.linspace(0, 1, len(quantiles))
        mean = float(np.mean((quantiles[1:] + quantiles[:-1]) / 2))
        drawn = np.interp(np.random.default_rng(seed).random((num_steps, n)), levels, quantiles) / mean
    return np.asarray(drawn * np.asarray(worker_factors))
