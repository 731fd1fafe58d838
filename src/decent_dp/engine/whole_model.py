"""Decisions that need every gradient first: loss scaling and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler


class WholeModel(torch.optim.Optimizer):
    """All parameters as one optimizer, as a GradScaler wants to see them; its step only notes that it was called."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(list(parameters), {})
        self.stepped = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Note that the scaler found every gradient finite."""
        self.stepped = True


def decide(model: WholeModel, scaler: GradScaler | None, max_norm: float) -> None:
    """Unscale once, clip once, and drop every gradient if any is not finite under the scaler.

    Dropped gradients skip the update on this worker; it still mixes and stays in the round of the others.

    Args:
        model: All parameters, in registration order.
        scaler: Scales of the loss; None when there is none.
        max_norm: Largest global 2-norm of the gradient, as `torch.nn.utils.clip_grad_norm_`; 0 does not clip.
    """
    parameters = model.param_groups[0]["params"]
    if all(parameter.grad is None for parameter in parameters):
        return
    if scaler is not None:
        scaler.unscale_(model)
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if scaler is not None:
        model.stepped = False
        scaler.step(model)
        scaler.update()
        if not model.stepped:
            for parameter in parameters:
                parameter.grad = None
