"""``decent-dp simulate``: topologies on virtual workers and a simulated clock."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decent_dp.cli.output import print_json
from decent_dp.cli.parsing import count, layout_of, seed
from decent_dp.errors import ConfigurationError

if TYPE_CHECKING:
    from decent_dp.plan import Profile
    from decent_dp.simulate import Run, Times
    from decent_dp.topology import AnyTopology, Layout

PROBLEMS = ("consensus", "digits", "least-squares", "logistic", "noise")
OPTIMIZERS = ("sgd", "momentum", "adamw")
_ALL_REDUCE = "all-reduce"
_CLOCK = ("compute_ms", "parameters", "bandwidth_mbit", "latency_ms", "inside_bandwidth_mbit")

_EPILOG = """\
The clock runs with --profile, or with --compute-ms, --parameters and
--bandwidth-mbit. Without either there are steps and no times.

examples:
  decent-dp simulate --workers 16 --topology exp --topology ring
  decent-dp simulate --problem least-squares --workers 24 --topology base-2 \\
      --topology ring --plot curves.png --output curves.csv
  decent-dp simulate --clock-only --workers 64 --nodes 8 --compute-ms 300 \\
      --parameters 65M --bandwidth-mbit 10000 --jitter 0.1 --topology exp \\
      --topology alternating-exp-ring --topology all-reduce
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="train virtual workers on a small problem, under a simulated clock",
        description="Virtual workers in one process train a small problem with the\nlibrary's own step; a clock says "
        "when the steps would end on a cluster.",
        epilog=_EPILOG,
    )
    add_argument = parser.add_argument
    add_argument("--workers", type=count, metavar="N", help="workers in all (16, or those of the profile)")
    add_argument("--nodes", type=count, metavar="M", help="nodes they share, equally many on each (1)")
    add_argument("--topology", action="append", metavar="NAME", help="a topology, or all-reduce; may be repeated (exp)")
    add_argument("--steps", type=count, default=200, metavar="N", help="steps of every worker (200)")
    add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (0)")

    problem = parser.add_argument_group("problem").add_argument
    problem("--problem", choices=PROBLEMS, metavar="NAME", default="noise", help=f"{', '.join(PROBLEMS)} (noise)")
    problem("--optimizer", choices=OPTIMIZERS, metavar="NAME", default="sgd", help="sgd, momentum or adamw (sgd)")
    problem("--lr", type=float, metavar="X", help="learning rate (one that suits problem and sgd)")
    problem("--dimension", type=count, metavar="N", help="coordinates of a replica")
    problem("--noise", type=float, metavar="X", help="standard deviation of the noise of a gradient")
    problem("--heterogeneity", type=float, metavar="X", help="how different the workers' data are; 0: alike")
    problem("--target", type=float, metavar="LOSS", help="report when the consensus has this loss")
    problem("--every", type=count, metavar="N", help="steps between two measurements (steps / 100)")
    problem("--clock-only", action="store_true", help="train nothing, say what a step takes")

    clock = parser.add_argument_group("clock").add_argument
    clock("--profile", metavar="FILE", help="what 'decent-dp measure' has written")
    clock("--compute-ms", type=float, metavar="MS", help="forward, backward and update")
    clock("--parameters", metavar="N", help="of the model, float32: 65M, 1.3B")
    clock("--bandwidth-mbit", type=float, metavar="X", help="of the link of a node, each way")
    clock("--inside-bandwidth-mbit", type=float, metavar="X", help="of a worker, in its node (10 times that)")
    clock("--latency-ms", type=float, metavar="MS", help="of a message (0)")
    clock("--jitter", type=float, metavar="CV", help="coefficient of variation of compute (0)")
    clock("--slow-rank", type=int, metavar="RANK", help="a worker that is always slow")
    clock("--slow-factor", type=float, metavar="X", help="how many times the compute it takes (1.3)")

    output = parser.add_argument_group("output").add_argument
    output("--output", metavar="FILE", help="write every measurement to FILE.csv or FILE.json")
    output("--plot", metavar="FILE", help="draw the curves to FILE.png")
    output("--json", action="store_true", help="print JSON")
    output("--markdown", action="store_true", help="print the table for a page of documentation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from decent_dp.simulate import Run
    from decent_dp.simulate.report import as_dict, as_markdown, as_text

    _check(args)
    profile, layout = _cluster(args)
    runs: list[Run] = []
    for name, topology in _topologies(args, layout):
        times = None if profile is None else _times(args, topology, profile, layout)
        if args.clock_only:
            assert times is not None
            runs.append(Run(name, step_s=times.step_s))
        else:
            runs.append(_train(args, name, topology, times, layout.num_workers))
        if sys.stderr.isatty():
            print(f"{name} done", file=sys.stderr)
    _write(args, runs, layout)
    if args.json:
        print_json({"num_workers": layout.num_workers, "num_nodes": layout.num_nodes, "runs": as_dict(runs)})
    elif args.markdown:
        print(as_markdown(runs, args.target))
    else:
        what = "the clock alone" if args.clock_only else args.problem
        print(f"{what}: {layout.num_workers} workers on {layout.num_nodes} nodes, {args.steps} steps\n")
        print(as_text(runs, args.target))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse early what would be found out late."""
    for name in ("lr", "noise", "heterogeneity", "target", "jitter", "slow_factor", *_CLOCK):
        value = getattr(args, name)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value:g}; give a number of at least 0")
    if args.output is not None and Path(args.output).suffix not in (".csv", ".json"):
        raise ConfigurationError(f"--output is {args.output}; give a file that ends in .csv or .json")
    if args.json and args.markdown:
        raise ConfigurationError("--json and --markdown both say how to print; give one of them")
    if args.slow_factor is not None and args.slow_rank is None:
        raise ConfigurationError("--slow-factor says how slow, and nobody is; give --slow-rank RANK as well")
    for name in ("plot", "output"):
        path = getattr(args, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigurationError(f"--{name} is {path}; the folder does not exist: make it, or give another")
    if args.plot is not None:
        from decent_dp.simulate.chart import check_path

        check_path(args.plot)
        if args.clock_only:
            raise ConfigurationError("--plot shows what changes from step to step, which --clock-only has not")
    if args.target is not None and (args.clock_only or args.problem in ("noise", "consensus")):
        raise ConfigurationError("--target is a loss to reach, and here there is none; give another --problem")


def _cluster(args: argparse.Namespace) -> tuple[Profile | None, Layout]:
    """The profile of the clock, or None, and the workers."""
    from decent_dp.cli.measure import parse_count
    from decent_dp.plan import Profile
    from decent_dp.simulate import cluster, with_stragglers

    given = [name for name in _CLOCK if getattr(args, name) is not None]
    profile = None
    if args.profile is not None:
        if given:
            raise ConfigurationError(f"--profile says what --{given[0].replace('_', '-')} says; give one of them")
        profile = Profile.load(args.profile)
        if args.workers is None:
            args.workers, args.nodes = profile.num_workers, args.nodes or profile.layout.num_nodes
    args.workers = args.workers or 16
    layout = layout_of(args)
    if given:
        missing = [name for name in _CLOCK[:3] if getattr(args, name) is None]
        if missing:
            wanted = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigurationError(f"--{given[0].replace('_', '-')} is for a clock, which needs {wanted} as well")
        inside = args.inside_bandwidth_mbit
        profile = cluster(
            layout,
            compute_s=args.compute_ms / 1000,
            num_parameters=parse_count(args.parameters),
            bytes_per_s=args.bandwidth_mbit * 125_000,
            latency_s=(args.latency_ms or 0.0) / 1000,
            inside_bytes_per_s=None if inside is None else inside * 125_000,
        )
    if profile is not None:
        slow = args.slow_factor if args.slow_factor is not None else 1.3
        straggle = {"jitter": args.jitter, "slow_rank": args.slow_rank, "slow_factor": slow}
        return with_stragglers(profile, layout=layout, **straggle), layout
    for name in ("jitter", "slow_rank"):
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for a clock; give --profile or --compute-ms, ...")
    if args.clock_only:
        raise ConfigurationError("--clock-only needs --profile, or --compute-ms, --parameters and --bandwidth-mbit")
    return None, layout


def _topologies(args: argparse.Namespace, layout: Layout) -> list[tuple[str, AnyTopology | None]]:
    """Names and topologies; None for all-reduce."""
    from decent_dp.topology import build

    names = list(dict.fromkeys(args.topology or ["exp"]))
    return [(name, None if name == _ALL_REDUCE else build(name, layout)) for name in names]


def _times(args: argparse.Namespace, topology: AnyTopology | None, profile: Profile, layout: Layout) -> Times:
    from decent_dp.simulate import run_clock

    return run_clock(topology, profile, args.steps, seed=args.seed, layout=layout)


def _train(
    args: argparse.Namespace, name: str, topology: AnyTopology | None, times: Times | None, num_workers: int
) -> Run:
    from torch.optim import SGD, AdamW

    from decent_dp.simulate import build_problem, simulate

    options = {"dimension": args.dimension, "noise": args.noise, "heterogeneity": args.heterogeneity}
    problem = build_problem(args.problem, num_workers, args.seed, **options)
    lr = args.lr if args.lr is not None else problem.lr
    optim_fn: Any = {
        "sgd": partial(SGD, lr=lr, foreach=False),
        "momentum": partial(SGD, lr=lr, momentum=0.9, foreach=False),
        "adamw": partial(AdamW, lr=lr, weight_decay=0.0, foreach=False),
    }[args.optimizer]
    return simulate(problem, topology, optim_fn, args.steps, name=name, every=args.every, times=times)


def _write(args: argparse.Namespace, runs: list[Run], layout: Layout) -> None:
    from decent_dp.simulate.chart import draw
    from decent_dp.simulate.report import as_csv, as_json

    if args.output is not None:
        text = as_csv(runs) if args.output.endswith(".csv") else as_json(runs)
        Path(args.output).write_text(text, encoding="utf-8")
    if args.plot is not None:
        title = f"{args.problem}, {layout.num_workers} workers on {layout.num_nodes} nodes"
        draw(runs, args.plot, title)
