"""Small problems with known answers, one a file, and their table."""

import inspect
from collections.abc import Callable

from decent_dp.errors import ConfigurationError
from decent_dp.simulate.problems.digits import Digits
from decent_dp.simulate.problems.flat import consensus, noise
from decent_dp.simulate.problems.least_squares import LeastSquares
from decent_dp.simulate.problems.logistic import Logistic
from decent_dp.simulate.problems.problem import Problem

PROBLEMS: dict[str, Callable[..., Problem]] = {
    "consensus": consensus,
    "digits": Digits,
    "least-squares": LeastSquares,
    "logistic": Logistic,
    "noise": noise,
}
"""Names to what makes the problem; each takes the number of workers and a seed, the rest by name."""


def build_problem(name: str, num_workers: int, seed: int = 0, **options: float | None) -> Problem:
    """Make the problem of a name.

    Args:
        name: A key of `PROBLEMS`.
        num_workers: Workers that will share it.
        seed: Of its data and of all that is drawn.
        options: ``dimension``, ``noise``, ``heterogeneity``, as the problem takes; those that are None are left out.

    Raises:
        ConfigurationError: The name is unknown, the problem does not take an option, or a value cannot work.

    Example:
        >>> build_problem("noise", 4, dimension=10).num_parameters
        10
    """
    if name not in PROBLEMS:
        raise ConfigurationError(f"unknown problem {name!r}; known are {', '.join(PROBLEMS)}")
    given = {key: value for key, value in options.items() if value is not None}
    takes = [key for key in inspect.signature(PROBLEMS[name]).parameters if key not in ("num_workers", "seed")]
    for key in given:
        if key not in takes:
            raise ConfigurationError(f"problem {name!r} takes no {key}; it takes {', '.join(takes) or 'no options'}")
    return PROBLEMS[name](num_workers=num_workers, seed=seed, **given)


__all__ = ["PROBLEMS", "Digits", "LeastSquares", "Logistic", "Problem", "build_problem", "consensus", "noise"]
