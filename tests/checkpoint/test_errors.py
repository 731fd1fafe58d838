"""What cannot be written or read: an error on all workers that names the file, and training goes on."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cases.workers import flat, loss_of, network
from decent_dp import CheckpointError, ConfigurationError, DecentralizedDataParallel, TrainingError
from decent_dp.checkpoint import async_save, checkpoints, inspect, load, save
from decent_dp.checkpoint.storage import Plan, read_part, write_part
from decent_dp.checkpoint.tree import pack
from decent_dp.cli.main import main
from virtual import wrap_virtual

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)


def wrap(n=1, optim_fn=SGD, make=network, **options):
    return wrap_virtual(n, lambda rank: make(), optim_fn, **options)


def run(models, first, last):
    for t in range(first, last):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()


# ---------------------------------------------------------------- on all workers


def go_through(rank, n, attempt, directory):
    """Train, try what fails on all, train on; with ``attempt`` None, train only."""
    model = DecentralizedDataParallel(network(), SGD, topology="ring", bucket_size_in_mb=16 / 2**20)
    messages = []
    for t in range(2):
        loss_of(model, t, rank).backward()
    if attempt is not None:
        for call in (save, load) if attempt == "load" else (save, lambda *args: async_save(*args).wait()):
            if attempt == "load" and call is save:
                continue
            if attempt == "limit" and rank == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, resource.RLIM_INFINITY))
            try:
                call(model, directory)
            except CheckpointError as error:
                messages.append(str(error))
            finally:
                if attempt == "limit" and rank == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if attempt != "load":
            assert not list(Path(directory).parent.rglob(".partial*")), "left behind"
    for t in range(2, 4):
        loss_of(model, t, rank).backward()
    model.synchronize()
    return messages, flat(model).tolist()


def fails_on_all(pool, attempt, directory, *words, num_messages=2):
    undisturbed = pool.run(go_through, 3, None, None)
    results = pool.run(go_through, 3, attempt, directory)
    for rank, (messages, values) in enumerate(results):
        assert len(messages) == num_messages
        for message in messages:
            assert message.startswith(f"rank {rank}, step 2: could not ")
            for word in words:
                assert word in message, message
        assert values == undisturbed[rank][1]


def test_a_file_that_the_system_refuses_on_one_worker_fails_on_all(pool, tmp_path: Path):
    directory = tmp_path / "run"
    fails_on_all(pool, "limit", directory, "rank 1: File too large: ", "__1_0.distcp")
    assert checkpoints(directory) == []


def test_a_full_disk_fails_on_all_and_the_one_before_stays(pool, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        pool.run(save_only, 3, disk / "run")
        before = inspect(disk / "run")
        (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 8192))
        fails_on_all(pool, "full", disk / "run", "No space left on device: ", ".partial-step-00000002")
        assert inspect(disk / "run") == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def save_only(rank, n, directory):
    model = DecentralizedDataParallel(network(), SGD, topology="ring", bucket_size_in_mb=16 / 2**20)
    loss_of(model, 0, rank).backward()
    save(model, directory)


def test_a_directory_that_cannot_be_made_fails_on_all(pool, tmp_path: Path):
    (tmp_path / "file").touch()
    fails_on_all(pool, "unwritable", tmp_path / "file" / "run", str(tmp_path / "file"))


DAMAGES = {
    "truncated": lambda folder: os.truncate(folder / "__2_0.distcp", 100),
    "missing": lambda folder: (folder / "__2_0.distcp").unlink(),
    "no-index": lambda folder: (folder / "__2.json").unlink(),
    "changed": lambda folder: flip(folder / "__2_0.distcp"),
    "foreign": lambda folder: (folder / "__2.json").write_bytes(pickle.dumps({"a": 1})),
}


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_of_one_worker_fails_on_all(pool, tmp_path: Path, damage):
    pool.run(save_only, 3, tmp_path)
    DAMAGES[damage](tmp_path / "step-00000001")
    name = "__2.json" if damage in ("no-index", "foreign") else "__2_0.distcp"
    fails_on_all(pool, "load", tmp_path, f"{tmp_path}/step-00000001/{name} cannot be used", num_messages=1)


def test_workers_at_different_steps_or_with_other_directories_are_refused(pool, tmp_path: Path):
    for messages in pool.run(disagree, 2, tmp_path):
        assert "rank 0 is at step 1" in messages[0]
        assert "rank 1 is at step 2" in messages[0]
        assert "rank 1 is at step 2 and saves to" in messages[1]
    assert checkpoints(tmp_path) == []


def disagree(rank, n, directory):
    model = DecentralizedDataParallel(network(), SGD, topology="ring")
    loss_of(model, 0, rank).backward()
    model.synchronize(drop=True)
    model._replica.t += rank
    messages = []
    for folder in (directory, directory / str(rank)):
        with pytest.raises(CheckpointError) as info:
            save(model, folder)
        messages.append(str(info.value))
    return messages


# ---------------------------------------------------------------- what a stranger wrote


class Harm:
    """Runs something when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_nothing_that_a_stranger_wrote_is_run(tmp_path: Path):
    models = wrap()
    folder = save(models[0], tmp_path / "run")
    identity = json.loads((folder / "__0.json").read_text())["id"]
    items = read_part(folder, 0, identity, lambda key: True)
    items["rest"] = Harm(tmp_path / "harmed")
    write_part(folder, 0, identity, Plan(items))  # with sizes and checksums that fit
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["part_bytes"] = [(folder / "__0_0.distcp").stat().st_size]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    for attempt in (lambda: load(models[0], tmp_path / "run"), lambda: inspect(tmp_path / "run")):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be used: it holds more than plain data"):
            attempt()
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"size": [2**60]},
        {"size": [-1]},
        {"offset": 2**60},
        {"offset": -4},
        {"length": 1},
        {"dtype": "save"},
        {"offset": "x"},
        {"size": None},
    ],
)
def test_an_index_that_says_nonsense_is_refused(change, tmp_path: Path):
    write_part(tmp_path, 0, "id", Plan(pack("model", {"a": torch.ones(3)})))
    index = json.loads((tmp_path / "__0.json").read_text())
    index["items"]["model/float32/0"] |= change
    (tmp_path / "__0.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be used"):
        read_part(tmp_path, 0, "id", lambda key: True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON"),
        ("[]", "it is JSON of something else"),
        ("{}", "it was not written by decent_dp"),
        ('{"format": "decent_dp checkpoint", "version": 9}', "its format has version 9"),
        ('{"format": "decent_dp checkpoint", "version": 2, "id": 3}', "its entry 'id'"),
    ],
)
def test_a_foreign_manifest_is_named(content, message, tmp_path: Path):
    (model,) = wrap()
    folder = save(model, tmp_path)
    (folder / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"step-00000000/checkpoint\.json cannot be used: {message}"):
        load(model, tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("mixing", "workers_per_node"), None),
        (("mixing", "workers_per_node"), 0),
        (("model", "parameters"), [1]),
        (("model", "parameters"), {}),
        (("saved_at",), float("nan")),
        (("saved_at",), 1e30),
    ],
)
def test_a_manifest_with_nonsense_is_told_and_not_a_traceback(path, value, tmp_path: Path):
    (model,) = wrap()
    file = save(model, tmp_path) / "checkpoint.json"
    content = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(content))
    command = main(["inspect", str(tmp_path)])
    if value == {}:  # nothing of it can be compared
        assert (command, inspect(tmp_path).consensus_distance) == (0, 0.0)
        return
    assert command == 1
    with pytest.raises(CheckpointError, match=r"step-00000000.* cannot be used: "):
        inspect(tmp_path)


