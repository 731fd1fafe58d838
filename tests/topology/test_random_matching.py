"""Pairs drawn from (seed, t) alone: alike everywhere, all equally likely."""

import copy
import pickle
import random

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Idle, Layout, Swap, draw, random_matching

from .oracle import plans_at


@pytest.mark.parametrize("n", [2, 5, 8, 17])
def test_every_worker_has_one_partner_and_one_idles_if_their_number_is_odd(n: int) -> None:
    topology = random_matching(Layout(n, 1))
    for t in range(30):
        plans = plans_at(topology, t)
        assert plans.count(Idle()) == n % 2
        for rank, plan in enumerate(plans):
            if isinstance(plan, Swap):
                (partner,) = plan.send_to
                assert plan == Swap((partner,), {partner: 0.5})
                assert plans[partner] == Swap((rank,), {rank: 0.5})


def test_the_draw_never_changes() -> None:
    """The same on every machine, with every version of Python and numpy."""
    drawn = [[f"{t}: {draw_at(seed, t)}" for t in (0, 1, 10**12)] for seed in (0, 1, -7)]
    assert drawn == EXPECTED


def draw_at(seed: int, t: int) -> str:
    topology = random_matching(Layout(5, 1), seed)
    pairs = {tuple(sorted((rank, *p.send_to))) for rank, p in enumerate(plans_at(topology, t)) if p != Idle()}
    return " ".join(f"{i}-{j}" for i, j in sorted(pairs))


EXPECTED = [
    ["0: 0-2 1-3", "1: 0-2 1-4", "1000000000000: 0-3 1-2"],
    ["0: 0-2 1-4", "1: 1-3 2-4", "1000000000000: 1-2 3-4"],
    ["0: 0-2 1-4", "1: 0-1 3-4", "1000000000000: 0-2 1-3"],
]


def test_global_generators_are_neither_read_nor_moved() -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()
    first = draw(random_matching(Layout(6, 1)))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    random.seed(2)
    assert draw(random_matching(Layout(6, 1))) == first


@pytest.mark.parametrize(("n", "factor"), [(16, 0.4667), (6, 0.4), (7, 0.5)])
def test_the_squared_distance_shrinks_by_this_factor_on_average(n: int, factor: float) -> None:
    """W is a projection, so E||W x||^2 = x^T E[W] x; the draws are fixed, so this passes always or never."""
    topology, steps = random_matching(Layout(n, 1)), 5000
    mean = sum(topology.round_at(t).matrix() for t in range(steps)) / steps
    off_diagonal = mean[~np.eye(n, dtype=bool)]
    likely = 1 / (2 * (n - 1 if n % 2 == 0 else n))
    assert abs(off_diagonal - likely).max() < 5 * np.sqrt(likely / 2 / steps)
    values = np.sort(np.linalg.eigvalsh(mean - 1 / n))[1:]  # without the mean's 0
    assert values.mean() == pytest.approx(factor, abs=1e-4)
    assert values == pytest.approx(np.full(n - 1, factor), abs=0.05)


def test_seeds_and_steps_draw_differently() -> None:
    layout = Layout(16, 4)
    prints = {random_matching(layout, seed).fingerprint() for seed in range(5)}
    assert len(prints) == 5
    rounds = {random_matching(layout).round_at(t) for t in range(50)}
    assert len(rounds) == 50


@pytest.mark.parametrize("seed", [1.5, "1", None])
def test_a_seed_is_a_whole_number(seed) -> None:
    with pytest.raises(TopologyError, match="seed"):
        random_matching(Layout(4, 1), seed)


def test_it_is_a_value() -> None:
    topology = random_matching(Layout(6, 2), seed=3)
    for twin in (pickle.loads(pickle.dumps(topology)), copy.deepcopy(topology), random_matching(Layout(6, 2), 3)):
        assert twin == topology
        assert twin.plan_at(99, 5) == topology.plan_at(99, 5)
    assert topology != random_matching(Layout(6, 2), seed=4)
