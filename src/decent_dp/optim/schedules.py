"""Learning-rate schedules, as functions of the step alone.

t    steps done                   η0   learning rate of the optimizer before the schedule
T_w  steps of warm-up             η_min   learning rate at the end
T    steps in all                 d    fraction of η0 to start from
"""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.errors import ConfigurationError
from decent_dp.optim.hyperparameters import is_integer, is_number


class CosineWithWarmup(LRScheduler):
    """Linear warm-up, then a cosine to the final learning rate, then constant.

    The learning rate depends on the number of steps and nothing else, so a resumed run continues with the
    numbers it would have had. Ticking it before the optimizer's first update is in order: a worker that skips
    an update because of an overflow keeps the learning rate of the others. The formula is in
    `lr_scheduler_fn_cosine_with_warmup`.

    Args:
        optimizer: Whose learning rates are set, each from its own η0.
        t_max: T, in steps.
        t_warmup: T_w, in steps.
        cosine_eta_min: η_min.
        warmup_decay: d.
        last_epoch: Steps done before, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        t_max: int,
        t_warmup: int,
        cosine_eta_min: float,
        warmup_decay: float,
        last_epoch: int = -1,
    ) -> None:
        self.t_max = t_max
        self.t_warmup = t_warmup
        self.cosine_eta_min = cosine_eta_min
        self.warmup_decay = warmup_decay
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of every group at the current step."""
        t, T, T_w = self.last_epoch, self.t_max, self.t_warmup
        if t < T_w:
            return [lr * (self.warmup_decay + (1 - self.warmup_decay) * t / T_w) for lr in self.base_lrs]
        if t < T:
            fall = (1 + math.cos(math.pi * (t - T_w) / (T - T_w))) / 2
            return [self.cosine_eta_min + (lr - self.cosine_eta_min) * fall for lr in self.base_lrs]
        return [self.cosine_eta_min for _ in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step, or to a given one, and set the learning rates."""
        self._step_count += 1
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._set_learning_rates()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, learning rates of the optimizer included."""
        super().load_state_dict(state_dict)
        self._set_learning_rates()

    def _set_learning_rates(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [
            group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            for group in self.optimizer.param_groups
        ]


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """Make a schedule of a linear warm-up, then a cosine, then a constant learning rate.

        η(t) = η0 (d + (1 - d) t / T_w)                                       t <= T_w
        η(t) = η_min + (η0 - η_min) (1 + cos(π (t - T_w) / (T - T_w))) / 2     T_w <= t <= T
        η(t) = η_min                                                          T <= t

    Up to T these are the numbers of torch's LinearLR followed by CosineAnnealingLR in a SequentialLR.

    Args:
        optimizer: Whose learning rates are set, each from its own η0.
        t_max: T, steps in all, warm-up included, > t_warmup.
        t_warmup: T_w, steps of warm-up, >= 0; 0 starts at η0.
        cosine_eta_min: η_min, finite, >= 0.
        warmup_decay: d, fraction of η0 to start the warm-up from, in [0, 1].

    Returns:
        The scheduler; call its `step()` once per update.

    Raises:
        ConfigurationError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=4, t_warmup=2, cosine_eta_min=0.0)
        >>> for _ in range(5):
        ...     print(f"{scheduler.get_last_lr()[0]:.4f}")
        ...     optimizer.step()
        ...     scheduler.step()
        0.0010
        0.0505
        0.1000
        0.0500
        0.0000

    References:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017,
        arXiv:1608.03983, equation 5, without restarts.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optimizer is of type {type(optimizer).__name__}: it must be a torch.optim.Optimizer; "
            "where a function of the optimizer is wanted, pass "
            "functools.partial(lr_scheduler_fn_cosine_with_warmup, t_max=..., t_warmup=...)"
        )
    if not (is_integer(t_warmup) and t_warmup >= 0):
        raise ConfigurationError(
            f"t_warmup is {t_warmup!r}: it must be a whole number of steps, 0 or more; pass t_warmup=0 for none"
        )
    if not (is_integer(t_max) and t_max > t_warmup):
        raise ConfigurationError(
            f"t_max is {t_max!r} with t_warmup={t_warmup}: it counts all steps, warm-up included, so it must be "
            f"an integer above t_warmup; raise t_max or lower t_warmup"
        )
    if not (is_number(cosine_eta_min) and cosine_eta_min >= 0):
        raise ConfigurationError(
            f"cosine_eta_min is {cosine_eta_min!r}: the final learning rate must be a finite number >= 0; "
            "pass for example cosine_eta_min=1e-6"
        )
    if not (is_number(warmup_decay) and 0 <= warmup_decay <= 1):
        raise ConfigurationError(
            f"warmup_decay is {warmup_decay!r}: the warm-up starts at this fraction of the learning rate, from "
            "0 to 1; pass for example warmup_decay=0.01"
        )
    return CosineWithWarmup(optimizer, int(t_max), int(t_warmup), float(cosine_eta_min), float(warmup_decay))
