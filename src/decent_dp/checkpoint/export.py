"""The average of all replicas as plain weights, and what is inside of a checkpoint."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decent_dp.checkpoint.agreement import Report
from decent_dp.checkpoint.directory import Manifest, find
from decent_dp.checkpoint.loading import read_sections
from decent_dp.checkpoint.other_world import Mean, is_averaged
from decent_dp.checkpoint.saving import finish_earlier
from decent_dp.checkpoint.state import check_moment
from decent_dp.checkpoint.storage import damaged, open_to_write, sync_folder
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, ConfigurationError, DecentDPError

Source = DecentralizedDataParallel | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is inside of a checkpoint.

    Attributes:
        path: Its folder.
        step: Updates that every worker had taken.
        saved_at: Seconds since 1970.
        num_workers: Workers that saved it.
        workers_per_node: Workers on one machine.
        topology: Name of the topology.
        wire_dtype: What parameters travelled in, ``"None"`` for their own dtype.
        optimizer: Class of the optimizer.
        scheduler: Class of the learning-rate scheduler, or ``"none"``.
        scaler: Class of the loss scaler, or ``"none"``.
        num_parameters: Elements of the parameters of one replica.
        part_bytes: Size of the part of each worker.
        consensus_distance: Root mean square over workers of the L2 distance of their trained parameters to the mean;
            None if it was not asked for.
        extra: Names of what the user saved besides.
    """

    path: Path
    step: int
    saved_at: float
    num_workers: int
    workers_per_node: int
    topology: str
    wire_dtype: str
    optimizer: str
    scheduler: str
    scaler: str
    num_parameters: int
    part_bytes: tuple[int, ...]
    consensus_distance: float | None
    extra: tuple[str, ...]


def inspect(directory: str | os.PathLike[str], *, step: int | None = None, distance: bool = True) -> Inspection:
    """Say what is inside of a checkpoint; for one process alone, without a process group.

    Args:
        directory: That `save` was given, or the folder of one checkpoint.
        step: Which checkpoint; the latest when None.
        distance: Whether to read all replicas and compute their consensus distance.

    Raises:
        CheckpointError: There is no checkpoint, or a file is missing, damaged or of something else.
    """
    manifest = find(directory, step)
    with _plausible(manifest):
        return _inspect(manifest, distance=distance)


def _inspect(manifest: Manifest, *, distance: bool) -> Inspection:
    model, mixing = manifest.model, manifest.mixing
    (rest,) = read_sections(manifest, 0, ("rest",))
    workers_per_node = int(mixing.get("workers_per_node", manifest.num_workers))
    if not 1 <= workers_per_node <= manifest.num_workers:
        raise ValueError(f"{workers_per_node} workers a node")
    return Inspection(
        path=manifest.path,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_workers=manifest.num_workers,
        workers_per_node=workers_per_node,
        topology=str(mixing.get("name")),
        wire_dtype=str(mixing.get("wire_dtype")),
        optimizer=str(model.get("optimizer")),
        scheduler=str(model.get("scheduler")),
        scaler=str(model.get("scaler")),
        num_parameters=sum(_numel(kind) for kind in model.get("parameters", {}).values()),
        part_bytes=manifest.part_bytes,
        consensus_distance=_distance(manifest) if distance else None,
        extra=tuple(rest["extra"]),
    )


@torch.no_grad()
def consensus_state(source: Source, *, step: int | None = None) -> dict[str, Any]:
    """Return the average of all replicas as a state dict for the bare model, on the CPU.

    Floating and complex tensors are averaged, buffers too; integer and bool ones are those of rank 0.

    Args:
        source: A wrapped model, which all workers must pass; or the directory of a checkpoint, which one process reads
            alone, without a process group.
        step: Of the checkpoint; the latest when None.

    Raises:
        CheckpointError: A file is missing, damaged or of something else.
    """
    if isinstance(source, DecentralizedDataParallel):
        return _of_running(source)
    manifest, mean = find(source, step), Mean()
    with _plausible(manifest):
        for rank in range(manifest.num_workers):
            (section,) = read_sections(manifest, rank, ("model",))
            mean.add(section["state_dict"])
        return mean.result()


@contextlib.contextmanager
def _plausible(manifest: Manifest) -> Iterator[None]:
    """Turn whatever content that no run saves leads to into an error that names the checkpoint."""
    try:
        yield
    except DecentDPError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise damaged(manifest.path, f"it is not what a run saves ({type(error).__name__}: {error})") from error


