"""The same neighbours in every round, one weight for all of them."""

from collections.abc import Callable, Iterable
from itertools import count

from decent_dp.errors import TopologyError
from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.topology import Topology


def static_ring(layout: Layout) -> Topology:
    """Each worker takes a third from its left and a third from its right neighbour on a ring, in every round.

    ``W[i, j] = 1/3`` for j = i, i - 1 and i + 1 modulo n. The distance to the mean shrinks by
    (1 + 2 cos(2 pi / n)) / 3 a round. Two workers take the mean of their pair, three that of all.

    Cost: two copies of the model sent per worker and step.

    Args:
        layout: Any.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(static_ring(Layout(num_workers=4, workers_per_node=1))))
        0: 0>1; .333 0>3; .333 1>0; .333 1>2; .333 2>1; .333 2>3; .333 3>0; .333 3>2; .333

    References:
        Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv
        1705.09056.
    """
    n = layout.num_workers
    return _static("static-ring", layout, lambda i: ((i - 1) % n, (i + 1) % n))


def static_exp(layout: Layout) -> Topology:
    """Each worker takes equal shares from the workers 1, 2, 4, ... before it (static exponential graph).

    With tau = ceil(log2 n), ``W[i, j] = 1 / (tau + 1)`` for j = i and j = i - 2^k modulo n, k < tau; worker i
    sends to the workers i + 2^k. Directed, but doubly stochastic. For even n the distance to the mean shrinks
    by (tau - 1) / (tau + 1) a round.

    Cost: tau copies of the model sent per worker and step.

    Args:
        layout: Any.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(static_exp(Layout(num_workers=4, workers_per_node=1))))
        0: 0>1; .333 0>2; .333 1>2; .333 1>3; .333 2>0; .333 2>3; .333 3>0; .333 3>1; .333

    References:
        Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021,
        arXiv 2110.13363.
    """
    n = layout.num_workers
    tau = (n - 1).bit_length()
    return _static("static-exp", layout, lambda i: ((i - (1 << k)) % n for k in range(tau)))


def hypercube(layout: Layout) -> Topology:
    """Each worker mixes with the workers whose rank differs from its own in one binary digit.

    n = 2^r: ``W[i, j] = 1 / (r + 1)`` for j = i and ``j = i xor 2^k``, k < r. The distance to the mean shrinks
    by (r - 1) / (r + 1) a round; no other weight, equal for all neighbours, does better.

    Cost: r = log2 n copies of the model sent per worker and step.

    Args:
        layout: A power of two of workers.

    Raises:
        TopologyError: The number of workers is not a power of two.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(hypercube(Layout(num_workers=4, workers_per_node=2))))
        0: 0>1; .333 0>2; .333 1>0; .333 1>3; .333 2>0; .333 2>3; .333 3>1; .333 3>2; .333

    References:
        Xiao and Boyd, Fast linear iterations for distributed averaging, Systems & Control Letters 53 (2004),
        65-78, section 4.1, for the weight.
    """
    n = layout.num_workers
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise TopologyError(
            "'hypercube' joins ranks that differ in one binary digit and needs a power of two of workers: 1, 2, 4, 8, "
            f"..., nearest {below} and {2 * below}; got {n} workers. 'static-exp', 'exp' and 'base-2' serve this layout"
        )
    return _static("hypercube", layout, lambda i: (i ^ (1 << k) for k in range(n.bit_length() - 1)))


def torus(layout: Layout) -> Topology:
    """Each worker mixes with its four neighbours on a grid that closes on itself at both edges.

    n = a b with 3 <= a <= b as close to each other as n allows; worker i stands in row ``i // b`` and column
    ``i mod b``. ``W[i, j] = 1/5`` for j = i, the worker above, below, to the left and to the right. The distance
    to the mean shrinks by (3 + 2 cos(2 pi / b)) / 5 a round. One worker alone is served too.

    Cost: four copies of the model sent per worker and step.

    Args:
        layout: n = a b workers with a, b of at least 3, or one worker.

    Raises:
        TopologyError: The number of workers is no such product.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(torus(Layout(num_workers=9, workers_per_node=3))))  # doctest: +ELLIPSIS
        0: 0>1; .2 0>2; .2 0>3; .2 0>6; .2 1>0; .2 1>2; .2 1>4; .2 1>7; .2 2>0; .2 ... 8>7; .2

    References:
        Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021,
        arXiv 2110.13363, where it is compared with other graphs.
    """
    n = layout.num_workers
    if n == 1:
        return _static("torus", layout, lambda i: ())
    a = _rows_of_torus(n)
    if a is None:
        below = next((f"{m} and " for m in range(n - 1, 8, -1) if _rows_of_torus(m)), "")
        nearest = below + next(str(m) for m in count(n + 1) if _rows_of_torus(m))
        raise TopologyError(
            "'torus' needs a grid of a x b workers with a and b of at least 3: 9, 12, 15, 16, 18, 20, 21, 24, 25, "
            f"..., nearest {nearest}; got {n} workers. 'static-exp', 'exp' and 'base-2' serve this layout"
        )
    b = n // a

    def around(i: int) -> tuple[int, ...]:
        row, column = divmod(i, b)
        vertical = ((row - 1) % a * b + column, (row + 1) % a * b + column)
        return (*vertical, row * b + (column - 1) % b, row * b + (column + 1) % b)

    return _static("torus", layout, around)


def _rows_of_torus(n: int) -> int | None:
    """The largest divisor a of n with 3 <= a <= n / a."""
    return max((a for a in range(3, int(n**0.5) + 1) if n % a == 0), default=None)


def _static(name: str, layout: Layout, neighbours_of: Callable[[int], Iterable[int]]) -> Topology:
    """One round in which each worker gives itself and every neighbour the same weight."""
    rows = (_equal_shares({i, *neighbours_of(i)}) for i in range(layout.num_workers))
    return Topology(name, layout, (Round(tuple(rows)),))


def _equal_shares(ranks: set[int]) -> Row:
    return tuple((rank, 1 / len(ranks)) for rank in sorted(ranks))
