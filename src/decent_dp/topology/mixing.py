"""How fast a topology makes replicas agree, and how far noise and unlike data keep them apart.

Every update adds u to the replicas, the topology multiplies them by W_t. With y the deviations from the mean,

    y(t+1) = P W_t y(t) + P u(t)        P = I - J

- *noise*: u independent over workers and steps. The covariance C of y follows C <- M C M^T + P, M = P W_t;
- *heterogeneity*: u independent over workers and the same in every step, as from workers with unlike data. Then
  y = G u with G <- M G + P.

Over a cycle both recursions are linear with one fixed point, which is solved for exactly, so the factors

    mean over the cycle of trace(C) / n,        mean over the cycle of ||G||_F^2 / n

are the stationary squared consensus distance, divided by the variance of u, per coordinate.

Legend: n workers, m rounds in a cycle, W_t, J, P, M, C, G as above, Phi the product of all M of a cycle, D of some.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decent_dp.errors import TopologyError
from decent_dp.topology.function_of_time import AnyTopology, FunctionOfTime
from decent_dp.topology.layout import Layout
from decent_dp.topology.random_matching import _Draw
from decent_dp.topology.rounds import Round
from decent_dp.topology.symmetry import Array, Blocks, blocks_of

_MAX_WORKERS = 4096
_MAX_WORK = 6e10
"""Multiplications and additions, some seconds of them."""

_NUM_APPLIED = 7
"""How often each round is multiplied by."""

_NUM_AVERAGED = 2000
"""Rounds followed where there is no cycle; the second half is averaged."""

_ZERO, _NOT_ZERO = 1e-11, 1e-7
"""A distance that falls from above the second to below the first in one round has become zero but for rounding."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Convergence of a topology.

    Args:
        rounds_to_exact: Rounds, from step 0 on, after which all workers have the mean of the starts; None if the
            distance only shrinks.
        contraction_per_step: Factor by which the distance to the mean shrinks in a step in the long run, the geometric
            mean over a cycle; 0 if it gets exact, 1 if it does not shrink. For random matchings the root of the mean
            factor of the squared distance; for other functions of the step as measured.
        cycle_distance: ``||W_m-1 ... W_0 - J||``, the largest singular value; None without a cycle.
        noise: Stationary squared consensus distance under independent noise of variance 1 in every update.
        heterogeneity: The same under updates that differ between workers with variance 1 and never change.
        method: ``"exact"``, ``"expectation"`` over what is random, or ``"average over 2000 rounds"``.
    """

    rounds_to_exact: int | None
    contraction_per_step: float
    cycle_distance: float | None
    noise: float
    heterogeneity: float
    method: str = "exact"

    @property
    def spectral_gap(self) -> float:
        """``1 - contraction_per_step``."""
        return 1 - self.contraction_per_step


def mixing(topology: AnyTopology) -> Mixing:
    """Follow the recursions of the module over a cycle, to their fixed points.

    Topologies on two levels are followed on their nodes, those that look alike from many workers by frequency
    (`decent_dp.topology.symmetry`), random matchings in expectation, other functions of the step for 2,000 rounds.

    Args:
        topology: What to analyse.

    Raises:
        TopologyError: It would take more than some seconds, which says how much.

    Example:
        >>> from decent_dp.topology import build
        >>> found = mixing(build("exp", Layout(num_workers=16, workers_per_node=4)))
        >>> found.rounds_to_exact, round(found.noise, 4), round(found.heterogeneity, 4)
        (4, 1.625, 3.625)

    References:
        Koloskova et al., A Unified Theory of Decentralized SGD with Changing Topology and Local Updates, ICML 2020,
        arXiv 2003.10422, for the two terms.
    """
    if isinstance(topology, FunctionOfTime):
        if isinstance(topology.fn, _Draw):
            return _of_random_matching(topology.layout)
        return _followed(topology)
    if topology.between is None or topology.layout.workers_per_node == 1:
        return _of_cycle(topology.name, topology.rounds)
    return _spread(_of_cycle(topology.name, topology.between), topology.layout)


def _spread(nodes: Mixing, layout: Layout) -> Mixing:
    """Of all workers, from that of the nodes: inside a node everything but the last update has been averaged away."""
    n, N = layout.num_workers, layout.num_nodes
    inside = (n - N) / n
    return Mixing(
        rounds_to_exact=None if nodes.rounds_to_exact is None else max(1, nodes.rounds_to_exact),
        contraction_per_step=nodes.contraction_per_step,
        cycle_distance=nodes.cycle_distance,
        noise=inside + nodes.noise * N / n,
        heterogeneity=inside + nodes.heterogeneity * N / n,
    )


def _of_random_matching(layout: Layout) -> Mixing:
    """W is a projection, and all workers are alike on average: E[W] and E[W W] are the same multiple of P on P."""
    n = layout.num_workers
    if n <= 2:
        return _of_cycle("random-matching", [Round.of_cliques(n, [range(n)])])
    factor = (n - 2) / (2 * (n - 1)) if n % 2 == 0 else 0.5
    start = (n - 1) / n
    return Mixing(
        rounds_to_exact=None,
        contraction_per_step=math.sqrt(factor),
        cycle_distance=None,
        noise=start / (1 - factor),
        heterogeneity=start * (1 + factor) / (1 - factor) ** 2,
        method="expectation",
    )


def _of_cycle(name: str, rounds: Sequence[Round]) -> Mixing:
    """Fixed points of the recursions over a cycle."""
    n, m = rounds[0].num_workers, len(rounds)
    if n == 1:
        return Mixing(0, 0.0, 0.0, 0.0, 0.0)
    blocks = _blocks_of(name, rounds)
    P, F, b = blocks.projection, blocks.num_blocks, blocks.size
    Phi, Q, R = P, np.zeros_like(P), np.zeros_like(P)
    distances = [_norm(P)]
    for t in range(m):
        Phi, Q, R = blocks.apply(t, Phi), _covariance(blocks, t, Q) + P, blocks.apply(t, R) + P
        distances.append(_norm(Phi))
    rounds_to_exact = _first_zero(distances)
    if rounds_to_exact is None:
        _refuse(name, rounds, 100.0 * F * b**3)
        rounds_to_exact = _cycles_to_zero(Phi, n, m)
    if rounds_to_exact is not None:
        contraction, cycle_distance = 0.0, 0.0 if rounds_to_exact <= m else _spectral_norm(Phi)
    else:
        contraction = min(1.0, float(np.abs(np.linalg.eigvals(Phi)).max()) ** (1 / m))
        cycle_distance = _spectral_norm(Phi)
    if contraction > 1 - 1e-12:
        return Mixing(None, 1.0, cycle_distance, math.inf, math.inf)
    C, G = Q, R
    if rounds_to_exact is None or rounds_to_exact > m:
        C, G = _fixed_point(Phi, Q), np.linalg.solve(np.broadcast_to(np.eye(b), P.shape) - Phi, R)
    noise = heterogeneity = 0.0
    for t in range(m):
        C, G = _covariance(blocks, t, C) + P, blocks.apply(t, G) + P
        noise += _trace(C)
        heterogeneity += _norm(G) ** 2
    return Mixing(rounds_to_exact, contraction, cycle_distance, noise / n / m, heterogeneity / n / m)


def _followed(topology: FunctionOfTime) -> Mixing:
    """The recursions along the first rounds, from replicas that agree; their second half is averaged."""
    n = topology.layout.num_workers
    if n == 1:
        return Mixing(0, 0.0, None, 0.0, 0.0)
    num_rounds = _NUM_AVERAGED
    if 8.0 * n**3 * num_rounds > _MAX_WORK:
        raise TopologyError(
            f"topology {topology.name!r}: {num_rounds} rounds of {n} workers without a cycle take too long to follow; "
            "give at most 150 workers, or rounds with a cycle"
        )
    P = np.eye(n) - 1 / n
    C = G = P
    D, log_distance, rounds_to_exact = P / _norm(P), 0.0, None
    noise = heterogeneity = 0.0
    for t in range(num_rounds):
        M = P @ topology.round_at(t).matrix()
        if rounds_to_exact is None:
            D = M @ D
            distance = _norm(D)
            if distance <= _ZERO:
                rounds_to_exact = t + 1
            else:
                D, log_distance = D / distance, log_distance + math.log(distance)
        C, G = _both_sides(M, C) + P, M @ G + P
        if t >= num_rounds // 2:
            noise += _trace(C)
            heterogeneity += _norm(G) ** 2
    contraction = math.exp(log_distance / num_rounds) if rounds_to_exact is None else 0.0
    counted = n * (num_rounds - num_rounds // 2)
    method = f"average over {num_rounds} rounds"
    return Mixing(rounds_to_exact, contraction, None, noise / counted, heterogeneity / counted, method)


def _blocks_of(name: str, rounds: Sequence[Round]) -> Blocks:
    if rounds[0].num_workers > _MAX_WORKERS:
        _refuse(name, rounds, math.inf)
    blocks = blocks_of(rounds)
    _refuse(name, rounds, _NUM_APPLIED * blocks.work)
    return blocks


def _refuse(name: str, rounds: Sequence[Round], work: float) -> None:
    if work > _MAX_WORK:
        raise TopologyError(
            f"topology {name!r}: {len(rounds)} round(s) of {rounds[0].num_workers} workers take too long to analyse; "
            f"give fewer workers, or up to {_MAX_WORKERS} where rounds look the same from all of them"
        )


def _covariance(blocks: Blocks, t: int, C: Array) -> Array:
    """``M C M^T``, C being symmetric."""
    return blocks.apply(t, blocks.apply(t, C).conj().swapaxes(1, 2))


def _both_sides(A: Array, C: Array) -> Array:
    return A @ C @ A.conj().swapaxes(-1, -2)


def _norm(D: Array) -> float:
    return float(np.linalg.norm(D.ravel()))


def _trace(C: Array) -> float:
    return float(np.trace(C, axis1=-2, axis2=-1).sum().real)


def _spectral_norm(D: Array) -> float:
    return float(np.linalg.norm(D, 2, axis=(1, 2)).max())


def _first_zero(distances: Sequence[float]) -> int | None:
    """The round after which a distance is zero, if it fell to zero at once."""
    for t in range(1, len(distances)):
        if distances[t] <= _ZERO:
            return t if distances[t - 1] > _NOT_ZERO else None
    return None


def _cycles_to_zero(Phi: Array, n: int, m: int) -> int | None:
    """The rounds of all cycles after which the product falls to zero at once, looked for in log2 n + 1 cycles."""
    D, before = Phi, _norm(Phi)
    for cycle in range(2, n.bit_length() + 2):
        D = D @ Phi
        distance = _norm(D)
        if distance <= _ZERO:
            return cycle * m if before > _NOT_ZERO else None
        before = distance
    return None


def _fixed_point(Phi: Array, Q: Array) -> Array:
    """The C with ``C = Phi C Phi^T + Q``, by doubling: after k turns the sum has 2^k terms."""
    C, A = Q, Phi
    while _norm(A) > 1e-16:
        C = C + _both_sides(A, C)
        A = A @ A
    return C
