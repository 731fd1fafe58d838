"""The commands measure and plan, as a user types them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from cli.program import in_process
from decent_dp.cli.measure import parse_count
from decent_dp.errors import ConfigurationError
from decent_dp.plan import Profile, recommend
from plan.synthetic import MB, profile


def make():
    """A factory as --model wants it."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), lambda model: model(torch.ones(2, 8)).sum()


def make_alone():
    return nn.Linear(2, 2)


@pytest.fixture
def saved(tmp_path):
    profile(8, 2, net={"across": 2 * MB}).save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_plan_prints_a_table_that_fits_and_a_recommendation(capsys, saved):
    ran = in_process(capsys, f"plan --profile {saved}")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    found = recommend(Profile.load(saved))
    assert sum(line.startswith("all-reduce ") for line in lines) == 2
    assert f"topology={found.choice.topology!r}" in ran.out
    assert len([line for line in lines if line.endswith((" wire", " compute", " jitter"))]) == len(found.predictions)


def test_plan_of_a_small_model_tells_steps_apart(capsys, tmp_path):
    times = {"forward_s": 2e-4, "backward_s": 3e-4, "bucket_bytes": 1000}
    profile(8, 2, net={"across": 10 * MB}, **times).save(tmp_path / "small.json")
    out = in_process(capsys, f"plan --profile {tmp_path}/small.json").out
    assert "forward 0.200 ms, backward 0.300 ms" in out
    assert "(0.500 ms against 0.588 ms of all-reduce)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_plan_as_json(capsys, saved):
    whole = json.loads(in_process(capsys, f"plan --profile {saved} --topology exp --wire-dtype float32 --json").out)
    assert [p["topology"] for p in whole["predictions"]] == ["exp", "all-reduce"]
    assert whole["predictions"][0]["wire_dtype"] is None
    assert whole["is_worth_it"] is True
    assert whole["recommended"]["topology"] == "exp"


def test_plan_for_other_workers(capsys, saved):
    out = in_process(
        capsys, f"plan --profile {saved} --workers 32 --nodes 8 --topology exp --topology hierarchical"
    ).out
    assert out.startswith("32 workers on 8 nodes")
    assert "measured with 8 workers on 4 nodes" in out
    assert in_process(capsys, f"plan --profile {saved} --nodes 2 --topology exp").out.startswith("4 workers on 2 nodes")


def test_plan_says_when_it_is_not_worth_it(capsys, tmp_path):
    profile(4, 1, net={"across": 1e6 * MB}).save(tmp_path / "fast.json")
    out = in_process(capsys, f"plan --profile {tmp_path}/fast.json").out
    assert "decentralized training is not worth it here" in " ".join(out.split())
    profile(4, 1, worker_factors=(1, 1, 1.5, 1), net={"across": MB}).save(tmp_path / "slow.json")
    out = in_process(capsys, f"plan --profile {tmp_path}/slow.json --topology exp").out
    assert "worker 2 takes 1.50 times the mean" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "required: --profile"),
        ("plan --profile nowhere.json", "profile nowhere.json cannot be read"),
        ("plan --profile {} --topology nosuch", "unknown topology 'nosuch'"),
        ("plan --profile {} --workers 7", "7 workers on 4 nodes: nodes must be equally full"),
        ("plan --profile {} --workers 5000", "--workers 5000: the command line goes up to 4096"),
        ("plan --profile {} --workers 0", "no whole number of at least 1"),
        ("plan --profile {} --wire-dtype int8", "'int8'"),
        ("plan --profile {} --seed -1", "argument --seed: '-1' is no whole number of at least 0"),
        ("measure", "give either --model PATH, or --parameters N with --compute-ms MS"),
        ("measure --parameters 65M", "--parameters N and --compute-ms MS go together"),
        ("measure --model a:b --compute-ms 3", "go together"),
        ("measure --parameters 65X --compute-ms 3", "--parameters is '65X'"),
        ("measure --parameters 65M --compute-ms -3", "--compute-ms is -3"),
        ("measure --parameters 65M --compute-ms nan", "--compute-ms is nan"),
        ("measure --parameters 1 --compute-ms 3 --bucket-mb 0", "--bucket-mb is 0"),
        ("measure --parameters 1 --compute-ms 3 --optimizer Adamm", "--optimizer is 'Adamm'"),
        ("measure --parameters 1 --compute-ms 3 --output no/such/folder/p.json", "there is no folder"),
        ("measure --model nocolon", "give PACKAGE.MODULE:FACTORY"),
        ("measure --model no_such_module:make", "No module named 'no_such_module'"),
        ("measure --model plan.test_commands:nothing", "has no attribute 'nothing'"),
    ],
)
def test_what_cannot_work_is_one_line_and_code_2(capsys, saved, line, message):
    ran = in_process(capsys, line.format(saved))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.fixture
def one_worker(monkeypatch):
    """No launch variables, and the process group gone afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_measure_a_model_with_one_worker(capsys, tmp_path, one_worker):
    line = f"measure --model plan.test_commands:make --steps 3 --output {tmp_path}/p.json"
    ran = in_process(capsys, line)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80 + len(str(tmp_path))
    read = Profile.load(tmp_path / "p.json")
    assert read.num_bytes == 4 * (64 + 8 + 8 + 1)
    assert read.notes["model"] == "plan.test_commands:make"
    printed = in_process(capsys, f"measure --parameters 1K --compute-ms 3 --json --output {tmp_path}/q.json").out
    assert Profile.from_json(printed) == Profile.load(tmp_path / "q.json")
    ran = in_process(capsys, f"measure --model plan.test_commands:make_alone --output {tmp_path}/p.json")
    assert ran.code == 2
    assert "the factory returned Linear; it must return (model, loss)" in ran.err
    assert "One worker has nobody to mix with" in in_process(capsys, f"plan --profile {tmp_path}/p.json").out


def test_counts():
    assert [parse_count(text) for text in ("65M", "1.3b", "4000", " 2k")] == [65_000_000, 1_300_000_000, 4000, 2000]
    for text in ("", "M", "-3", "1e3", "0", "0.0001", "65 M M", "9" * 30):
        with pytest.raises(ConfigurationError, match="--parameters is"):
            parse_count(text)
