"""The page ``docs/what-works.md`` says what is: every row names its proof, every message is what is raised."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ids
from decent_dp import DecentralizedDataParallel, MismatchError
from decent_dp.checkpoint import load, save
from decent_dp.comm import InProcessWorld
from decent_dp.engine.bucketing import plan_buckets, plan_offsets
from decent_dp.utils import initialize_dist
from virtual import stack, wrap_virtual

PAGE = ids.ROOT / "docs" / "what-works.md"
RESULTS = ("works", "refused", "not on this backend", "not yet")
SGD = partial(torch.optim.SGD, lr=0.1)
TINY = 16 / 2**20


class Row(NamedTuple):
    """One row of a table of the page."""

    capability: str
    result: str
    text: str
    proof: str

    @property
    def proofs(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.proof)

    @property
    def messages(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.text)


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and not line.startswith(("| Capability", "|---")):
            yield Row(*(cell.strip() for cell in line.strip("|").split("|")))


ROWS = list(rows())


# ---------------------------------------------------------------- checks: what works


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def wrap(model: nn.Module, optim_fn: object = SGD, *args: object, n: int = 1, **options: object) -> nn.Module:
    communicator = InProcessWorld(n).communicator(0)
    return DecentralizedDataParallel(model, optim_fn, *args, communicator=communicator, **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def assert_equal_to_plain(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    max_norm: float = 0.0,
    scaler: torch.amp.GradScaler | None = None,
) -> nn.Module:
    """Three steps of one worker with tiny buckets are those of the plain optimizer."""
    model, plain = wrap(make(), SGD, None, "ring", scaler, max_norm, bucket_size_in_mb=TINY), make()
    local = SGD(plain.parameters())
    for t in range(3):
        loss = loss_of(model, t)
        (loss if scaler is None else scaler.scale(loss)).backward()
        loss_of(plain, t).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        local.step()
        local.zero_grad()
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6, msg=name)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
    return model


def check_autocast_bfloat16() -> None:
    def loss_of(model: nn.Module, t: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.full((2, 4), 1.0 + t)).float().square().mean()

    assert_equal_to_plain(net, loss_of)


def check_autocast_float16() -> None:
    def loss_of(model: nn.Module, t: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(torch.full((2, 4), 1.0 + t)).float().square().mean()

    assert_equal_to_plain(net, loss_of, scaler=torch.amp.GradScaler("cpu", init_scale=64))


class SeveralKinds(nn.Module):
    """Parameters of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float32)
        self.parts = nn.ParameterList([torch.full((3,), 1.0 + i, dtype=dtype) for i, dtype in enumerate(dtypes)])

    def forward(self, factor: float) -> Tensor:
        return sum((factor * part).abs().square().sum().double() for part in self.parts)


def check_several_dtypes() -> None:
    model = assert_equal_to_plain(SeveralKinds, lambda model, t: model(0.1 * (1 + t)))
    assert len(model.optimizers) == 5
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32, torch.float64, torch.complex64}


def check_complex() -> None:
    def make() -> nn.Module:
        return nn.ParameterList(
            [torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([2 - 1j, 0.5 + 1j]).conj().resolve_conj()]
        )

    for max_norm in (0.0, 0.5):
        assert_equal_to_plain(make, lambda model, t: sum((p.abs() ** 2).sum() for p in model.parameters()), max_norm)
    models = wrap_virtual(2, lambda rank: make(), partial(torch.optim.SGD, lr=0.0))
    with torch.no_grad():
        for rank, model in enumerate(models):
            for p in model.parameters():
                p.add_(rank * (1 + 1j))
    start = stack(models)
    for _ in range(2):
        for model in models:
            sum(p.abs().sum() for p in model.parameters()).backward()
    torch.testing.assert_close(stack(models), start.mean(0).expand(2, -1))


def check_scalar_and_empty() -> None:
    def make() -> nn.Module:
        return nn.ParameterList([torch.tensor(2.0), torch.empty(0, 3), torch.ones(2)])

    assert_equal_to_plain(make, lambda model, t: sum(p.square().sum() for p in model.parameters()))


def check_channels_last() -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
            deep = nn.Sequential(nn.Conv3d(2, 4, 2)).to(memory_format=torch.channels_last_3d)
        return nn.ModuleDict({"flat": flat, "deep": deep})

    def loss_of(model: nn.Module, t: int) -> Tensor:
        inner = getattr(model, "module", model)
        image = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last) * (1 + t)
        volume = torch.ones(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d)
        return inner["flat"](image).square().mean() + inner["deep"](volume).square().mean()

    assert_equal_to_plain(make, loss_of)


