"""What can go wrong, as a tree.

    DecentDPError
    ├── ConfigurationError (ValueError)     what the caller passed cannot work
    │   ├── TopologyError                   an unknown topology, a bad matrix, a world it cannot serve
    │   ├── LaunchError                     missing or contradicting launch variables, a busy port
    │   └── MismatchError                   the workers passed different things
    └── TrainingError (RuntimeError)        what happened while training
        ├── ModelChangedError               a parameter was replaced, converted or used by another optimizer
        ├── CheckpointError                 a checkpoint could not be written, or cannot be read
        ├── ExchangeError                   another worker died, hung or is at another step
        └── UnusableError                   an earlier error left the model half-stepped

Every message says what was given, the rule, and the way out. Messages of errors that concern several workers begin
with the rank and, while training, the step.
"""


class DecentDPError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(DecentDPError, ValueError):
    """What the caller passed cannot work."""


class TopologyError(ConfigurationError):
    """An unknown topology, an invalid mixing matrix, or a layout the topology cannot serve."""


class LaunchError(ConfigurationError):
    """Launch variables are missing or contradict each other, or the rendezvous address cannot be used."""


class MismatchError(ConfigurationError):
    """The workers passed different models, topologies or optimizers, or one of them failed to set up."""


class TrainingError(DecentDPError, RuntimeError):
    """Something went wrong while training."""


class ModelChangedError(TrainingError):
    """A parameter was replaced, converted or handed to another optimizer after wrapping."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be read; training can go on."""


class ExchangeError(TrainingError):
    """Another worker died, hung, or is not at the same step."""


class UnusableError(TrainingError):
    """An earlier error left the model half-stepped; it refuses to go on."""
