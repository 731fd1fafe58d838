"""Topologies of the user's own matrices, weighted pairs or function of the step."""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import index as whole

import numpy as np
from numpy.typing import ArrayLike

from decent_dp.errors import TopologyError
from decent_dp.topology.function_of_time import FunctionOfTime
from decent_dp.topology.layout import Layout, check_layout
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.topology import Topology


def from_matrices(
    matrices: Sequence[ArrayLike],
    layout: Layout | None = None,
    doubly_stochastic: bool = True,
    name: str = "custom",
) -> Topology:
    """The cycle of the given mixing matrices: step t multiplies by ``matrices[t mod len(matrices)]``.

    How each worker carries a round out is derived from the matrix: cliques of three or more with equal
    weights average with one collective, everything else is point-to-point.

    Cost: one copy of the model sent per worker and step for every other worker that gives it weight,
    2 (k - 1) / k copies inside a clique of k.

    Args:
        matrices: Square, one row and one column a worker; ``W[i, j]`` is what worker i gives to worker j.
        layout: The workers and nodes; without it every worker counts as a node of its own.
        doubly_stochastic: Whether columns must sum to 1 as rows must, which keeps the mean of the replicas.
        name: What messages call the topology.

    Raises:
        TopologyError: Naming the round and the rank: not square, negative or not finite, a sum that is not 1;
            or the cycle does not connect all workers.

    Example:
        >>> from decent_dp.topology import draw
        >>> star = [[0.4, 0.3, 0.3], [0.3, 0.7, 0.0], [0.3, 0.0, 0.7]]
        >>> print(draw(from_matrices([star])))
        0: 0>1; .3 0>2; .3 1>0; .3 2>0; .3

    References:
        Xiao and Boyd, Fast linear iterations for distributed averaging, Systems & Control Letters 53 (2004),
        65-78.
    """
    if not isinstance(matrices, Iterable):
        raise TopologyError(f"topology {name!r}: matrices={matrices!r}; give a sequence of square matrices")
    rounds = []
    for t, W in enumerate(matrices):
        try:
            rounds.append(Round.of_matrix(W))
        except TopologyError as error:
            is_row = isinstance(W, Iterable) and all(np.isscalar(weight) for weight in W)
            way_out = "; a single matrix goes in a list: [W]" if is_row else ""
            raise TopologyError(f"topology {name!r}, round {t}: {error}{way_out}") from None
    if layout is None:
        layout = Layout(rounds[0].num_workers if rounds else 1, 1)
    return Topology(name, check_layout(layout), tuple(rounds), doubly_stochastic)


def from_edges(
    rounds_of_edges: Iterable[Iterable[tuple[int, int, float]]], layout: Layout, name: str = "custom"
) -> Topology:
    """The cycle of the given weighted pairs, round by round.

    ``(i, j, w)`` sets ``W[i, j] = W[j, i] = w``, and each worker keeps the rest: ``W[i, i] = 1 - sum_j W[i,
    j]``. Every round is symmetric, so the mean of the replicas is kept. A worker in no pair idles.

    Cost: one copy of the model sent per worker and step for each pair it stands in; 2 (k - 1) / k copies
    where the pairs make a clique of k with equal weights.

    Args:
        rounds_of_edges: For each round its pairs, in any order, with weights from 0 to 1; what a worker gives
            away in one round may not exceed 1.
        layout: The workers and nodes.
        name: What messages call the topology.

    Raises:
        TopologyError: Naming the round and the rank: a rank out of range, a pair listed twice, a worker
            paired with itself, weights below 0 or above 1 in sum; or the cycle does not connect all workers.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(from_edges([[(0, 1, 0.5)], [(1, 2, 0.2)]], Layout(num_workers=3, workers_per_node=1))))
        0: (0 1) idle 2
        1: (1 2; .2) idle 0

    References:
        Xiao and Boyd, Fast linear iterations for distributed averaging, Systems & Control Letters 53 (2004),
        65-78.
    """
    check_layout(layout)
    rounds = (_round_of(edges, layout, f"topology {name!r}, round {t}") for t, edges in enumerate(rounds_of_edges))
    return Topology(name, layout, tuple(rounds))


