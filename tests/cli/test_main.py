"""The program as a whole: help, errors, exit codes, what it imports."""

import doctest
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import decent_dp
from decent_dp.cli import main as program
from decent_dp.cli.main import COMMANDS, main
from decent_dp.errors import ConfigurationError, TrainingError

from .program import as_user, in_process

ROOT = Path(__file__).parent.parent.parent
HELP = ["--help", "topology --help", "topology list --help", "topology show --help", "topology compare --help",
        *(f"{command} --help" for command in COMMANDS)]  # fmt: skip


@pytest.mark.parametrize("line", HELP)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_help_fits_80_columns(capsys, monkeypatch, line, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ran = in_process(capsys, line)
    assert (ran.code, ran.err) == (0, "")
    assert "decent-dp" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_help_names_every_command_and_exit_code(capsys) -> None:
    out = in_process(capsys, "--help").out
    for name in COMMANDS:
        assert name in out
    document = (ROOT / "docs" / "command-line.md").read_text()
    for code, constant in [(1, "FAILED"), (2, "USAGE"), (130, "INTERRUPTED"), (141, "PIPE")]:
        assert getattr(program, f"EXIT_{constant}") == code
        assert re.search(rf"^  {code} ", out, re.MULTILINE)
        assert f"| {code} |" in document


def test_the_entry_point_and_the_module_are_the_same_program() -> None:
    assert 'decent-dp = "decent_dp.cli.main:main"' in (ROOT / "pyproject.toml").read_text()
    ran = as_user("--version")
    assert ran == (0, f"decent-dp {decent_dp.__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "decent-dp: the following arguments are required: COMMAND; see 'decent-dp --help'"),
        ("topolgy list", "unknown COMMAND 'topolgy', did you mean 'topology'?"),
        ("topology", "required: COMMAND; see 'decent-dp topology --help'"),
        ("topology shwo ring", "did you mean 'show'? Known are 'list', 'show', 'compare'"),
        ("topology show rign --workers 4", "unknown topology 'rign', did you mean 'ring'?"),
        ("topology show ring --worker 4", "unknown option '--worker', did you mean '--workers'?"),
        ("topology show ring --workrs=4", "unknown option '--workrs', did you mean '--workers'?"),
        ("topology show ring --qqqq", "unknown option '--qqqq'; see"),
        ("topology show ring", "required: --workers"),
        ("topology show ring --workers 0", "argument --workers: '0' is no whole number of at least 1"),
        ("topology show ring --workers 4.5", "'4.5' is no whole number"),
        ("topology show ring --workers -4", "argument --workers: "),
        ("topology show ring more --workers 4", "unrecognized arguments: more"),
        ("topology show ring --workers 12 --nodes 5", "give --nodes 3 or 4 or 6"),
        ("topology show torus --workers 7", "'torus' needs a grid"),
        ("topology show ring --workers 4 --draw out.pdf", "must end in .svg or .png"),
        ("topology show ring --workers 5000", "--workers 5000: the command line goes up to 4096"),
        ("topology compare", "--workers is missing"),
        ("topology compare --nodes 3", "--workers is missing"),
        ("topology compare --workers 4 --wire-dtype bflot16", "'bflot16', did you mean 'bfloat16'?"),
        ("topology compare --profile nowhere.json", "profile nowhere.json cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_and_code_2(capsys, line, message) -> None:
    ran = in_process(capsys, line)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.startswith("decent-dp")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigurationError("two\n  lines"), 2, "two lines"),
        (TrainingError("a worker died"), 1, "a worker died"),
        (FileNotFoundError(2, "No such file", "x"), 1, "x: No such file"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_goes_wrong_inside_a_command(capsys, monkeypatch, error, code, message) -> None:
    def run(args) -> None:
        raise error

    broken = types.ModuleType("broken")
    broken.add = lambda subparsers: subparsers.add_parser("broken")  # type: ignore[attr-defined]
    broken.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_command", broken)
    monkeypatch.setitem(COMMANDS, "broken", ("broken_command", "breaks"))
    assert in_process(capsys, "broken") == (code, "", f"decent-dp: {message}\n")


def test_a_reader_that_stops_reading_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "decent_dp", "topology", "list"], stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "topology list",
        "topology show exp --workers 12 --nodes 3",
        "topology compare --workers 8",
    ],
)
def test_torch_is_not_imported(line) -> None:
    code = (
        "import sys; from decent_dp.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["diagram", "main", "output", "parsing", "picture", "topology", "words"])
def test_docstrings_run(name) -> None:
    assert doctest.testmod(importlib.import_module(f"decent_dp.cli.{name}")).failed == 0


DOCUMENT = (ROOT / "docs" / "command-line.md").read_text()
QUOTED = re.findall(r"^    \$ decent-dp (topology .*)\n((?:    .*\n|\n(?=    [^$]))*)", DOCUMENT, re.MULTILINE)


@pytest.mark.parametrize(("line", "quoted"), QUOTED, ids=[line for line, _ in QUOTED])
def test_the_document_quotes_what_is_printed(capsys, line, quoted) -> None:
    ran = in_process(capsys, line)
    expected = re.sub("^    ", "", quoted, flags=re.MULTILINE)
    start = expected.removesuffix(" ...\n")
    assert (ran.out + ran.err).startswith(start)
    assert start != expected or (ran.out + ran.err) == expected


def test_the_document_quotes_every_command() -> None:
    assert {line.split()[1] for line, _ in QUOTED} == {"show", "compare"}


def test_arguments_come_from_the_process_unless_given(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decent-dp", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("decent-dp ")