def export(source: Source, out: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Write the average of all replicas as a file that loads into the bare model anywhere.

    With the suffix ``.safetensors`` it is one of safetensors (``safetensors.torch.load_file``), else a state dict of
    ``torch.save`` (``torch.load(out, weights_only=True)``). The file appears when it is complete.

    Args:
        source: As for `consensus_state`; rank 0 of a running model writes.
        out: The file.
        step: Of the checkpoint; the latest when None.

    Returns:
        The file.

    Raises:
        ConfigurationError: safetensors is not installed, or the state holds what it cannot.
        CheckpointError: A file cannot be read or written; on all workers.
    """
    file = Path(out)
    if not isinstance(source, DecentralizedDataParallel):
        _check_format(file)
        _write(consensus_state(source, step=step), file)
        return file
    asking = Report(source, f"export to {file}")
    with asking:
        check_moment(source)
        _check_format(file)
    asking.share()
    state = consensus_state(source)
    writing = Report(source, f"export to {file}")
    with writing:
        if source._communicator.rank == 0:
            _write(state, file)
    writing.share()
    return file


def _of_running(model: DecentralizedDataParallel) -> dict[str, Any]:
    finish_earlier(model)
    buffers = [buffer for buffer in model.module.buffers() if buffer.layout == torch.strided]
    model._averager.replace(lambda: buffers, will_revert=True, return_distance=False)
    try:
        return {name: _on_cpu(value) for name, value in model.state_dict().items()}
    finally:
        model._averager.revert()


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _check_format(file: Path) -> None:
    if not file.name:
        raise ConfigurationError(f"out={str(file)!r} is no name of a file; give one that ends in .safetensors or .pt")
    if file.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ConfigurationError(
            f"{file} is to be a file of safetensors, and the package safetensors is not installed; run "
            "`pip install safetensors`, or give a name that ends in .pt"
        )


def _write(state: Mapping[str, Any], file: Path) -> None:
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            _write_safetensors(state, partial)
        else:
            with open_to_write(partial) as stream:
                torch.save(dict(state), stream)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, file)
        sync_folder(file.parent)
    except OSError as error:
        place = file if str(error.filename) in ("None", str(partial)) else error.filename
        raise CheckpointError(f"could not write {place}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _write_safetensors(state: Mapping[str, Any], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    others = [name for name, value in state.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if others:
        raise ConfigurationError(
            f"'{others[0]}' is no dense tensor, which safetensors cannot hold; give a name that ends in .pt"
        )
    # two names of one parameter become two tensors, since the format knows no sharing
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    try:
        save_file(tensors, file)
    except KeyError as error:  # it looks dtypes up
        names = [name for name, value in state.items() if value.dtype == error.args[0]]
        raise ConfigurationError(
            f"{names} are of {error.args[0]}, which safetensors cannot hold; give a name that ends in .pt"
        ) from error
    except SafetensorError as error:
        reason = re.search(r"os error (\d+)", str(error))
        if reason is None:
            raise CheckpointError(f"safetensors could not write {file}: {error}") from error
        raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(file)) from error


def _distance(manifest: Manifest) -> float:
    """Consensus distance, from two readings of all replicas."""
    kinds = manifest.model.get("parameters", {})
    trained = {name for name, kind in kinds.items() if not str(kind).endswith("frozen")}

    def replicas() -> Iterator[dict[str, Tensor]]:
        for rank in range(manifest.num_workers):
            (section,) = read_sections(manifest, rank, ("model",))
            state = section["state_dict"]
            yield {name: state[name] for name in state if name in trained and is_averaged(state[name])}

    mean = Mean()
    for replica in replicas():
        mean.add({name: value.double() if value.is_floating_point() else value for name, value in replica.items()})
    center, square = mean.result(), 0.0
    for replica in replicas():
        square += sum(
            float((value.to(center[name].dtype) - center[name]).abs().square().sum()) for name, value in replica.items()
        )
    return math.sqrt(square / manifest.num_workers)


def _numel(kind: Any) -> int:
    """Elements of a parameter that is described as ``[4, 3] float32``."""
    sizes = str(kind).partition("]")[0].strip("[")
    return math.prod(int(size) for size in sizes.split(",") if size.strip().isdigit())
