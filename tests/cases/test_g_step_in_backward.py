"""Kind G: the optimizer steps inside backward, and still does what it would do after it."""

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import ConfigurationError, DecentralizedDataParallel, ModelChangedError, TrainingError, UnusableError
from faults import DelayedCommunicator
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, accumulating, assert_equal, matrices, on_gloo, replay, values

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, x):
        return self.layers(x)


def data(t, rank):
    """Eight samples; a full batch, or four micro-batches of two."""
    generator = torch.Generator().manual_seed(100 * t + rank)
    return torch.randn(8, 3, dtype=torch.float64, generator=generator) + rank


def full_batch(net, t, rank):
    net(data(t, rank)).square().mean().backward()


def micro_batches(net, t, rank):
    for k, x in enumerate(data(t, rank).chunk(4)):
        net.set_accumulate_grad(k < 3)
        (net(x).square().mean() / 4).backward()


def with_no_sync(net, t, rank):
    *first, last = data(t, rank).chunk(4)
    with accumulating(net):
        for x in first:
            (net(x).square().mean() / 4).backward()
    (net(last).square().mean() / 4).backward()


@pytest.mark.parametrize("act", [micro_batches, with_no_sync])
@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("bucket", [25, TINY], ids=["one bucket", "a bucket each"])
def test_g1_accumulation(pool, act, clip, bucket):
    options = {"topology": "ring", "grad_clip_norm": clip, "bucket_size_in_mb": bucket}
    actual = on_gloo(pool, 2, Net, act, ADAM, 3, **options)
    assert_equal(actual, replay(2, Net, full_batch, ADAM, 3, max_norm=clip))


def test_g1_one_window_is_one_step_one_round_and_one_tick():
    models = wrap_virtual(2, lambda rank: Net(), ADAM, HALVING, topology="ring", bucket_size_in_mb=TINY)
    for model in models:
        micro_batches(model, 0, 0)
        assert model.t == 1
        assert [s.get_last_lr() for s in model.lr_schedulers] == [[0.05]] * 6
        counts = [int(state["step"]) for opt in model.optimizers for state in opt.state.values()]
        assert counts == [1] * 6


