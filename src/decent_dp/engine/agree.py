"""All workers set up the same thing, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from decent_dp.comm.protocol import Communicator
from decent_dp.errors import ExchangeError, MismatchError

Facts = Sequence[tuple[str, str]]
T = TypeVar("T")


def agree(communicator: Communicator, prepare: Callable[[], tuple[Facts, T]]) -> T:
    """Run a local preparation on every worker and compare what it says of itself.

    Args:
        communicator: Of all workers.
        prepare: Returns facts, pairs of a subject and its value in words, that must be equal on all workers, and a
        result.

    Returns:
        The result of this worker's preparation.

    Raises:
        MismatchError: On all workers, naming the first difference, or the worker whose preparation failed.
        Exception: What ``prepare`` raised on this worker.
    """
    failure: Exception | None = None
    facts: Facts = ()
    result: T | None = None
    try:
        facts, result = prepare()
    except ExchangeError:
        raise
    except Exception as error:
        failure = error
    reports = communicator.gather((list(facts), None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, (_, error_text) in enumerate(reports):
        if error_text is not None:
            raise MismatchError(f"rank {communicator.rank}: rank {rank} could not set up its model: {error_text}")
    for rank, (theirs, _) in enumerate(reports):
        difference = _first_difference(reports[0][0], theirs)
        if difference is not None:
            subject, first, other = difference
            raise MismatchError(
                f"rank {communicator.rank}: the workers disagree on {subject}: rank 0 has {first}, rank {rank} "
                f"has {other}; every worker must wrap the same model with the same arguments"
            )
    return result  # type: ignore[return-value]


def _first_difference(first: Facts, other: Facts) -> tuple[str, str, str] | None:
    ours, theirs = dict(first), dict(other)
    for subject, _ in [*first, *other]:
        if ours.get(subject) != theirs.get(subject):
            return subject, ours.get(subject, "nothing"), theirs.get(subject, "nothing")
    return None
