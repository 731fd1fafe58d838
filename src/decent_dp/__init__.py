"""Decentralized data-parallel training for PyTorch."""

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import (
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
