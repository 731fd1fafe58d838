"""What one worker saves, and how it is put back.

Three sections, each for itself so that weights can be read without the rest:

- ``model``: ``state_dict`` of the module, and buffers that are not in it;
- ``training``: what `decent_dp.engine.training_state` captures, and the open accumulation window;
- ``rest``: random states, and what the user handed in.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp.checkpoint.tree import Items, Staging, pack
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.engine.hooks import in_backward
from decent_dp.engine.training_state import State, capture, restore
from decent_dp.errors import CheckpointError, ConfigurationError, TrainingError

SECTIONS = ("model", "training", "rest")


@runtime_checkable
class Stateful(Protocol):
    """Something with a state that can be saved: a sampler, a data loader, a moving average."""

    def state_dict(self) -> Any:
        """Return the state, as plain data."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take it over."""


def check_moment(model: DecentralizedDataParallel) -> None:
    """Refuse calls at a moment at which the state of a model is not whole.

    Raises:
        TrainingError: Now is no time to save or load.
    """
    replica = model._replica
    replica.check_usable()
    model._averager.refuse_applied()
    if in_backward():
        raise TrainingError(f"{replica.here}: a checkpoint inside of backward(); call it after backward() has returned")
    if replica.after_step is not None:
        raise TrainingError(
            f"{replica.here}: a checkpoint inside of join(), where workers are at different steps; call it after join()"
        )


@torch.no_grad()
def collect(model: DecentralizedDataParallel, extra: Mapping[str, Any] | None, staging: Staging) -> Items:
    """Copy everything that this worker needs to go on, once; see `decent_dp.checkpoint.tree.pack`."""
    replica = model._replica
    items = pack("model", {"state_dict": model.state_dict(), "buffers": other_buffers(model.module)}, staging)
    training = capture(replica, copy=False)
    training["window"] = None
    if replica.num_accumulated:
        named = zip(replica.names, replica.parameters, strict=True)
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        training["window"] = {"num_accumulated": replica.num_accumulated, "gradients": gradients}
    items |= pack("training", training, staging)
    items |= pack("rest", {"random": random_states(), "extra": _states_of(extra)}, staging)
    return items


@torch.no_grad()
def put_back(model: DecentralizedDataParallel, weights: State, training: State) -> None:
    """Overwrite the replica with sections ``model`` and ``training``; random states come last, by the caller."""
    replica = model._replica
    with replica.fails_on_error():
        model.load_state_dict(weights["state_dict"])
        buffers = dict(model.module.named_buffers())
        for name, value in weights["buffers"].items():
            buffers[name].copy_(value)
        replica.drop_exchanges()
        replica.drop_gradients()
        model._hooks.reset()
        restore(replica, training)
        window = training["window"]
        if window is not None:
            replica.num_accumulated = window["num_accumulated"]
            for name, parameter in zip(replica.names, replica.parameters, strict=True):
                if name in window["gradients"]:
                    parameter.grad = torch.empty_like(parameter).copy_(window["gradients"][name])


def describe(model: DecentralizedDataParallel) -> dict[str, Any]:
    """What a checkpoint must agree on with a model, in plain words; bucket sizes are not part of it."""
    replica, settings = model._replica, model._settings
    trained, buckets = set(replica.names), replica.buckets
    schedulers = {type(b.scheduler).__name__ for b in buckets if b.scheduler is not None}
    return {
        "parameters": {
            name: _kind(p) + ("" if name in trained else ", frozen") for name, p in model.named_parameters()
        },
        "buffers": {name: _kind(buffer) for name, buffer in model.named_buffers()},
        "optimizer": ", ".join(sorted({type(bucket.optimizer).__name__ for bucket in buckets})),
        "scheduler": ", ".join(sorted(schedulers)) or "none",
        "scaler": "none" if settings.active_scaler is None else type(settings.active_scaler).__name__,
    }


def describe_mixing(model: DecentralizedDataParallel) -> dict[str, Any]:
    """Who mixes with whom, to be compared: a checkpoint is never asked to build a topology."""
    topology, wire_dtype = model._replica._topology, model._settings.wire_dtype
    return {
        "name": topology.name,
        "num_workers": topology.layout.num_workers,
        "workers_per_node": topology.layout.workers_per_node,
        "fingerprint": topology.fingerprint(),
        "wire_dtype": str(wire_dtype).removeprefix("torch."),
    }


def random_states() -> dict[str, Any]:
    """Random states of Python, numpy, torch, and the current CUDA device."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on where the random generators were."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"].clone())  # torch reads these from the beginning of their storage
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].clone())


def _states_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the user handed in, objects replaced by their state."""
    found: dict[str, Any] = {}
    for name, value in as_mapping(extra).items():
        if not isinstance(name, str):
            raise CheckpointError(f"extra has the key {name!r}; its keys must be strings")
        if isinstance(value, torch.Generator):
            value = value.get_state()
        found[name] = value.state_dict() if isinstance(value, Stateful) else value
    return found


def as_mapping(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the user handed in, by name.

    Raises:
        ConfigurationError: It has no names.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigurationError(
            f"extra is a {type(extra).__name__}; it must be a dict such as {{'epoch': 3}}, or None"
        )
    return extra or {}


def check_extra(extra: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that what the user handed in can be given its state back.

    Raises:
        CheckpointError: There is none for one of them, or it takes none.
    """
    for name, value in extra.items():
        if name not in saved:
            raise CheckpointError(f"extra has '{name}' and the checkpoint has only {sorted(saved)} from its user")
        if not isinstance(value, (torch.Generator, Stateful)):
            raise CheckpointError(
                f"extra['{name}'] is a {type(value).__name__}, which cannot be loaded in place; take it from what "
                "load() returns, and pass only objects with load_state_dict, or torch generators"
            )


def give_back(extra: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Give objects that the user handed in their state back."""
    for name, value in extra.items():
        if isinstance(value, torch.Generator):
            value.set_state(saved[name].clone())
        else:
            value.load_state_dict(saved[name])


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that ``state_dict`` leaves out."""
    kept = module.state_dict(keep_vars=True).values()
    inside = {id(value) for value in kept}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in inside}


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
