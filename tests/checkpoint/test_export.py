"""The consensus as plain weights, and what inspection says."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decent_dp import CheckpointError, ConfigurationError, DecentralizedDataParallel
from decent_dp.checkpoint import consensus_state, export, inspect, save
from decent_dp.checkpoint import export as export_function
from virtual import wrap_virtual

from .runs import COSINE, OPTIMIZERS, TINY, Network


def train(rank, n, directory):
    """Save, export from the running model, and return what the average is."""
    model = DecentralizedDataParallel(
        Network(), OPTIMIZERS["adamw"], COSINE, "ring", sync_buffer_in_global_avg=True, bucket_size_in_mb=TINY
    )
    for _ in range(3):
        model(torch.randn(5, 6)).square().mean().backward()
    save(model, directory / "run", extra={"epoch": 3})
    before = [p.detach().clone() for p in model.parameters()]
    state = consensus_state(model)
    for suffix in ("pt", "safetensors"):
        assert export(model, directory / f"live.{suffix}") == directory / f"live.{suffix}"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    distance = model.consensus_distance()
    with model.consensus():
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.randn(5, 6)).square().mean().backward()
    return {name: value.tolist() for name, value in state.items()}, distance


def test_live_and_saved_exports_are_the_consensus_and_load_into_the_bare_model(pool, tmp_path: Path):
    from safetensors.torch import load_file

    results = pool.run(train, 3, tmp_path)
    (expected, distance) = results[0]
    assert all(result == results[0] for result in results)
    export(tmp_path / "run", tmp_path / "saved.pt")
    export(tmp_path / "run" / "step-00000003", tmp_path / "new" / "saved.safetensors")
    for file in (
        tmp_path / "live.pt",
        tmp_path / "live.safetensors",
        tmp_path / "saved.pt",
        tmp_path / "new" / "saved.safetensors",
    ):
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        model = Network()
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, torch.tensor(expected[name], dtype=value.dtype), rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            assert model.eval()(torch.randn(2, 6)).isfinite().all()
    found = inspect(tmp_path / "run")
    assert (found.step, found.num_workers, found.topology, found.optimizer) == (3, 3, "ring", "AdamW")
    assert (found.scheduler, found.scaler, found.extra) == ("CosineWithWarmup", "none", ("epoch",))
    assert found.num_parameters == sum(p.numel() for p in Network().parameters())
    assert found.consensus_distance == pytest.approx(distance, rel=1e-5)
    assert len(found.part_bytes) == 3
    assert inspect(tmp_path / "run", distance=False).consensus_distance is None


def test_a_fresh_process_without_a_group_exports(tmp_path: Path):
    (model,) = wrap_virtual(1, lambda rank: Network(), OPTIMIZERS["sgd"])
    save(model, tmp_path / "run")
    code = f"""
from decent_dp.checkpoint import export, inspect
export({str(tmp_path / "run")!r}, {str(tmp_path / "out.safetensors")!r})
print(inspect({str(tmp_path / "run")!r}).step)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert (tmp_path / "out.safetensors").stat().st_size > 0


def test_without_safetensors_the_message_names_it(tmp_path: Path, monkeypatch):
    (model,) = wrap_virtual(1, lambda rank: Network(), OPTIMIZERS["sgd"])
    save(model, tmp_path / "run")
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for source in (tmp_path / "run", model):
        with pytest.raises(ConfigurationError, match="pip install safetensors"):
            export(source, tmp_path / "out.safetensors")
        export(source, tmp_path / "out.pt")


def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path):
    (model,) = wrap_virtual(1, lambda rank: Network(), OPTIMIZERS["sgd"])
    save(model, tmp_path / "run")
    (tmp_path / "file").touch()
    for source in (tmp_path / "run", model):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/file"):
            export_function(source, tmp_path / "file" / "out.pt")
        with pytest.raises(CheckpointError, match=f"could not write {tmp_path}/run: Is a directory"):
            export_function(source, tmp_path / "run")
        with pytest.raises(ConfigurationError, match=r"out='\.' is no name of a file"):
            export_function(source, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_full_disk_is_told_as_such(suffix, tmp_path: Path):
    (model,) = wrap_virtual(1, lambda rank: torch.nn.Linear(3, 10_000), OPTIMIZERS["sgd"])
    save(model, tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        for source in (tmp_path / "run", model):
            with pytest.raises(CheckpointError, match=rf"could not write {tmp_path}/out\.{suffix}: File too large"):
                export(source, tmp_path / f"out.{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


class Halves(torch.nn.Linear):
    """With a buffer that safetensors does not know."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("halves", torch.ones(2, dtype=torch.complex128))


def test_a_dtype_that_safetensors_cannot_hold_is_named(tmp_path: Path):
    (model,) = wrap_virtual(1, lambda rank: Halves(), OPTIMIZERS["sgd"])
    save(model, tmp_path / "run")
    for source in (tmp_path / "run", model):
        with pytest.raises(ConfigurationError, match=r"\['halves'\] are of torch.complex128, which safetensors cannot"):
            export(source, tmp_path / "out.safetensors")
        export(source, tmp_path / "out.pt")
