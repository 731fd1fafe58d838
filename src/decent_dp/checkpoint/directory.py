"""A directory of checkpoints: what they are called, when they count, which is the latest.

    DIR/step-00000100/checkpoint.json           what is inside; written last
                      __0_0.distcp __0.json     the part of rank 0
                      __1_0.distcp __1.json     the part of rank 1
    DIR/.partial-.../                           one that is being written, or never was finished
    DIR/.removed-.../                           one that is being removed

A checkpoint appears by one renaming, when every part of it is on the disk, and disappears by one. Which is the latest
says the number inside of it, not its name, its date or a pointer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decent_dp.checkpoint.storage import damaged, data_name, index_name, read_json, sync_folder, write_json
from decent_dp.errors import CheckpointError

logger = logging.getLogger("decent_dp")

_FORMAT = "decent_dp checkpoint"
_VERSION = 2
_MANIFEST = "checkpoint.json"
_END_OF_TIME = 2**36  # seconds since 1970
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")
_LEFT_OVER = (".partial-", ".removed-")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``checkpoint.json`` says.

    Attributes:
        path: The folder it is in.
        id: Differs between any two checkpoints; every file of one carries it.
        number: Grows from each checkpoint of a directory to the next.
        step: Updates that every worker had taken.
        saved_at: Seconds since 1970.
        mixing: Who mixed with whom.
        model: What a model must agree on.
        part_bytes: Size of the data of each worker; as many as there were workers.
    """

    path: Path
    id: str
    number: int
    step: int
    saved_at: float
    mixing: Mapping[str, Any]
    model: Mapping[str, Any]
    part_bytes: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        """Workers that saved it."""
        return len(self.part_bytes)


_FIELDS: dict[str, Any] = {
    "id": str, "number": int, "step": int, "saved_at": (int, float), "mixing": dict, "model": dict, "part_bytes": list
}  # fmt: skip


def read_manifest(folder: Path) -> Manifest:
    """Read what is inside of a checkpoint.

    Raises:
        CheckpointError: The file is missing, or something else; the message names it.
    """
    file = folder / _MANIFEST
    content = read_json(file)
    if content.get("format") != _FORMAT:
        raise damaged(file, "it was not written by decent_dp")
    if content.get("version") != _VERSION:
        raise damaged(file, f"its format has version {content.get('version')}, and this decent_dp reads {_VERSION}")
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name), kind) or isinstance(content[name], bool):
            raise damaged(file, f"its entry '{name}' is not what was saved")
    sizes = content["part_bytes"]
    if not sizes or not all(isinstance(size, int) for size in sizes):
        raise damaged(file, "its entry 'part_bytes' is not what was saved")
    if not 0 <= content["saved_at"] < _END_OF_TIME:
        raise damaged(file, "its entry 'saved_at' is not what was saved")
    return Manifest(
        folder, **{name: content[name] for name in _FIELDS if name != "part_bytes"}, part_bytes=tuple(sizes)
    )


def check_parts(manifest: Manifest) -> None:
    """Check that the data of all workers is there, by its size.

    Raises:
        CheckpointError: A file is missing or truncated; the message names it.
    """
    for rank, expected in enumerate(manifest.part_bytes):
        for file in (manifest.path / data_name(rank), manifest.path / index_name(rank)):
            try:
                size = file.stat().st_size
            except OSError as error:
                raise damaged(file, str(error.strerror)) from error
            if file.suffix == ".distcp" and size != expected:
                raise damaged(file, f"it has {size:,} bytes and had {expected:,} when it was saved")


def checkpoints(directory: str | os.PathLike[str]) -> list[Manifest]:
    """The checkpoints of a directory, the latest last; empty if there are none, or no directory.

    Raises:
        CheckpointError: One of them has no readable manifest; the message names it.
    """
    found, errors = _look(directory)
    if errors:
        raise errors[0]
    return found


