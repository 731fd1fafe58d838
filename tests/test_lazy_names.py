"""Public names load on first use, and stay what they were for readers and type checkers."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import decent_dp


def test_names_for_type_checkers_are_the_names_that_load() -> None:
    tree = ast.parse(Path(decent_dp.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        seen |= {alias.name: node.module for alias in node.names}
    assert sorted(seen) == decent_dp.__all__
    for name, module in seen.items():
        assert getattr(decent_dp, name) is getattr(importlib.import_module(module), name)


def test_names_are_listed_and_unknown_ones_refused() -> None:
    assert set(decent_dp.__all__) | {"ddp", "topology"} <= set(dir(decent_dp))
    with pytest.raises(AttributeError, match="'decent_dp' has no attribute 'Toplogy'"):
        _ = decent_dp.Toplogy  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Toplogy'"):
        from decent_dp import Toplogy  # type: ignore[attr-defined] # noqa: F401


def test_topologies_load_without_torch_and_the_rest_on_first_use() -> None:
    code = (
        "import sys, decent_dp\n"
        "decent_dp.Layout(4, 2), decent_dp.TopologyError, decent_dp.topology.analysis\n"
        "assert 'torch' not in sys.modules\n"
        "assert decent_dp.ddp.DecentralizedDataParallel is decent_dp.DecentralizedDataParallel\n"
        "namespace = {}\n"
        "exec('from decent_dp import *', namespace)\n"
        "assert set(decent_dp.__all__) <= set(namespace)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
