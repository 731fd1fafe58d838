"""The short form of `tests/soak.py`, with seeds of its own for every run of the tests."""

import random

from soak import soak


def test_random_runs_equal_the_dense_recursion(pool):
    seed = random.randrange(10**6)
    counts = pool.run(soak, 4, seed, 100, 8.0, timeout_s=60)
    assert min(counts) == max(counts) >= 2, f"seed {seed}"