def check_parametrizations() -> None:
    def make() -> nn.Module:
        model = net()
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Softplus())
        return model

    model = assert_equal_to_plain(make, lambda model, t: model(torch.full((2, 4), 0.1 + t)).square().mean())
    assert "0.parametrizations.weight.original0" in model.state_dict()


def check_many_elements() -> None:
    many = 2**31 + 7
    offsets, total = plan_offsets([many, many, 5], 16)
    assert offsets == (0, 2**31 + 16, 2**32 + 32)
    assert total == 2**32 + 48
    assert plan_buckets([4 * many, 4 * many, 20], ["f32"] * 3, 25 * 2**20) == ((2,), (1,), (0,))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


ROWS_OF_DATA = torch.tensor([[0.0, 1.0], [2.0, 5.0]])


def check_buffers_are_local() -> None:
    models = wrap_virtual(2, lambda rank: Normed(), SGD)
    for rank, model in enumerate(models):
        model(ROWS_OF_DATA + 10 * rank).square().sum().backward()
    first, second = (model.module.norm.running_mean for model in models)
    torch.testing.assert_close(second - first, torch.ones(2))
    (model,) = wrap_virtual(1, lambda rank: Normed(), SGD)
    with model.consensus():
        model.module.norm.running_mean.fill_(3.0)
    assert model.module.norm.running_mean.tolist() == [3.0, 3.0]  # nothing restores what is not averaged


