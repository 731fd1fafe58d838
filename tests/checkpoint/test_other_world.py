"""Another number of workers, another topology: only when asked for, by the documented rule."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cases.workers import flat, loss_of, network
from decent_dp import CheckpointError, DecentralizedDataParallel, from_matrices
from decent_dp.checkpoint import consensus_state, load, save
from decent_dp.checkpoint.other_world import Mean, fold
from decent_dp.engine.training_state import capture
from engine import oracle
from virtual import stack, wrap_virtual

from .runs import COSINE, OPTIMIZERS, TINY, Network

WORLDS = [
    (4, "exp", 2, "exp"),
    (4, "ring", 6, "exp"),
    (1, "complete", 4, "ring"),
    (4, "complete", 4, "ring"),
    (3, "ring", 1, "exp"),
]


def wrap(n, topology, optimizer="sgd", mb=oracle.BUCKET_MB, **options):
    return wrap_virtual(
        n, lambda rank: oracle.make_network(), OPTIMIZERS[optimizer], COSINE, topology, bucket_size_in_mb=mb,
        workers_per_node=n, **options
    )  # fmt: skip


def run(models, first, last):
    for t in range(first, last):
        for rank, model in enumerate(models):
            oracle.loss_of(model, t, 0, rank, 1).backward()


def moments(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        for optimizer in model.optimizers
        for p, state in optimizer.state.items()
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_everyone_starts_from_the_consensus_with_averaged_moments(world, optimizer, tmp_path: Path):
    n, topology, m, other = world
    saved = wrap(n, topology, optimizer)
    run(saved, 0, 6)
    for model in saved:
        model.set_adaptive_factor(0.5)
        save(model, tmp_path, extra={"rank": model._communicator.rank})
    started = wrap(m, other, optimizer, mb=25)
    with pytest.raises(CheckpointError, match="say start='consensus'"):
        load(started[0], tmp_path)
    started = wrap(m, other, optimizer, mb=25)
    for rank, model in enumerate(started):
        loaded = load(model, tmp_path, start="consensus")
        assert (loaded.num_workers, loaded.step, loaded.extra) == (n, 6, {"rank": rank % n})
    mean = stack(saved).mean(0)
    torch.testing.assert_close(stack(started), mean.expand(m, -1), rtol=0, atol=1e-15)
    theirs = [moments(model) for model in saved]
    for model in started:
        assert (model.t, model.get_lr(), model._replica.strength) == (6, saved[0].get_lr(), 0.5)
        assert all(bucket.exchange is None for bucket in model._replica.buckets)
        for name, values in moments(model).items():
            for key, value in values.items():
                average = sum(other[name][key] for other in theirs) / n
                torch.testing.assert_close(value, average, rtol=0, atol=1e-15)
    run(started, 6, 9)
    assert stack(started).isfinite().all()


def test_moments_of_a_replica(tmp_path: Path):
    saved = wrap(2, "exp", "adamw")
    run(saved, 0, 4)
    for model in saved:
        save(model, tmp_path)
    started = wrap(5, "complete", "adamw")
    for rank, model in enumerate(started):
        load(model, tmp_path, start="consensus", moments="replica")
        expected = moments(saved[rank % 2])
        for name, values in moments(model).items():
            assert all(torch.equal(value, expected[name][key]) for key, value in values.items())


def test_what_was_in_flight_is_folded_in_as_the_next_step_would_have(tmp_path: Path):
    # rows sum to 1 and columns do not: the mean of what is mixed is not that of what is there
    uneven = from_matrices([[[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.5, 0.0, 0.5]]], doubly_stochastic=False)
    saved = wrap(3, uneven)
    run(saved, 0, 5)
    mixed = torch.tensor(uneven.rounds[0].matrix()) @ stack(saved)
    for model in saved:
        save(model, tmp_path)
    (model,) = wrap(1, "complete")
    load(model, tmp_path, start="consensus")
    torch.testing.assert_close(stack([model])[0], mixed.mean(0), rtol=0, atol=1e-15)
    assert not torch.allclose(mixed.mean(0), stack(saved).mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("topology", ["ring", "complete", "exp"])
def test_folding_keeps_the_mean_whatever_the_wire_dtype(topology, tmp_path: Path):
    saved = wrap(4, topology, wire_dtype=torch.bfloat16)
    run(saved, 0, 5)
    for model in saved:
        save(model, tmp_path)
    (model,) = wrap(1, "complete")
    load(model, tmp_path, start="consensus")
    torch.testing.assert_close(stack([model])[0], stack(saved).mean(0), rtol=0, atol=1e-14)


def test_folding_is_what_the_step_does(tmp_path: Path):
    """Compared with updates that have nothing to add."""
    saved = wrap_virtual(3, lambda rank: network(), partial(torch.optim.SGD, lr=0.1), topology="ring")
    for t in range(3):
        for rank, model in enumerate(saved):
            loss_of(model, t, rank).backward()
    folded = []
    for model in saved:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        fold(state, capture(model._replica)["exchange"])
        folded.append(torch.cat([value.flatten() for value in state.values()]).float())
    for model in saved:
        model.finish_window()  # mixes what has arrived, and updates nothing
    for model, values in zip(saved, folded, strict=True):
        torch.testing.assert_close(flat(model), values, rtol=0, atol=1e-7)


def test_buffers_tied_weights_and_the_window(tmp_path: Path):
    saved = wrap_virtual(3, lambda rank: Network(), OPTIMIZERS["sgd"], topology="ring", bucket_size_in_mb=TINY)
    for rank, model in enumerate(saved):
        for _ in range(rank + 1):
            model.module.count += 1
        model(torch.randn(5, 6)).square().mean().backward()
    for model in saved:
        with model.no_sync():
            model(torch.randn(5, 6)).square().mean().backward()
        save(model, tmp_path)
    started = wrap_virtual(2, lambda rank: Network(), OPTIMIZERS["sgd"], topology="exp")
    for model in started:
        load(model, tmp_path, start="consensus")
        module = model.module
        assert module.third.weight is module.second.weight
        for name in ("second.weight", "first.bias"):
            mean = sum(dict(other.named_parameters())[name].detach().double() for other in saved) / 3
            torch.testing.assert_close(dict(model.named_parameters())[name].detach(), mean.float(), rtol=0, atol=1e-7)
            gradient = sum(dict(other.named_parameters())[name].grad.double() for other in saved) / 3
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient.float(), rtol=0, atol=1e-7)
        torch.testing.assert_close(
            module.norm.running_mean, sum(other.module.norm.running_mean for other in saved) / 3, rtol=0, atol=1e-7
        )
        assert (module.count, module.norm.num_batches_tracked) == (3, 2)  # those of rank 0
        assert model._replica.num_accumulated == 1
    for model in started:
        model(torch.randn(5, 6)).square().mean().backward()
        assert model.t == 2
    weights = consensus_state(tmp_path)
    assert torch.equal(weights["second.weight"], weights["third.weight"])


def test_means_are_of_those_that_have_a_value():
    mean = Mean()
    mean.add({"a": torch.tensor([1.0]), "b": 3, "c": {"d": torch.tensor([1])}})
    mean.add({"a": torch.tensor([2.0]), "b": 4, "c": {"e": torch.tensor(5.0, dtype=torch.bfloat16)}})
    result = mean.result()
    assert result["a"].tolist() == [1.5]
    assert (result["b"], result["c"]["d"].tolist(), result["c"]["e"].dtype) == (3, [1], torch.bfloat16)


def test_what_is_empty_stays_there():
    mean = Mean()
    mean.add({"a": {}, "b": {"c": torch.tensor([1.0])}, "d": {}})
    mean.add({"a": {}, "b": {}, "d": {"e": 1}})
    assert mean.result() == {"a": {}, "b": {"c": torch.tensor([1.0])}, "d": {"e": 1}}


class WithNothingBesides(nn.Linear):
    """Its extra state is there, and empty."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {}


