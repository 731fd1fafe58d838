"""Ways in which a wrapped model could go on wrongly without a word; each was seen once."""

import dataclasses
import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from broken import Fragile
from decent_dp import (
    ConfigurationError,
    DecentralizedDataParallel,
    ExchangeError,
    ModelChangedError,
    TopologyError,
    TrainingError,
    UnusableError,
    from_edges,
    from_matrices,
)
from decent_dp.comm import InProcessWorld
from decent_dp.topology import catalog
from virtual import stack, wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1)
X = torch.ones(1, 3)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def one(model, optim_fn=SGD, *args, **options):
    return DecentralizedDataParallel(model, optim_fn, *args, communicator=InProcessWorld(1).communicator(0), **options)


def uneven_end(rank, n, topology):
    """The last worker to finish starts exchanges that nobody needs."""
    model = DecentralizedDataParallel(net(), SGD, topology=topology, bucket_size_in_mb=1e-5)
    for t in range(6):
        if rank == 1 and t == 5:
            time.sleep(1)
        model(X * (1 + rank)).square().sum().backward()
    t = model.t
    del model
    return t


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_a_normal_end_does_not_fail_the_slower_worker(pool, topology):
    assert pool.run(uneven_end, 3, topology) == [6, 6, 6]


def other_steps(rank, n, call):
    """One worker has taken a step less; it idles in the round that would show it."""
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    for _ in range(6 - (rank == 1)):
        model(X).sum().backward()
    try:
        model.global_avg(False) if call == "global_avg" else model.consensus_distance()
    except (ExchangeError, TrainingError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["global_avg", "consensus_distance"])
def test_averages_of_replicas_at_different_steps_are_refused(pool, call):
    for rank, text in enumerate(pool.run(other_steps, 3, call, group_timeout_s=4)):
        assert text is not None
        assert text.startswith(f"rank {rank}, step ")


def other_calls(rank, n):
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    model(X).sum().backward()
    with pytest.raises(ExchangeError, match=r"rank 0 has consensus_distance\(\) at step 1, rank 1 has global_avg"):
        model.consensus_distance() if rank == 0 else model.global_avg(False)


def test_different_calls_do_not_meet(pool):
    pool.run(other_calls, 2)


def after_timeout(rank, n):
    model = DecentralizedDataParallel(net(), SGD, topology="complete")
    model(X).sum().backward()
    if rank == 0:
        with pytest.raises(ExchangeError):
            model.global_avg()
        with pytest.raises(UnusableError, match="restart from a checkpoint"):
            model(X)
    else:
        time.sleep(6)


def test_after_a_failed_average_the_model_is_unusable(pool):
    pool.run(after_timeout, 2, group_timeout_s=2)


def expanded(rank, n):
    model = net()
    model.register_buffer("b", torch.full((1,), float(rank)).expand(4))
    model.register_parameter("frozen", nn.Parameter(torch.full((1,), float(rank)).expand(2, 3), requires_grad=False))
    DecentralizedDataParallel(model, SGD)
    return model.b.tolist(), model.frozen.tolist()


def test_expanded_buffers_and_frozen_parameters_are_copied(pool):
    assert pool.run(expanded, 2) == [([0.0] * 4, [[0.0] * 3] * 2)] * 2


def replace_layer(model):
    model[1] = nn.Linear(3, 1)


def add_parameter(model):
    model.extra = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(("change", "name"), [(replace_layer, "1.weight"), (add_parameter, "extra")])
def test_replaced_layers_and_late_parameters_are_noticed(change, name):
    model = one(net())
    change(model.module)
    with pytest.raises(ModelChangedError, match=rf"'{name}'.*refresh\(\)"):
        model(X)
    model.refresh()
    before = stack([model])
    model(X).sum().backward()
    assert not torch.equal(before, stack([model]))


def test_a_module_without_parameters_may_be_added():
    model = one(net())
    model.module.append(nn.Tanh())
    model(X).sum().backward()


@pytest.mark.parametrize(
    ("optim_fn", "message"),
    [
        (lambda named, m: torch.optim.SGD(m.parameters(), lr=0.1), "holds parameters that it was not given"),
        (lambda named, m: torch.optim.SGD([p for n, p in named if "weight" in n], lr=0.1), "leaves out '1.bias'"),
    ],
)
def test_an_optimizer_must_hold_its_bucket(optim_fn, message):
    module = net()
    with pytest.raises(ConfigurationError, match=message):
        one(module, lambda named: optim_fn(named, module), bucket_size_in_mb=20 / 2**20)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda optimizer: None, "returned None"),
        (lambda optimizer: 3, "returned int"),
        (
            lambda optimizer: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1), 1),
            "of another optimizer",
        ),
    ],
)
def test_a_schedule_must_belong_to_its_optimizer(schedule, message):
    with pytest.raises(ConfigurationError, match=message):
        one(net(), SGD, schedule)


def test_a_refused_backward_leaves_no_gradient_behind():
    model, clean = one(net()), one(net())
    model.global_avg()
    with pytest.raises(TrainingError, match="replaced by their average"):
        model(X).sum().backward()
    model.revert_global_avg()
    stale = model(X).sum()
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"computed before|modified by an inplace operation"):
        stale.backward()
    model(X).sum().backward()
    for _ in range(2):
        clean(X).sum().backward()
    assert torch.equal(stack([model]), stack([clean]))


