"""Loading: the same run goes on bit for bit, or another world starts from its consensus."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from decent_dp.checkpoint.agreement import Report
from decent_dp.checkpoint.directory import Manifest, find, read_manifest
from decent_dp.checkpoint.other_world import consensus_start
from decent_dp.checkpoint.saving import finish_earlier
from decent_dp.checkpoint.state import (
    SECTIONS,
    as_mapping,
    check_extra,
    check_moment,
    describe,
    describe_mixing,
    give_back,
    other_buffers,
    put_back,
    set_random_states,
)
from decent_dp.checkpoint.storage import damaged, data_name, read_part
from decent_dp.checkpoint.tree import unpack
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.engine.training_state import check
from decent_dp.errors import CheckpointError, ConfigurationError, TrainingError

Start = Literal["exact", "consensus"]
Moments = Literal["average", "replica"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: Folder of the checkpoint.
        step: Updates that every worker had taken; also ``model.t`` now.
        num_workers: Workers that saved it.
        extra: What was handed to `save` as ``extra``, objects as their states.
    """

    path: Path
    step: int
    num_workers: int
    extra: dict[str, Any]


@torch.inference_mode(False)  # what is made here is trained on
def load(
    model: DecentralizedDataParallel,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    start: Start = "exact",
    moments: Moments = "average",
) -> Loaded:
    """Continue a run that `save` has saved; every worker must call it.

    With ``start="exact"`` every worker takes over the part of its rank, and the run goes on bit for bit: with the same
    model, optimizer, number of workers and topology. The bucket size may differ. Hyperparameters such as the
    learning rate are those that were saved.

    With ``start="consensus"`` number of workers, topology and wire dtype may differ. Every worker starts from the
    average of the saved replicas, each after mixing what it had in flight, so that their mean is kept where the
    topology keeps it; integer buffers are those of rank 0. The step t and the mixing strength are kept. Optimizer
    states and gradients of an open accumulation window are averaged, or taken from a replica: worker i takes those of
    saved worker ``i % n``, n being their number; so come counters, hyperparameters, schedulers, scaler and ``extra``
    in any case. Random states stay as they are. Each worker reads all parts.

    Nothing is changed unless all workers could read all they need.

    Args:
        model: The wrapped model; what it has in flight is dropped.
        directory: That `save` was given, or the folder of one checkpoint.
        step: Which checkpoint; the latest when None.
        extra: Objects to give their state back to, by the name they were saved under: with ``load_state_dict``, or
            torch generators.
        start: ``"exact"``, or ``"consensus"`` into another world.
        moments: With ``"consensus"``: ``"average"`` or ``"replica"``.

    Returns:
        What was loaded.

    Raises:
        CheckpointError: On all workers: there is no checkpoint, a file is missing, damaged or of something else, or it
            does not fit the model or the world; the message names the file, or the difference.
    """
    finish_earlier(model)
    doing = f"load from {directory}"
    choice = Report(model, doing)
    with choice:
        check_moment(model)
        given = as_mapping(extra)
        if start not in ("exact", "consensus") or moments not in ("average", "replica"):
            raise ConfigurationError(
                f"start={start!r}, moments={moments!r}; start is 'exact' or 'consensus', moments 'average' or 'replica'"
            )
        found = find(directory, step) if model._communicator.rank == 0 else None
        choice.result = (start, moments, step), found and (found.path.name, found.id)
    choices = choice.share()
    name, identity = choices[0][1]
    for rank, (asked, _) in enumerate(choices):
        if asked != choices[0][0]:
            words = ["start={!r}, moments={!r}, step={!r}".format(*choices[other][0]) for other in (0, rank)]
            raise CheckpointError(
                f"{model._replica.here}: the workers do not load the same way: rank 0 asks for {words[0]}, rank {rank} "
                f"for {words[1]}; every worker must make the same call"
            )

    reading = Report(model, doing)
    with reading:
        folder = Path(directory)
        manifest = read_manifest(
            folder if folder.name == name and (folder / "checkpoint.json").exists() else folder / name
        )
        if manifest.id != identity:
            raise CheckpointError(
                f"{manifest.path} is another checkpoint here than on rank 0; all workers must be given one directory"
            )
        _compare(model, manifest, start)
        weights, training, rest = _read(model, manifest, start, moments)
        _check_content(model, manifest, weights, training, rest)
        check_extra(given, rest["extra"])
    reading.share()

    # from here on only what the user has written can refuse: a load_state_dict, a set_extra_state
    placing = Report(model, doing)
    with placing:
        put_back(model, weights, training)
        give_back(given, rest["extra"])
        if start == "exact":
            set_random_states(rest["random"])
    placing.share()
    return Loaded(manifest.path, manifest.step, manifest.num_workers, rest["extra"])


