"""Rounds that use the network between nodes alternate with rounds inside a node."""

from itertools import count

from decent_dp.errors import TopologyError
from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round
from decent_dp.topology.topology import Topology


def alternating_exp_ring(layout: Layout) -> Topology:
    """Pairs of nodes at distance 1, 2, 4, ... average over all their workers, half of the pairs at a time.

    N = 2^r nodes of L workers. Level i = 0 .. r-1 pairs node j with ``j xor 2^i`` and takes two rounds. A
    pair is *joined* in one of them: its 2L workers average, weights 1/(2L); in the other each of its two
    nodes averages over its own L workers. The pairs, counted through all levels, are joined in the second
    round (even) or in the first (odd). So from N = 4 on half of the pairs use the network in every round.
    Exact after the 2 log2 N rounds of a cycle. One node averages over its L workers in every round.

    Cost: one collective a step over L or 2L workers, at most 2 (2L - 1) / (2L) copies of the model sent per
    worker; as a ring, (2L - 1) / (2L) copies leave a node per step on average.

    Args:
        layout: A power of two of nodes, any number of workers a node; with one worker a node, what would be
            inside a node is idle.

    Raises:
        TopologyError: The number of nodes is not a power of two.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(alternating_exp_ring(Layout(num_workers=8, workers_per_node=2))))
        0: (0 1) (2 3) (4 5 6 7)
        1: (0 1 2 3) (4 5) (6 7)
        2: (0 1) (2 3 6 7) (4 5)
        3: (0 1 4 5) (2 3) (6 7)

    References:
        Wang et al., From Promise to Practice: Realizing High-performance Decentralized Training, ICLR 2025,
        arXiv 2410.11998, Fig. 12.
    """
    N, n = layout.num_nodes, layout.num_workers
    if N & (N - 1):
        raise TopologyError(
            "'alternating-exp-ring' pairs nodes at distances 1, 2, 4, ... and needs a power of two of "
            f"nodes: 1, 2, 4, 8, 16, ... with any number of workers a node; got {N} nodes of "
            f"{layout.workers_per_node} workers ({n} in all). 'exp', 'complete' and 'ring' serve this layout"
        )
    if N == 1:
        return Topology("alternating-exp-ring", layout, (Round.of_cliques(n, [range(n)]),))
    rounds = []
    counter = count()
    for level in range(N.bit_length() - 1):
        halves: tuple[list[list[int]], list[list[int]]] = ([], [])
        for j in range(N):
            partner = j ^ (1 << level)
            if j < partner:
                first, second = list(layout.ranks_of(j)), list(layout.ranks_of(partner))
                joined = 0 if next(counter) % 2 else 1
                halves[joined].append(first + second)
                halves[1 - joined].extend((first, second))
        rounds += [Round.of_cliques(n, cliques) for cliques in halves]
    return Topology("alternating-exp-ring", layout, tuple(rounds))
