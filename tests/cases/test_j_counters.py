"""J: counters and schedules. One step, one round, one tick, whatever the number of buckets."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import InProcessCommunicator, InProcessWorld
from virtual import wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)
NUM_WORKERS = 4
NUM_PARAMETERS = 7


class Seven(nn.Module):
    """Seven parameters of 16 bytes; ``factor`` reaches the gradients."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.full((4,), float(i)) for i in range(NUM_PARAMETERS)])

    def forward(self, factor, used=NUM_PARAMETERS):
        return sum((factor * part).sum() for part in self.parts[:used])


class Recording(InProcessCommunicator):
    """Notes with whom this worker exchanges which bucket in which step."""

    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.log = []

    def start_swap(self, payloads, send_to, receive_from, buffers, tag, *, in_turn=False):
        self.log.append((tag >> 18, tag >> 2 & 0xFFFF, tuple(send_to), tuple(receive_from)))
        return super().start_swap(payloads, send_to, receive_from, buffers, tag, in_turn=in_turn)


def plain(model, scaler, rank, t):
    model(1.0).backward()


def unused(model, scaler, rank, t):
    """Each worker uses other parameters in each step."""
    model(1.0, used=1 + (rank + t) % NUM_PARAMETERS).backward()


def accumulated(model, scaler, rank, t):
    """Windows of one to three micro-batches, of another length on each worker."""
    with model.no_sync():
        for _ in range((rank + t) % 3):
            model(1.0).backward()
    model(1.0).backward()


def skipped(model, scaler, rank, t):
    """One worker after the other overflows and skips its update."""
    factor = float("inf") if rank == t % NUM_WORKERS else 1.0
    scaler.scale(model(factor)).backward()


def without_gradients(model, scaler, rank, t):
    """Nothing but a round."""
    model.finish_window()


STEPS = {step.__name__: step for step in (plain, unused, accumulated, skipped, without_gradients)}


@pytest.mark.parametrize("num_buckets", [1, 3, 7])
@pytest.mark.parametrize("kind", STEPS)
def test_j1_one_partner_per_step_for_all_buckets(kind, num_buckets):
    world = InProcessWorld(NUM_WORKERS)
    communicators = [Recording(world, rank) for rank in range(NUM_WORKERS)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8) if kind == "skipped" else None for _ in range(NUM_WORKERS)]
    capacity = {1: 1000, 3: 3 * 16, 7: 16}[num_buckets]
    models = [
        DecentralizedDataParallel(
            Seven(),
            SGD,
            partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
            "one-peer-exp",
            scaler,
            bucket_size_in_mb=capacity / 2**20,
            communicator=communicator,
        )
        for communicator, scaler in zip(communicators, scalers, strict=True)
    ]
    for t in range(6):
        for rank, model in enumerate(models):
            STEPS[kind](model, scalers[rank], rank, t)
    for rank, communicator in enumerate(communicators):
        partners = [rank ^ (1, 2)[t % 2] for t in range(6)]
        expected = [(t, bucket, (p,), (p,)) for t, p in enumerate(partners) for bucket in range(num_buckets)]
        assert communicator.log == expected
        assert models[rank].t == 6
        assert [s.get_last_lr() for s in models[rank].lr_schedulers] == [[0.1 * 0.5**6]] * num_buckets


def test_j3_a_shared_metric_sets_the_rate_of_every_bucket_and_worker():
    """The way out that the refusal of ReduceLROnPlateau names."""
    models = wrap_virtual(3, lambda rank: Seven(), SGD, bucket_size_in_mb=16 / 2**20)
    dummies = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in models]
    plateaus = [torch.optim.lr_scheduler.ReduceLROnPlateau(dummy, factor=0.5, patience=1) for dummy in dummies]
    rates = []
    for _ in range(8):
        losses = []
        for rank, model in enumerate(models):
            loss = model(1.0 + rank) * 0 + 1.0
            losses.append(loss.item())
            loss.backward()
        shared = sum(losses) / len(losses)
        for model, plateau, dummy in zip(models, plateaus, dummies, strict=True):
            plateau.step(shared)
            for optimizer in model.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = dummy.param_groups[0]["lr"]
        rates.append([model.get_lr() for model in models])
    assert all(len(set(row)) == 1 for row in rates)
    assert rates[0][0] == 0.1
    assert rates[-1][0] == 0.0125
    assert all(len({o.param_groups[0]["lr"] for o in model.optimizers}) == 1 for model in models)


def test_j3_a_scheduler_derived_from_plateau_is_refused_by_its_name_too():
    class Patient(torch.optim.lr_scheduler.ReduceLROnPlateau):
        pass

    with pytest.raises(ValueError, match=r"ReduceLROnPlateau steps on a metric.*all workers share"):
        wrap_virtual(1, lambda rank: Seven(), SGD, Patient)


def halves(rank, n, as_view, will_revert):
    """Weights equal to the rank; everything that shows them shows 0.5 after the average."""
    model = DecentralizedDataParallel(nn.Linear(2, 1, bias=False), SGD, param_as_bucket_view=as_view)
    ema = torch.optim.swa_utils.AveragedModel(model.module)
    with torch.no_grad():
        model.module.weight.fill_(rank)
    model.global_avg(will_revert=will_revert)
    ema.update_parameters(model.module)
    seen = [
        model.module.weight[0, 0].item(),
        model.state_dict()["weight"][0, 0].item(),
        model.optimizers[0].param_groups[0]["params"][0][0, 0].item(),
        model(torch.ones(1, 2)).item() / 2,
        ema.module.weight[0, 0].item(),
    ]
    if will_revert:
        model.revert_global_avg()
    return seen, model.module.weight[0, 0].item()


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("will_revert", [True, False])
def test_j4_the_average_is_what_every_holder_of_the_weights_sees(pool, as_view, will_revert):
    results = pool.run(halves, 2, as_view, will_revert)
    assert [seen for seen, _ in results] == [[0.5] * 5] * 2
    assert [after for _, after in results] == ([0.0, 1.0] if will_revert else [0.5, 0.5])


def counting(rank, n, num_epochs):
    """Evaluation, averages and reading between the steps tick nothing."""
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    model = DecentralizedDataParallel(Seven(), SGD, schedule, "exp", bucket_size_in_mb=16 / 2**20)
    seen = []
    for _ in range(num_epochs):
        model(1.0).backward()
        model.eval()
        with torch.no_grad(), model.consensus():
            model(1.0)
        model.train()
        model.consensus_distance()
        model.synchronize()
        model.state_dict()
        seen.append((model.t, model.get_lr()))
    return seen


def test_j1_evaluation_averages_and_reading_tick_nothing(pool):
    assert pool.run(counting, 3, 4) == [[(t, 0.1 * 0.5**t) for t in range(1, 5)]] * 3