@pytest.mark.parametrize("key", ["bytes", "crc32", "items"])
def test_an_index_without_an_entry_is_named(key, tmp_path: Path):
    write_part(tmp_path, 0, "id", Plan(pack("model", {"a": torch.ones(3)})))
    index = json.loads((tmp_path / "__0.json").read_text())
    del index[key]
    (tmp_path / "__0.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"__0\.json cannot be used: it is not what was saved"):
        read_part(tmp_path, 0, "id", lambda key: True)


def test_parts_of_two_checkpoints_are_never_mixed(tmp_path: Path):
    models = wrap(2)
    first, second = ([save(model, tmp_path / name) for model in models][-1] for name in "ab")
    for name in ("__1_0.distcp", "__1.json"):
        shutil.copy(second / name, first / name)
    load(models[0], tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"__1\.json cannot be used: it belongs to another checkpoint"):
        load(models[1], tmp_path / "a")


# ---------------------------------------------------------------- another model, another moment


class Wider(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"make": Wider}, r"parameter '0.weight' is \[4, 3\] float32 in the checkpoint and \[5, 3\] float32"),
        ({"make": lambda: nn.Sequential(network(), nn.BatchNorm1d(2))}, "parameter '0.weight' is .* and not there"),
        ({"optim_fn": ADAMW}, "with optimizer SGD and this model has AdamW"),
        ({"lr_scheduler_fn": partial(torch.optim.lr_scheduler.StepLR, step_size=2)}, "scheduler none .* StepLR"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler none and this model has GradScaler"),
        ({"n": 2}, "by 1 workers.*this run has 2 workers"),
        ({"topology": "ring"}, "on topology 'complete' .* on 'ring'|on topology 'ring'"),
        ({"wire_dtype": torch.bfloat16}, "with wire_dtype bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(other, message, tmp_path: Path):
    (saved,) = wrap()
    run([saved], 0, 2)
    save(saved, tmp_path)
    model = wrap(**other)[0]
    before = flat(model)
    with pytest.raises(CheckpointError, match=message):
        load(model, tmp_path)
    assert model.t == 0
    assert torch.equal(flat(model), before)


def test_frozen_and_trained_are_not_the_same(tmp_path: Path):
    save(wrap()[0], tmp_path)
    frozen = network()
    frozen[0].requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"parameter '0.weight' is .* float32, frozen in the model"):
        load(wrap(make=lambda: frozen)[0], tmp_path)


def test_moments_at_which_the_state_is_not_whole_are_refused(tmp_path: Path):
    (model,) = wrap()
    with model.consensus(), pytest.raises(TrainingError, match="replaced by their average"):
        save(model, tmp_path)
    model._replica.after_step = print  # as in join(), which virtual workers do not have
    with pytest.raises(TrainingError, match=r"inside of join\(\)"):
        save(model, tmp_path)
    model._replica.after_step = None
    with pytest.raises(ConfigurationError, match="model is Sequential"):
        save(model.module, tmp_path)
    for keep in (0, True):
        with pytest.raises(ConfigurationError, match="keep must be at least 1"):
            save(model, tmp_path, keep=keep)
    for call in (save, load):
        with pytest.raises(ConfigurationError, match="extra is a list; it must be a dict"):
            call(model, tmp_path, extra=[1])
    with pytest.raises(ConfigurationError, match="start='other'"):
        load(model, tmp_path, start="other")
    loss = loss_of(model, 0, 0)
    loss.grad_fn.next_functions[0][0].register_hook(lambda *_: save(model, tmp_path))
    with pytest.raises(TrainingError, match=r"inside of backward\(\)"):
        loss.backward()
    assert checkpoints(tmp_path) == []


def test_an_extra_that_only_pickle_could_restore_is_named(tmp_path: Path):
    (model,) = wrap()
    with pytest.raises(CheckpointError, match="rest/extra/where is a PosixPath, which only pickle"):
        save(model, tmp_path, extra={"where": tmp_path})
    with pytest.raises(CheckpointError, match=r"rest/extra/a/0 is a ndarray.*torch\.from_numpy"):
        save(model, tmp_path, extra={"a": [torch.ones(2).numpy()]})


def test_extras_that_cannot_be_loaded_change_nothing(tmp_path: Path):
    (model,) = wrap()
    run([model], 0, 1)
    save(model, tmp_path, extra={"a": 1})
    (other,) = wrap()
    before = flat(other)
    with pytest.raises(CheckpointError, match="extra has 'b' and the checkpoint has only"):
        load(other, tmp_path, extra={"b": torch.Generator()})
    with pytest.raises(CheckpointError, match=r"extra\['a'\] is a int, which cannot be loaded in place"):
        load(other, tmp_path, extra={"a": 1})
    assert other.t == 0
    assert torch.equal(flat(other), before)


def test_options_that_cannot_share_a_group_change_nothing(tmp_path: Path):
    apart = {"bucket_size_in_mb": 16 / 2**20}
    (model,) = wrap(**apart)
    assert len(model.optimizers) > 1
    run([model], 0, 2)
    model.optimizers[0].param_groups[0]["lr"] = 0.5
    save(model, tmp_path)
    (other,) = wrap()
    run([other], 0, 1)
    before = flat(other)
    with pytest.raises(CheckpointError, match=r"come to share a parameter group and their lr differs \(0.* and 0"):
        load(other, tmp_path)
    assert other.t == 1
    assert torch.equal(flat(other), before)
    run([other], 1, 2)  # and training can go on
    (same,) = wrap(**apart)
    load(same, tmp_path)
    assert torch.equal(flat(same), flat(model))


class Counting(nn.Sequential):
    def __init__(self, persistent):
        super().__init__(nn.Linear(3, 2))
        self.register_buffer("count", torch.zeros(2), persistent=persistent)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_enters_or_leaves_the_state_dict_is_refused(persistent, tmp_path: Path):
    (model,) = wrap(make=lambda: Counting(persistent))
    run([model], 0, 1)
    save(model, tmp_path)
    (other,) = wrap(make=lambda: Counting(not persistent))
    before = flat(other)
    with pytest.raises(CheckpointError, match="does not fit this model: 'count' is in the state dict of only one"):
        load(other, tmp_path)
    assert other.t == 0
    assert torch.equal(flat(other), before)


def test_no_checkpoint_and_no_such_step(tmp_path: Path):
    (model,) = wrap()
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the directory"):
        load(model, tmp_path / "nowhere")
    save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 7; there are steps \[0\]"):
        load(model, tmp_path, step=7)


def test_checksums_are_those_of_zlib(tmp_path: Path):
    write_part(tmp_path, 0, "id", Plan(pack("model", {"a": torch.ones(3)})))
    index = json.loads((tmp_path / "__0.json").read_text())
    assert index["crc32"] == zlib.crc32((tmp_path / "__0_0.distcp").read_bytes())
