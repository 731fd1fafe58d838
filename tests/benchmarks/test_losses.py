"""The two benchmarks that look at losses run, in tiny form; what they measure here means nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import time_to_loss, wire_loss
from benchmarks.crew import ROOT
from benchmarks.lab import Lab
from benchmarks.language import Task
from benchmarks.time_to_loss import Point, Run


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A model and a text that take no time."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return Task(steps=4, width=16, num_layers=1, num_heads=2, context=8, batch=2, windows=8, text=str(text))


def falling(*losses: float) -> Run:
    points = [Point(10 * index, float(index), loss, loss + 0.2, loss + 0.4) for index, loss in enumerate(losses)]
    return Run("ours:exp", 0, tuple(points), 0.0)


def test_all_sides_take_the_same_steps_to_the_end(task: Task, tmp_path: Path) -> None:
    with Lab(2, namespaces=False) as hosts:
        runs, num_parameters = time_to_loss.measure(hosts, task, num_seeds=1, target=0.0, every=3, bucket_mib=0.005)
    assert num_parameters > 1000
    assert [run.side for run in runs] == list(time_to_loss.SIDES)
    assert all([point.step for point in run.points] == [0, 3, 4] for run in runs)
    assert len({run.points[0].consensus for run in runs}) == 1  # one start
    ours, _, ddp, _ = (run.points[-1] for run in runs)
    assert ours.consensus == pytest.approx(ddp.consensus, abs=0.05)
    assert ddp.consensus == ddp.mean == ddp.worst
    assert ours.worst > ours.mean
    written = time_to_loss.write(runs, 0.0, "tiny", {"date": "today"}, "python", tmp_path / "folder" / "tiny")
    assert [path.name for path in written] == ["tiny.md", "tiny.json", "tiny.png"]
    assert "| decent_dp exp, bf16 | not reached |" in written[0].read_text()
    assert len(json.loads(written[1].read_text())["runs"]) == 4
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_the_target_is_passed_between_two_measurements() -> None:
    run = falling(3.0, 2.5, 1.5)
    assert run.reached(2.0) == (1.5, 15.0)
    assert run.reached(2.0, "mean") == (pytest.approx(1.7), pytest.approx(17))
    assert run.reached(1.6, "worst") == (math.inf, math.inf)
    assert run.reached(3.0) == (0.0, 0.0)
    assert run.ms == 100


def test_a_seed_that_never_arrives_is_told() -> None:
    runs = [falling(3.0, 2.5, 1.5), falling(3.0, 2.5, 2.4), falling(3.0, 1.5)]
    line = time_to_loss.table(runs, 2.0)[1]
    assert line[:4] == ["decent_dp exp", "1.5", "0.7 to not reached", "-"]
    assert "not reached" in time_to_loss.table(runs[1:2], 2.0)[1]


def test_wire_loss(task: Task, tmp_path: Path) -> None:
    runs = wire_loss.measure(task, num_workers=3, num_seeds=2)
    assert len(runs) == 2 * 3 * 2
    rows = wire_loss.compare(runs)
    assert [row["differences"] for row in rows if row["wire"] == "fp32"] == [[0.0, 0.0]] * 2
    narrow = [row for row in rows if row["wire"] != "fp32"]
    assert all(0 < max(map(abs, row["differences"])) < 0.05 for row in narrow)
    written = wire_loss.write(runs, "tiny", {"date": "today"}, "python", tmp_path / "tiny")
    assert [path.name for path in written] == ["tiny.md", "tiny.json", "tiny.png"]
    assert "- exp: with bf16 on the wire the loss is" in written[0].read_text()
    assert len(json.loads(written[1].read_text())["rows"]) == 6


def test_options() -> None:
    assert time_to_loss.parse(["--quick"]).steps == 12
    assert time_to_loss.parse(["--sides", "ddp"]).sides == ["ddp"]
    assert wire_loss.parse(["--quick"]).seeds == 2
    with pytest.raises(SystemExit):
        wire_loss.parse(["--seeds", "1"])
