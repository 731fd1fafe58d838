"""N: save, resume and copy."""

import copy
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from decent_dp import ConfigurationError, DecentralizedDataParallel
from decent_dp.engine.training_state import capture, restore
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup
from pool import Pool
from virtual import stack, wrap_virtual

from .workers import flat, loss_of, network

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
COSINE = partial(lr_scheduler_fn_cosine_with_warmup, t_max=6, t_warmup=2)
TINY = 16 / 2**20


# ---------------------------------------------------------------- N1


def test_n1_names_go_both_ways_and_to_averaging_tools():
    plain = network(1)
    (model,) = wrap_virtual(1, lambda rank: network(), ADAMW, bucket_size_in_mb=TINY)
    for source, target in ((plain, model), (model, network(2)), (model, torch.nn.ModuleList([network(3)])[0])):
        result = target.load_state_dict(source.state_dict(), strict=False)
        assert result.missing_keys == result.unexpected_keys == []
        assert torch.equal(flat(target), flat(source))
    ema = torch.optim.swa_utils.AveragedModel(model.module)
    assert [name for name, _ in ema.module.named_parameters()] == [name for name, _ in model.named_parameters()]
    loss_of(model, 0, 0).backward()
    ema.update_parameters(model.module)
    assert torch.equal(flat(ema.module), flat(model))
    assert [name for name, _ in model.module.named_parameters()] == list(plain.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_model."])
def test_n1_keys_of_other_wrappers_are_refused_and_listed(prefix):
    (model,) = wrap_virtual(1, lambda rank: network(), ADAMW)
    foreign = {prefix + name: value for name, value in network(1).state_dict().items()}
    before = flat(model)
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*{prefix}0.weight"):
        model.load_state_dict(foreign)
    result = model.load_state_dict(foreign, strict=False)
    assert result.unexpected_keys == list(foreign)
    assert result.missing_keys == list(network().state_dict())
    assert torch.equal(flat(model), before)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(foreign, prefix)
    model.load_state_dict(foreign)
    assert torch.equal(flat(model), flat(network(1)))


def test_n1_copies_of_the_module_train_on_their_own():
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    loss_of(model, 0, 0).backward()
    twin = copy.deepcopy(model.module)
    assert list(twin.state_dict()) == list(model.state_dict())
    before = flat(model)
    loss_of(twin, 1, 0).backward()
    assert all(p.grad is not None for p in twin.parameters())
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.equal(flat(model), before)
    assert not torch.equal(flat(twin), before)
    with pytest.raises(ConfigurationError, match="assign"):
        model.load_state_dict(twin.state_dict(), assign=True)


# ---------------------------------------------------------------- N2


def train(rank, n, topology, first, last, load, save):
    """AdamW, cosine schedule, scaler (rank 1 overflows once), clipping and accumulation; state from and to files."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=2)
    model = DecentralizedDataParallel(
        network(), ADAMW, COSINE, topology, scaler, grad_clip_norm=1.0, bucket_size_in_mb=TINY
    )
    if load is not None:
        saved = torch.load(load / f"{rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        restore(model._replica, saved["training"])
    for t in range(first, last):
        with model.no_sync():
            scaler.scale(loss_of(model, 10 * t, rank)).backward()
        factor = float("inf") if (rank, t) == (1, 1) else 1.0
        scaler.scale(loss_of(model, t, rank) * factor).backward()
    if save is not None:
        torch.save({"model": model.state_dict(), "training": capture(model._replica)}, save / f"{rank}.pt")
    model.synchronize()
    return model.t, model.get_lr(), scaler.state_dict(), flat(model).tolist()


@pytest.mark.parametrize(("n", "topology"), [(2, "ring"), (3, "complete"), (4, "exp")])
def test_n2_a_run_goes_on_in_new_processes_bit_for_bit(pool, tmp_path: Path, n, topology):
    straight = pool.run(train, n, topology, 0, 6, None, None)
    pool.run(train, n, topology, 0, 3, None, tmp_path)
    with Pool() as others:
        resumed = others.run(train, n, topology, 3, 6, tmp_path, None)
        assert not set(others.pids()) & set(pool.pids())
    assert resumed == straight
    assert {t for t, _, _, _ in straight} == {6}
    assert len({lr for _, lr, _, _ in straight}) == 1
    assert len({tuple(values) for _, _, _, values in straight}) == n  # replicas differ: each needs its own file


def weights_alone(rank, n, folder):
    """Weights of two workers into three: each takes what it is given, the training state starts afresh."""
    model = DecentralizedDataParallel(network(5), ADAMW, COSINE, "exp", bucket_size_in_mb=TINY)
    saved = torch.load(folder / f"{rank % 2}.pt", weights_only=True)["model"]
    model.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert (model.t, model.get_lr()) == (0, pytest.approx(0.02 * 0.01))
    for t in range(3):
        loss_of(model, t, rank).backward()
    with model.consensus():
        return flat(model).tolist()


def test_n2_weights_alone_go_into_another_world_size(pool, tmp_path: Path):
    pool.run(train, 2, "ring", 0, 3, None, tmp_path)
    first, second, third = pool.run(weights_alone, 3, tmp_path)
    assert first == second == third


# ---------------------------------------------------------------- N3


class Layers(nn.Module):
    """Two layers of one shape, registered in either order."""

    def __init__(self, order):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = {name: nn.Linear(4, 4, bias=False) for name in ("a", "b")}
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def momenta(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: s["momentum_buffer"] for o in model.optimizers for p, s in o.state.items()}


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("capacity", [25, 64 / 2**20])
def test_n3_each_momentum_finds_its_parameter_by_name(order, capacity, as_view):
    def wrap(order, capacity, as_view):
        return wrap_virtual(
            2, lambda rank: Layers(order), SGD, bucket_size_in_mb=capacity, param_as_bucket_view=as_view
        )

    def go(models, first, last):
        for t in range(first, last):
            for rank, model in enumerate(models):
                model(torch.full((2, 4), 1.0 + t + rank)).square().mean().backward()

    straight = wrap("ab", 25, True)
    go(straight, 0, 4)
    first = wrap("ab", 25, True)
    go(first, 0, 2)
    second = wrap(order, capacity, as_view)
    assert len(second[0].optimizers) == (1 if capacity == 25 else 2)
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(before.state_dict())
        restore(after._replica, capture(before._replica))
        assert momenta(after).keys() == {"a.weight", "b.weight"}
        assert all(torch.equal(value, momenta(before)[name]) for name, value in momenta(after).items())
        assert not torch.equal(momenta(after)["a.weight"], momenta(after)["b.weight"])
    go(second, 2, 4)
    for expected, actual in zip(straight, second, strict=True):
        state = expected.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in actual.state_dict().items())


def test_n3_the_state_shares_no_memory_with_the_model():
    models = wrap_virtual(2, lambda rank: network(), SGD, topology="ring")
    for rank, model in enumerate(models):
        loss_of(model, 0, rank).backward()
    states = [capture(model._replica) for model in models]
    frozen = copy.deepcopy(states)
    for rank, model in enumerate(models):
        loss_of(model, 1, rank).backward()
    for state, kept in zip(states, frozen, strict=True):
        for name, entry in state["optimizer"].items():
            assert torch.equal(entry["state"]["momentum_buffer"], kept["optimizer"][name]["state"]["momentum_buffer"])
            assert torch.equal(state["exchange"]["received"][name], kept["exchange"]["received"][name])
    assert stack(models).isfinite().all()


# ---------------------------------------------------------------- N6


def save_on_rank_0(rank, n, folder, sleep_s):
    """Rank 0 alone saves, slowly; nobody waits for anything but the exchange itself."""
    model = DecentralizedDataParallel(network(), ADAMW, topology="ring", bucket_size_in_mb=TINY)
    for t in range(2):
        loss_of(model, t, rank).backward()
    if rank == 0 and folder is not None:
        torch.save(model.state_dict(), folder / "model.pt")
        expected = flat(model)
        time.sleep(sleep_s)
        loaded = network(3)
        loaded.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        assert torch.equal(flat(loaded), expected)
    for t in range(2, 4):
        loss_of(model, t, rank).backward()
    model.synchronize()
    return flat(model).tolist()


def test_n6_saving_on_one_rank_alone_is_local_and_may_be_slow(pool, tmp_path: Path):
    expected = pool.run(save_on_rank_0, 2, None, 0)
    assert pool.run(save_on_rank_0, 2, tmp_path, 1.5, group_timeout_s=4) == expected
