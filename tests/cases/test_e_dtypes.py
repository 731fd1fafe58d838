"""Kind E: dtypes, alone and mixed."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from virtual import wrap_virtual

from .replay import TINY, assert_equal, inner, on_gloo, on_virtual, replay

SGD = partial(torch.optim.SGD, lr=0.1)
VIEWS = pytest.mark.parametrize("as_view", [True, False], ids=["view", "copy"])
BUCKETS = pytest.mark.parametrize("bucket", [1000, TINY], ids=["huge bucket", "a bucket each"])


class Mixed(nn.Module):
    """Every dtype on its own way to the loss, so that one does not blur the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3)
        self.wide = nn.Linear(3, 3, dtype=torch.float64)
        self.scalar = nn.Parameter(torch.tensor(1 + 2j))

    def forward(self, x):
        parts = (self.narrow(x.bfloat16()), self.norm(x.float()), self.wide(x.double()), self.scalar * x.sum().float())
        return sum(part.abs().square().sum().double() for part in parts)


def use_all(net, t, rank):
    net(torch.linspace(-1, 1, 6).view(2, 3) * (1 + rank) + 0.1 * t).backward()


@VIEWS
@BUCKETS
def test_e1_mixed_dtypes_in_one_model(pool, bucket, as_view):
    options = {"topology": "ring", "bucket_size_in_mb": bucket, "param_as_bucket_view": as_view}
    actual = on_gloo(pool, 2, Mixed, use_all, SGD, 3, **options)
    expected = replay(2, Mixed, use_all, SGD, 3)
    sizes = {"scalar": 1, "narrow": 12, "norm": 6, "wide": 12}
    tolerances = {"scalar": 1e-5, "narrow": 0.02, "norm": 1e-5, "wide": 1e-13}
    for kind, a, e in zip(
        sizes, actual.split(list(sizes.values()), 1), expected.split(list(sizes.values()), 1), strict=True
    ):
        assert_equal(a, e, tolerances[kind])
    (model,) = wrap_virtual(1, lambda rank: Mixed(), SGD, **options)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32, torch.float64, torch.complex64}
    kinds = [{p.dtype for p in bucket.parameters} for bucket in model._replica.buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert len(kinds) == (4 if bucket == 1000 else 7)


def test_mixed_dtypes_are_clipped_together():
    actual = on_virtual(2, Mixed, use_all, SGD, 3, grad_clip_norm=0.5, bucket_size_in_mb=TINY)
    assert_equal(actual, replay(2, Mixed, use_all, SGD, 3, max_norm=0.5), 0.02)


class Complex(nn.Module):
    """The parameter is made by another function: as it is, or lazily conjugated."""

    def __init__(self, make):
        super().__init__()
        start = torch.tensor([[1 + 2j, 3 - 1j, 0.5j], [2, -1 + 1j, 0.25]])
        self.w = nn.Parameter(make(start))

    def forward(self, x):
        return (self.w * x).abs().square().sum()


COMPLEX = {
    "plain": lambda w: w.clone(),
    "conj": lambda w: w.conj(),
    "conj of transposed": lambda w: w.t().conj(),
    "adjoint": lambda w: w.mH,
    "complex128": lambda w: w.to(torch.complex128),
    "conj of complex128": lambda w: w.to(torch.complex128).conj(),
}


def modulus(net, t, rank):
    net(0.5 + 0.3 * rank + 0.1 * t).backward()


@pytest.mark.parametrize("make", COMPLEX)
@pytest.mark.parametrize("clip", [0.0, 1.5], ids=["unclipped", "clipped"])
@VIEWS
def test_e2_complex_parameters(make, clip, as_view):
    scenario = (partial(Complex, COMPLEX[make]), modulus, SGD, 4)
    actual = on_virtual(2, *scenario, topology="ring", grad_clip_norm=clip, param_as_bucket_view=as_view)
    plain = (partial(Complex, lambda w: COMPLEX[make](w).resolve_conj()), modulus, SGD, 4)
    expected = replay(2, *plain, max_norm=clip)
    assert_equal(actual, expected, 1e-5)
    assert actual.imag.abs().max() > 0.1
    assert clip == 0 or not torch.allclose(expected, replay(2, *plain), atol=0.01)  # clipping did something


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_e2_complex_parameters_between_processes(pool, topology):
    for make in ("plain", "conj of complex128"):
        module = partial(_complex, make)
        actual = on_gloo(pool, 3, module, modulus, SGD, 4, topology=topology)
        assert_equal(actual, replay(3, module, modulus, SGD, 4, topology), 1e-5)


def _complex(make):
    return Complex(COMPLEX[make])


class Conjugates(nn.Module):
    """Lazily conjugated and negated tensors that are not trained."""

    def __init__(self, rank, where):
        super().__init__()
        z = torch.tensor([1 + 2j, 3 - 1j]) * (1 + rank)
        self.w = nn.Parameter(torch.ones(2))
        if where == "frozen":
            self.z = nn.Parameter(z.conj(), requires_grad=False)
        else:
            self.register_buffer("z", z.conj() if where == "buffer" else z.conj().imag)

    def forward(self, x):
        return (self.w * self.z * x).abs().sum()


def conjugates(rank, n, where):
    model = DecentralizedDataParallel(Conjugates(rank, where), SGD, sync_buffer_in_global_avg=True)
    model(1.0).backward()
    start = model.module.z.resolve_conj().resolve_neg().tolist()
    with model.consensus():
        return start, model.module.z.resolve_conj().resolve_neg().tolist()


@pytest.mark.parametrize(
    ("where", "expected"),
    [("frozen", [1 - 2j, 3 + 1j]), ("buffer", [1 - 2j, 3 + 1j]), ("negated buffer", [-2.0, 1.0])],
)
def test_conjugate_and_negated_views_start_from_rank_0(pool, where, expected):
    assert pool.run(conjugates, 2, where) == [(expected, expected)] * 2


class Rounded(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self):
        return self.w.sum() * 0


def far_apart(net, t, rank):
    """Opposite ends of the range: neither the sum nor the difference exists in float16."""
    if t == 0:
        with torch.no_grad():
            inner(net).w.copy_(torch.tensor([40000.0, 60000.0 * (-1) ** rank, 1.0 + rank / 256, 2.0**-14]))
    net().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("n", "topology"), [(2, "ring"), (3, "complete"), (3, "ring"), (4, "exp"), (4, "complete")])
