"""L: world size, topologies and groups."""

import os
import random
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from decent_dp import DecentralizedDataParallel, ExchangeError, from_edges, initialize_dist
from decent_dp.topology import Idle, Layout, Sharded, Swap, build, names
from virtual import names_for

from .workers import flat, held, leave, loss_of, network, short_notes, stay_until_left

SGD = partial(torch.optim.SGD, lr=0.1)
STILL = partial(torch.optim.SGD, lr=0.0)
TINY = 16 / 2**20


# ---------------------------------------------------------------- L1


def one_worker(rank, n, through_helper):
    """Every topology with every optimizer, next to plain training."""
    if through_helper:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        assert initialize_dist() == (0, 1)
    for topology in names():
        for optim_fn in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01)):
            plain, model = network(), DecentralizedDataParallel(network(), optim_fn, topology=topology)
            local = optim_fn(plain.parameters())
            for t in range(5):
                loss_of(model, t, 0).backward()
                loss_of(plain, t, 0).backward()
                local.step()
                local.zero_grad()
            assert torch.equal(flat(model), flat(plain)), topology
            with model.consensus():
                assert torch.equal(flat(model), flat(plain))
            assert model.consensus_distance() == 0


@pytest.mark.parametrize("through_helper", [True, False], ids=["initialize_dist", "own process group"])
def test_l1_one_worker_trains_as_without_the_wrapper(pool, through_helper):
    pool.run(one_worker, 1, through_helper, group_timeout_s=None if through_helper else 20)


# ---------------------------------------------------------------- L2


def contract(rank, n, steps):
    """With a learning rate of 0 only mixing moves the parameters."""
    values = {}
    for topology in names_for(n, n):
        model = DecentralizedDataParallel(
            nn.ParameterList([torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]),
            STILL,
            topology=topology,
            bucket_size_in_mb=TINY,
        )
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(rank**2)
        values[topology] = []
        for _ in range(steps):
            sum(p.sum() for p in model.parameters()).backward()
            values[topology].append([p[0].item() for p in model.parameters()])
        model.synchronize()  # nobody may be at its last step still when this one goes: see test_o_process_life.py
    return values


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_l2_small_worlds_follow_their_matrices_and_contract(pool, n):
    steps = 40
    results = pool.run(contract, n, steps)
    for topology in names_for(n, n):
        rounds = [build(topology, Layout(n, n)).round_at(t).matrix() for t in range(steps)]
        for W in rounds:
            assert W.sum(0) == pytest.approx(np.ones(n), abs=1e-12)
            assert W.sum(1) == pytest.approx(np.ones(n), abs=1e-12)
        x = np.arange(n, dtype=np.float64) ** 2
        mean = x.mean()
        for t in range(steps):  # what step t shows is mixed t times
            x = rounds[t - 1] @ x if t else x
            for rank in range(n):
                assert results[rank][topology][t] == pytest.approx([x[rank]] * 2, abs=1e-12)
        assert x == pytest.approx(np.full(n, mean), abs=1e-6)


@pytest.mark.parametrize("topology", names_for(2, 2))
def test_l2_two_workers_do_not_count_their_neighbour_twice(topology):
    pair = build(topology, Layout(2, 2))
    for t in range(5):
        assert pair.round_at(t).matrix().tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert pair.plan_at(t, 0) in (Swap((1,), {1: 0.5}), Sharded((0, 1), Idle()))


# ---------------------------------------------------------------- L3


def every_topology_twice(rank, n):
    """Two models for every topology, and a late worker; the user's own collectives go on in between."""
    groups = []
    for number, topology in enumerate(names_for(n, n)):
        models = []
        for k in range(2):
            if rank == n - 1 and number == k == 0:
                time.sleep(1.0)
            models.append(DecentralizedDataParallel(network(k), SGD, topology=topology, bucket_size_in_mb=TINY))
            groups.append(dist.new_group([0, n - 1]))
        for t in range(3):
            for model in models:
                loss_of(model, t, rank).backward()
            share = torch.tensor([float(rank)])
            dist.all_reduce(share)
            assert share.item() == sum(range(n))
            if rank in (0, n - 1):
                dist.all_reduce(share, group=groups[-1])
        assert [model.t for model in models] == [3, 3]
        means = []
        for model in models:
            with model.consensus():
                means.append(flat(model).tolist())
        assert means[0] != means[1]
    return means


def test_l3_groups_are_made_in_one_order_and_never_pair_with_others(pool):
    results = pool.run(every_topology_twice, 4)
    assert all(means == results[0] for means in results)


PAIRS = [[(0, 1, 0.5), (2, 3, 0.3)], [(1, 2, 0.25), (0, 3, 0.5), (0, 2, 0.1)]]


