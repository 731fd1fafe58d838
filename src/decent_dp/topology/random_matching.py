"""A partner at random, drawn alike by all workers without a word."""

import hashlib
import struct
from dataclasses import dataclass
from operator import index

from decent_dp.errors import TopologyError
from decent_dp.topology.function_of_time import FunctionOfTime
from decent_dp.topology.layout import Layout
from decent_dp.topology.rounds import Round


def random_matching(layout: Layout, seed: int = 0) -> FunctionOfTime:
    """In every round the workers are paired at random, and each pair takes its mean.

    All pairings are equally likely, and a round is a function of (seed, t) alone, so every worker draws the same
    one, in every run. For odd n one worker, drawn at random too, idles. For even n the squared distance to the
    mean shrinks by (n - 2) / (2 (n - 1)) a round on average, for odd n by 1/2.

    Cost: one copy of the model sent per worker and step; for odd n none by the worker that idles.

    Args:
        layout: Any.
        seed: Any whole number, the same on all workers; another one draws other pairs.

    Raises:
        TopologyError: ``seed`` is no whole number.

    Example:
        >>> from decent_dp.topology import draw
        >>> print(draw(random_matching(Layout(num_workers=6, workers_per_node=1)), num_rounds=3))
        0: (0 4) (1 2) (3 5)
        1: (0 2) (1 5) (3 4)
        2: (0 2) (1 3) (4 5)
        >>> random_matching(Layout(num_workers=6, workers_per_node=1), seed=1).plan_at(10**9, 0)
        Swap(send_to=(1,), receive_from=mappingproxy({1: 0.5}))

    References:
        Boyd, Ghosh, Prabhakar and Shah, Randomized gossip algorithms, IEEE Transactions on Information Theory 52
        (2006), 2508-2530.
    """
    try:
        drawn = _Draw(layout.num_workers, index(seed))
    except TypeError:
        raise TopologyError(f"seed={seed!r}: give a whole number, the same on all workers") from None
    return FunctionOfTime("random-matching", layout, drawn)


@dataclass(frozen=True, slots=True)
class _Draw:
    """The pairing of a step: workers in the order of the 64-bit words of a digest, two by two."""

    num_workers: int
    seed: int

    def __call__(self, t: int) -> Round:
        n = self.num_workers
        stream = hashlib.shake_256(f"random matching, seed {self.seed}, step {t}".encode()).digest(8 * n)
        words = struct.unpack(f"<{n}Q", stream)
        order = sorted(range(n), key=words.__getitem__)
        return Round.of_cliques(n, zip(order[::2], order[1::2], strict=False))