class Two(nn.Module):
    """Two parameters with given gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))

    def forward(self):
        return self.first @ torch.tensor([3.0, 4.0]).double() + self.second @ torch.tensor([6.0, 8.0]).double()


@pytest.mark.parametrize("bucket", [25, TINY], ids=["one bucket", "two buckets"])
def test_g2_clipping_is_by_the_global_norm(bucket):
    lr = partial(torch.optim.SGD, lr=1.0)
    (model,) = wrap_virtual(1, lambda rank: Two(), lr, grad_clip_norm=1.0, bucket_size_in_mb=bucket)
    model().backward()
    expected = -torch.tensor([[3.0, 4.0, 6.0, 8.0]]).double() / (125**0.5 + 1e-6)
    torch.testing.assert_close(stack([model]), expected, rtol=0, atol=1e-15)


# ---------------------------------------------------------------- the user steps as well


def test_g5_a_loop_with_an_optimizer_of_its_own_is_refused():
    models = wrap_virtual(2, lambda rank: Net(), ADAM, HALVING, topology="ring")
    for rank, model in enumerate(models):
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        local.zero_grad()
        full_batch(model, 0, rank)
        after = stack([model])
        with pytest.raises(ModelChangedError, match=r"SGD.step\(\).*updates inside backward.*optim_fn"):
            local.step()
        assert torch.equal(stack([model]), after)
        with pytest.raises(ModelChangedError, match=r"SGD.step\(\)"):
            local.step(lambda: torch.tensor(0.0))
        assert all(p.grad is None for p in model.parameters())
        assert model.get_lr() == 0.05  # what a log needs can be reached
        assert all(isinstance(optimizer, torch.optim.Adam) for optimizer in model.optimizers)


def test_the_wrapper_s_own_optimizers_are_not_stepped_by_hand_to_any_effect():
    (model,) = wrap_virtual(1, lambda rank: Net(), ADAM)
    full_batch(model, 0, 0)
    after = stack([model])
    for optimizer in model.optimizers:
        optimizer.step()  # no gradient is left
        optimizer.zero_grad()
    assert torch.equal(stack([model]), after)


def test_step_hooks_of_optimizers_run_once_per_bucket_and_step():
    calls = []
    (model,) = wrap_virtual(1, lambda rank: Net(), ADAM, bucket_size_in_mb=TINY)
    for optimizer in model.optimizers:
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for t in range(3):
        micro_batches(model, t, 0)
    assert len(calls) == 3 * 6


# ---------------------------------------------------------------- optimizers that evaluate again


class Sam(torch.optim.SGD):
    """As davda54/sam: a default of None, and yet a closure is needed."""

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("optim_fn", [torch.optim.LBFGS, partial(torch.optim.LBFGS, lr=0.5)])
def test_g7_optimizers_with_a_closure_are_refused_at_wrap(n, optim_fn):
    with pytest.raises(ConfigurationError, match=r"LBFGS.step needs a closure"):
        wrap_virtual(n, lambda rank: Net(), optim_fn)


def test_g7_a_hidden_closure_fails_at_the_first_step_and_moves_nothing():
    (model,) = wrap_virtual(1, lambda rank: Net(), partial(Sam, lr=0.1))
    before = stack([model])
    with pytest.raises(AssertionError, match="requires closure"):
        full_batch(model, 0, 0)
    assert torch.equal(stack([model]), before)
    with pytest.raises(UnusableError, match=r"AssertionError in step 0.*requires closure"):
        full_batch(model, 0, 0)


def sharpness_by_hand(net, t, rank):
    """Two backwards: the update uses the gradient at the perturbed point, by a copy of the module."""
    module = net.module if isinstance(net, DecentralizedDataParallel) else net
    away = copy.deepcopy(module)
    gradients = torch.autograd.grad(away(data(t, rank)).square().mean(), list(away.parameters()))
    with torch.no_grad():
        for p, g in zip(away.parameters(), gradients, strict=True):
            p.add_(g, alpha=0.05)
    gradients = torch.autograd.grad(away(data(t, rank)).square().mean(), list(away.parameters()))
    for p, g in zip(module.parameters(), gradients, strict=True):
        p.grad = g
    if isinstance(net, DecentralizedDataParallel):
        net.finish_window()


def test_g7_a_two_backward_step_by_hand(pool):
    """Gradients from anywhere are one step with finish_window()."""
    actual = on_gloo(pool, 2, Net, sharpness_by_hand, ADAM, 3, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, Net, sharpness_by_hand, ADAM, 3))


@pytest.mark.parametrize("forward", [None, "eval", "train"])
def test_gradients_assigned_by_hand_are_not_lost(forward):
    """Whatever forward runs between: it changes nothing."""
    (model,), plain = wrap_virtual(1, lambda rank: Net(), ADAM), Net()
    for net in (model, plain):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
    if forward is not None:
        with torch.set_grad_enabled(forward == "train"):
            model.train(forward == "train")(data(0, 0))
    model.finish_window()
    ADAM(plain.parameters()).step()
    assert torch.equal(stack([model]), stack([plain]))


# ---------------------------------------------------------------- nobody sees what is half done


def read_at_once(rank, n, topology):
    """Exchanges take 200 ms; what is read right after backward is the replica after its update."""
    communicator = DelayedCommunicator(0.2)
    model = DecentralizedDataParallel(Net(), ADAM, topology=topology, bucket_size_in_mb=TINY, communicator=communicator)
    seen = []
    for t in range(3):
        full_batch(model, t, rank)
        begin = time.monotonic()
        with torch.no_grad():
            reads = [
                values(model),
                torch.cat([p.flatten() for p in model.state_dict().values()]).to(torch.complex128),
                torch.stack([p.sum() for p in model.parameters()]),
                model(torch.ones(1, 3, dtype=torch.float64)),
            ]
        waited = time.monotonic() - begin
        in_flight = any(not handle.is_done for handle in communicator.handles)
        distance = model.consensus_distance() if t == 1 else None
        with model.consensus():
            average = values(model)
        seen.append((reads, waited, in_flight, average, distance, values(model)))
    return seen


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_g8_reads_right_after_backward_while_an_exchange_is_in_flight(pool, topology):
    n = 3 if topology == "complete" else 2
    oracle, per_rank = (
        Replay([Net() for _ in range(n)], ADAM, matrices(topology, n)),
        pool.run(read_at_once, n, topology),
    )
    for t in range(3):
        oracle.step(full_batch)
        mean = oracle.values().mean(0)
        for rank, module in enumerate(oracle.modules):
            reads, waited, in_flight, average, distance, after = per_rank[rank][t]
            replica = values(module)
            assert_equal(reads[0], replica)
            assert_equal(reads[1], replica)
            torch.testing.assert_close(reads[2], torch.stack([p.detach().sum() for p in module.parameters()]))
            torch.testing.assert_close(reads[3], module(torch.ones(1, 3, dtype=torch.float64)).detach())
            assert_equal(average, mean)
            assert torch.equal(after, reads[0])
            assert in_flight
            assert waited < 0.15  # reading needs no wait
            if distance is not None:
                spread = (oracle.values() - mean).abs().square().sum(1).mean().sqrt().item()
                assert distance == pytest.approx(spread, rel=1e-9)


# ---------------------------------------------------------------- what an error in the middle leaves


def test_an_optimizer_that_raises_leaves_the_model_unusable_and_says_so():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            if self.param_groups[0]["params"][0].shape == (4, 3):
                raise MemoryError("no memory left")

    (model,) = wrap_virtual(1, lambda rank: Net(), partial(Failing, lr=0.1), bucket_size_in_mb=TINY)
    with pytest.raises(MemoryError):
        full_batch(model, 0, 0)
    for go_on in (partial(full_batch, model, 1, 0), model.finish_window, model.consensus_distance):
        with pytest.raises(UnusableError, match=r"rank 0, step 0: .*MemoryError.*checkpoint"):
            go_on()


def _fail_in_window(model):
    with model.no_sync():
        full_batch(model, 0, 0)
        raise KeyError("a bad sample")


def test_an_exception_in_the_middle_of_a_window_keeps_the_switch():
    (model,), plain = wrap_virtual(1, lambda rank: Net(), ADAM), Net()
    with pytest.raises(KeyError, match="a bad sample"):
        _fail_in_window(model)
    full_batch(model, 1, 0)  # no longer accumulating: the window ends here, with both gradients
    local = ADAM(plain.parameters())
    full_batch(plain, 0, 0)
    full_batch(plain, 1, 0)
    local.step()
    assert model.t == 1
    assert torch.equal(stack([model]), stack([plain]))


def test_no_sync_may_be_nested():
    (model,) = wrap_virtual(1, lambda rank: Net(), ADAM)
    with model.no_sync():
        with model.no_sync():
            full_batch(model, 0, 0)
        full_batch(model, 0, 0)
        assert model.t == 0
    full_batch(model, 0, 0)
    assert model.t == 1


@pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])
def test_autograd_is_told_that_parameters_change(as_view):
    """A value that autograd saved before an update must not be used after it, whoever holds the graph."""
    (model,) = wrap_virtual(1, lambda rank: Net(), SGD, param_as_bucket_view=as_view, bucket_size_in_mb=TINY)
    weight = model.module.layers[0].weight
    penalty = weight.square().sum()
    full_batch(model, 0, 0)
    with pytest.raises((RuntimeError, TrainingError), match=r"inplace|no_sync"):
        penalty.backward()
