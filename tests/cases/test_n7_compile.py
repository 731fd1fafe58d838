"""N7: torch.compile inside, outside, in place and around the step; equal to the run without it."""

import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from virtual import stack, wrap_virtual

ADAM = partial(torch.optim.Adam, lr=0.1)
TINY = 16 / 2**20
STEPS = 3


class Network(nn.Module):
    """With a checkpointed part if wanted."""

    def __init__(self, checkpointed=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def part(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        hidden = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return self.second(hidden)


def batch(t, rank):
    return torch.full((2, 3), 0.5 + t + rank)


def loss_of(model, x):
    return model(x).square().sum()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[SimpleNamespace]:
    """Nothing compiled before or after, and the counters of what is compiled in between."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import
        import torch._dynamo
        from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    yield SimpleNamespace(
        num_graphs=lambda: counters["stats"]["unique_graphs"],
        num_recompiles=lambda: sum(counters["recompiles"].values()),
    )
    torch._dynamo.reset()
    counters.clear()


def plainly(backend, models):
    return models, None


def outside(backend, models):
    return [torch.compile(model, backend=backend) for model in models], None


def in_place(backend, models):
    for model in models:
        model.module.compile(backend=backend)
    return models, None


def loss_compiled(backend, models):
    return models, torch.compile(loss_of, backend=backend)


def run(backend, compile_them, make=Network, steps=STEPS, **options):
    models = wrap_virtual(2, lambda rank: make(), ADAM, topology="ring", bucket_size_in_mb=TINY, **options)
    called, loss = compile_them(backend, models)
    for t in range(steps):
        for rank, model in enumerate(called):
            (loss or loss_of)(model, batch(t, rank)).backward()
    assert [model.t for model in models] == [steps] * 2
    return stack(models)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["inside", "outside", "in_place", "loss_compiled"])
@pytest.mark.parametrize("options", [{}, {"grad_clip_norm": 0.5}, {"param_as_bucket_view": False}], ids=str)
def test_n7_compiled_equals_uncompiled_and_is_compiled_once(compiler, backend, way, options):
    expected = run(backend, plainly, **options)
    assert compiler.num_graphs() == 0
    if way == "inside":
        actual = run(backend, plainly, lambda: torch.compile(Network(), backend=backend), **options)
    else:
        actual = run(backend, globals()[way], **options)
    assert torch.equal(actual, expected)
    assert 1 <= compiler.num_graphs() <= 2
    assert compiler.num_recompiles() == 0


@pytest.mark.parametrize("way", ["inside", "outside"])
def test_n7_a_checkpointed_module_compiles_too(compiler, way):
    make = partial(Network, True)
    expected = run("aot_eager", plainly, make)
    if way == "inside":
        actual = run("aot_eager", plainly, lambda: torch.compile(make(), backend="aot_eager"))
    else:
        actual = run("aot_eager", outside, make)
    torch.testing.assert_close(actual, expected)
    assert compiler.num_recompiles() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_n7_a_compiled_train_step_equals_the_uncompiled_one(compiler, backend):
    """backward() breaks the graph, and what the library does inside of it is not compiled."""
    expected = run(backend, plainly)
    models = wrap_virtual(2, lambda rank: Network(), ADAM, topology="ring", bucket_size_in_mb=TINY)

    @torch.compile(backend=backend)
    def train_step(model, x):
        model(x).square().sum().backward()

    for t in range(STEPS):
        for rank, model in enumerate(models):
            train_step(model, batch(t, rank))
    assert [model.t for model in models] == [STEPS] * 2
    assert torch.equal(stack(models), expected)
    assert compiler.num_graphs() <= 4
    assert compiler.num_recompiles() == 0


def test_n7_accumulation_evaluation_and_averages_next_to_compiled_steps(compiler):
    def go(compile_them):
        models = wrap_virtual(2, lambda rank: Network(), ADAM, topology="ring", bucket_size_in_mb=TINY)
        called, _ = compile_them("aot_eager", models)
        outputs = []
        for t in range(STEPS):
            for rank, (model, net) in enumerate(zip(models, called, strict=True)):
                with model.no_sync():
                    loss_of(net, batch(10 * t, rank)).backward()
                loss_of(net, batch(t, rank)).backward()
                with torch.no_grad():
                    outputs.append(net.eval()(torch.ones(1, 3)))
                net.train()
        return torch.cat(outputs)

    assert torch.equal(go(outside), go(plainly))
    assert compiler.num_recompiles() <= 2  # one for grad mode, one for eval mode


@pytest.mark.parametrize("way", ["inside", "outside"])
def test_n7_a_loss_from_before_an_update_is_refused(compiler, way):
    """By the library or, where a compiled wrapper has no hook on its output, by autograd."""
    make = Network if way == "outside" else lambda: torch.compile(Network(), backend="aot_eager")
    (model,) = wrap_virtual(1, lambda rank: make(), ADAM)
    net = model if way == "inside" else torch.compile(model, backend="aot_eager")
    first, second = loss_of(net, batch(0, 0)), loss_of(net, batch(1, 0))
    first.backward()
    before = stack([model])
    with pytest.raises(RuntimeError, match=r"computed before the update of step 0|modified by an inplace operation"):
        second.backward()
    assert torch.equal(stack([model]), before)


# ---------------------------------------------------------------- N1, compiled


def test_n1_keys_when_compiled_inside_outside_and_in_place(compiler):
    """`torch.compile(module)` renames, `module.compile()` does not; the wrapper adds nothing to either."""
    plain = Network()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    names = list(plain.state_dict())
    prefixed = [f"_orig_mod.{name}" for name in names]
    (inside,) = wrap_virtual(1, lambda rank: torch.compile(Network(), backend="eager"), ADAM)
    (model,) = wrap_virtual(1, lambda rank: Network(), ADAM)
    (placed,) = wrap_virtual(1, lambda rank: Network(), ADAM)
    outside = torch.compile(model, backend="eager")
    placed.module.compile(backend="eager")
    assert list(inside.state_dict()) == prefixed
    assert [name for name, _ in inside.named_parameters()] == prefixed
    assert list(outside.state_dict()) == prefixed
    assert list(model.state_dict()) == list(placed.state_dict()) == names
    for target, renamed in ((inside, True), (outside, True), (model, False), (placed, False)):
        state = {(f"_orig_mod.{name}" if renamed else name): value for name, value in plain.state_dict().items()}
        result = target.load_state_dict(state)
        assert result.missing_keys == result.unexpected_keys == []
        loaded = target.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        with pytest.raises(RuntimeError, match="Missing key"):
            target.load_state_dict({"nonsense." + name: value for name, value in state.items()})
