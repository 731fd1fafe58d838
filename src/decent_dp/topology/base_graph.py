"""Exact averaging in finitely many rounds for any number of workers: the Base-(k+1) graph.

Legend: k the most partners of a worker in a round, V a set of workers in rank order, n = |V|.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from operator import index
from typing import TypeAlias

from decent_dp.errors import TopologyError
from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.topology import Topology

_Rows: TypeAlias = dict[int, Row]
"""The rows of a round for the workers that do not idle in it."""


def base_graph(layout: Layout, base: int) -> Topology:
    """Cliques and weighted pairs that leave every worker with the mean of all after one cycle, for any n.

    With k = base - 1, from three constructions on workers V:

    - *cliques by digits*, if all prime factors of n are at most k + 1: n = n_1 ... n_m with factors of at most
      k + 1 and the fewest of them; in round r the workers that agree in all mixed-radix digits but digit r
      average, weights 1/n_r;
    - *parts by digits*, for other n: n = sum_l a_l (k+1)^p_l cuts V into parts V_l of a_l pieces. First every
      part averages inside. Then part after part hands over: each worker of a later part meets one worker of
      every piece of V_r with the weight ``|V_r| / (a_r (|V_r| + |V_r+1| + ...))``; after that the pieces average
      inside while the next parts hand over;
    - *groups*, if that is shorter: n = p q with p the largest divisor whose prime factors are at most k + 1; p
      groups of q workers run the former in parallel, then the workers at equal places of the groups the first.

    Every round is symmetric. Exact after a cycle, which has at most 2 log_(k+1) n + 2 rounds.

    Cost: at most k copies of the model sent per worker and step where they are pairs, 2 (c - 1) / c in a clique
    of c <= k + 1; some workers idle in some rounds.

    Args:
        layout: Any.
        base: k + 1, at least 2: the largest clique. ``"base-2"`` names ``base=2``, and so on.

    Raises:
        TopologyError: ``base`` is no whole number of at least 2.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(base_graph(Layout(num_workers=5, workers_per_node=1), base=2)))
        0: (0 1) (2 3) idle 4
        1: (0 2) (1 3) idle 4
        2: (0 1) (3 4; .8) idle 2
        3: (0 1) (2 3) idle 4
        4: (0 2) (1 3) idle 4
        >>> print(draw(base_graph(Layout(num_workers=6, workers_per_node=2), base=3)))
        0: (0 1) (2 3) (4 5)
        1: (0 2 4) (1 3 5)

    References:
        Takezawa et al., Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning
        via Finite-time Convergence, NeurIPS 2023, arXiv 2305.11420.
    """
    k = _check_base(base) - 1
    n = layout.num_workers
    rounds = [Round(tuple(rows.get(i, ((i, 1.0),)) for i in range(n))) for rows in _base(range(n), k)]
    return Topology(f"base-{k + 1}", layout, tuple(rounds or [Round.identity(n)]))


def _check_base(base: object) -> int:
    try:
        if isinstance(base, bool):
            raise TypeError
        value = index(base)  # type: ignore[arg-type]  # whatever is not a whole number raises TypeError
    except TypeError:
        raise TopologyError(f"base={base!r}: give a whole number of at least 2, such as 2") from None
    if value < 2:
        raise TopologyError(
            f"'base-{value}': the base is the number of workers that average together, at least 2: 'base-2' mixes in "
            "pairs, 'base-3' in cliques of up to 3, ..."
        )
    return value


def _base(V: Sequence[int], k: int) -> list[_Rows]:
    """Groups, then cliques by digits across them, if shorter than parts by digits."""
    rounds = _simple(V, k)
    q = _rough_part(len(V), k)
    p = len(V) // q
    if p > 1 and q > 1:
        inside = _together(_simple(V[start : start + q], k) for start in range(0, len(V), q))
        across = _together(_by_digits(V[place::q], k) for place in range(q))
        if len(inside) + len(across) < len(rounds):
            return inside + across
    return rounds


def _simple(V: Sequence[int], k: int) -> list[_Rows]:
    """Cliques by digits if the size allows it, else parts by digits."""
    if _rough_part(len(V), k) == 1:
        return _by_digits(V, k)
    parts, p_1 = _parts(V, k)
    last = len(parts) - 1
    inside = [_by_digits([i for piece in pieces for i in piece], k) for pieces in parts]
    rounds = [_merged(_cyclic(own, t) for own in inside) for t in range(len(inside[0]))]
    in_pieces = [_together(_by_digits(piece, k) for piece in pieces) for pieces in parts]
    for r in range(p_1 + 1):
        rows = _hand_over(parts[r:], k) if r < last else {}
        for part, own in enumerate(in_pieces):
            begins = min(part + 1, last)  # the last part hands nothing over
            if r >= begins:
                rows |= _cyclic(own, r - begins)
        rounds.append(rows)
    return rounds


def _parts(V: Sequence[int], k: int) -> tuple[list[list[Sequence[int]]], int]:
    """The pieces of each part, largest first, and the exponent of the first part's pieces."""
    digits = []
    left = len(V)
    while left:
        left, digit = divmod(left, k + 1)
        digits.append(digit)
    parts = []
    start = 0
    for power in range(len(digits) - 1, -1, -1):
        size = (k + 1) ** power
        pieces = [V[start + i * size : start + (i + 1) * size] for i in range(digits[power])]
        start += len(pieces) * size
        if pieces:
            parts.append(pieces)
    return parts, len(digits) - 1