def _look(directory: str | os.PathLike[str]) -> tuple[list[Manifest], list[CheckpointError]]:
    """The checkpoints with a readable manifest, the latest last, and what is wrong with the others."""
    found: list[Manifest] = []
    errors: list[CheckpointError] = []
    try:
        names = sorted(entry for entry in os.listdir(directory) if _NAME.fullmatch(entry))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [CheckpointError(f"{directory} cannot be read ({error.strerror}); give a directory")]
    for name in names:
        try:
            found.append(read_manifest(Path(directory, name)))
        except CheckpointError as error:
            errors.append(error)
    return sorted(found, key=lambda manifest: manifest.number), errors


def find(directory: str | os.PathLike[str], step: int | None = None) -> Manifest:
    """Return the latest checkpoint, or the latest of a step; a directory may be a checkpoint itself.

    Raises:
        CheckpointError: There is none, or files are missing or damaged; the message names them.
    """
    folder = Path(directory)
    found, errors = ([read_manifest(folder)], []) if os.path.exists(folder / _MANIFEST) else _look(folder)
    if errors and (step is None or all(manifest.step != step for manifest in found)):
        raise errors[0]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint; give the directory that save() was given")
    matching = found if step is None else [manifest for manifest in found if manifest.step == step]
    if not matching:
        steps = sorted({manifest.step for manifest in found})
        raise CheckpointError(f"{folder} holds no checkpoint of step {step}; there are steps {steps}")
    check_parts(matching[-1])
    return matching[-1]


# ---------------------------------------------------------------- writing one


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the next checkpoint will be: chosen by one worker for all.

    Attributes:
        id: Its identity.
        number: Its number in the directory.
        partial: Where its parts are written.
        path: Where it will appear.
    """

    id: str
    number: int
    partial: str
    path: str

    def absolute(self) -> Offer:
        """The same on this worker, whatever its working directory will be."""
        return replace(self, partial=os.path.abspath(self.partial), path=os.path.abspath(self.path))


def offer(directory: str | os.PathLike[str], step: int) -> Offer:
    """Choose a place for a checkpoint, and remove what unfinished ones have left; for one worker alone."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        if name.startswith(_LEFT_OVER):
            with contextlib.suppress(OSError):
                _delete(folder / name)
    number = max((manifest.number for manifest in _look(folder)[0]), default=0) + 1
    name, again = f"step-{step:08d}", 1
    while (folder / name).exists():
        again += 1
        name = f"step-{step:08d}.{again}"
    identity = uuid.uuid4().hex
    return Offer(identity, number, str(folder / f".partial-{name}-{identity[:8]}"), str(folder / name))


def commit(place: Offer, num_workers: int, content: Mapping[str, Any]) -> None:
    """Let a checkpoint appear; for one worker alone, when all have written their parts.

    Raises:
        OSError: The operating system refuses.
        CheckpointError: Parts are missing, because not all workers see one directory.
    """
    folder, sizes = Path(place.partial), []
    for rank in range(num_workers):
        file = folder / index_name(rank)
        if not file.exists():
            raise CheckpointError(
                f"the part of rank {rank} is not in {folder}; all workers must be given one directory, on a file "
                "system that they share"
            )
        sizes.append(read_json(file)["bytes"])
    head = {"format": _FORMAT, "version": _VERSION, "id": place.id, "number": place.number, "part_bytes": sizes}
    write_json(folder / _MANIFEST, {**head, **content})
    sync_folder(folder)
    os.rename(folder, place.path)
    sync_folder(Path(place.path).parent)


def give_up(place: Offer) -> None:
    """Remove what was written of a checkpoint that will not appear; for one worker alone."""
    shutil.rmtree(place.partial, ignore_errors=True)


def keep_latest(directory: str | os.PathLike[str], num_kept: int) -> None:
    """Remove all checkpoints but the latest few; what cannot be removed stays, with a warning in the log."""
    try:
        _remove(checkpoints(directory)[:-num_kept])
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints could not be removed: %s", error)


def _remove(manifests: Sequence[Manifest]) -> None:
    for manifest in manifests:
        away = manifest.path.with_name(f".removed-{manifest.path.name}-{manifest.id[:8]}")
        os.rename(manifest.path, away)
        _delete(away)


def _delete(folder: Path) -> None:
    """Remove a folder; of a link, which may lead to where others keep it, only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