def _read(model: DecentralizedDataParallel, manifest: Manifest, start: Start, moments: Moments) -> tuple[Any, Any, Any]:
    rank = model._communicator.rank
    if start == "exact":
        return read_sections(manifest, rank)
    own = rank % manifest.num_workers
    (rest,) = read_sections(manifest, own, ("rest",))
    parts = (read_sections(manifest, other, ("model", "training")) for other in range(manifest.num_workers))
    weights, training = consensus_start(parts, manifest.num_workers, own, average_moments=moments == "average")
    return weights, training, rest


def read_sections(manifest: Manifest, rank: int, sections: tuple[str, ...] = SECTIONS) -> tuple[Any, ...]:
    """Read sections of one worker's part.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    items = read_part(manifest.path, rank, manifest.id, lambda key: key.split("/")[0] in sections)
    try:
        return tuple(unpack(section, items) for section in sections)
    except ValueError as error:
        raise damaged(manifest.path / data_name(rank), str(error)) from error


def _compare(model: DecentralizedDataParallel, manifest: Manifest, start: Start) -> None:
    """Refuse another model, and without being told otherwise another world."""
    ours = describe(model)
    for subject in ("parameters", "buffers"):
        here, there = ours[subject], manifest.model.get(subject)
        there = there if isinstance(there, dict) else {}
        for name in [*there, *here]:
            before, now = there.get(name, "not there"), here.get(name, "not there")
            if before != now:
                raise CheckpointError(
                    f"{manifest.path} does not fit this model: {subject[:-1]} '{name}' is {before} in the checkpoint "
                    f"and {now} in the model; build the model as it was when it was saved, or load weights "
                    "alone: model.load_state_dict(consensus_state(directory))"
                )
    for subject in ("optimizer", "scheduler", "scaler"):
        if ours[subject] != manifest.model.get(subject):
            raise CheckpointError(
                f"{manifest.path} was saved with {subject} {manifest.model.get(subject)} and this model has "
                f"{ours[subject]}; use the same, or load weights alone: "
                "model.load_state_dict(consensus_state(directory))"
            )
    world = describe_mixing(model)
    if start == "exact" and (world != manifest.mixing or world["num_workers"] != manifest.num_workers):
        raise CheckpointError(
            f"{manifest.path} was saved by {_in_words(manifest.mixing)} and this run has {_in_words(world)}; start the "
            "same, or say start='consensus' to begin with the average of the saved replicas"
        )


def _check_content(
    model: DecentralizedDataParallel, manifest: Manifest, weights: Any, training: Any, rest: Any
) -> None:
    """Refuse before anything is changed what cannot be put back, although it is as it was saved."""
    file = manifest.path / data_name(model._communicator.rank)
    try:
        names = set(model._replica.names)
        fits = training["step"] == manifest.step and training.keys() >= {"strength", "schedulers", "scaler", "window"}
        fits = fits and training["optimizer"].keys() <= names and {"random", "extra"} <= rest.keys()
        ours = model.state_dict()
        if names_of_one := sorted(weights["state_dict"].keys() ^ ours.keys()):
            raise CheckpointError(
                f"{manifest.path} does not fit this model: '{names_of_one[0]}' is in the state dict of only one; "
                "build the model as it was when it was saved"
            )
        fits = fits and weights["buffers"].keys() == other_buffers(model.module).keys()
        for name, value in ours.items():
            saved = weights["state_dict"][name]
            fits = fits and getattr(saved, "shape", None) == getattr(value, "shape", None)
        for exchanged in [] if training["exchange"] is None else [training["exchange"][key] for key in _TRAVELS]:
            fits = fits and exchanged.keys() <= names
        try:
            check(model._replica, training)
        except TrainingError as error:
            raise CheckpointError(
                f"{manifest.path} does not fit this model: {error} it is saved, or load it with the bucket size of then"
            ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"it is not what a run saves ({error})") from error
    if not fits:
        raise damaged(file, "it is not what a run saves")


_TRAVELS = ("received", "sent", "remainder")


def _in_words(mixing: Mapping[str, Any]) -> str:
    wire = mixing.get("wire_dtype")
    return (
        f"{mixing.get('num_workers')} workers, {mixing.get('workers_per_node')} a node, on topology "
        f"'{mixing.get('name')}' ({mixing.get('fingerprint')})" + (f" with wire_dtype {wire}" if wire != "None" else "")
    )
