"""Saving: every worker writes its own part, one lets the checkpoint appear."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from decent_dp.checkpoint.agreement import Report
from decent_dp.checkpoint.directory import Offer, commit, give_up, keep_latest, offer
from decent_dp.checkpoint.state import check_moment, collect, describe, describe_mixing
from decent_dp.checkpoint.storage import Plan, write_part
from decent_dp.checkpoint.tree import Staging
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, ConfigurationError, DecentDPError

_POLL_S = 0.01
_FAILED = 2**20  # on the board: a worker that has not written its part, next to a count of those that have
_AFTER_END_S = 10.0  # how long a process that ends waits for the parts of others
_SLICE_S = 0.001  # of one core: what is used at a time for writing beside training
_REST = 19  # and how many times as long it is left to training in between
_PATIENCE_S = 60.0  # where nobody has set a timeout

#: Of models that were saved in the background.
_STAGING: weakref.WeakKeyDictionary[DecentralizedDataParallel, Staging] = weakref.WeakKeyDictionary()
_UNDER_WAY: weakref.WeakKeyDictionary[DecentralizedDataParallel, Saving] = weakref.WeakKeyDictionary()


def save(
    model: DecentralizedDataParallel,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save a run so that `load` continues it bit for bit; every worker must call it after the same update.

    Each worker writes its own replica, optimizer state, schedulers, loss scaler, exchange in flight, open accumulation
    window and random states. The checkpoint appears under its name when all parts are on the disk, and only then are
    older ones removed. Training may go on from where it is.

    Args:
        model: The wrapped model, outside of ``backward()``, ``consensus()`` and ``join()``.
        directory: The same on all workers, on a file system that they share; made if it is not there. Of one run.
        extra: What else to save, by name: plain data (tensors, numbers, strings, lists, dicts), torch generators, and
            objects with ``state_dict()``, such as a sampler.
        keep: How many checkpoints to keep in the directory, this one included; all when None.

    Returns:
        The folder of the new checkpoint, ``directory/step-...``.

    Raises:
        CheckpointError: On all workers, if any could not write; the message names the file. Earlier checkpoints are as
            they were, and training can go on.
        ExchangeError: Another worker has ended.

    Example:
        >>> import functools, tempfile, torch
        >>> from decent_dp.comm import InProcessWorld
        >>> def wrap():
        ...     optim_fn = functools.partial(torch.optim.SGD, lr=0.1)
        ...     return DecentralizedDataParallel(torch.nn.Linear(2, 1), optim_fn,
        ...                                      communicator=InProcessWorld(1).communicator(0))
        >>> directory, model = tempfile.mkdtemp(), wrap()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> save(model, directory, extra={"epoch": 3}).name
        'step-00000001'
        >>> from decent_dp.checkpoint import load
        >>> load(wrap(), directory).extra
        {'epoch': 3}
    """
    return _start(model, directory, extra, keep, in_background=False).wait()


