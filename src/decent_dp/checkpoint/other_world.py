"""From the replicas of one world to the start of another.

    x      <- mean over saved workers of x_i after mixing what it had in flight
    moment <- mean over saved workers, or that of one

Sums are taken in float64 (complex128), one saved worker at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decent_dp.checkpoint.tree import leaves


class Mean:
    """Averages nested values: tensors of floating dtypes; of all else the first counts."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, ...], tuple[Tensor, torch.dtype, int]] = {}
        self._first: dict[tuple[Any, ...], Any] = {}

    def add(self, value: dict[Any, Any]) -> None:
        """Count one more."""
        for path, leaf in leaves(value):
            if not is_averaged(leaf):
                self._first.setdefault(path, leaf)
                continue
            wide = leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)
            if path in self._sums:
                total, dtype, count = self._sums[path]
                self._sums[path] = total.add_(wide), dtype, count + 1
            else:
                self._sums[path] = wide.clone() if wide is leaf else wide, leaf.dtype, 1

    def result(self) -> dict[Any, Any]:
        """Return the mean of those that had an entry, for every entry."""
        tree: dict[Any, Any] = {}
        values = {path: total.div(count).to(dtype) for path, (total, dtype, count) in self._sums.items()}
        for path, leaf in {**self._first, **values}.items():
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            if isinstance(leaf, dict):
                node.setdefault(path[-1], {})  # it has entries elsewhere, or nowhere
            else:
                node[path[-1]] = leaf
        return tree


def is_averaged(value: Any) -> bool:
    """Whether a mean of such values means something: not of counters, flags or generators' states."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@torch.no_grad()
def consensus_start(
    parts: Iterable[tuple[Any, Any]], num_parts: int, own: int, *, average_moments: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections ``model`` and ``training`` for a worker of another world.

    Args:
        parts: The same sections of all saved workers, in rank order; each is needed for a moment only.
        num_parts: How many.
        own: The saved worker that this one takes after.
        average_moments: Whether to average optimizer states and gradients, or take those of ``own``.
    """
    weights, moments = Mean(), Mean()
    training: dict[str, Any] = {}
    for rank, (model, theirs) in enumerate(parts):
        fold(model["state_dict"], theirs["exchange"])
        weights.add(model)
        if rank == own:
            training = {**theirs, "exchange": None}
        if average_moments:
            moments.add(_moments(theirs))
    assert num_parts > own, (num_parts, own)
    start = weights.result()
    if average_moments:
        _take(training, moments.result())
    return start, training


def fold(state_dict: dict[str, Any], exchange: dict[str, Any] | None) -> None:
    """Mix what a worker had in flight into its parameters, as its next step would have."""
    if exchange is None:
        return
    weight = exchange["weight"]
    for name, received in exchange["received"].items():
        x = state_dict[name]
        wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
        base = exchange["sent"].get(name)
        change = received.to(wide.dtype) - (wide if base is None else base.to(wide.dtype))
        if name in exchange["remainder"]:
            change += exchange["remainder"][name].to(wide.dtype)
        tied = [other for other, y in state_dict.items() if y is x or (isinstance(y, Tensor) and _is_same(x, y))]
        for other in tied:
            state_dict[other] = wide + weight * change


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors that were read are one parameter under two names."""
    return x.numel() > 0 and y.layout == torch.strided and (x.data_ptr(), x.shape) == (y.data_ptr(), y.shape)


def _moments(training: dict[str, Any]) -> dict[str, Any]:
    """What is averaged of the training state: tensors of optimizers that are no counters, and gradients."""
    states = {
        name: {key: value for key, value in entry["state"].items() if is_averaged(value) and key != "step"}
        for name, entry in training["optimizer"].items()
    }
    window = training["window"]
    return {"states": states, "gradients": {} if window is None else window["gradients"]}


def _take(training: dict[str, Any], moments: dict[str, Any]) -> None:
    for name, values in moments.get("states", {}).items():
        state = training["optimizer"][name]["state"]
        training["optimizer"][name]["state"] = {**state, **values} if state else state
    if training["window"] is not None:
        training["window"] = {**training["window"], "gradients": moments.get("gradients", {})}
