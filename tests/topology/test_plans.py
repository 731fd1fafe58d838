"""Plans are derived from the matrix alone, and carrying them out multiplies by it."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest

from decent_dp.topology import Average, Idle, Round, Swap, plan_of

from .oracle import Matrix, carry_out


def plans_of(W: Matrix) -> list:
    round = Round.of_matrix(W)
    return [plan_of(round, rank) for rank in range(len(W))]


def random_doubly_stochastic(rng: np.random.Generator, n: int) -> Matrix:
    """A convex mixture of a few permutations, so that most entries are zero."""
    shares = rng.dirichlet(np.ones(3))
    return np.asarray(sum(share * np.eye(n)[rng.permutation(n)] for share in shares))


def random_row_stochastic(rng: np.random.Generator, n: int) -> Matrix:
    W = rng.random((n, n)) * (rng.random((n, n)) < 0.4) + np.eye(n) * rng.random((n, 1))
    return W / W.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [random_doubly_stochastic, random_row_stochastic])
def test_plans_of_random_matrices_multiply_by_them(kind, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    W = kind(rng, n)
    x = rng.normal(size=(n, 4))
    np.testing.assert_allclose(Round.of_matrix(W).matrix(), W, atol=0)
    np.testing.assert_allclose(carry_out(plans_of(W), x), W @ x, atol=1e-13)


@pytest.mark.parametrize("seed", range(20))
def test_plans_of_random_cliques_multiply_by_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 15))
    order = rng.permutation(n)
    W = np.eye(n)
    cuts = sorted({0, n, *(int(c) for c in rng.integers(1, n, size=2))})
    sizes = {}
    for begin, end in pairwise(cuts):
        ranks = order[begin:end]
        k = len(ranks)
        weight = rng.uniform(0.1, 1.0)
        W[np.ix_(ranks, ranks)] = (1 - weight) * np.eye(k) + weight / k
        sizes[tuple(sorted(int(r) for r in ranks))] = weight
    plans = plans_of(W)
    for ranks, weight in sizes.items():
        for rank in ranks:
            if len(ranks) >= 3:
                assert plans[rank] == Average(ranks, pytest.approx(weight, abs=1e-12))
            else:
                assert isinstance(plans[rank], Swap if len(ranks) == 2 else Idle)
    x = rng.normal(size=(n, 4))
    np.testing.assert_allclose(carry_out(plans, x), W @ x, atol=1e-13)


@pytest.mark.parametrize("k", [3, 7, 49, 107])
def test_the_weight_of_an_equal_clique_is_exactly_one(k: int) -> None:
    assert plan_of(Round.of_cliques(k, [range(k)]), 0) == Average(tuple(range(k)), 1.0)


def test_a_pair_is_a_swap() -> None:
    plans = plans_of(np.array([[0.8, 0.2, 0], [0.2, 0.8, 0], [0, 0, 1]]))
    assert plans == [Swap((1,), {1: 0.2}), Swap((0,), {0: 0.2}), Idle()]


def test_a_directed_shift_is_a_swap() -> None:
    W = 0.5 * np.eye(4) + 0.5 * np.roll(np.eye(4), 1, axis=0)
    assert plans_of(W)[0] == Swap(send_to=(1,), receive_from={3: 0.5})


def test_a_ring_with_two_neighbours_is_a_swap() -> None:
    eye = np.eye(5)
    plans = plans_of((eye + np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 3)
    assert plans[0] == Swap((1, 4), {1: 1 / 3, 4: 1 / 3})
    assert list(plans[4].receive_from) == [0, 3]


def test_three_workers_on_a_two_neighbour_ring_are_a_clique() -> None:
    eye = np.eye(3)
    plans = plans_of((eye + np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 3)
    assert plans == [Average((0, 1, 2), 1.0)] * 3


def test_a_star_is_a_swap() -> None:
    W = np.eye(4)
    W[0] = [0.4, 0.2, 0.2, 0.2]
    W[1:, 0] = 0.2
    W[1:, 1:] = 0.8 * np.eye(3)
    plans = plans_of(W)
    assert plans[0] == Swap((1, 2, 3), {1: 0.2, 2: 0.2, 3: 0.2})
    assert plans[3] == Swap((0,), {0: 0.2})


def test_a_worker_that_only_gives_swaps_without_receiving() -> None:
    plans = plans_of(np.array([[1.0, 0.0], [0.5, 0.5]]))
    assert plans == [Swap((1,), {}), Swap((), {0: 0.5})]


def test_a_clique_that_is_read_from_outside_swaps_on_every_member() -> None:
    W = np.zeros((4, 4))
    W[:3, :3] = 1 / 3
    W[3] = [0.5, 0, 0, 0.5]
    assert all(isinstance(plan, Swap) for plan in plans_of(W))


def test_a_clique_without_self_weight_swaps() -> None:
    W = (np.ones((3, 3)) - np.eye(3)) / 2
    assert plans_of(W)[0] == Swap((1, 2), {1: 0.5, 2: 0.5})


def test_a_clique_with_unequal_weights_swaps() -> None:
    W = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
    assert all(isinstance(plan, Swap) for plan in plans_of(W))


def test_a_clique_may_keep_less_than_it_takes() -> None:
    W = np.full((3, 3), 0.45) + np.eye(3) * (0.1 - 0.45)
    assert plans_of(W)[0] == Average((0, 1, 2), pytest.approx(1.35))


def test_rounding_in_the_weights_does_not_break_a_clique() -> None:
    W = np.full((3, 3), 1 / 3) + np.eye(3) * (1 - 1 / 3 - 1 / 3 - 1 / 3)
    W[1, 0] += 1e-15
    assert plans_of(W) == [Average((0, 1, 2), 1.0)] * 3


def test_a_swap_is_a_value() -> None:
    swap = Swap((1,), {4: 0.25, 2: 0.5})
    assert list(swap.receive_from) == [2, 4]
    with pytest.raises(TypeError):
        swap.receive_from[2] = 1.0  # type: ignore[index]
    for twin in (pickle.loads(pickle.dumps(swap)), copy.deepcopy(swap), Swap((1,), {2: 0.5, 4: 0.25})):
        assert twin == swap
        assert hash(twin) == hash(swap)
