"""``decent-dp simulate``: what it prints and writes, and what it refuses."""

import csv
import json

import pytest

from decent_dp.cli import simulate
from decent_dp.simulate.problems import PROBLEMS

from .program import in_process

CLOCK = "--compute-ms 300 --parameters 25M --bandwidth-mbit 1000"


def test_the_names_of_problems_are_those_there_are():
    assert list(simulate.PROBLEMS) == sorted(PROBLEMS)


def test_a_table_within_80_columns(capsys):
    line = f"simulate --workers 4 --nodes 2 --problem logistic --steps 20 --target 0.5 {CLOCK} --jitter 0.1"
    ran = in_process(capsys, f"{line} --topology exp --topology alternating-exp-ring --topology all-reduce")
    assert ran.code == 0
    assert "logistic: 4 workers on 2 nodes, 20 steps" in ran.out
    assert all(len(row) <= 80 for row in ran.out.splitlines())
    for word in ("loss*", "accuracy*", "ms/step", "steps to 0.5", "all-reduce"):
        assert word in ran.out


def test_json_csv_and_plot_hold_the_same_run(capsys, tmp_path):
    line = f"simulate --workers 4 --dimension 8 --steps 6 {CLOCK} --json"
    ran = in_process(capsys, f"{line} --output {tmp_path}/a.csv --plot {tmp_path}/a.png")
    again = in_process(capsys, f"{line} --output {tmp_path}/a.json")
    assert ran.code == again.code == 0
    assert ran.out == again.out
    (run,) = json.loads(ran.out)["runs"]
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [float(row["consensus_distance"]) for row in rows] == [r["consensus_distance"] for r in run["records"]]
    assert [float(row["time_s"]) for row in rows] == [r["time_s"] for r in run["records"]]
    assert len(rows) == 7
    assert json.loads((tmp_path / "a.json").read_text()) == [run]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_clock_alone(capsys):
    ran = in_process(capsys, f"simulate --workers 8 --nodes 2 --clock-only --steps 50 {CLOCK} --slow-rank 1 --markdown")
    assert ran.code == 0
    header, _, row = ran.out.splitlines()
    assert header == "| topology | ms/step |"
    assert float(row.split("|")[2]) > 390


@pytest.mark.parametrize("lr", ["0", "1e-200", "1e200", "1e308"])
def test_learning_rates_that_make_no_sense_have_no_traceback(capsys, lr):
    ran = in_process(capsys, f"simulate --workers 4 --dimension 2 --steps 4 --lr {lr} --json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out, parse_constant=pytest.fail)["num_workers"] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--topology rign", "unknown topology 'rign', did you mean 'ring'?"),
        ("--clock-only", "--clock-only needs --profile, or --compute-ms"),
        ("--compute-ms 3", "--compute-ms is for a clock, which needs --parameters, --bandwidth-mbit as well"),
        ("--jitter 0.1", "--jitter is for a clock"),
        ("--slow-factor 2", "give --slow-rank RANK as well"),
        ("--problem logistic --noise 1", "problem 'logistic' takes no noise"),
        ("--output a.txt", "give a file that ends in .csv or .json"),
        ("--plot a.gif", "give a file that ends in .png, .svg or .pdf"),
        ("--plot /no/such/folder/a.png", "the folder does not exist"),
        ("--lr -1", "--lr is -1; give a number of at least 0"),
        ("--target 1", "--target is a loss to reach, and here there is none"),
        ("--workers 4 --nodes 3", "every node has equally many workers"),
        ("--profile no.json", "profile no.json cannot be read"),
        ("--seed -1", "argument --seed: '-1' is no whole number of at least 0"),
        ("--seed 99999999999999999999", "is no whole number of at least 0 and at most 10**12"),
        (f"--dimension {10**13}", "is no whole number of at least 1 and at most 10**12"),
        ("--workers " + "9" * 5000, "is no whole number of at least 1 and at most 10**12"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capsys, line, message):
    ran = in_process(capsys, f"simulate --steps 1 {line}")
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        f"--steps {10**12} --clock-only {CLOCK}",
        f"--dimension {10**12}",
    ],
)
def test_what_does_not_fit_into_memory_is_one_line(capsys, line):
    ran = in_process(capsys, f"simulate --workers 16 {line}")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("decent-dp: this does not fit into memory; ask for less")
    assert ran.err.count("\n") == 1
