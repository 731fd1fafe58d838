"""Stop anywhere, go on exactly: checkpoints of a run whose replicas all differ.

`docs/checkpoints.md` shows the loop.
"""

from decent_dp.checkpoint.directory import Manifest, checkpoints
from decent_dp.checkpoint.export import Inspection, consensus_state, export, inspect
from decent_dp.checkpoint.interrupt import StopSignal
from decent_dp.checkpoint.loading import Loaded, load
from decent_dp.checkpoint.saving import Saving, async_save, save
from decent_dp.checkpoint.state import Stateful

__all__ = [
    "Inspection",
    "Loaded",
    "Manifest",
    "Saving",
    "Stateful",
    "StopSignal",
    "async_save",
    "checkpoints",
    "consensus_state",
    "export",
    "inspect",
    "load",
    "save",
]
