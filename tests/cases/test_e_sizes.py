"""Kind E: very large, 0-dimensional, empty and sparse."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel, TrainingError
from decent_dp.engine.bucketing import plan_buckets, plan_offsets
from decent_dp.engine.storage import FlatStorage
from decent_dp.optim import optim_fn_adamw
from virtual import stack, wrap_virtual

from .replay import TINY, Replay, accumulating, assert_equal, matrices, on_gloo, on_virtual, replay, values

SGD = partial(torch.optim.SGD, lr=0.1)
VIEWS = pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])
BUCKETS = pytest.mark.parametrize("bucket", [1000, TINY], ids=["huge bucket", "a bucket each"])


# ---------------------------------------------------------------- sizes

BIG = 2**31 + 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_e8_more_than_2_31_elements(dtype):
    """On meta tensors: offsets, split and the views into the flat tensor."""
    parameters = [nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")) for numel in (BIG, 5, BIG, 3)]
    sizes = [p.numel() * p.element_size() for p in parameters]
    assert plan_buckets(sizes, [0] * 4, 25 * 2**20) == ((3,), (2,), (1,), (0,))
    assert plan_buckets(sizes, [0] * 4, 2**60) == ((3, 2, 1, 0),)
    offsets, total = plan_offsets([p.numel() for p in parameters], 64 // dtype.itemsize)
    assert all(b - a >= p.numel() for a, b, p in zip(offsets, [*offsets[1:], total], parameters, strict=True))
    storage = FlatStorage(parameters, as_view=True)
    factor = 2 if dtype.is_complex else 1
    assert storage.flat.numel() == factor * total
    assert [p.storage_offset() for p in parameters] == list(offsets)
    views = storage.views(torch.empty_like(storage.flat, dtype=torch.float32))
    assert [view.storage_offset() for view in views] == list(offsets)
    assert [view.numel() for view in views] == [BIG, 5, BIG, 3]
    assert offsets[3] > 2 * BIG > 2**32


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(300 * 2**20 // 4))
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (self.w.view(-1, 2**18)[:, 0] * x).sum() + self.b.sum()


def large(rank, n, topology):
    model = DecentralizedDataParallel(Large(), partial(torch.optim.SGD, lr=1.0), topology=topology)
    model(1.0 + rank).backward()
    model(0.0).backward()
    w = model.module.w.detach().view(-1, 2**18)
    return w[:, 0].unique().tolist(), w.count_nonzero().item(), model.module.b.tolist()


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_e8_a_bucket_of_300_mb(pool, topology):
    """One step down by 1 and 2, then the mean of -1 and -2, and a step of b alone."""
    assert pool.run(large, 2, topology, timeout_s=60) == [([-1.5], 300, [-2.0] * 3)] * 2


class Small(nn.Module):
    """0-dim and empty parameters, some alone in their dtype."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.alone = nn.Parameter(torch.empty(3, 0))
        self.none = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return (self.scalar * x).square() + sum(p.sum() for p in (self.empty, self.alone, self.none))


def small(net, t, rank):
    net(1.0 + rank + t).backward()


@VIEWS
@BUCKETS
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_0_dim_and_empty_parameters(pool, topology, bucket, as_view):
    options = {"topology": topology, "bucket_size_in_mb": bucket, "param_as_bucket_view": as_view}
    actual = on_gloo(pool, 2, Small, small, partial(torch.optim.Adam, lr=0.1), 3, **options)
    assert_equal(actual, replay(2, Small, small, partial(torch.optim.Adam, lr=0.1), 3))
    assert actual.shape == (2, 1)


# ---------------------------------------------------------------- sparse gradients


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        self.out = nn.Linear(3, 2).double()

    def forward(self, tokens):
        return self.out(torch.tanh(self.emb(tokens)))


def read(net, t, rank):
    net(torch.tensor([1, 3, 3, rank]) + t % 2).square().sum().backward()


def read_in_windows(net, t, rank):
    with accumulating(net):
        net(torch.tensor([rank, 2])).sum().backward()
    read(net, t, rank)


@pytest.mark.parametrize("act", [read, read_in_windows])
def test_sparse_gradients(pool, act):
    actual = on_gloo(pool, 2, Words, act, SGD, 4, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, Words, act, SGD, 4))


def sparse_where_sparse(named):
    named = list(named)
    if any(name.startswith("emb") for name, _ in named):
        return torch.optim.SparseAdam(named, lr=0.1)
    return torch.optim.Adam(named, lr=0.1)


class Both:
    """Two optimizers as one, for the replay."""

    def __init__(self, named):
        self.parts = [sparse_where_sparse([pair]) for pair in named]

    def step(self):
        for part in self.parts:
            part.step()


def test_a_sparse_optimizer_for_some_buckets():
    actual = on_virtual(2, Words, read, sparse_where_sparse, 4, topology="ring", bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, Words, read, Both, 4))


@pytest.mark.parametrize(
    ("optim_fn", "options", "by"),
    [
        (partial(torch.optim.AdamW, lr=0.1), {}, "AdamW"),
        (partial(optim_fn_adamw, lr=0.1), {}, "AdamW"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), {}, "SGD"),
        (SGD, {"grad_clip_norm": 1.0}, "clipping"),
    ],
)
def test_sparse_gradients_are_refused_by_name(optim_fn, options, by):
    (model,) = wrap_virtual(1, lambda rank: Words(), optim_fn, bucket_size_in_mb=TINY, **options)
    before = stack([model])
    with pytest.raises(TrainingError, match=rf"'emb.weight' has a sparse gradient, which {by} does not take"):
        read(model, 0, 0)
    if options:
        assert torch.equal(stack([model]), before)


def test_sparse_gradients_under_a_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    (model,) = wrap_virtual(1, lambda rank: Words(), SGD, scaler=scaler, bucket_size_in_mb=TINY)
    oracle = Replay([Words()], SGD, matrices("complete", 1))
    for t in range(3):
        scaler.scale(model(torch.tensor([1, 3, 3]) + t % 2).square().sum()).backward()
        oracle.step(read_once)
    assert_equal(values(model), oracle.values()[0])


def read_once(net, t, rank):
    net(torch.tensor([1, 3, 3]) + t % 2).square().sum().backward()
