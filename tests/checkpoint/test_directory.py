"""Which checkpoints there are, which is the latest, which are kept."""

import gc
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cases.workers import loss_of, network
from decent_dp import CheckpointError, DecentralizedDataParallel
from decent_dp.checkpoint import async_save, checkpoints, inspect, load, save
from decent_dp.checkpoint import directory as directory_module
from decent_dp.checkpoint import saving as saving_module
from spawn import spawn_script
from virtual import wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def one():
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    return model


def names(folder):
    return [manifest.path.name for manifest in checkpoints(folder)]


def test_as_many_are_kept_as_asked_for_and_the_latest_is_loaded(tmp_path: Path):
    model = one()
    for t in range(5):
        loss_of(model, t, 0).backward()
        save(model, tmp_path, keep=None if t < 3 else 2)
        if t == 2:
            assert len(checkpoints(tmp_path)) == 3
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert sorted(os.listdir(tmp_path)) == names(tmp_path)
    assert load(one(), tmp_path).step == 5
    assert load(one(), tmp_path, step=4).step == 4
    assert load(one(), tmp_path / "step-00000004").step == 4


def test_the_latest_is_found_by_content(tmp_path: Path):
    model = one()
    for t in range(3):
        loss_of(model, t, 0).backward()
        save(model, tmp_path)
    again = one()
    load(again, tmp_path, step=1)  # back, and on from there
    save(again, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003", "step-00000001.2"]
    assert load(one(), tmp_path).path.name == "step-00000001.2"
    os.rename(tmp_path / "step-00000001.2", tmp_path / "step-00000000")  # names and times say nothing
    os.utime(tmp_path / "step-00000003")
    assert load(one(), tmp_path).path.name == "step-00000000"


def test_what_is_unfinished_does_not_count_and_is_removed(tmp_path: Path, monkeypatch):
    model = one()
    save(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(directory_module.os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(directory_module.shutil, "rmtree", lambda *_, **__: None)
        loss_of(model, 0, 0).backward()
        with pytest.raises(KeyboardInterrupt):
            save(model, tmp_path)
    (left_over,) = tmp_path.glob(".partial-*")
    assert (left_over / "checkpoint.json").exists()  # whole, and yet it never appeared
    assert names(tmp_path) == ["step-00000000"]
    assert load(one(), tmp_path).step == 0
    (tmp_path / ".removed-step-1").mkdir()
    save(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-00000000", "step-00000001"]


def test_a_damaged_one_is_named_and_stands_in_nobodys_way(tmp_path: Path):
    model = one()
    for t in range(3):
        loss_of(model, t, 0).backward()
        save(model, tmp_path)
    (tmp_path / "step-00000002" / "checkpoint.json").write_text("")
    with pytest.raises(CheckpointError, match=r"step-00000002/checkpoint\.json cannot be used"):
        load(one(), tmp_path)
    assert load(one(), tmp_path, step=1).step == 1
    assert load(one(), tmp_path / "step-00000003").step == 3
    loss_of(model, 3, 0).backward()
    assert save(model, tmp_path, keep=1).name == "step-00000004"
    assert len(list(tmp_path.iterdir())) == 4  # nothing is removed as long as something is wrong


def test_other_things_in_the_directory_are_left_alone(tmp_path: Path):
    for name in ("notes", "step-1", "step-00000001-old"):
        (tmp_path / name).mkdir()
    model = one()
    for t in range(2):
        loss_of(model, t, 0).backward()
        save(model, tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000001-old", "step-00000002", "step-1"]


def test_links_to_checkpoints_are_read_and_removed_and_what_they_lead_to_stays(tmp_path: Path, caplog):
    model, place = one(), tmp_path / "elsewhere" / "step-00000000"
    place.parent.mkdir()
    os.rename(save(model, tmp_path / "run"), place)
    (tmp_path / "run" / "step-00000000").symlink_to(place)
    assert load(one(), tmp_path / "run").step == 0
    loss_of(model, 0, 0).backward()
    save(model, tmp_path / "run", keep=1)
    assert (caplog.messages, os.listdir(tmp_path / "run")) == ([], ["step-00000001"])
    assert load(one(), place).step == 0


def test_a_name_that_the_system_refuses_is_told():
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\); give a directory"):
        inspect("x" * 300)


def test_the_one_before_stays_until_the_new_one_is_there(tmp_path: Path, monkeypatch):
    model = one()
    save(model, tmp_path, keep=1)
    seen = []
    rename = os.rename
    monkeypatch.setattr(
        directory_module.os, "rename", lambda a, b: (seen.append(sorted(os.listdir(tmp_path))), rename(a, b))
    )
    loss_of(model, 0, 0).backward()
    save(model, tmp_path, keep=1)
    assert [[name for name in names if not name.startswith(".")] for names in seen] == [
        ["step-00000000"],
        ["step-00000000", "step-00000001"],
    ]


def test_everything_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch):
    log = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append("rename"), rename(a, b)))
    save(one(), tmp_path)
    assert [Path(entry).name.split("-step")[0] for entry in log] == [
        "__0_0.distcp",
        "__0.json",
        "checkpoint.json",
        ".partial",
        "rename",
        tmp_path.name,
    ]


# ---------------------------------------------------------------- in the background


def test_it_appears_by_itself_and_holds_the_moment_of_the_call(tmp_path: Path):
    models = wrap_virtual(3, lambda rank: network(), SGD, topology="ring")
    for t in range(2):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()
    expected = [[p.detach().clone() for p in model.parameters()] for model in models]
    savings = [async_save(model, tmp_path) for model in models]
    for rank, model in enumerate(models):
        loss_of(model, 2, rank).backward()
    for saving in savings:
        saving._thread.join()
        assert saving.done
    assert names(tmp_path) == ["step-00000002"]
    assert [saving.wait() for saving in savings] == [tmp_path / "step-00000002"] * 3
    others = wrap_virtual(3, lambda rank: network(7), SGD, topology="ring")
    for model, values in zip(others, expected, strict=True):
        load(model, tmp_path)
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def test_the_next_call_waits_for_it_and_raises_what_it_met(tmp_path: Path):
    model = one()
    async_save(model, tmp_path / "run")
    save(model, tmp_path / "run")
    assert len(checkpoints(tmp_path / "run")) == 2
    os.rename(tmp_path / "run", tmp_path / "moved")
    begun = threading.Event()
    write = directory_module.commit

    def commit_late(*args):
        begun.wait(10)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_module, "commit", commit_late)
        saving = async_save(model, tmp_path / "run")
        while not list((tmp_path / "run").glob(".partial-*/__0.json")):
            time.sleep(0.001)
        (partial_folder,) = (tmp_path / "run").glob(".partial-*")
        assert checkpoints(tmp_path / "run") == []
        os.rename(partial_folder, tmp_path / "gone")
        begun.set()
        with pytest.raises(CheckpointError, match=r"could not save to .*run: rank 0: the part of rank 0 is not in"):
            save(model, tmp_path / "run")
    with pytest.raises(CheckpointError, match="this checkpoint was not written"):
        saving.wait()
    save(model, tmp_path / "run")
    assert len(checkpoints(tmp_path / "run")) == 1


