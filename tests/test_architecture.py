"""Arrows point down: who may import whom, read from the source."""

import ast
import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import decent_dp

SOURCE = Path(decent_dp.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PUBLIC = [
    "decent_dp",
    "decent_dp.checkpoint",
    "decent_dp.comm",
    "decent_dp.optim",
    "decent_dp.plan",
    "decent_dp.topo",
    "decent_dp.topology",
    "decent_dp.utils",
]


def imports(path, *, typing_only=False):
    """Modules a file names in import statements, without those for type checkers alone."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


#: What each layer may import of this package.
ALLOWED = {
    "errors": set(),
    "topology": {"errors", "topology"},
    "comm": {"errors", "comm", "topology"},
    "optim": {"errors", "optim"},
    "startup": {"errors"},
    "engine": {"errors", "topology", "comm", "engine"},
    "consensus": {"errors", "comm", "engine"},
    "join": {"errors", "comm", "engine"},
    "ddp": {"errors", "topology", "comm", "engine", "consensus", "join", "startup"},
    "checkpoint": {"errors", "consensus", "engine", "ddp", "checkpoint"},
    "topo": {"errors", "topology", "engine"},
    "utils": {"startup"},
    "plan": {"errors", "topology", "comm", "engine", "plan"},
    "simulate": {"errors", "topology", "comm", "ddp", "plan", "simulate"},
    "cli": {"errors", "topology", "plan", "simulate", "startup", "comm", "checkpoint", "cli"},
    "__main__": {"cli"},
    "__init__": {"errors", "topology", "ddp", "startup"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_down(path):
    mine = {name.split(".")[1] for name in imports(path) if name.startswith("decent_dp.")}
    assert mine <= ALLOWED[layer(path)], f"{path} imports {mine - ALLOWED[layer(path)]}"
    external = {name.split(".")[0] for name in imports(path)} - {"decent_dp"} - set(sys.stdlib_module_names)
    relative = path.relative_to(SOURCE).as_posix()
    optional = {"checkpoint/export.py": {"safetensors"}, "cli/picture.py": {"matplotlib"}}.get(relative, set())
    assert external <= {"torch", "numpy"} | optional
    if layer(path) in ("topology", "errors") or relative in ("engine/bucketing.py", "engine/release.py"):
        assert "torch" not in external
    if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in imports(path)):
        # the storage of checkpoints is torch's; it speaks to no other worker
        assert relative in ("comm/torch_communicator.py", "startup.py", "checkpoint/storage.py")
    if "_execution_engine" in path.read_text() or "_current_graph_task_id" in path.read_text():
        assert relative == "engine/hooks.py"
    if "environ" in path.read_text():
        assert relative == "startup.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("name", PUBLIC)
def test_exports_are_sorted_and_exist(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    for export in module.__all__:
        thing = getattr(module, export)
        assert thing.__doc__, f"{name}.{export} has no docstring"


def test_version_and_changelog_agree():
    changelog = SOURCE.parents[1] / "CHANGELOG.md"
    assert f"## {decent_dp.__version__}" in changelog.read_text()
    assert f'version = "{decent_dp.__version__}"' in (SOURCE.parents[1] / "pyproject.toml").read_text()


def test_silent_and_without_work_on_import():
    heavy = ["torch.distributed.checkpoint", "torch.distributed.run", "torch._dynamo", "matplotlib", "rich"]
    code = f"import decent_dp.ddp, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""
    assert logging.getLogger("decent_dp").handlers == []
