"""One worker's part of a checkpoint, with the planner and the storage of `torch.distributed.checkpoint`.

Two of its habits are left out, because a checkpoint may come from a stranger: it keeps what is where in a pickled
``.metadata``, and reads objects with ``weights_only=False``. Here an index in JSON says what is where, and whatever is
read is read with ``weights_only=True``. Nor does it speak to other workers: each has a part of its own, in two files,
``__RANK_0.distcp`` and ``__RANK.json``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from decent_dp.checkpoint.tree import Items
from decent_dp.errors import CheckpointError

_BLOCK_BYTES = 2**18


def data_name(rank: int) -> str:
    """Name of the file with a worker's data."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """Name of the file that says what is where in it."""
    return f"__{rank}.json"


class Plan(DefaultSavePlanner):
    """What a worker's part consists of. To plan keeps the interpreter busy, so it is not done beside training.

    Args:
        items: Tensors on the CPU, and objects of plain data.
    """

    def __init__(self, items: Items) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pause: Callable[[], object] = lambda: None
        self.set_up_planner(items, is_coordinator=True)
        plans, _ = self.create_global_plan([self.create_local_plan()])
        self.finish_plan(plans[0])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what is to be written for an item; an object is serialized, which takes its time."""
        self.pause()
        return super().resolve_data(write_item)


def write_part(folder: Path, rank: int, identity: str, plan: Plan, pause: Callable[[], object] = lambda: None) -> None:
    """Write one worker's part and wait until it is on the disk.

    Args:
        folder: Is made if it is not there.
        rank: Of the worker.
        identity: Of the checkpoint; parts of different checkpoints never go together.
        plan: What to write.
        pause: Called now and then: before every item, and after every `_BLOCK_BYTES` of it.

    Raises:
        OSError: The operating system refuses, for example because the disk is full.
    """
    plan.pause = pause
    writer = _Writer(folder, rank, identity, pause)
    (prepared,) = writer.prepare_global_plan([writer.prepare_local_plan(plan.plan)])
    written = writer.write_data(prepared, plan)
    written.wait()
    writer.finish(plan.metadata, [written.value()])


def read_part(folder: Path, rank: int, identity: str, wanted: Callable[[str], bool]) -> Items:
    """Read items of one worker's part, after its checksum.

    Args:
        folder: Of the checkpoint.
        rank: Of the worker that wrote the part.
        identity: Of the checkpoint.
        wanted: Says by its key whether an item is wanted.

    Raises:
        CheckpointError: A file is missing, truncated, changed or of something else; the message names it.
    """
    index = _read_index(folder, rank, identity)
    data = folder / data_name(rank)
    num_bytes, checksum = _checksum(data)
    if num_bytes != index["bytes"]:
        raise damaged(data, f"it has {num_bytes:,} bytes and had {index['bytes']:,} when it was saved")
    if checksum != index["crc32"]:
        raise damaged(data, "its content is not what was saved (the checksum differs)")
    try:
        reader = _Reader(folder, index, data.name)
        metadata = reader.read_metadata()
        items: Items = {
            key: torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu")
            if isinstance(kind, TensorStorageMetadata)
            else b""
            for key, kind in metadata.state_dict_metadata.items()
            if wanted(key)
        }
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(items, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
        reader.read_data(plan, planner).wait()
    except pickle.UnpicklingError as error:
        raise damaged(data, "it holds more than plain data, which is not read") from error
    except Exception as error:  # whatever a file that somebody made up may lead to
        raise damaged(data, f"{type(error).__name__}: {error}") from error
    return items


def damaged(file: Path, reason: str) -> CheckpointError:
    """Return the error of a file that is not what it should be."""
    return CheckpointError(f"{file} cannot be used: {reason}")


def read_json(file: Path) -> dict[str, Any]:
    """Read an object in JSON.

    Raises:
        CheckpointError: The file is missing or no such thing; the message names it.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise damaged(file, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise damaged(file, "it is not JSON, so it was not written by decent_dp or is truncated") from error
    if not isinstance(content, dict):
        raise damaged(file, "it is JSON of something else")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object in JSON and wait until it is on the disk."""
    with named(file), file.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Give errors of the operating system the name of the file, which those of a write lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


# ---------------------------------------------------------------- writing


@dataclasses.dataclass
class _Prefix:
    """What the writer looks for in a plan."""

    prefix: str


class _Writer(FileSystemWriter):
    """Writes an index in JSON in place of pickled metadata."""

    def __init__(self, folder: Path, rank: int, identity: str, pause: Callable[[], object]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder, self._rank, self._identity = folder, rank, identity
        self._files = self.fs = _Files(pause)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=_Prefix(f"__{self._rank}_")) for plan in plans]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        places = {result.index.fqn: result.storage_data for some in results for result in some}
        items = {}
        for key, kind in metadata.state_dict_metadata.items():
            place: dict[str, Any] = {"offset": places[key].offset, "length": places[key].length}
            if isinstance(kind, TensorStorageMetadata):
                place |= {"dtype": str(kind.properties.dtype).removeprefix("torch."), "size": list(kind.size)}
            items[key] = place
        index = {
            "id": self._identity,
            "rank": self._rank,
            "bytes": self._files.num_bytes,
            "crc32": self._files.checksum,
            "items": items,
        }
        write_json(self._folder / index_name(self._rank), index)


class _Files(FileSystem):
    """Opens files, and remembers size and checksum of what was written."""

    def __init__(self, pause: Callable[[], object]) -> None:
        super().__init__()
        self.num_bytes = self.checksum = 0
        self._pause = pause

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with named(Path(path)), Path(path).open(mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = _Stream(file, self._pause)
            try:
                yield stream
            except Exception:
                if stream.failure is None:
                    raise
            if stream.failure is not None:
                raise stream.failure
            self.num_bytes, self.checksum = stream.num_bytes, stream.checksum


def open_to_write(file: Path) -> AbstractContextManager[Any]:
    """Open a file for `torch.save`, so that what the operating system refuses is an `OSError`."""
    return _Files(lambda: None).create_stream(file, "wb")


class _Stream(io.RawIOBase):
    """Counts and checks what is written.

    An error is kept and raised at the end: the writer of archives would end the process if it met one.
    """

    def __init__(self, file: IO[bytes], pause: Callable[[], object]) -> None:
        self._file, self._pause = file, pause
        self.num_bytes = 0
        self.checksum = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _BLOCK_BYTES):
            self._write(view[begin : begin + _BLOCK_BYTES])
        return len(view)

    def _write(self, block: memoryview) -> None:
        if self.failure is None:
            try:
                self._file.write(block)
                self.checksum = zlib.crc32(block, self.checksum)
            except OSError as error:
                self.failure = error
        self.num_bytes += len(block)
        self._pause()

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        if self.failure is None and not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self.failure = error

    def fileno(self) -> int:
        self.flush()
        if self.failure is not None:
            raise self.failure
        return self._file.fileno()


# ---------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the reader looks for: where an item is."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(FileSystemReader):
    """Takes what is where from an index that was read before."""

    def __init__(self, folder: Path, index: dict[str, Any], data: str) -> None:
        super().__init__(folder)
        self._index, self._data = index, data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        kinds: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for key, item in self._index["items"].items():
            place = _Place(self._data, int(item["offset"]), int(item["length"]))
            if min(place.offset, place.length) < 0 or place.offset + place.length > self._index["bytes"]:
                raise ValueError(f"item '{key}' lies outside of the file")
            if "dtype" in item:
                dtype, size = getattr(torch, item["dtype"]), torch.Size(item["size"])
                if not isinstance(dtype, torch.dtype) or min(size, default=0) < 0:
                    raise ValueError(f"item '{key}' is no tensor")
                if size.numel() * dtype.itemsize > place.length:
                    raise ValueError(f"item '{key}' is larger than its place in the file")
                chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                kinds[key] = TensorStorageMetadata(TensorProperties(dtype), size, [chunk])
                places[MetadataIndex(key, [0] * len(size))] = place
            else:
                kinds[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = place
        return Metadata(kinds, storage_data=places)


class _LoadPlanner(DefaultLoadPlanner):
    """Reads objects without running what they say."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _read_index(folder: Path, rank: int, identity: str) -> dict[str, Any]:
    file = folder / index_name(rank)
    index = read_json(file)
    if (index.get("id"), index.get("rank")) != (identity, rank):
        raise damaged(file, "it belongs to another checkpoint")
    if not all(isinstance(index.get(key), kind) for key, kind in (("bytes", int), ("crc32", int), ("items", dict))):
        raise damaged(file, "it is not what was saved")
    return index


def _checksum(file: Path) -> tuple[int, int]:
    num_bytes = checksum = 0
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                num_bytes, checksum = num_bytes + len(block), zlib.crc32(block, checksum)
    except OSError as error:
        raise damaged(file, str(error.strerror)) from error
    return num_bytes, checksum
