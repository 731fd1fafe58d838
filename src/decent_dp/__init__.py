"""Decentralized data-parallel training for PyTorch.

Names are loaded when they are first used, so that topologies and the command line do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.errors import (
        CheckpointError,
        ConfigurationError,
        DecentDPError,
        ExchangeError,
        LaunchError,
        MismatchError,
        ModelChangedError,
        TopologyError,
        TrainingError,
        UnusableError,
    )
    from decent_dp.startup import initialize_dist
    from decent_dp.topology import Layout, Topology, from_edges, from_function, from_matrices

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DecentDPError",
    "DecentralizedDataParallel",
    "ExchangeError",
    "LaunchError",
    "Layout",
    "MismatchError",
    "ModelChangedError",
    "Topology",
    "TopologyError",
    "TrainingError",
    "UnusableError",
    "from_edges",
    "from_function",
    "from_matrices",
    "initialize_dist",
]

_MODULE_OF = {
    "DecentralizedDataParallel": "decent_dp.ddp",
    "Layout": "decent_dp.topology",
    "Topology": "decent_dp.topology",
    "from_edges": "decent_dp.topology",
    "from_function": "decent_dp.topology",
    "from_matrices": "decent_dp.topology",
    "initialize_dist": "decent_dp.startup",
}
"""Where names are defined; ``decent_dp.errors`` defines the others."""

_SUBMODULES = frozenset(
    {
        "checkpoint",
        "comm",
        "consensus",
        "ddp",
        "engine",
        "errors",
        "join",
        "optim",
        "plan",
        "simulate",
        "startup",
        "topology",
    }
)
"""What ``import decent_dp`` alone makes reachable, as ``decent_dp.ddp``."""


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"decent_dp.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'decent_dp' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF.get(name, "decent_dp.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