def async_save(
    model: DecentralizedDataParallel,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Saving:
    """As `save`, but write while training goes on, from a copy of this worker's state.

    The copy is made before this returns; its memory is kept for the next one. Writing takes a twentieth of a processor,
    so that training goes on at its speed, and hurries when it is waited for.

    The checkpoint appears as soon as all workers have written. The next call of `save`, `async_save` or `load` with
    this model waits for it first, and raises what it has met.

    Returns:
        The saving under way, to be waited for.

    Raises:
        CheckpointError: On all workers, if any could not begin, or the saving before has failed.
    """
    return _start(model, directory, extra, keep, in_background=True)


class Saving:
    """A checkpoint being written; made by `async_save`."""

    def __init__(
        self,
        model: DecentralizedDataParallel,
        directory: str | os.PathLike[str],
        place: Offer,
        plan: Plan,
        content: Mapping[str, Any],
        keep: int | None,
    ) -> None:
        communicator = model._communicator
        self._communicator, self._place = communicator, place.absolute()
        self._plan, self._content, self._keep = plan, content, keep
        # virtual workers take turns, so that only the last one can know that all have written
        self._commits = communicator.rank == (0 if communicator.timeout is not None else communicator.num_workers - 1)
        self._report = Report(model, f"save to {directory}")
        self._key = f"checkpoint {place.id}"
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._used_s = 0.0  # of the processor, up to the last pause
        self._is_shared = False
        self._failure: Exception | None = None  # of any worker

    @property
    def done(self) -> bool:
        """Whether this worker's part of the work has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the checkpoint's folder when it has appeared; every worker must call it.

        Raises:
            CheckpointError: On all workers, if any has met an error; the message names the file.
        """
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise CheckpointError(f"this checkpoint was not written: {self._failure}")
        if not self._is_shared:
            self._is_shared = True
            try:
                self._report.share()
            except DecentDPError as error:
                self._failure = error
                raise
            finally:
                if self._commits:
                    with contextlib.suppress(RuntimeError):
                        self._communicator.board.delete(self._key)
        return Path(self._place.path)

    def run(self) -> None:
        """Write this worker's part, and let the checkpoint appear if that is up to this worker."""
        self._is_shared = True
        self._hurry.set()
        self._write()
        try:
            self._report.share()
        except BaseException:
            if self._commits:
                give_up(self._place)
            raise
        if self._commits:
            with self._report:
                self._commit()
        self._report.share()

    def start(self) -> None:
        """Do the same on another thread, which agrees with others on the board: collectives belong to training."""
        self._thread = threading.Thread(target=self._run_beside, name="decent_dp checkpoint")
        self._thread.start()

    def _run_beside(self) -> None:
        self._hurry.wait(_SLICE_S * _REST)  # the call was a slice, too
        self._write()
        with self._report:
            self._communicator.board.add(self._key, 1 if self._report.error is None else _FAILED)
        if self._commits:
            all_have = False
            with self._report:
                all_have = self._all_have_written()
            if not all_have:
                give_up(self._place)
                return
            with self._report:
                self._commit()

    def _write(self) -> None:
        with self._report:
            write_part(Path(self._place.partial), self._communicator.rank, self._place.id, self._plan, self._pause)
        del self._plan  # and with it the copy of the state, unless that memory is kept

    def _pause(self) -> None:
        """Leave the processor to training, unless somebody waits."""
        if not self._hurry.is_set() and threading.main_thread().is_alive():
            used_s = time.thread_time() - self._used_s
            if used_s > _SLICE_S:
                self._hurry.wait(used_s * _REST)
                self._used_s = time.thread_time()

    def _commit(self) -> None:
        try:
            commit(self._place, self._communicator.num_workers, self._content)
        except BaseException:
            give_up(self._place)
            raise
        if self._keep is not None:
            keep_latest(Path(self._place.path).parent, self._keep)

    def _all_have_written(self) -> bool:
        """Wait until every worker has written its part, or failed to."""
        timeout, ended_at = self._communicator.timeout, None
        # others wait for this worker as long as the timeout: half of it, so that they hear what happened
        patience_s = _PATIENCE_S if timeout is None else timeout.total_seconds() / 2
        started_at = time.monotonic()
        while True:
            num_failed, num_written = divmod(self._communicator.board.add(self._key, 0), _FAILED)
            if num_failed + num_written >= self._communicator.num_workers:
                return num_failed == 0
            now = time.monotonic()
            if ended_at is None and not threading.main_thread().is_alive():
                ended_at = now
            if now - started_at > patience_s or (ended_at is not None and now - ended_at > _AFTER_END_S):
                missing = self._communicator.num_workers - num_failed - num_written
                raise CheckpointError(
                    f"{missing} workers have not written their part within {patience_s:g} s; look at their logs"
                )
            time.sleep(_POLL_S)


def _start(
    model: DecentralizedDataParallel,
    directory: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    keep: int | None,
    *,
    in_background: bool,
) -> Saving:
    finish_earlier(model)
    report = Report(model, f"save to {directory}")
    if in_background:
        _STAGING.setdefault(model, Staging())
    content: dict[str, Any] = {}
    with report:
        check_moment(model)
        if keep is not None and (not isinstance(keep, Integral) or isinstance(keep, bool) or keep < 1):
            raise ConfigurationError(f"keep must be at least 1 checkpoint, or None to keep all, got {keep!r}")
        plan = Plan(collect(model, extra, _STAGING.get(model, Staging())))
        content = {
            "step": model.t,
            "saved_at": time.time(),
            "mixing": describe_mixing(model),
            "model": describe(model),
        }
        place = offer(directory, model.t) if model._communicator.rank == 0 else None
        report.result = (f"is at step {model.t} and saves to {os.fspath(directory)} with keep={keep}", place)
    results = report.share()
    for rank, (words, _) in enumerate(results):
        if words != results[0][0]:
            raise CheckpointError(
                f"{model._replica.here}: the workers do not save the same thing: rank 0 {results[0][0]}, rank {rank} "
                f"{words}; every worker must make the same call after the same update"
            )
    saving = Saving(model, directory, results[0][1], plan, content, keep)
    if in_background:
        _UNDER_WAY[model] = saving
        saving.start()
    else:
        saving.run()
    return saving


def finish_earlier(model: DecentralizedDataParallel) -> None:
    """Wait for what `async_save` has started, unless that was waited for already."""
    earlier = _UNDER_WAY.get(model) if isinstance(model, DecentralizedDataParallel) else None
    if earlier is not None and not earlier._is_shared:
        earlier.wait()  # an interrupt leaves it under way, and its memory in use
