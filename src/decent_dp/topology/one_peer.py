"""One partner a round: one copy of the model sent per worker and step."""

from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.topology import Topology


def ring(layout: Layout) -> Topology:
    """Neighbours on a ring average in pairs, each worker with its left and its right neighbour by turns.

    Round t pairs (t, t+1), (t+2, t+3), ... modulo n, with weights 1/2. For even n these are two matchings
    that alternate, and the distance to the mean shrinks by cos(2 pi / n) a round in the long run; n = 4 is
    exact in two rounds. For odd n one worker idles, and which one rotates with period n.

    Cost: one copy of the model sent per worker and step; for odd n none by the worker that idles.

    Args:
        layout: Any.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(ring(Layout(num_workers=6, workers_per_node=1))))
        0: (0 1) (2 3) (4 5)
        1: (0 5) (1 2) (3 4)
        >>> print(draw(ring(Layout(num_workers=3, workers_per_node=1))))
        0: (0 1) idle 2
        1: (1 2) idle 0
        2: (0 2) idle 1

    References:
        Wang et al., From Promise to Practice: Realizing High-performance Decentralized Training, ICLR 2025,
        arXiv 2410.11998.
    """
    n = layout.num_workers
    if n <= 2:
        return Topology("ring", layout, (Round.of_cliques(n, [range(n)]),))
    rounds = (
        Round.of_cliques(n, [((t + i) % n, (t + i + 1) % n) for i in range(0, n - 1, 2)])
        for t in range(n if n % 2 else 2)
    )
    return Topology("ring", layout, tuple(rounds))


def exp(layout: Layout) -> Topology:
    """Each worker meets workers at distances 1, 2, 4, ... by turns, one a round (one-peer exponential graph).

    For n a power of two, worker i averages with ``i xor 2^t`` in round t: pairs, exact after log2 n rounds
    from any round on. For other n the rounds are directed: with s = 2^t, t < ceil(log2 n), worker i takes
    ``x_i/2 + x_(i-s)/2`` and sends to i + s (modulo n): never exact, but doubly stochastic, so the mean is
    kept.

    Cost: one copy of the model sent per worker and step.

    Args:
        layout: Any.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(exp(Layout(num_workers=8, workers_per_node=4))))
        0: (0 1) (2 3) (4 5) (6 7)
        1: (0 2) (1 3) (4 6) (5 7)
        2: (0 4) (1 5) (2 6) (3 7)
        >>> print(draw(exp(Layout(num_workers=3, workers_per_node=1))))
        0: 0>1 1>2 2>0
        1: 0>2 1>0 2>1

    References:
        Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021,
        arXiv 2110.13363. Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
        arXiv 1811.10792.
    """
    n = layout.num_workers
    shifts = [1 << t for t in range((n - 1).bit_length())]
    if not shifts:
        rounds = [Round.identity(n)]
    elif n & (n - 1) == 0:
        rounds = [Round.of_cliques(n, [(i, i ^ s) for i in range(n) if not i & s]) for s in shifts]
    else:
        rounds = [Round(tuple(_halves(i, (i - s) % n) for i in range(n))) for s in shifts]
    return Topology("exp", layout, tuple(rounds))


def _halves(i: int, j: int) -> Row:
    return ((min(i, j), 0.5), (max(i, j), 0.5))
