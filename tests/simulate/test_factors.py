"""Virtual workers settle where the exact recursions say: noise and constant pulls on a flat loss."""

from functools import partial

import numpy as np
import pytest
from torch.optim import SGD

from decent_dp.simulate import build_problem, simulate
from decent_dp.topology import Layout, build


def run(name, n, steps, **options):
    topology = build(name, Layout(n, 1))
    return simulate(build_problem("noise", n, **options), topology, partial(SGD, lr=0.5, foreach=False), steps)


@pytest.mark.parametrize(
    ("name", "expected", "steps"),
    [
        ("complete", 0.9375, 20),
        ("static-ring", 2.4096, 160),
        ("torus", 1.1393, 40),
        ("hypercube", 1.1393, 40),
        ("exp", 1.6250, 40),
        ("random-matching", 1.758, 400),
        ("ring", 2.245, 160),
    ],
)
def test_noise_settles_where_the_document_says(name, expected, steps):
    dimension = 2048 if steps < 400 else 512
    found = dict(run(name, 16, steps, dimension=dimension, noise=3.0).factors)
    assert found["noise factor"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("name", "expected"), [("exp", 1.81), ("base-2", 2.09), ("base-3", 1.59)])
def test_noise_at_24_workers(name, expected):
    found = dict(run(name, 24, 48, dimension=2048).factors)
    assert found["noise factor"] == pytest.approx(expected, rel=0.02)


def pulled_apart(name, n):
    """Mean over a cycle of ``trace(S S^T) / n`` with x = S b the deviation that constant pulls b settle at."""
    matrices = [round.matrix() for round in build(name, Layout(n, 1)).rounds]
    P = np.eye(n) - 1 / n
    S, before, after = P, 0.0, 1.0
    while abs(after - before) > 1e-9 * after:
        before, after = after, 0.0
        for W in matrices:
            S = W @ S + P
            after += np.sum(S * S) / n / len(matrices)
    return after


def test_constant_pulls_settle_where_the_recursion_says_and_a_ring_is_much_worse():
    found = {}
    for name, steps in (("ring", 360), ("exp", 60), ("base-2", 60)):
        factors = dict(run(name, 24, steps, dimension=4096, heterogeneity=2.0).factors)
        found[name] = factors["heterogeneity factor"]
        assert found[name] == pytest.approx(pulled_apart(name, 24), rel=0.05)
    assert 10 < found["ring"] / found["exp"] < 100
    assert 10 < found["ring"] / found["base-2"] < 100


def test_heterogeneous_least_squares_ranks_topologies_alike():
    def squared(name):
        problem = build_problem("least-squares", 24, heterogeneity=1.0)
        optim_fn = partial(SGD, lr=0.002, foreach=False)
        records = simulate(problem, build(name, Layout(24, 1)), optim_fn, 240, every=6).records
        assert records[-1].loss_of_consensus < 0.5 * records[0].loss_of_consensus
        return np.mean([record.consensus_distance**2 for record in records[-6:]])

    ring, exp, base = map(squared, ("ring", "exp", "base-2"))
    assert 10 < ring / exp < 100
    assert 10 < ring / base < 100


def test_one_seed_gives_one_answer_and_another_seed_another():
    first, again, other = (run("exp", 4, 10, dimension=8, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.records[1:] != other.records[1:]