def _hand_over(parts: Sequence[Sequence[Sequence[int]]], k: int) -> _Rows:
    """Every worker of a later part meets one of each piece of the first; who is left over averages in cliques.

    All workers of a part hold the same here, so cliques among those left over move no part's mean.
    """
    free = [list(piece) for piece in parts[0]]
    num_first = sum(len(piece) for piece in free)
    later = [v for pieces in parts[1:] for piece in pieces for v in piece]
    num_all = num_first + len(later)
    weight = num_first / (len(free) * num_all)
    rows: _Rows = {}
    for v in later:
        met = [piece.pop() for piece in free]
        rows[v] = tuple(sorted([*((u, weight) for u in met), (v, len(later) / num_all)]))
        for u in met:
            rows[u] = tuple(sorted([(u, 1 - weight), (v, weight)]))
    left = [u for piece in free for u in piece]
    for start in range(0, len(left), k + 1):
        rows |= _mean(left[start : start + k + 1])
    return rows


def _by_digits(V: Sequence[int], k: int) -> list[_Rows]:
    """One round for each factor of n: workers that differ in this digit alone take their mean."""
    rounds = []
    stride = 1
    for factor in _factors(len(V), k):
        block = stride * factor
        rows: _Rows = {}
        for start in range(0, len(V), block):
            for offset in range(start, start + stride):
                rows |= _mean(V[offset : offset + block : stride])
        rounds.append(rows)
        stride = block
    return rounds


def _mean(ranks: Sequence[int]) -> _Rows:
    row = tuple((rank, 1 / len(ranks)) for rank in ranks)
    return dict.fromkeys(ranks, row)


@cache
def _factors(n: int, k: int) -> tuple[int, ...]:
    """The fewest factors of n that are at most k + 1, ascending; of several choices the most even one."""
    if n == 1:
        return ()
    found = (tuple(sorted((f, *_factors(n // f, k)))) for f in range(2, min(k + 1, n) + 1) if n % f == 0)
    return min(found, key=lambda factors: (len(factors), sum(factors), factors))


def _rough_part(n: int, k: int) -> int:
    """What is left of n when all prime factors of at most k + 1 are divided out."""
    f = 2
    while f <= min(k + 1, n):
        if n % f:
            f += 1
        else:
            n //= f
    return n


def _cyclic(rounds: Sequence[_Rows], t: int) -> _Rows:
    return rounds[t % len(rounds)] if rounds else {}


def _merged(rows: Iterable[_Rows]) -> _Rows:
    """One round of what several sets of workers do in it."""
    return {rank: row for part in rows for rank, row in part.items()}


def _together(runs: Iterable[Sequence[_Rows]]) -> list[_Rows]:
    """Equally many rounds of several sets of workers, at the same time."""
    return [_merged(rows) for rows in zip(*runs, strict=True)]
