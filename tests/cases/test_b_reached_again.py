"""Kind B: parameters that a step reaches more than once get one update, from gradients at one point."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from decent_dp import DecentralizedDataParallel, TrainingError
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, accumulating, assert_equal, inner, matrices, on_gloo, on_virtual, replay

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)


def batch(t, rank, *shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape) * (1 + rank) + 0.1 * t


# ---------------------------------------------------------------- checkpointing


class CalledTwice(nn.Module):
    """One layer, used twice, each time as a segment of its own."""

    def __init__(self, mode=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mode = nn.Linear(4, 4).double(), mode

    def segment(self, x):
        return torch.tanh(self.layer(x))

    def forward(self, x):
        for _ in range(2):
            x = self.segment(x) if self.mode is None else checkpoint(self.segment, x, use_reentrant=self.mode)
        return x


class Stacked(nn.Module):
    """Four layers in two segments, of which neighbours share a weight."""

    def __init__(self, mode=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.mode = nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(4))), mode
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x):
        return (
            self.layers(x) if self.mode is None else checkpoint_sequential(self.layers, 2, x, use_reentrant=self.mode)
        )


def with_input_gradient(net, t, rank):
    net(batch(t, rank, 2, 4).requires_grad_()).square().sum().backward()


@pytest.mark.parametrize("make", [CalledTwice, Stacked])
@pytest.mark.parametrize("mode", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("bucket", [25, TINY], ids=["one bucket", "a bucket each"])
def test_b1_tied_weight_under_checkpointing(make, mode, bucket):
    for steps in (1, 3):
        actual = on_virtual(2, partial(make, mode), with_input_gradient, ADAM, steps, bucket_size_in_mb=bucket)
        assert_equal(actual, replay(2, make, with_input_gradient, ADAM, steps))


# ---------------------------------------------------------------- one Parameter, two names


class TiedHead(nn.Module):
    """Embedding and output layer with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.mid, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.double()

    def forward(self, tokens):
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


def next_token(net, t, rank):
    tokens = (torch.arange(6) * (1 + rank) + t) % 5
    nn.functional.cross_entropy(net(tokens), tokens.roll(1)).backward()


def tied(rank, n):
    model = DecentralizedDataParallel(TiedHead(), ADAM, topology="ring", bucket_size_in_mb=TINY)
    one = [model.module.head.weight is model.module.emb.weight]
    for t in range(3):
        next_token(model, t, rank)
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    with model.consensus():
        one.append(model.module.head.weight is model.module.emb.weight)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    one.append(model.module.head.weight is model.module.emb.weight)
    again = TiedHead()
    again.load_state_dict(saved)
    one.append(all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)))
    counts = [int(s["step"]) for optimizer in model.optimizers for s in optimizer.state.values()]
    return end, all(one), list(saved), counts, len(model.optimizers)


def test_b2_one_parameter_under_two_names(pool):
    expected = replay(2, TiedHead, next_token, ADAM, 3)
    for rank, (end, one, names, counts, num_buckets) in enumerate(pool.run(tied, 2)):
        assert_equal(end.to(torch.complex128), expected[rank])
        assert one
        assert names == ["emb.weight", "mid.weight", "mid.bias", "head.weight"]
        assert counts == [3, 3, 3]
        assert num_buckets == 3


# ---------------------------------------------------------------- several forwards, several backwards


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 1, 2)).double()

    def forward(self, x):
        return self.net(x)


def real_and_fake(net, t, rank):
    """As a discriminator: both forwards in train mode, one backward."""
    real, fake = batch(t, rank, 2, 1, 5, 5), batch(t, rank, 2, 1, 5, 5).sin()
    (-net(real).mean() + net(fake).square().mean()).backward()


def anchor_and_other(net, t, rank):
    """As contrastive learning: outputs of two forwards in one product, with a forward in eval mode between."""
    a, b = net(batch(t, rank, 2, 1, 5, 5)), None
    net.eval()
    with torch.no_grad():
        net(batch(t, rank, 2, 1, 5, 5))
    net.train()
    b = net(batch(t + 1, rank, 2, 1, 5, 5).cos())
    (a * b).sum().backward()


