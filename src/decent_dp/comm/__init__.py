"""How bytes move: the protocol, virtual workers, and torch.distributed."""

from decent_dp.comm.in_process import InProcessCommunicator, InProcessWorld
from decent_dp.comm.protocol import Communicator, Handle, WorkerLost
from decent_dp.comm.torch_communicator import TorchCommunicator

__all__ = [
    "Communicator",
    "Handle",
    "InProcessCommunicator",
    "InProcessWorld",
    "TorchCommunicator",
    "WorkerLost",
]
