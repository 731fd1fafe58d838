"""A worker process: joins the process group, then calls the functions it is told to, one JSON line each way.

Started by `benchmarks.crew`, in the virtual environment of this library or of the published package: nothing here
may import more than torch.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer requests ``{"function": "module:name", "arguments": {...}}`` until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # a killed parent leaves nobody behind
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    state: dict[str, Any] = {}
    print(json.dumps({"result": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        print(json.dumps({"result": function(state, **request["arguments"])}), file=replies, flush=True)
    os._exit(0)  # connections end with the process; a tidy end would only have the workers wait for each other


if __name__ == "__main__":
    main()
