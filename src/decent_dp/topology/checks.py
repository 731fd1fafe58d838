"""What makes rounds a topology, checked when the value is built."""

import math
from collections.abc import Sequence

from decent_dp.errors import TopologyError
from decent_dp.topology.rounds import Round, Row

TOLERANCE = 1e-9
"""How far a sum of weights may be from 1: above float64 rounding, far below what a long run would notice."""


def check_rounds(name: str, num_workers: int, rounds: Sequence[Round], *, doubly_stochastic: bool) -> None:
    """Refuse rounds that are no mixing of ``num_workers`` workers.

    Every round must have a row a worker, finite weights above zero and rows that sum to 1, columns too if
    ``doubly_stochastic``; over the cycle every worker must reach every other.

    Raises:
        TopologyError: Naming the topology, the round, the rank and the number found.
    """
    if not rounds:
        raise TopologyError(f"topology {name!r} has no rounds: give at least one; Round.identity(n) mixes nothing")
    for index, round in enumerate(rounds):
        check_round(f"topology {name!r}, round {index}", num_workers, round, doubly_stochastic=doubly_stochastic)
    _check_connected(name, num_workers, rounds)


def check_round(where: str, num_workers: int, round: Round, *, doubly_stochastic: bool) -> None:
    """Refuse one round that is no mixing of ``num_workers`` workers; messages begin with ``where``.

    Raises:
        TopologyError: Naming the rank and the number found.
    """
    if round.num_workers != num_workers:
        n = round.num_workers
        raise TopologyError(
            f"{where}: the matrix is {n} x {n}, but the layout has {num_workers} workers; every round "
            "needs one row and one column a worker"
        )
    columns = [0.0] * num_workers
    for row, ranks in _owners(round).values():
        _check_row(f"{where}, rank {ranks[0]}", row, num_workers)
        for other, weight in row:
            columns[other] += len(ranks) * weight
    if doubly_stochastic:
        _check_columns(where, columns)


def _owners(round: Round) -> dict[int, tuple[Row, list[int]]]:
    """Each row object once, with the workers that share it."""
    owners: dict[int, tuple[Row, list[int]]] = {}
    for rank, row in enumerate(round.rows):
        owners.setdefault(id(row), (row, []))[1].append(rank)
    return owners


def _check_row(where: str, row: Row, num_workers: int) -> None:
    before = -1
    for other, weight in row:
        if not 0 <= other < num_workers:
            raise TopologyError(f"{where}: gives weight to rank {other}; ranks go from 0 to {num_workers - 1}")
        if other <= before:
            raise TopologyError(f"{where}: rank {other} follows rank {before}; list ranks once, in ascending order")
        before = other
        if weight > 0 and math.isfinite(weight):
            continue
        if weight == 0:
            raise TopologyError(f"{where}: gives rank {other} the weight 0; leave it out of the row")
        raise TopologyError(f"{where}: gives rank {other} the weight {weight}; weights are finite and not negative")
    total = math.fsum(weight for _, weight in row)
    if abs(total - 1) > TOLERANCE:
        raise TopologyError(
            f"{where}: the row sums to {total:.12g}; what a worker gives to all workers, itself included, "
            f"must sum to 1 within {TOLERANCE}. Raise or lower its own weight by the difference, in float64"
        )


def _check_columns(where: str, columns: Sequence[float]) -> None:
    for rank, total in enumerate(columns):
        if abs(total - 1) > TOLERANCE:
            raise TopologyError(
                f"{where}, rank {rank}: the column sums to {total:.12g}; what all workers give to worker "
                f"{rank} must sum to 1 to keep the mean of the replicas. Balance the weights, or pass "
                "doubly_stochastic=False if the mean need not be kept"
            )


def _check_connected(name: str, num_workers: int, rounds: Sequence[Round]) -> None:
    """Every worker's parameters must reach every other worker over a cycle repeated often enough."""
    groups = [group for round in rounds for group in _owners(round).values()]
    owned: list[list[int]] = [[] for _ in range(num_workers)]
    reading: list[list[int]] = [[] for _ in range(num_workers)]
    for number, (row, ranks) in enumerate(groups):
        for rank in ranks:
            owned[rank].append(number)
        for rank, _ in row:
            reading[rank].append(number)
    heard = _reached_from_zero(owned, [[rank for rank, _ in row] for row, _ in groups])
    told = _reached_from_zero(reading, [ranks for _, ranks in groups])
    for reached, sentence in (
        (heard, "worker {0} never reaches worker 0"),
        (told, "worker 0 never reaches worker {0}"),
    ):
        missing = next((rank for rank in range(num_workers) if rank not in reached), None)
        if missing is not None:
            raise TopologyError(
                f"topology {name!r} is not connected: over its cycle of {len(rounds)} round(s) what is at "
                f"{sentence.format(missing)}, so the replicas would never agree; add a round that joins them"
            )


def _reached_from_zero(groups_of: Sequence[Sequence[int]], members_of: Sequence[Sequence[int]]) -> set[int]:
    """Workers reached from worker 0 by going from a worker to its groups and on to their members."""
    reached, used, waiting = {0}, set(), [0]
    while waiting:
        for number in groups_of[waiting.pop()]:
            if number not in used:
                used.add(number)
                new = set(members_of[number]) - reached
                reached |= new
                waiting.extend(new)
    return reached