def test_an_empty_extra_state_of_a_module_is_kept(tmp_path: Path):
    (model,) = wrap_virtual(1, lambda rank: WithNothingBesides(), OPTIMIZERS["sgd"])
    save(model, tmp_path)
    load(model, tmp_path, start="consensus")
    WithNothingBesides().load_state_dict(consensus_state(tmp_path))


def load_differently(rank, n, directory):
    model = DecentralizedDataParallel(network(), partial(torch.optim.SGD, lr=0.1), topology="ring")
    loss_of(model, 0, rank).backward()
    save(model, directory)
    loss_of(model, 1, rank).backward()
    before, messages = flat(model), []
    for options in ({"start": "consensus"}, {"step": 1}):
        with pytest.raises(CheckpointError) as info:
            load(model, directory, **(options if rank == 2 else {}))
        messages.append(str(info.value))
    assert torch.equal(flat(model), before)
    load(model, directory)
    return messages


def test_workers_that_ask_for_another_start_are_refused(pool, tmp_path: Path):
    for first, second in pool.run(load_differently, 3, tmp_path):
        assert "do not load the same way: rank 0 asks for start='exact'" in first
        assert "rank 2 for start='consensus', moments='average', step=None; every" in first
        assert "step=None, rank 2 for start='exact', moments='average', step=1; every" in second


class Refusing(WithNothingBesides):
    """One worker does not take it back."""

    def set_extra_state(self, state: dict[str, int]) -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("not again")


def load_what_refuses(rank, n, directory):
    model = DecentralizedDataParallel(Refusing(), partial(torch.optim.SGD, lr=0.1), topology="ring")
    save(model, directory)
    with pytest.raises(CheckpointError) as info:
        load(model, directory)
    return str(info.value)


def test_a_module_that_refuses_on_one_worker_fails_on_all(pool, tmp_path: Path):
    for rank, message in enumerate(pool.run(load_what_refuses, 3, tmp_path, group_timeout_s=5)):
        assert message == f"rank {rank}, step 0: could not load from {tmp_path}: rank 1: ValueError: not again"
