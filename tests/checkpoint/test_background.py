"""What saving in the background must survive: changed directories, interrupts, failures of others."""

import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from cases.workers import flat, loss_of, network
from decent_dp import CheckpointError, DecentralizedDataParallel
from decent_dp.checkpoint import async_save, checkpoints, load, save
from decent_dp.checkpoint import saving as saving_module
from virtual import wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def one():
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    return model


def test_a_relative_directory_is_that_of_the_call(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    begin = threading.Event()
    write = saving_module.write_part
    monkeypatch.setattr(saving_module, "write_part", lambda *args: (begin.wait(10), write(*args)))
    model = one()
    saving = async_save(model, "run", keep=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    begin.set()
    assert saving.wait() == tmp_path / "run" / "step-00000000"
    assert os.listdir(tmp_path / "elsewhere") == []
    assert len(checkpoints(tmp_path / "run")) == 1


def test_an_interrupt_while_waiting_leaves_the_copy_alone(tmp_path: Path, monkeypatch):
    begin = threading.Event()
    write = saving_module.write_part
    monkeypatch.setattr(saving_module, "write_part", lambda *args: (begin.wait(10), write(*args)))
    model = one()
    loss_of(model, 0, 0).backward()
    expected = flat(model)
    saving = async_save(model, tmp_path)
    loss_of(model, 1, 0).backward()
    with monkeypatch.context() as patch:
        patch.setattr(saving._thread, "join", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(model, tmp_path)
    threading.Timer(0.2, begin.set).start()
    save(model, tmp_path)
    assert [manifest.step for manifest in checkpoints(tmp_path)] == [1, 2]
    other = one()
    load(other, tmp_path, step=1)
    assert torch.equal(flat(other), expected)


def fail_on_one(rank, n, directory):
    model = DecentralizedDataParallel(network(), SGD, topology="ring")
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(saving_module, "write_part", lambda *_: (_ for _ in ()).throw(OSError(28, "full", "file")))
        saving = async_save(model, directory)
        for _ in range(2):
            with pytest.raises(CheckpointError) as info:
                saving.wait()
            messages.append(str(info.value))
    save(model, directory)
    return messages


def test_a_checkpoint_that_one_worker_could_not_write_stays_unwritten_for_all(pool, tmp_path: Path):
    for rank, (first, second) in enumerate(pool.run(fail_on_one, 3, tmp_path)):
        assert first == f"rank {rank}, step 0: could not save to {tmp_path}: rank 1: full: file"
        assert second == f"this checkpoint was not written: {first}"
    assert len(checkpoints(tmp_path)) == 1


def test_what_others_never_finish_leaves_nothing(tmp_path: Path, monkeypatch):
    models = wrap_virtual(2, lambda rank: network(), SGD, topology="ring")
    monkeypatch.setattr(saving_module, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(saving_module, "write_part", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(models[0]._communicator.board, "add", lambda *_: 1)
    saving = saving_module.Saving(models[1], tmp_path, saving_module.offer(tmp_path, 0), {}, {}, None)
    saving.start()
    saving._thread.join()
    assert "1 workers have not written" in str(saving._report.error)
    assert os.listdir(tmp_path) == []
