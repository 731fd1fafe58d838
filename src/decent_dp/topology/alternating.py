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

    Cost: carried out on two levels (`decent_dp.topology.Sharded`), so that a joined node sends one copy of the
    model to its partner, half a copy per step on average; a worker sends 2 (L - 1) / L copies inside its node
    and 1/L across in a joined round.

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
        joined: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for j in range(N):
            partner = j ^ (1 << level)
            if j < partner:
                joined[0 if next(counter) % 2 else 1].append((j, partner))
        rounds += [Round.of_cliques(N, pairs) for pairs in joined]
    return Topology.two_level("alternating-exp-ring", layout, rounds)