def from_function(
    name: str,
    layout: Layout,
    fn: Callable[[int], Round],
    *,
    cliques: Iterable[Iterable[int]] = (),
    doubly_stochastic: bool = True,
) -> FunctionOfTime:
    """The topology that plays the round ``fn(t)`` in step t, without a cycle.

    Each round is made and checked when it is first asked for. That the rounds connect all workers is not checked.

    Cost: as the rounds of :func:`from_matrices`; making and checking a round takes time in proportion to its
    weights, on every worker and once a step.

    Args:
        name: What messages call the topology.
        layout: The workers and nodes.
        fn: Gives the round of step t, counted from 0. It depends on t alone and gives equal rounds on all workers,
            in every run, so whatever is random in it is seeded with t. It is called in any order, more than once
            for a step.
        cliques: Every set of three or more ranks that averages together with one weight in some round. Groups are
            made of them when a model is wrapped; a round with another clique is refused. Pairs need no name.
        doubly_stochastic: Whether columns must sum to 1 as rows must, which keeps the mean of the replicas.

    Raises:
        TopologyError: Naming the step and the rank, here for round 0 and for the others when they are played.

    Example:
        >>> from decent_dp.topology import draw
        >>> def shifts(t: int) -> Round:
        ...     return Round.of_matrix((np.eye(5) + np.roll(np.eye(5), 1 + t * t % 3, axis=0)) / 2)
        >>> print(draw(from_function("shifts", Layout(5, 1), shifts), num_rounds=2))
        0: 0>1 1>2 2>3 3>4 4>0
        1: 0>2 1>3 2>4 3>0 4>1

    References:
        Boyd, Ghosh, Prabhakar and Shah, Randomized gossip algorithms, IEEE Transactions on Information Theory 52
        (2006), 2508-2530, for rounds drawn at random.
    """
    return FunctionOfTime(name, layout, fn, cliques, doubly_stochastic)  # type: ignore[arg-type]  # made tuples there


def _round_of(edges: Iterable[tuple[int, int, float]], layout: Layout, where: str) -> Round:
    given: list[dict[int, float]] = [{} for _ in range(layout.num_workers)]
    for edge in edges:
        i, j, w = _read(edge, layout, where)
        if j in given[i]:
            raise TopologyError(
                f"{where}: the pair of ranks {i} and {j} is listed twice; give it once, in either order"
            )
        given[i][j] = given[j][i] = w
    return Round(tuple(_row_of(rank, weights, where) for rank, weights in enumerate(given)))


def _read(edge: tuple[int, int, float], layout: Layout, where: str) -> tuple[int, int, float]:
    try:
        i, j, w = edge
        w = float(w)
    except (TypeError, ValueError):
        raise TopologyError(f"{where}: {edge!r} is no weighted pair; give (i, j, weight)") from None
    for rank in (i, j):
        try:
            whole(rank)
        except TypeError:
            raise TopologyError(f"{where}: {rank!r} in {edge!r} is no rank; ranks are whole numbers") from None
        if not 0 <= rank < layout.num_workers:
            raise TopologyError(f"{where}, rank {rank}: ranks go from 0 to {layout.num_workers - 1}")
    if i == j:
        raise TopologyError(f"{where}, rank {i}: paired with itself; a worker keeps what it does not give away")
    if not 0 <= w <= 1:
        raise TopologyError(f"{where}, rank {i}: gives rank {j} the weight {w}; weights go from 0 to 1")
    return whole(i), whole(j), w


def _row_of(rank: int, weights: dict[int, float], where: str) -> Row:
    keeps = 1 - math.fsum(weights.values())
    if keeps < -1e-12:
        raise TopologyError(
            f"{where}, rank {rank}: gives away {1 - keeps:.12g} in all; the sum over its pairs may not exceed 1"
        )
    row = {**weights, rank: keeps if keeps > 1e-12 else 0.0}
    return tuple((other, w) for other, w in sorted(row.items()) if w)
