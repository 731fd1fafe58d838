"""What may be saved comes back as it was, or is refused when it is saved."""

import enum
import mmap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cases.workers import flat, loss_of, network
from decent_dp import CheckpointError
from decent_dp.checkpoint import async_save, consensus_state, load, save
from decent_dp.checkpoint.tree import pack, unpack
from virtual import wrap_virtual


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    RED = "red"


def one(lr=0.1):
    (model,) = wrap_virtual(1, lambda rank: network(), partial(torch.optim.SGD, lr=lr))
    return model


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
        (np.bool_(True), True),
        (Number.ONE, 1),
        (Word.RED, "red"),
        (True, True),
        ({np.float64(1.5): 1, Number.ONE: 2, Word.RED: 3, True: 4}, {1.5: 1, 1: 4, "red": 3}),
        ({np.float64(1.5), (Word.RED, 2)}, {1.5, ("red", 2)}),
    ],
)
def test_subclasses_of_numbers_and_strings_are_saved_as_their_values(value, expected, tmp_path: Path):
    save(one(), tmp_path, extra={"value": value})
    found = load(one(), tmp_path).extra["value"]
    assert found == expected
    assert type(found) is type(expected)


def test_a_learning_rate_of_numpy_is_saved_as_its_value(tmp_path: Path):
    save(one(np.float64(0.25)), tmp_path)
    model = one()
    load(model, tmp_path)
    assert model.get_lr() == 0.25


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({torch.ones(2)}, "rest/extra/value is a set with a Tensor in it"),
        ({(torch.ones(2),)}, "rest/extra/value is a set with a Tensor in it"),
        ({frozenset([1])}, "rest/extra/value is a set with a frozenset in it"),
        (np.longdouble(1), "rest/extra/value is a longdouble, which only pickle"),
        (1j, "rest/extra/value is a complex, which only pickle"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value, message, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message):
        save(one(), tmp_path, extra={"value": value})


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused():
    value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match=r"model/a is a quantized tensor.*dequantize"):
        pack("model", {"a": value})


def test_views_of_one_memory_that_read_it_differently_are_kept_apart():
    x = torch.tensor([1 + 2j, 3 - 1j])
    values = [x, x.conj(), x.imag, x.conj().imag]
    for found, value in zip(unpack("a", pack("a", values)), values, strict=True):
        assert torch.equal(found, value)


def test_a_sparse_tensor_is_copied_too():
    value = torch.eye(2).to_sparse()
    items = pack("a", value)
    value._values().mul_(3)
    assert torch.equal(unpack("a", items).to_dense(), torch.eye(2))


def test_a_default_device_changes_nothing(tmp_path: Path):
    model = one()
    with torch.device("meta"):  # as torch.set_default_device
        async_save(model, tmp_path).wait()
        load(model, tmp_path)
        assert consensus_state(tmp_path)["0.weight"].device.type == "cpu"


def test_a_run_loaded_in_inference_mode_goes_on(tmp_path: Path):
    models = wrap_virtual(3, lambda rank: network(), partial(torch.optim.Adam, lr=0.1), topology="ring")
    for t in range(4):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()
        if t == 1:
            with torch.inference_mode():
                for model in models:
                    save(model, tmp_path, extra={"a": torch.ones(2)})
    expected = [flat(model) for model in models]
    for model in models:
        with torch.inference_mode():
            assert not load(model, tmp_path).extra["a"].is_inference()
    for t in range(2, 4):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()
    assert all(torch.equal(flat(model), values) for model, values in zip(models, expected, strict=True))


class WithoutHugePages(mmap.mmap):
    def madvise(self, *args):
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_does(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    assert torch.equal(unpack("a", pack("a", torch.ones(2))), torch.ones(2))