def check_update_bn() -> None:
    (model,) = wrap_virtual(1, lambda rank: Normed(), SGD, sync_buffer_in_global_avg=True)
    model(ROWS_OF_DATA + 10).square().sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with model.consensus():
        torch.optim.swa_utils.update_bn([ROWS_OF_DATA, ROWS_OF_DATA], model)
        torch.testing.assert_close(model.module.norm.running_mean, ROWS_OF_DATA.mean(0))
        torch.testing.assert_close(model.module.norm.running_var, ROWS_OF_DATA.var(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.t == 1


# ---------------------------------------------------------------- checks: messages


def message_of(attempt: Callable[[], object]) -> str:
    """The message of the error that it raises."""
    try:
        attempt()
    except Exception as error:
        return str(error)
    pytest.fail("nothing was raised")


def after_one_step(change: Callable[[nn.Module], object], frozen: bool = False) -> str:
    inner = net()
    inner[2].bias.requires_grad_(not frozen)
    model = wrap(inner)
    step(model)
    change(model)
    return message_of(lambda: step(model))


def check_shared_memory() -> str:
    model = net()
    model[2] = nn.Linear(4, 4)
    model[2].weight.data = model[0].weight.data
    return message_of(lambda: wrap(model))


def check_nothing_to_train() -> str:
    return message_of(lambda: wrap(net().requires_grad_(False)))


def check_thawed() -> str:
    return after_one_step(lambda model: model.module[2].bias.requires_grad_(True), frozen=True)


def check_replaced() -> str:
    return after_one_step(lambda model: setattr(model.module[0], "weight", nn.Parameter(torch.zeros(4, 4))))


def check_assign() -> str:
    return message_of(lambda: wrap(net()).load_state_dict(net().state_dict(), assign=True))


def check_converted() -> str:
    return after_one_step(lambda model: model.module.half())


def check_moved() -> str:
    return after_one_step(lambda model: setattr(model.module[0].weight, "data", torch.zeros(4, 4)))


def check_lazy() -> str:
    return message_of(lambda: wrap(nn.LazyLinear(2)))


def check_sparse() -> str:
    model = wrap(nn.Embedding(5, 3, sparse=True), partial(torch.optim.Adam, lr=0.1))
    return message_of(lambda: model(torch.tensor([1])).sum().backward())


def check_devices() -> str:
    model = net()
    model[2].weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    return message_of(lambda: wrap(model))


def second_backward(inner: nn.Module) -> str:
    model = wrap(inner)
    first, second = (model(torch.ones(2, 4)).sum() for _ in range(2))
    first.backward()
    before = stack([model])
    message = message_of(second.backward)
    assert torch.equal(stack([model]), before)
    return message


def check_two_backwards() -> str:
    return second_backward(net())


def check_two_backwards_of_one_layer() -> str:
    return second_backward(nn.Linear(4, 2))


def check_reentrant_past_the_wrapper() -> str:
    model = wrap(net())
    x = torch.ones(2, 4, requires_grad=True)
    return message_of(lambda: checkpoint(model.module, x, use_reentrant=True).sum().backward())


class FailsInTheMiddle(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        if self.param_groups[0]["params"][0].shape == (4, 4):
            raise ValueError("no")
        super().step()


def check_half_stepped() -> str:
    model = wrap(net(), partial(FailsInTheMiddle, lr=0.1), bucket_size_in_mb=TINY)
    assert message_of(lambda: step(model)) == "no"
    return message_of(lambda: step(model))


def check_closure() -> str:
    return message_of(lambda: wrap(net(), torch.optim.LBFGS))


def check_own_optimizer() -> str:
    model = wrap(net())
    local = torch.optim.Adam(model.parameters())
    step(model)
    return message_of(local.step)


def check_sync_batch_norm() -> str:
    with mock.patch("torch.distributed.is_initialized", return_value=True):
        return message_of(lambda: nn.SyncBatchNorm(2)(torch.ones(3, 2)))


def check_consensus_alone() -> str:
    models = wrap_virtual(2, lambda rank: net(), SGD)
    return message_of(lambda: models[0].global_avg())


def check_training_while_averaged() -> str:
    model = wrap(net())
    with model.consensus():
        return message_of(lambda: step(model))


def check_plateau() -> str:
    return message_of(lambda: wrap(net(), SGD, torch.optim.lr_scheduler.ReduceLROnPlateau))


def check_layout() -> str:
    return message_of(lambda: wrap(net(), n=6, topology="alternating-exp-ring", workers_per_node=2))


def check_no_process_group() -> str:
    return message_of(lambda: DecentralizedDataParallel(net(), SGD))


def check_resumed_in_another_world() -> str:
    with tempfile.TemporaryDirectory() as folder:
        save(wrap_virtual(1, lambda rank: net(), SGD)[0], folder)
        return message_of(lambda: load(wrap_virtual(2, lambda rank: net(), SGD)[0], folder))


def check_damaged_checkpoint() -> str:
    (model,) = wrap_virtual(1, lambda rank: net(), SGD)
    with tempfile.TemporaryDirectory() as folder:
        (save(model, folder) / "__0_0.distcp").write_bytes(b"something else")
        return message_of(lambda: load(model, folder))


def check_unwritable_directory() -> str:
    (model,) = wrap_virtual(1, lambda rank: net(), SGD)
    with tempfile.NamedTemporaryFile() as file:
        return message_of(lambda: save(model, file.name))


def check_saving_while_averaged() -> str:
    (model,) = wrap_virtual(1, lambda rank: net(), SGD)
    with tempfile.TemporaryDirectory() as folder, model.consensus():
        return message_of(lambda: save(model, folder))


def check_copy() -> str:
    return message_of(lambda: copy.deepcopy(wrap(net())))


def check_disagreement() -> str:
    def differ() -> None:
        wrap_virtual(2, lambda rank: nn.Linear(2, 2 + rank), SGD)

    with pytest.raises(MismatchError):
        differ()
    return message_of(differ)


def check_not_finite() -> str:
    models = wrap_virtual(2, lambda rank: net(), SGD, check_finite=True)
    return message_of(lambda: (models[0](torch.ones(2, 4)) * float("nan")).sum().backward())


def check_launch_variables() -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "abc", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        return message_of(initialize_dist)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


# ---------------------------------------------------------------- the page


def says(text: str, message: str) -> bool:
    """Whether a message holds a text, in which an ellipsis stands for anything."""
    return re.search(".*".join(map(re.escape, text.split("…"))), message, re.DOTALL) is not None


@pytest.mark.parametrize("row", ROWS, ids=[row.capability for row in ROWS])
def test_row_is_true(row: Row) -> None:
    assert row.result in RESULTS
    assert row.proofs, "a row without proof"
    for proof in row.proofs:
        if "::" in proof:
            assert ids.exists(proof), f"there is no {proof}"
            continue
        if proof.startswith("tests/"):
            assert ids.names_of_tests(proof)
            continue
        message = CHECKS[proof]()
        if message is None:
            assert row.result in ("works", "not yet")
        else:
            assert row.result in ("refused", "not on this backend")
            assert any(says(text, message) for text in row.messages), f"raised was: {message}"
    if row.result == "refused" and not any(proof.startswith("check_") for proof in row.proofs):
        # Raised between processes: the tests named look at the words.
        assert row.messages == ["the exchange of bucket … with … failed"]


def test_every_check_stands_in_a_row() -> None:
    assert set(CHECKS) == {proof for row in ROWS for proof in row.proofs if proof.startswith("check_")}


def test_rows_differ() -> None:
    assert len({row.capability for row in ROWS}) == len(ROWS)
