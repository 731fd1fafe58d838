"""What is written down of every measurement: where and with what it was made, and its result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.crew import ROOT


def provenance() -> dict[str, str]:
    """Hardware, versions and commit."""
    import decent_dp  # here: this file is also read where that is the published package

    return {
        "hardware": hardware(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "GPU": _gpu(),
        "decent_dp": decent_dp.__version__,
        "commit": commit(),
    }


def _gpu() -> str:
    """What benchmarks here do not use, and whether the tests that need it could run."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, not used by this benchmark"
    return "none was available; the tests marked gpu were not run"


def hardware() -> str:
    """Processor, cores this process may use, memory."""
    model = "unknown processor"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, StopIteration, ValueError):
        return model
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB"


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changes = _git("status", "--porcelain", "src", "benchmarks", ":!benchmarks/reports")
    return f"{head} with changes" if changes else head


def show(name: str, result: Mapping[str, Any], sentence: str) -> None:
    """Print a result as one JSON line and one line to read."""
    print(json.dumps({"benchmark": name, **result}))
    print(f"{name}: {sentence}")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
