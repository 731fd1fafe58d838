"""One check of hyperparameters for the Adam family: every member refuses the same things in the same words."""

import math
from numbers import Integral, Real

from decent_dp.errors import ConfigurationError


def check_hyperparameters(
    *, lr: object, beta1: object, beta2: object, eps: object, weight_decay: object, accum_iter: object = 1
) -> None:
    """Refuse what the Adam family cannot work with, naming what was given, the rule and the way out.

    Args:
        lr: Learning rate, a finite number >= 0.
        beta1: Decay of the first moment per window, 0 <= beta1 < 1.
        beta2: Decay of the second moment per window, 0 <= beta2 < 1.
        eps: Added to the square root of the second moment, a finite number >= 0.
        weight_decay: Strength of the weight decay, a finite number >= 0.
        accum_iter: Steps per window, an integer >= 1.

    Raises:
        ConfigurationError: One of them breaks its rule.

    Example:
        >>> check_hyperparameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
        >>> try:
        ...     check_hyperparameters(lr=-1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
        ... except ConfigurationError as error:
        ...     print(error)
        lr is -1: it must be a finite number >= 0; pass for example lr=0.001
    """
    for name, value, usual in (("lr", lr, 1e-3), ("eps", eps, 1e-8), ("weight_decay", weight_decay, 0.1)):
        if not (is_number(value) and float(value) >= 0.0):  # type: ignore[arg-type]
            raise ConfigurationError(
                f"{name} is {value!r}: it must be a finite number >= 0; pass for example {name}={usual}"
            )
    for name, value, usual in (("beta1", beta1, 0.9), ("beta2", beta2, 0.999)):
        if not (is_number(value) and 0.0 <= float(value) < 1.0):  # type: ignore[arg-type]
            raise ConfigurationError(
                f"{name} is {value!r}: it must be a number >= 0 and < 1; pass for example {name}={usual}"
            )
    if not (is_integer(accum_iter) and int(accum_iter) >= 1):  # type: ignore[call-overload]
        raise ConfigurationError(
            f"accum_iter is {accum_iter!r}: a window has a whole number of steps, 1 or more; "
            "pass for example accum_iter=4, or accum_iter=1 for plain Adam"
        )


def is_number(value: object) -> bool:
    """Whether it is a finite real number, and not a flag."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> bool:
    """Whether it is an integer, and not a flag."""
    return isinstance(value, Integral) and not isinstance(value, bool)
