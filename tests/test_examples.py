"""The README's example and the Shakespeare example run as they are written; wrong input ends in one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a python command as a user would, from `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def shakespeare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("shakespeare")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text long enough to train on."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def options(shakespeare: ModuleType, monkeypatch: pytest.MonkeyPatch, *given: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["shakespeare.py", *given])
    return shakespeare.parse()


def test_readme_example_runs_on_three_workers(tmp_path: Path) -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "quickstart.py").write_text(code)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    result = run(*launcher, "quickstart.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss of the consensus model (\d+\.\d{4})", result.stdout)]
    assert len(losses) == 3
    assert max(losses) < 1.0  # 3.4 for predicting the mean


@pytest.mark.parametrize("method", [("--topology", "ring"), ("--baseline", "ddp")], ids=["ring", "ddp"])
def test_shakespeare_example_learns_a_text(method: tuple[str, str], tmp_path: Path, text_file: Path) -> None:
    command = (str(ROOT / "examples" / "shakespeare.py"), "--workers", "2", "--data", str(text_file), *method)
    small = ("--steps", "30", "--width", "32", "--heads", "2", "--layers", "1", "--sample", "20", "--context", "16")
    result = run(*command, *small, "--lr", "0.02", "--output", str(tmp_path / "out"), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    loss = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in result.stdout.splitlines() if line.strip()}
    assert float(loss["consensus model"]) < float(loss["before training"]) - 0.5
    assert {"replica 0", "replica 1"} < set(loss)
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr == ""


def test_workers_that_fail_leave_one_sentence(tmp_path: Path) -> None:
    command = (str(ROOT / "examples" / "shakespeare.py"), "--workers", "2", "--data", "missing.txt")
    result = run(*command, folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "shakespeare.py: --data missing.txt cannot be read (No such file or directory): give a text file\n"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--data", "{folder}"), "Is a directory"),
        (("--data", "{folder}/empty"), "has 0 characters, at least 1300 are needed"),
        (("--data", "{folder}/binary"), "is not UTF-8 text"),
        (("--topology", "rign"), "ring"),
        (("--heads", "3"), "--width 128 is not a multiple of --heads 3"),
        (("--lr", "-1"), "--lr -1.0 is not between 0 and 1"),
        (("--output", "{folder}/empty/out"), "cannot be made"),
    ],
)
def test_wrong_input_is_refused_before_training(
    given: tuple[str, str],
    message: str,
    shakespeare: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text_file: Path,
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    name, value = given
    args = options(shakespeare, monkeypatch, "--data", str(text_file), "--output", str(tmp_path / "out"), name,
                   value.format(folder=tmp_path))  # fmt: skip
    with pytest.raises(shakespeare.InputError, match=message):
        shakespeare.check(args, 4)


def test_corpus_is_the_42_works_with_whole_works_held_out(shakespeare: ModuleType) -> None:
    corpus = shakespeare.read_corpus(None, 64)
    assert len(corpus.train) + len(corpus.validation) == 5_057_198
    assert len(corpus.alphabet) == 84
    assert len(corpus.validation) == 103_427 + 95_728 + 114_876


def test_validation_windows_are_the_same_every_time(shakespeare: ModuleType) -> None:
    corpus = shakespeare.Corpus("abcdefgh" * 50, "hgfedcba" * 50, "half")
    windows = [x for x, _ in corpus.validation_batches(16, 70)]
    again = [x for x, _ in corpus.validation_batches(16, 70)]
    assert sum(len(x) for x in windows) == 70
    assert all(x.equal(y) for x, y in zip(windows, again, strict=True))