def shuffled(rank, n, order):
    """The same pairs in another order and direction on every worker."""
    generator = random.Random(order * (1 + rank))
    rounds = [[(j, i, w) if generator.random() < 0.5 else (i, j, w) for i, j, w in edges] for edges in PAIRS]
    for edges in rounds:
        generator.shuffle(edges)
    model = DecentralizedDataParallel(network(), SGD, topology=from_edges(rounds, Layout(n, n)), bucket_size_in_mb=TINY)
    for t in range(6):
        loss_of(model, t, rank).backward()
    model.synchronize()
    return flat(model).tolist()


def test_l3_the_order_of_a_custom_topology_does_not_matter(pool):
    same, other = (pool.run(shuffled, 4, order) for order in (0, 7))
    assert same == other


def alternately(rank, n, topology, in_one_order):
    """Several models, stepped in another order and another number of times on every worker."""
    models = [DecentralizedDataParallel(network(k), SGD, topology=topology, bucket_size_in_mb=TINY) for k in range(3)]
    for t in range(5):
        turn = 0 if in_one_order else rank + t
        for k in range(len(models)):
            loss_of(models[(k + turn) % len(models)], t, rank).backward()
    for model in models:
        model.synchronize()
    return [flat(model).tolist() for model in models]


@pytest.mark.parametrize("topology", ["complete", "exp", "hierarchical"])
def test_l3_models_may_be_stepped_in_another_order_on_every_worker(pool, topology):
    assert pool.run(alternately, 3, topology, False) == pool.run(alternately, 3, topology, True)


# ---------------------------------------------------------------- L4


def silent_worker(rank, n, topology, how, folder):
    """The last worker says nothing after the first step; how long do the others wait?"""
    if how == "new_group":
        group = dist.new_group(timeout=timedelta(seconds=2))
        options = {"process_group": group}
    else:
        options = {"timeout": timedelta(seconds=2)} if how == "timeout" else {}
    model = DecentralizedDataParallel(network(), SGD, topology=topology, **options)
    loss_of(model, 0, rank).backward()
    model.synchronize()
    if rank == n - 1:
        stay_until_left(folder, n - 1)
        return None
    begin = time.monotonic()
    try:
        with short_notes():
            for t in range(1, 6):
                loss_of(model, t, rank).backward()
    except ExchangeError as error:
        return str(error), time.monotonic() - begin
    finally:
        leave(folder, rank)
    return None


@pytest.mark.parametrize(
    ("n", "topology", "how"),
    [(2, "ring", "init_process_group"), (3, "complete", "new_group"), (2, "ring", "timeout")],
)
def test_l4_the_timeout_of_the_user_holds_in_every_group(pool, tmp_path: Path, n, topology, how):
    results = pool.run(silent_worker, n, topology, how, tmp_path, group_timeout_s=2 if "init" in how else 20)
    for rank in range(n - 1):
        text, seconds = results[rank]
        assert f"rank {n - 1}" in text
        assert text.startswith(f"rank {rank}, step 1: ")
        assert 1.8 < seconds < 6


# ---------------------------------------------------------------- L5


def wrap_and_delete(rank, n, topology, rounds):
    """Descriptors and threads before any wrap, inside of each, and after each."""
    before, inside, after = held(), [], []
    for _ in range(rounds):
        model = DecentralizedDataParallel(network(), SGD, topology=topology)
        loss_of(model, 0, rank).backward()
        model.synchronize()
        inside.append(held())
        dist.barrier()
        del model
        after.append(held())
    return before, inside, after


@pytest.mark.parametrize("topology", ["alternating-exp-ring", "complete", "exp"])
def test_l5_descriptors_and_threads_are_flat_over_20_wraps(pool, topology):
    results = pool.run(wrap_and_delete, 4, topology, 20)
    for before, inside, after in results:
        assert max(h.num_descriptors for h in inside) <= before.num_descriptors + 12
        assert max(h.num_threads for h in inside) <= before.num_threads + 4
        # Connections close a moment later, on threads of the backend.
        assert max(h.num_descriptors for h in after[10:]) <= max(h.num_descriptors for h in after[:10])
        assert max(h.num_threads for h in after[10:]) <= max(h.num_threads for h in after[:10])
        assert max(h.num_descriptors for h in inside[10:]) <= max(h.num_descriptors for h in inside[:10])


@pytest.mark.parametrize(("per_node", "topology"), [(k, name) for k in (1, 4, 64) for name in names_for(64, k)])
def test_l5_sixty_four_workers_need_few_groups(topology, per_node):
    """One for all point-to-point traffic, and one for each distinct clique a worker is in."""
    cliques = build(topology, Layout(64, per_node)).cliques()
    assert len(set(cliques)) == len(cliques)
    largest = max(1 + sum(rank in clique for clique in cliques) for rank in range(64))
    assert largest <= (2 if topology in ("ring", "exp", "one-peer-exp", "complete") else 8)