def test_a_model_that_was_saved_in_the_background_is_freed(tmp_path: Path):
    model = one()
    async_save(model, tmp_path)._thread.join()
    alive = weakref.ref(model.module)
    del model
    gc.collect()
    assert alive() is None


class Wide(nn.Module):
    """One parameter of 40 MB."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10_000_000))

    def forward(self, x):
        return (self.weight * x).sum()


def test_no_more_than_one_copy_is_held(pool, tmp_path: Path):
    (extra_bytes, own_bytes) = pool.run(memory, 2, tmp_path, timeout_s=60)[0]
    assert extra_bytes < 1.1 * own_bytes + 2**23


def memory(rank, n, folder):
    """Peak of resident memory while saving, above what was there before, and what the state takes."""
    model = wrap_real()
    for _ in range(2):
        model(1.0).backward()
    model.synchronize()
    own_bytes = 3 * 40_000_000  # parameters, momentum, what has arrived
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    async_save(model, folder).wait()
    return _status("VmHWM") - before, own_bytes


def wrap_real():
    return DecentralizedDataParallel(Wide(), SGD, topology="ring")


def _status(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


AT_THE_END = """
import functools, sys, torch
from decent_dp.checkpoint import async_save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.utils import initialize_dist
initialize_dist()
model = DecentralizedDataParallel(torch.nn.Linear(1000, 1000), functools.partial(torch.optim.SGD, lr=0.1))
async_save(model, sys.argv[1])
torch.distributed.destroy_process_group()
"""


def test_a_process_that_ends_finishes_what_it_is_writing(tmp_path: Path):
    run = spawn_script(AT_THE_END, 2, args=[str(tmp_path)])
    assert [(rank.code, rank.stderr) for rank in run.ranks] == [(0, "")] * 2
    assert names(tmp_path) == ["step-00000000"]