def recurrent(net, t, rank):
    """As backpropagation through time: an output is the next input."""
    x = batch(t, rank, 2, 1, 8, 8)
    for _ in range(2):
        x = net(x)
    x.square().sum().backward()


@pytest.mark.parametrize("act", [real_and_fake, anchor_and_other, recurrent])
def test_b4_several_forwards_before_one_backward(pool, act):
    actual = on_gloo(pool, 2, ConvNet, act, ADAM, 3, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, ConvNet, act, ADAM, 3), 1e-11)


class TwoLayers(nn.Module):
    """What it returns is wrapped as asked for."""

    def __init__(self, pack=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.pack = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), pack

    def forward(self, x):
        return self.pack(self.second(torch.tanh(self.first(x))))


def two_graphs(net, t, rank):
    """Two forwards, two backwards; all but the last under no_sync, as in DDP."""
    first, second = net(batch(t, rank, 2, 3)).square().sum(), net(batch(t, rank, 2, 3).cos()).sum()
    with accumulating(net):
        first.backward()
    second.backward()


def one_graph(net, t, rank):
    y = net(batch(t, rank, 2, 3))
    with accumulating(net):
        y.sum().backward(retain_graph=True)
    y.square().sum().backward()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("act", [two_graphs, one_graph])
def test_b5_two_losses_accumulate_until_a_declared_end(pool, act, n):
    actual = on_gloo(pool, n, TwoLayers, act, ADAM, 3, bucket_size_in_mb=TINY)
    assert_equal(actual, replay(n, TwoLayers, act, ADAM, 3))


@dataclass
class Output:
    """As many libraries return it; not known to torch's trees."""

    logits: Tensor


PACKED = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, 1), lambda out: out[0]),
    "dict": (lambda y: {"a": [y]}, lambda out: out["a"][0]),
    "dataclass": (Output, lambda out: out.logits),
}


class OneLayer(nn.Module):
    """Its backward saves no weight, so autograd cannot notice that the weight has changed."""

    def __init__(self, pack):
        super().__init__()
        self.layer, self.pack = nn.Linear(3, 2).double(), pack

    def forward(self, x):
        return self.pack(self.layer(x))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("graphs", ["two graphs", "one graph"])
def test_b5_undeclared_second_backward_is_refused_before_it_moves_anything(n, kind, graphs):
    pack, unpack = PACKED[kind]
    for model in wrap_virtual(n, lambda rank: OneLayer(pack), SGD, bucket_size_in_mb=TINY):
        y = unpack(model(batch(0, 0, 2, 3)))
        z = y if graphs == "one graph" else unpack(model(batch(1, 0, 2, 3)))
        y.sum().backward(retain_graph=True)
        after = stack([model])
        with pytest.raises(TrainingError, match="no_sync"):
            z.square().sum().backward()
        assert torch.equal(stack([model]), after)


@pytest.mark.parametrize("past", [False, True], ids=["through the wrapper", "past the wrapper"])
def test_b5_undeclared_second_backward_through_saved_weights_is_refused_by_autograd(past):
    """Updates count as in-place operations, though they go through ``.data`` of views."""
    (model,) = wrap_virtual(1, lambda rank: TwoLayers(), SGD, bucket_size_in_mb=TINY)
    net = model.module if past else model
    y, z = net(batch(0, 0, 2, 3)), net(batch(1, 0, 2, 3))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


# ---------------------------------------------------------------- two wrapped models in one process


class Pair:
    """A generator and a discriminator, plain or wrapped."""

    def __init__(self, wrap):
        torch.manual_seed(0)
        self.g = wrap(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double())
        self.d = wrap(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())


def freeze(pair, noise):
    pair.d.requires_grad_(False)
    pair.d(pair.g(noise)).mean().backward()
    pair.d.requires_grad_(True)


def choose_inputs(pair, noise):
    pair.d(pair.g(noise)).mean().backward(inputs=list(pair.g.parameters()))


