"""Test ids as documents and tables write them: ``tests/test_backward.py::test_forward_...``."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """The test functions of a file, found without running it."""
    tree = ast.parse((ROOT / file).read_text())
    functions = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in functions if name.startswith("test_"))


def exists(test_id: str) -> bool:
    """Whether there is a test of that id; parameters in brackets are not looked at."""
    file, _, name = test_id.partition("::")
    return (ROOT / file).is_file() and name.partition("[")[0] in names_of_tests(file)
