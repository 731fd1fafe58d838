"""``decent-dp measure``: the times of a model and of the network on the user's own processes, into a profile."""

from __future__ import annotations

import argparse
import datetime
import importlib
import platform
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decent_dp.cli.parsing import count
from decent_dp.comm import TorchCommunicator
from decent_dp.errors import ConfigurationError
from decent_dp.plan import Compute, Profile
from decent_dp.plan.measure import assume_model, measure, time_model
from decent_dp.startup import default_workers_per_node, initialize_dist

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}

_MEASURE = """\
Times forward, backward and update of a model, and what the network gives each
pattern of traffic, on the processes that will train. Writes a profile for
'decent-dp plan'.
"""

_EPILOG = """\
Start it as training is started, with all workers:
  torchrun --nproc-per-node 4 -m decent_dp measure --model my_project:make
  torchrun --nproc-per-node 4 -m decent_dp measure --parameters 65M \\
      --compute-ms 300
A factory returns (model, loss): a torch.nn.Module on its device, and a function
that takes it, runs the forward of one step and returns the loss.
"""


def add(subparsers: Any) -> None:
    """Add ``measure``."""
    parser = subparsers.add_parser(
        "measure", help="time a model and the network, under torchrun", description=_MEASURE, epilog=_EPILOG
    )
    parser.add_argument("--model", metavar="PATH", help="PACKAGE.MODULE:FACTORY of (model, loss)")
    parser.add_argument("--parameters", metavar="N", help="instead of a model: how many, as 65M")
    parser.add_argument("--compute-ms", type=float, metavar="MS", help="and what its forward and backward take")
    parser.add_argument("--optimizer", default="AdamW", metavar="NAME", help="of torch.optim, with defaults (AdamW)")
    parser.add_argument("--bucket-mb", type=float, default=25, metavar="MB", help="size of a bucket (25)")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="timed steps of the model (20)")
    parser.add_argument("--workers-per-node", type=count, metavar="L", help="as the launcher says, unless given")
    parser.add_argument("--output", default="profile.json", metavar="FILE", help="the profile (profile.json)")
    parser.add_argument("--json", action="store_true", help="print the profile")


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 writes and prints."""
    _check(args)
    folder = Path(args.output).resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(f"--output {args.output}: there is no folder {folder}; make it first")
    build = _model(args.model) if args.model else None
    rank, num_workers = initialize_dist()
    per_node = args.workers_per_node or default_workers_per_node(num_workers)
    communicator = TorchCommunicator()

    def say(what: str) -> None:
        if rank == 0:
            print(f"measuring {what}", file=sys.stderr, flush=True)

    optim_fn = partial(_optimizer, args.optimizer)
    compute: Callable[[], tuple[Compute, int, torch.device]]
    if build is not None:
        model, loss = build()
        compute = partial(
            time_model,
            *(communicator, model, loss, optim_fn),
            bucket_size_in_mb=args.bucket_mb,
            num_steps=args.steps,
            say=say,
        )
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        compute = partial(
            assume_model,
            *(communicator, parse_count(args.parameters), args.compute_ms / 1000, optim_fn, device),
            bucket_size_in_mb=args.bucket_mb,
            say=say,
        )
    what = args.model or f"{args.parameters} parameters, {args.compute_ms:g} ms of compute given"
    notes = {
        "date": datetime.date.today().isoformat(),
        "model": what,
        "optimizer": args.optimizer,
        "torch": torch.__version__,
        "machine of rank 0": platform.machine(),
    }
    profile = measure(communicator, per_node, compute, notes, say)
    if rank == 0:
        profile.save(args.output)
        print(profile.to_json() if args.json else "\n".join(as_text(profile, args.output)))
    communicator.close()
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.parameters is None):
        raise ConfigurationError("give either --model PATH, or --parameters N with --compute-ms MS")
    if (args.parameters is None) != (args.compute_ms is None):
        raise ConfigurationError("--parameters N and --compute-ms MS go together; a --model is timed instead")
    if args.parameters is not None:
        parse_count(args.parameters)
        if not 0 <= args.compute_ms < 1e9:
            raise ConfigurationError(f"--compute-ms is {args.compute_ms:g}; give milliseconds, at least 0")
    if not args.bucket_mb > 0 or args.steps < 2:
        raise ConfigurationError(
            f"--bucket-mb is {args.bucket_mb:g} and --steps {args.steps}; give more than 0 and at least 2"
        )
    _optimizer(args.optimizer, [("probe", torch.nn.Parameter(torch.zeros(1)))])


def parse_count(text: str) -> int:
    """A number of parameters: 65M, 1.3B, 4000.

    Raises:
        ConfigurationError: If it is none.

    Example:
        >>> parse_count("65M"), parse_count("1.3b"), parse_count("4000")
        (65000000, 1300000000, 4000)
    """
    parsed = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMBG]?)", text.strip().upper())
    count = round(float(parsed[1]) * _UNITS[parsed[2]]) if parsed else 0
    if not 1 <= count <= 10**13:
        raise ConfigurationError(f"--parameters is {text!r}; give a number with or without K, M or B, as 65M")
    return count


def _model(path: str) -> Callable[[], tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]]:
    """Find a factory, and return a function that calls it and checks what it gives."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"--model is {path!r}; give PACKAGE.MODULE:FACTORY, as my_project.models:small")
    if "" not in sys.path:
        sys.path.insert(0, "")  # an installed command does not look where it is started, as python -m does
    try:
        factory: Any = importlib.import_module(module_name)
        for part in name.split("."):
            factory = getattr(factory, part)
    except Exception as error:
        raise ConfigurationError(
            f"--model {path}: {type(error).__name__}: {error}; the module must be importable from "
            "here, and have the factory"
        ) from error

    def build() -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        made = factory()
        if not (
            isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])
        ):
            raise ConfigurationError(
                f"--model {path}: the factory returned {type(made).__name__}; it must return (model, loss), a "
                "torch.nn.Module and a function that takes the model, runs one forward and returns the loss"
            )
        return made

    return build


def _optimizer(name: str, parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    found = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    kind = found.get(name.lower())
    if kind is None or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        raise ConfigurationError(f"--optimizer is {name!r}; give the name of a class in torch.optim, as AdamW or SGD")
    return kind([parameter for _, parameter in parameters])  # type: ignore[call-arg]


def as_text(profile: Profile, path: str) -> list[str]:
    """Lines for a terminal, at most 80 columns wide."""
    compute = profile.compute
    lines = [
        f"wrote {path}: {profile.num_workers} workers on {profile.layout.num_nodes} nodes, "
        f"{profile.num_bytes / 2**20:.1f} MiB of parameters",
        "",
        f"{'forward':<22}{1000 * compute.forward_s:>10.2f} ms",
        f"{'backward':<22}{1000 * compute.backward_s:>10.2f} ms",
        f"{'update':<22}{1000 * compute.update_s:>10.2f} ms",
        f"{'mixing':<22}{1000 * compute.mix_s:>10.2f} ms",
        f"{'slowest worker':<22}{max(compute.worker_factors):>10.2f} times the mean",
        "",
        f"{'pattern':<22}{'latency ms':>13}{'MB/s a worker':>16}",
    ]
    for name in profile.network.__dataclass_fields__:
        rate = getattr(profile.network, name)
        if rate is not None:
            lines.append(f"{name:<22}{1000 * rate.latency_s:>13.3f}{rate.bytes_per_s / 1e6:>16.1f}")
    return [*lines, "", f"next: decent-dp plan --profile {path}"]