def test_e3_half_precision_neither_overflows_nor_cancels(pool, dtype, n, topology):
    make = partial(Rounded, dtype)
    actual = on_gloo(pool, n, make, far_apart, partial(torch.optim.SGD, lr=0.0), 3, topology=topology)
    assert actual.isfinite().all()
    expected = replay(n, make, far_apart, partial(torch.optim.SGD, lr=0.0), 3, topology)
    tolerance = 2 * torch.finfo(dtype).eps * torch.tensor([40000, 60000, 1, 2**-14], dtype=torch.float64)
    assert ((actual - expected).abs() <= tolerance).all()
    assert (actual[:, 0] == torch.tensor(40000.0, dtype=dtype).item()).all()  # what all agree on stays, bit for bit


class AutocastNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x):
        return self.net(x)


def autocast(dtype, net, t, rank):
    """Twice the same weights in one region, so that its cache of casted weights is in use."""
    x = torch.linspace(-1, 1, 48).view(3, 2, 8) * (1 + rank) + 0.1 * t
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(net(x) + net(-x), torch.arange(3))
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2])
def test_autocast(pool, n, dtype):
    act = partial(autocast, dtype)
    actual = on_gloo(pool, n, AutocastNet, act, SGD, 4, topology="ring", bucket_size_in_mb=TINY)
    expected = replay(n, AutocastNet, act, SGD, 4)
    assert torch.equal(actual, expected) if n == 1 else ((actual - expected).abs() < 1e-3).all()
    (model,) = wrap_virtual(1, lambda rank: AutocastNet(), SGD)
    with torch.autocast("cpu", dtype=dtype):  # around the whole step, as some loops have it
        for t in range(2):
            act(model, t, 0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