def accumulate_and_drop(pair, noise):
    with accumulating(pair.d):
        pair.d(pair.g(noise)).mean().backward()
    if isinstance(pair.d, DecentralizedDataParallel):
        with pytest.warns(UserWarning, match="discards 1 accumulated"):
            pair.d.zero_grad()
    else:
        pair.d.zero_grad()


@pytest.mark.parametrize("generator_step", [freeze, choose_inputs, accumulate_and_drop])
def test_generator_and_discriminator_take_turns(generator_step):
    """The loss of one model passes through the other, which must not learn from it."""
    wrapped = [Pair(lambda m, r=rank: m) for rank in range(2)]
    for name in ("g", "d"):
        for pair, model in zip(
            wrapped,
            wrap_virtual(2, lambda rank, name=name: getattr(wrapped[rank], name), ADAM, bucket_size_in_mb=TINY),
            strict=True,
        ):
            setattr(pair, name, model)
    plain = [Pair(lambda m: m) for _ in range(2)]
    oracles = {name: Replay([getattr(p, name) for p in plain], ADAM, matrices("ring", 2)) for name in ("g", "d")}
    for t in range(4):
        noise = [batch(t, rank, 3, 2) for rank in range(2)]
        truth = [batch(t, rank, 3, 2).cos() for rank in range(2)]

        def learn_to_tell(pair, rank, noise=noise, truth=truth):
            (pair.d(truth[rank]).mean() - pair.d(pair.g(noise[rank]).detach()).mean()).backward()

        for rank, pair in enumerate(wrapped):
            learn_to_tell(pair, rank)
            generator_step(pair, noise[rank])
            assert (pair.g.t, pair.d.t) == (t + 1, t + 1)
        oracles["d"].step(lambda module, t, rank, learn=learn_to_tell: learn(plain[rank], rank))
        oracles["g"].step(lambda module, t, rank, noise=noise: generator_step(plain[rank], noise[rank]))
    for name in ("g", "d"):
        torch.testing.assert_close(
            stack([getattr(p, name) for p in wrapped]), stack([getattr(p, name) for p in plain]), rtol=0, atol=1e-12
        )


class Joint(nn.Module):
    """Two halves; wrapped as one, or one by one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("options", [{}, {"grad_clip_norm": 1e9}], ids=["each bucket", "whole model"])
def test_two_models_in_one_graph_take_one_step_each(options):
    halves = [Joint() for _ in range(2)]
    first = wrap_virtual(2, lambda rank: halves[rank].a, ADAM, bucket_size_in_mb=TINY, **options)
    second = wrap_virtual(2, lambda rank: halves[rank].b, ADAM, bucket_size_in_mb=TINY, **options)

    def act(net, t, rank):
        if isinstance(net, Joint):
            net(batch(t, rank, 2, 3)).square().sum().backward()

    for t in range(3):
        for rank in range(2):
            second[rank](torch.tanh(first[rank](batch(t, rank, 2, 3)))).square().sum().backward()
            assert first[rank].t == second[rank].t == t + 1
    assert_equal(torch.cat([stack(first), stack(second)], 1).to(torch.complex128), replay(2, Joint, act, ADAM, 3))


# ---------------------------------------------------------------- gradients of gradients


def penalised(net, t, rank):
    """A gradient penalty: the gradient with respect to the input is part of the loss."""
    x = batch(t, rank, 2, 3).requires_grad_()
    y = net(x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (y + g.square().sum()).backward()


def second_order(net, t, rank):
    """The gradient with respect to the parameters is part of the loss (as in meta-learning)."""
    y = net(batch(t, rank, 2, 3)).square().sum()
    gradients = torch.autograd.grad(y, list(inner(net).parameters()), create_graph=True)
    (y + sum(g.square().sum() for g in gradients)).backward()


@pytest.mark.parametrize("act", [penalised, second_order])
def test_double_backward(act):
    actual = on_virtual(2, TwoLayers, act, SGD, 3, bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, TwoLayers, act, SGD, 3), 1e-9)
