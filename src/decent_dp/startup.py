"""From launch variables to a process group. Besides the communicator, the only file that names torch.distributed.

torchrun, Slurm scripts and the like describe the world in environment variables. They are read here and nowhere
else, as defaults.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from decent_dp.errors import LaunchError

logger = logging.getLogger("decent_dp")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_PORT = "choose a free one (torchrun --standalone, or --master-port N)"
_HINT = "start the script with 'torchrun --nproc-per-node N script.py', which sets all of them"


def initialize_dist(timeout: timedelta | None = None) -> tuple[int, int]:
    """Initialise the default process group from torchrun's variables, nccl if CUDA is there, else gloo.

    Without any launch variable the script runs as the only worker. An initialised group is used as it is. With CUDA the
    current device becomes that of LOCAL_RANK.

    Args:
        timeout: How long a worker may be silent before the others give up; torch's default when None.

    Returns:
        The rank of this worker and the number of workers.

    Raises:
        LaunchError: If variables are missing or not numbers, or the rendezvous address is busy or out of reach.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    cuda = torch.cuda.is_available()
    if cuda:
        local_rank = _number("LOCAL_RANK", default=0)
        if local_rank >= torch.cuda.device_count():
            raise LaunchError(
                f"LOCAL_RANK is {local_rank} and this machine has {torch.cuda.device_count()} CUDA devices; "
                "start at most one worker per device (--nproc-per-node)"
            )
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        logger.info("no launch variables: one worker")
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
        return 0, 1
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise LaunchError(f"{', '.join(given)} set but {', '.join(missing)} missing in the environment; {_HINT}")
    rank, world_size, port = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
    if world_size < 1 or rank >= world_size:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE is {world_size}; ranks go from 0 to WORLD_SIZE - 1; {_HINT}")
    address = f"{os.environ['MASTER_ADDR']}:{port}"
    try:
        limit = {} if timeout is None else {"timeout": timeout}
        store, _, _ = next(rendezvous("env://", rank, world_size, **limit))
        _claim(store, rank, address)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, LaunchError):
            raise
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(
                f"port {port} (MASTER_PORT) is in use at {address}, perhaps by another job; {_OTHER_PORT}"
            ) from error
        text = (str(error).splitlines() or [""])[0]
        raise LaunchError(
            f"rank {rank}: no rendezvous of {world_size} workers at {address} (MASTER_ADDR, MASTER_PORT): {text}. All "
            f"workers must be started, and no other job may use this port; {_OTHER_PORT}"
        ) from error
    return rank, world_size


def _claim(store: Any, rank: int, address: str) -> None:
    """Refuse a store in which another process is this rank already: it belongs to another job."""
    key, me = f"decent_dp/rank/{rank}", f"{socket.gethostname()}:{os.getpid()}"
    if store.check([key]) and store.get(key).decode() != me:
        raise LaunchError(
            f"rank {rank} is taken at {address} by process {store.get(key).decode()}, so another job uses this port "
            f"(MASTER_PORT); {_OTHER_PORT}"
        )
    store.set(key, me)


def default_workers_per_node(num_workers: int) -> int:
    """Return how many workers a node has, from LOCAL_WORLD_SIZE; all of them without it.

    Args:
        num_workers: Number of workers of the process group.

    Raises:
        LaunchError: If LOCAL_WORLD_SIZE is not a positive number.
    """
    local = _number("LOCAL_WORLD_SIZE", default=num_workers)
    if local < 1:
        raise LaunchError(f"LOCAL_WORLD_SIZE is {local}; it must be at least 1; {_HINT}")
    return min(local, num_workers)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise LaunchError(f"{name} is {text!r} in the environment; it must be a whole number; {_HINT}") from None
    if value < 0:
        raise LaunchError(f"{name} is {value} in the environment; it must not be negative; {_HINT}")
    return value
