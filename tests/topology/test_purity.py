"""The topology layer knows neither torch nor anything above it; its docstrings are run."""

import ast
import doctest
import importlib
import sys
from pathlib import Path

import pytest

import decent_dp.topology

FOLDER = Path(decent_dp.topology.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_point_down(path: Path) -> None:
    for module in imported_modules(path):
        if module.split(".")[0] == "decent_dp":
            assert module == "decent_dp.errors" or module.startswith("decent_dp.topology")
        else:
            assert module.split(".")[0] in sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_docstrings_run(path: Path) -> None:
    module = importlib.import_module(f"decent_dp.topology.{path.stem}".removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.failed == 0


def test_every_public_name_is_documented_and_listed_in_order() -> None:
    public = decent_dp.topology.__all__
    assert sorted(public) == sorted(set(public))
    for name in public:
        assert name in ("Plan", "Row") or getattr(decent_dp.topology, name).__doc__


BUILDERS = [
    "alternating_exp_ring",
    "base_graph",
    "complete",
    "exp",
    "from_edges",
    "from_function",
    "from_matrices",
    "hypercube",
    "random_matching",
    "ring",
    "static_exp",
    "static_ring",
    "torus",
]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_says_its_cost_an_example_and_its_source(name: str) -> None:
    text = getattr(decent_dp.topology, name).__doc__
    for part in ("Cost:", ">>> ", "Reference"):
        assert part in text
