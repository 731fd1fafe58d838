"""K: workers with unequal numbers of batches, who do not use ``join``, or use it with everything else."""

import re
import time
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, ExchangeError

from .workers import leave, loss_of, network, stay_until_left

SGD = partial(torch.optim.SGD, lr=0.05)
TIMEOUT_S = 2.0


def without_join(rank, n, topology, batches, folder):
    """The one with fewer batches goes on to something else."""
    model = DecentralizedDataParallel(network(), SGD, topology=topology)
    try:
        for t in range(batches[rank]):
            loss_of(model, t, rank).backward()
        if batches[rank] < max(batches):
            stay_until_left(folder, n - 1)
        else:
            model.global_avg()
    except ExchangeError as error:
        return str(error)
    finally:
        leave(folder, rank)
    return None


@pytest.mark.parametrize(("topology", "batches"), [("ring", (5, 4, 5)), ("complete", (3, 0, 3))])
def test_k1_without_join_the_error_names_who_stopped_and_where(pool, tmp_path, topology, batches):
    begin = time.monotonic()
    results = pool.run(without_join, 3, topology, batches, tmp_path, group_timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin < 15
    assert results[1] is None
    for rank in (0, 2):
        # Of an average over three only its members are known; the notes of the others tell who was waited for.
        assert re.match(rf"rank {rank}\b.*\b(rank 1\b|waiting for \[1\])", results[rank])
    step = rf"rank [02], step {batches[1]}: the exchange of bucket 0 \(.*\) with (rank 1|one of the ranks)\b"
    assert any(re.match(step, results[rank]) for rank in (0, 2))


def scaled(rank, n, batches):
    """Mixed precision, clipping, a schedule and a buffer, over two epochs of unequal length."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=3)
    model = DecentralizedDataParallel(
        nn.Sequential(network(), nn.BatchNorm1d(2)),
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
        "ring",
        scaler,
        1.0,
        sync_buffer_in_global_avg=True,
        bucket_size_in_mb=1e-5,
        wire_dtype=torch.bfloat16,
    )
    for counts in batches:
        with model.join():
            for t in range(counts[rank]):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, t, rank)
                scaler.scale(loss).backward()
        model.eval()
        with model.consensus(), torch.no_grad():
            output = model(torch.ones(2, 3)).tolist()
        model.train()
    return model.t, model.get_lr(), output


def test_k1_join_with_scaler_clipping_autocast_buffers_and_wire_dtype(pool):
    results = pool.run(scaled, 3, ((2, 5, 0), (0, 1, 4)))
    assert results[0] == results[1] == results[2]
    t, lr, output = results[0]
    assert t == 9
    assert lr == pytest.approx(0.01 * 0.9**t)
    assert torch.tensor(output).isfinite().all()


def two_models(rank, n):
    """Two models in one join each: who has left the one goes on with the other."""
    first, second = (DecentralizedDataParallel(network(), SGD, topology="complete") for _ in range(2))
    with first.join(), second.join():
        for t in range(rank):
            loss_of(first, t, rank).backward()
            loss_of(second, t, rank).backward()
    return first.t, second.t


def test_k1_two_models_in_one_join(pool):
    results = pool.run(two_models, 3, group_timeout_s=TIMEOUT_S)
    assert results == [(2, 2)] * 3
