"""M: evaluation and reads, on one worker alone and while parameters travel."""

import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from decent_dp import DecentralizedDataParallel, ExchangeError
from faults import DelayedCommunicator
from virtual import wrap_virtual

from .workers import flat, leave, loss_of, network, short_notes, stay_until_left

ADAM = partial(torch.optim.Adam, lr=0.05)
DELAY_S = 0.3
BUCKET_MB = 16 / 2**20


def evaluate_alone(rank, n, topology, alone, folder):
    """Rank 0 evaluates while the others wait; then it asks for an average that nobody else asks for."""
    model = DecentralizedDataParallel(network(), ADAM, topology=topology, bucket_size_in_mb=BUCKET_MB)
    loss_of(model, 0, rank).backward()
    if rank == 0 and alone:
        before = flat(model)
        model.eval()
        with torch.no_grad():
            for t in range(3):
                loss_of(model, t, rank)
        model.train()
        assert torch.equal(flat(model), before)
    dist.barrier()
    for t in (1, 2):
        loss_of(model, t, rank).backward()
    replica = flat(model).tolist()
    if not alone:
        model.synchronize()
        return replica, None
    if rank != 0:
        stay_until_left(folder, 1)
        return replica, None
    begin = time.monotonic()
    try:
        with short_notes():
            model.global_avg()
    except ExchangeError as error:
        return replica, (str(error), time.monotonic() - begin)
    finally:
        leave(folder, rank)
    return replica, None


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_m1_evaluation_is_local_and_an_average_on_one_rank_fails_in_time(pool, tmp_path, topology):
    alone = pool.run(evaluate_alone, 2, topology, True, tmp_path, group_timeout_s=2)
    together = pool.run(evaluate_alone, 2, topology, False, tmp_path)
    assert [replica for replica, _ in alone] == [replica for replica, _ in together]
    text, seconds = alone[0][1]
    assert seconds < 6
    assert "waiting for [1]" in text
    assert "Every worker must call consensus(), global_avg() or consensus_distance()" in text


def state(model, ema):
    return torch.cat([p.flatten() for p in model.state_dict().values()])


def copied(model, ema):
    return flat(copy.deepcopy(model.module))


def averaged(model, ema):
    ema.update_parameters(model.module)
    return flat(ema.module)


def norm(model, ema):
    return torch.nn.utils.get_total_norm(list(model.parameters())).view(1)


def forward(model, ema):
    with torch.no_grad():
        return model(torch.ones(1, 3)).flatten()


def past_the_wrapper(model, ema):
    with torch.no_grad():
        return model.module(torch.ones(1, 3)).flatten()


def local_values(model, ema):
    return torch.cat([p.detach().cpu().flatten() for _, p in model.named_parameters()])


READS = {f.__name__: f for f in (state, copied, averaged, norm, forward, past_the_wrapper, local_values)}


def read_at_once(rank, n, topology, delay_s, as_view):
    """All reads right after each backward, and whether they came before the exchange had ended."""
    communicator = DelayedCommunicator(delay_s)
    model = DecentralizedDataParallel(
        network(), ADAM, topology=topology, param_as_bucket_view=as_view, communicator=communicator
    )
    ema = torch.optim.swa_utils.AveragedModel(model.module)
    seen, early = [], []
    for t in range(3):
        loss_of(model, t, rank).backward()
        begin = time.monotonic()
        first = {name: read(model, ema).tolist() for name, read in READS.items() if read is not averaged}
        first["averaged"] = averaged(model, ema).tolist()
        early.append(time.monotonic() - begin < delay_s and not communicator.handles[-1].is_done)
        if delay_s:
            model.synchronize()
            second = {name: read(model, ema).tolist() for name, read in READS.items() if read is not averaged}
            assert second == {name: value for name, value in first.items() if name != "averaged"}
        seen.append(first)
    model.synchronize()
    return seen, early


@pytest.mark.parametrize(("topology", "as_view"), [("ring", True), ("ring", False), ("complete", True)])
def test_m3_reads_right_after_backward_see_the_updated_replica(pool, topology, as_view):
    late = pool.run(read_at_once, 2, topology, DELAY_S, as_view)
    prompt = pool.run(read_at_once, 2, topology, 0.0, as_view)
    assert [seen for seen, _ in late] == [seen for seen, _ in prompt]
    assert all(all(early) for _, early in late)  # reading waited for nothing


def clamp(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)


def write_by_hand(rank, n):
    """Clamp the weights after every step; what travels is what backward left."""
    communicator = DelayedCommunicator(0.05)
    model = DecentralizedDataParallel(network(), ADAM, topology="exp", communicator=communicator)
    for t in range(4):
        loss_of(model, t, rank).backward()
        model.synchronize()
        assert communicator.handles[-1].is_done
        clamp(model)
    return flat(model).tolist()


def test_m3_writing_by_hand_is_announced_by_synchronize(pool):
    models = wrap_virtual(3, lambda rank: network(), ADAM, topology="exp")  # a payload is copied when it leaves
    for t in range(4):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()
            clamp(model)
    for actual, model in zip(pool.run(write_by_hand, 3), models, strict=True):
        assert actual == flat(model).tolist()
