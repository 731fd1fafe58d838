"""The communicator between processes, over the backends of torch.distributed.

A model owns its groups: one for all point-to-point traffic (also used for broadcasts and whole-world sums) and one for
each distinct clique this worker is in. They are made on the store of the user's process group but never used by anybody
else, so they cannot pair up with the user's collectives, and they end with the model.
"""

import logging
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.comm.protocol import PeerFailure
from decent_dp.errors import ConfigurationError, ExchangeError

logger = logging.getLogger("decent_dp")


class TorchCommunicator:
    """`decent_dp.comm.protocol.Communicator` over gloo (CPU tensors) and nccl (CUDA tensors).

    Args:
        process_group: The user's group; its ranks are the workers. The default group when None.
        timeout: How long an exchange may take before the other worker counts as lost; that of the group when None.

    Raises:
        ConfigurationError: If there is no process group, or this process is not in it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "there is no process group: call decent_dp.utils.initialize_dist() (or "
                "torch.distributed.init_process_group) before wrapping the model, and start the script with "
                "'torchrun --nproc-per-node N script.py'; initialize_dist() also serves one worker without torchrun"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(
                f"process_group is {process_group!r}: this process is not in that group; wrap the model only "
                "on its members"
            )
        self.rank = group.rank()
        self.num_workers = group.size()
        self._group = group
        self._timeout = timeout
        self._groups: dict[tuple[tuple[int, ...] | None, str], Any] = {}

    def prepare(self, cliques: Sequence[tuple[int, ...]], devices: Sequence[torch.device]) -> None:
        """See `Communicator.prepare`: connect the groups, in the same order on every worker."""
        namespace = self.gather(uuid.uuid4().hex)[0]
        everyone = tuple(range(self.num_workers))
        for kind in sorted({device.type for device in devices}):
            self._groups[None, kind] = self._connect(everyone, kind, f"decent_dp/{namespace}/{kind}/all")
            for number, clique in enumerate(cliques):
                if self.rank in clique:
                    self._groups[clique, kind] = self._connect(clique, kind, f"decent_dp/{namespace}/{kind}/{number}")
        logger.debug("rank %d: %d groups for %d workers", self.rank, len(self._groups), self.num_workers)

    def start_swap(
        self,
        payload: Tensor,
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
    ) -> "_Works":
        """See `Communicator.start_swap`. Receives are posted first: a send waits for the receive of the other side."""
        kind = payload.device.type
        group = self._groups[None, kind]
        works: list[tuple[Any, tuple[int, ...]]] = []
        if kind == "cuda":  # one kernel for all, or the two sides' sends wait for each other
            group._start_coalescing(payload.device)
        for rank, buffer in zip(receive_from, buffers, strict=True):
            works.append((group.recv([buffer], rank, tag), (rank,)))
        for rank in send_to:
            works.append((group.send([payload], rank, tag), (rank,)))
        if kind == "cuda":
            works = [(group._end_coalescing(payload.device), tuple({*receive_from, *send_to}))]
        return _Works(works, (payload, *buffers))

    def start_sum(self, buffer: Tensor, ranks: Sequence[int] | None = None) -> "_Works":
        """See `Communicator.start_sum`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        work = self._groups[_key(ranks), buffer.device.type].allreduce([buffer], options)
        return _Works([(work, self._others(ranks))], (buffer,))

    def start_gather(self, payload: Tensor, buffers: Sequence[Tensor], ranks: Sequence[int]) -> "_Works":
        """See `Communicator.start_gather`; travels as bytes, so that every dtype is served."""
        bytes_out = payload.view(torch.uint8)
        bytes_in = [buffer.view(torch.uint8) for buffer in buffers]
        work = self._groups[_key(ranks), payload.device.type].allgather([bytes_in], [bytes_out])
        return _Works([(work, self._others(ranks))], (payload, *buffers))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """See `Communicator.broadcast`; travels as contiguous bytes, so that every dtype and stride is served."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = []
        for tensor in tensors:
            if tensor.numel() > 0:
                flat = tensor.detach().contiguous().reshape(-1)
                work = self._groups[None, tensor.device.type].broadcast([flat.view(torch.uint8)], options)
                sent.append((tensor, flat, work))
        works = [(work, (0,) if self.rank else self._others(None)) for _, _, work in sent]
        _Works(works, ()).wait()
        if self.rank:
            with torch.no_grad():
                for tensor, flat, _ in sent:
                    tensor.copy_(flat.view(tensor.shape))

    def gather(self, value: Any) -> list[Any]:
        """See `Communicator.gather`; uses the user's group, in program order."""
        values: list[Any] = [None] * self.num_workers
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: the other workers did not answer while the model was set up "
                f"({_first_line(error)}); every worker of the process group must wrap the model, and look at the "
                "log of the worker that ended first"
            ) from error
        return values

    def close(self) -> None:
        """See `Communicator.close`: the groups end when nothing in flight refers to them."""
        self._groups.clear()

    def _connect(self, ranks: tuple[int, ...], kind: str, name: str) -> Any:
        """Make a group of some workers for one kind of device."""
        try:
            users = self._group._get_backend(torch.device(kind))
        except RuntimeError:
            users = None
        backend = users.name() if users is not None else "no backend"
        if (kind, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
            raise ConfigurationError(
                f"the parameters are on {kind} and the process group has {backend} for {kind}; it must be gloo "
                "for cpu and nccl for cuda: pass backend='cpu:gloo,cuda:nccl' to init_process_group"
            )
        timeout = self._timeout or users.options._timeout  # type: ignore[union-attr]
        store = dist.distributed_c10d.PrefixStore(name, self._group.get_group_store())
        rank = ranks.index(self.rank)
        try:
            if kind == "cpu":
                return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: could not connect to the workers {list(ranks)} ({_first_line(error)}); "
                "look at the log of the worker that ended first"
            ) from error

    def _others(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        return tuple(rank for rank in (range(self.num_workers) if ranks is None else ranks) if rank != self.rank)


class _Works:
    """Several operations of a backend, each with the workers it depends on, and the tensors they use."""

    def __init__(self, works: list[tuple[Any, tuple[int, ...]]], tensors: tuple[Tensor, ...]) -> None:
        self._works = works
        self._tensors = tensors  # a backend writes to their memory until wait returns

    def wait(self) -> None:
        while self._works:
            work, ranks = self._works[0]
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerFailure(ranks, _reason(error)) from error
            self._works.pop(0)
        self._tensors = ()


def _key(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


def _reason(error: RuntimeError) -> str:
    text = str(error)
    if "Connection closed" in text or "Connection reset" in text or "Broken pipe" in text:
        return "its connection closed, so it has ended"
    if "imed out" in text or "imeout" in text:
        return f"it did not answer within the timeout ({_first_line(error)})"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    """Shorten a backend's message to what happened, without its source position."""
    return (str(error).splitlines() or [type(error).__name__])[0].rpartition("] ")[2].split(". This is")[0]