def test_a_backward_that_raised_before_its_first_update_leaves_no_gradient_behind():
    model, clean = one(Fragile()), one(Fragile())
    model.module.position = "middle"
    with pytest.raises(ValueError, match="boom"):
        model(X).sum().backward()
    model.module.position = None
    for each in (model, clean):
        each(X).sum().backward()
    assert torch.equal(stack([model]), stack([clean]))


def test_an_error_in_a_scheduler_leaves_the_model_unusable():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)

    model = one(net(), SGD, schedule, bucket_size_in_mb=20 / 2**20)
    model(X).sum().backward()
    model(X).sum().backward()
    last = model(X).sum()
    with pytest.raises(ValueError, match="step"):
        last.backward()
    with pytest.raises(UnusableError):
        model(X)


def test_a_failed_refresh_leaves_the_model_unusable():
    model = one(net())
    model.module.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no parameter"):
        model.refresh()
    with pytest.raises(UnusableError):
        model(X)


@pytest.mark.parametrize("nested", [False, True])
def test_loading_that_fails_keeps_what_is_in_flight(nested):
    runs = [wrap_virtual(3, lambda rank: net(), SGD, topology="complete") for _ in range(2)]
    for models in runs:
        for rank, model in enumerate(models):
            model(X * (1 + rank)).sum().backward()
    with pytest.raises(RuntimeError, match="Missing key"):
        (nn.ModuleDict({"g": runs[0][1]}) if nested else runs[0][1]).load_state_dict({})
    for models in runs:
        for rank, model in enumerate(models):
            model(X * (1 + rank)).sum().backward()
    assert torch.equal(stack(runs[0]), stack(runs[1]))


def test_loading_inside_of_consensus_is_refused():
    model = one(net())
    with model.consensus(), pytest.raises(TrainingError, match="leave consensus"):
        model.load_state_dict(net().state_dict())


def even_join(rank, n, topology):
    model = DecentralizedDataParallel(
        net(), SGD, partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12), topology
    )
    for _ in range(3):
        with model.join():
            for _ in range(4):
                model(X * (1 + rank)).square().sum().backward()
                time.sleep(0.003 * rank)
    return model.t


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_joining_even_work_adds_nothing(pool, topology):
    assert pool.run(even_join, 4, topology) == [12] * 4


@pytest.mark.parametrize("kind", ["frozen", "buffer"])
def test_memory_shared_with_what_is_not_trained_is_refused(kind):
    module = net()
    if kind == "frozen":
        module.other = nn.Parameter(module[0].weight.data, requires_grad=False)
    else:
        module.register_buffer("other", module[0].weight.data)
    with pytest.raises(ConfigurationError, match=r"share memory"):
        one(module)
    one(module, param_as_bucket_view=False)


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Wrapped(nn.Module):
    def __init__(self, kind, reentrant=False):
        super().__init__()
        self.layer, self.kind, self.reentrant = nn.Linear(3, 3), kind, reentrant

    def forward(self, x):
        y = checkpoint(self.layer, x, use_reentrant=True) if self.reentrant else self.layer(x)
        loss = y.square().sum()
        return Output(loss) if self.kind == "dataclass" else {"loss": [loss]}


@pytest.mark.parametrize("kind", ["dataclass", "dict"])
def test_outputs_of_any_kind_are_watched(kind):
    model = one(Wrapped(kind))

    def loss(x=X):
        output = model(x)
        return output.loss if kind == "dataclass" else output["loss"][0]

    stale = loss()
    loss().backward()
    with pytest.raises(TrainingError, match="computed before"):
        stale.backward()
    model = one(Wrapped(kind, reentrant=True))
    loss(X.clone().requires_grad_()).backward()
    assert model.t == 1


def test_wrapping_twice_is_refused_by_name():
    module = net()
    first = one(module)
    for again in (module, first):
        with pytest.raises(ConfigurationError, match=r"'(module\.)?0.weight' is trained by another"):
            one(again)
    first(X).sum().backward()
    del first, again
    gc.collect()  # the errors above hold on to their frames
    one(module)(X).sum().backward()


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: one(None), ConfigurationError),
        (lambda: one([net()]), ConfigurationError),
        (lambda: one(net(), grad_clip_norm=None), ConfigurationError),
        (lambda: one(net(), bucket_size_in_mb=None), ConfigurationError),
        (lambda: one(net(), scaler=True), ConfigurationError),
        (lambda: one(net()).set_adaptive_factor("a"), ConfigurationError),
        (lambda: one(net().half(), scaler=torch.amp.GradScaler("cpu")), ConfigurationError),
        (lambda: from_edges([[(0, 1, 0.5)]], 2), TopologyError),
        (lambda: from_matrices(None), TopologyError),
        (lambda: from_matrices([[[1j, 0], [0, 1]]]), TopologyError),
        (lambda: catalog.build("ring", 4), TopologyError),
        (lambda: catalog.register("zz", 3), TopologyError),
    ],
)
def test_arguments_of_the_wrong_kind(build, error):
    with pytest.raises(error):
        build()


def test_missing_keys_inside_of_another_module_have_the_names_of_the_user():
    outer = nn.ModuleDict({"g": one(net())})
    state = outer.state_dict()
    del state["g.1.bias"]
    assert outer.load_state_dict(state, strict=False).missing_keys == ["g.1.bias"]


def wrong_timeout(rank, n):
    with pytest.raises(ConfigurationError, match="timedelta"):
        DecentralizedDataParallel(net(), SGD, timeout=5)
    dist.barrier()


def test_a_timeout_is_a_duration(pool):
    pool.run(wrong_timeout, 1)
