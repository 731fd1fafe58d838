"""The page that answers "which one do I use?": each of its tables stands under the command that makes it."""

import importlib.util
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_choosing", DOCS / "make_choosing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_made_by_a_command(script):
    text = (DOCS / "choosing.md").read_text(encoding="utf-8")
    commands = []
    made = script.regenerate(text, lambda command: commands.append(command) or "TABLE")
    assert len(commands) == text.count(script.BEGIN) == text.count(script.END) == made.count("TABLE") > 8
    assert "| --- |" not in made


def test_the_tables_are_of_the_topologies_that_were_asked_for(script):
    text = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for block in script._BLOCK.finditer(text):
        words = shlex.split(block[1].replace("\\\n", " "))
        asked = [word for before, word in pairwise(words) if before == "--topology"]
        rows = [line.split("|")[1].strip(" `") for line in block[0].splitlines() if line.startswith("| `")]
        assert rows == asked


def test_a_table_is_what_the_command_prints(script):
    made = script.run("    $ decent-dp simulate --workers 3 --dimension 4 \\\n        --steps 2 --topology ring\n\n")
    assert made.splitlines()[0] == "| topology | distance | noise factor |"
