"""Workers with unequal numbers of batches, windows that are not full, and numbers that are not finite."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, ExchangeError, TrainingError
from virtual import stack, wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(model, t, rank):
    return model(torch.full((2, 3), 0.1 * (1 + t) * (1 + rank), dtype=torch.float64)).square().sum()


def unequal(rank, n, topology, batches):
    model = DecentralizedDataParallel(
        network(),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
        topology,
        bucket_size_in_mb=1e-4,
    )
    for epoch, counts in enumerate(batches):
        with model.join():
            for t in range(counts[rank]):
                loss_of(model, 10 * epoch + t, rank).backward()
                time.sleep(0.002 * rank)
    with model.consensus():
        mean = [p.detach().flatten().tolist() for p in model.parameters()]
    return model.t, model.get_lr(), [p.detach().flatten().tolist() for p in model.parameters()], mean


def unequal_by_hand(n, topology, batches, steps_per_epoch):
    """Virtual workers; one without a batch takes a step without a gradient."""
    models = wrap_virtual(
        n,
        lambda rank: network(),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
        topology,
        bucket_size_in_mb=1e-4,
    )
    for epoch, (counts, steps) in enumerate(zip(batches, steps_per_epoch, strict=True)):
        for t in range(steps):
            for rank, model in enumerate(models):
                if t < counts[rank]:
                    loss_of(model, 10 * epoch + t, rank).backward()
                else:
                    model.finish_window()
    return [[p.detach().flatten().tolist() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
@pytest.mark.parametrize("batches", [((5, 4, 5), (3, 0, 3)), ((0, 0, 4), (0, 0, 0), (2, 2, 2)), ((1, 6, 0), (6, 1, 6))])
def test_join_lets_workers_take_unequal_numbers_of_updates(pool, topology, batches):
    results = pool.run(unequal, 3, topology, batches)
    assert len({(t, lr) for t, lr, _, _ in results}) == 1
    total = results[0][0]
    most = [max(counts) for counts in batches]
    assert sum(most) <= total <= sum(most) + 3 * len(most)  # who has left may be a cycle ahead of those who have not
    assert results[0][3] == results[1][3] == results[2][3]
    if total == sum(most):
        for (_, _, replica, _), expected in zip(results, unequal_by_hand(3, topology, batches, most), strict=True):
            for actual, values in zip(replica, expected, strict=True):
                assert actual == pytest.approx(values, abs=1e-12)


def test_four_workers_join_on_a_one_peer_topology(pool):
    results = pool.run(unequal, 4, "exp", ((7, 2, 0, 5), (1, 1, 1, 9)))
    assert len({t for t, _, _, _ in results}) == 1


def raising(rank, n):
    model = DecentralizedDataParallel(network(), SGD, topology="ring")
    try:
        with model.join():
            for t in range(3):
                if rank == 1 and t == 1:
                    raise ValueError("no more data")
                loss_of(model, t, rank).backward()
    except (ValueError, ExchangeError) as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_inside_join_is_not_taken_for_leaving(pool):
    results = pool.run(raising, 3, group_timeout_s=3, timeout_s=30)
    assert results[1] == ("ValueError", "no more data")
    assert results[0][0] == results[2][0] == "ExchangeError"


def skipping(rank, n, topology):
    model = DecentralizedDataParallel(network(), SGD, topology=topology)
    begin = time.monotonic()
    try:
        for t in range(6):
            if rank == 1 and t == 3:
                continue
            loss_of(model, t, rank).backward()
        model.synchronize()
        time.sleep(3)
    except ExchangeError as error:
        return str(error), time.monotonic() - begin
    return None


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_a_worker_that_skips_a_step_unannounced_is_noticed(pool, topology):
    results = pool.run(skipping, 4, topology, group_timeout_s=3, timeout_s=40)
    told = [result for result in results if result is not None]
    assert told
    assert all(seconds < 15 for _, seconds in told)
    assert any("rank 1" in text and "step " in text for text, _ in told)


def leftovers(rank, n, finish):
    """Five micro-batches (four on rank 1) in windows of two, over two epochs."""
    model = DecentralizedDataParallel(network(), SGD, topology="ring")
    for epoch in range(2):
        with model.join():
            for micro in range(5 - (rank == 1)):
                model.set_accumulate_grad(micro % 2 == 0)
                (loss_of(model, 10 * epoch + micro, rank) / 2).backward()
            model.set_accumulate_grad(False)
            if finish:
                model.finish_window()
    return model.t, [p.grad is None for p in model.parameters()]


def test_the_last_incomplete_window_counts_on_request(pool):
    for t, consumed in pool.run(leftovers, 3, True):
        assert t >= 6
        assert all(consumed)


def discarding(rank, n):
    with pytest.warns(UserWarning, match=r"discards 1 accumulated.*finish_window"):
        return leftovers(rank, 1, False)


def test_the_last_incomplete_window_is_discarded_with_a_warning(pool):
    ((t, consumed),) = pool.run(discarding, 1)
    assert t == 4
    assert all(consumed)


def test_zero_grad_in_the_middle_of_a_window_warns():
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    with model.no_sync():
        loss_of(model, 0, 0).backward()
    with pytest.warns(UserWarning, match=r"rank 0, step 0: zero_grad\(\) discards 1 accumulated"):
        model.zero_grad()
    model.zero_grad()


def test_a_window_can_be_finished_without_another_backward():
    whole, cut = (wrap_virtual(1, lambda rank: network(), SGD)[0] for _ in range(2))
    (loss_of(whole, 0, 0) + loss_of(whole, 1, 0)).backward()
    with cut.no_sync():
        loss_of(cut, 0, 0).backward()
        loss_of(cut, 1, 0).backward()
    cut.finish_window()
    assert cut.t == 1
    torch.testing.assert_close(stack([cut]), stack([whole]), rtol=0, atol=1e-15)


def test_numbers_that_are_not_finite_are_refused_before_they_spread_if_asked_for():
    models = wrap_virtual(3, lambda rank: network(), SGD, topology="complete", check_finite=True)
    loss_of(models[0], 0, 0).backward()
    with pytest.raises(TrainingError, match=r"parameter '2.weight' is not finite"):
        (loss_of(models[1], 0, 1) + models[1].module[2].weight.sum() * float("nan")).backward()


def test_without_the_check_one_bad_replica_spreads_along_the_topology():
    models = wrap_virtual(4, lambda rank: network(), SGD, topology="ring")
    bad = []
    for t in range(4):
        for rank, model in enumerate(models):
            factor = float("nan") if (t, rank) == (0, 2) else 1.0
            (loss_of(model, t, rank) * factor).backward()
        bad.append(int((~stack(models).isfinite()).any(1).sum()))
    assert bad == [1, 2, 4, 4]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_sparse_gradients_are_served_where_the_optimizer_takes_them(clip):
    def embedding():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))

    plain = embedding()
    (model,) = wrap_virtual(1, lambda rank: embedding(), SGD, grad_clip_norm=0.0)
    local = SGD(plain.parameters())
    for _ in range(3):
        for net in (plain, model):
            net(torch.tensor([1, 3, 3])).sum().backward()
        local.step()
        local.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    (refused,) = wrap_virtual(1, lambda rank: embedding(), partial(torch.optim.AdamW, lr=0.1), grad_clip_norm=clip)
    by = "clipping" if clip else "AdamW"
    with pytest.raises(TrainingError, match=rf"'0.weight' has a sparse gradient, which {by} does not take"):
        refused(torch.tensor([1])).sum().backward()
