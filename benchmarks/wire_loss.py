"""What a narrow wire dtype does to the loss: after equal steps, bf16 and fp16 against fp32, for several seeds.

    python -m benchmarks.wire_loss            exp and complete, 4 workers, 3 seeds, 400 steps; a few minutes
    python -m benchmarks.wire_loss --quick    a few steps, to see that it runs

The workers are virtual ones of one process, so nothing is said of time. A seed fixes start and batches, which are the
same for all dtypes and topologies. The loss is that of the consensus model on held-out text, after the last step.
Rounding parts two runs with the same seed as another order of the batches would, if less; so a difference counts when
its mean over seeds is larger than the standard deviation over seeds with fp32.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import report
from benchmarks.crew import ROOT
from benchmarks.language import Task, batches_of, mean_loss
from benchmarks.record import provenance
from benchmarks.sides import DTYPES

REPORTS = ROOT / "benchmarks" / "reports"
TOPOLOGIES = ("exp", "complete")
WIRES = ("fp32", "bf16", "fp16")
COLORS = {"fp32": "#1f4e79", "bf16": "#c8553d", "fp16": "#5b8c3a"}
_TASK = Task(steps=400, batch=8)
QUICK = {"seeds": 2, "steps": 10, "batch": 2, "width": 32}

LEGEND = (
    "loss: of the consensus model, mean over seeds; sd: standard deviation over seeds; replicas: mean loss of the "
    "replicas; worst: of all replicas and seeds; - fp32: mean over seeds of the difference to fp32 with the same seed; "
    "within: whether that is at most the standard deviation over seeds with fp32."
)


@dataclass(frozen=True, slots=True)
class Run:
    """Losses after the last step: of the consensus model and of each replica, nats per character."""

    topology: str
    wire: str
    seed: int
    consensus: float
    replicas: tuple[float, ...]


def run_once(topology: str, wire: str, seed: int, task: Task, num_workers: int) -> Run:
    """Train virtual workers in turns, one step each."""
    from decent_dp import DecentralizedDataParallel
    from decent_dp.comm import InProcessWorld

    torch.set_num_threads(1)
    corpus, world = task.corpus(), InProcessWorld(num_workers)
    models = [
        DecentralizedDataParallel(
            task.network(corpus, seed),
            task.optim_fn,
            task.lr_scheduler_fn,
            topology=topology,
            bucket_size_in_mb=0.125,
            wire_dtype=DTYPES.get(wire),
            communicator=world.communicator(rank),
            workers_per_node=1,
        )
        for rank in range(num_workers)
    ]
    generators = [batches_of(seed, rank) for rank in range(num_workers)]
    for _ in range(task.steps):
        for model, generator in zip(models, generators, strict=True):
            model(*corpus.batch(task.batch, task.context, generator)).backward()
    validation = list(corpus.validation_batches(task.context, task.windows))
    replicas = tuple(mean_loss(model.module, validation) for model in models)
    mean = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).double().mean(0).float()
    consensus = task.network(corpus, seed)
    vector_to_parameters(mean, consensus.parameters())
    return Run(topology, wire, seed, mean_loss(consensus, validation), replicas)


def measure(
    task: Task,
    *,
    topologies: Sequence[str] = TOPOLOGIES,
    num_workers: int = 4,
    num_seeds: int = 3,
    num_processes: int = 1,
) -> list[Run]:
    """All topologies, dtypes and seeds; several at a time where several processes are given."""
    cases = [(topology, wire, seed) for topology in topologies for wire in WIRES for seed in range(num_seeds)]
    if num_processes == 1:
        return [run_once(*case, task, num_workers) for case in cases]
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_once, *case, task, num_workers) for case in cases]
        return [future.result() for future in futures]


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Numbers of each topology and dtype: loss, sd, replicas, worst, differences to fp32 by seed, within."""
    rows = []
    for topology, wire in dict.fromkeys((run.topology, run.wire) for run in runs):
        mine = [run for run in runs if (run.topology, run.wire) == (topology, wire)]
        wide = [run for run in runs if (run.topology, run.wire) == (topology, "fp32")]
        losses = [run.consensus for run in mine]
        differences = [a.consensus - b.consensus for a, b in zip(mine, wide, strict=True)]
        rows.append(
            {
                "topology": topology,
                "wire": wire,
                "loss": fmean(losses),
                "sd": stdev(losses),
                "replicas": fmean(loss for run in mine for loss in run.replicas),
                "worst": max(loss for run in mine for loss in run.replicas),
                "differences": differences,
                "within": abs(fmean(differences)) <= stdev(run.consensus for run in wide),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Head and a line for each topology and dtype."""
    lines = [["topology, wire", "loss", "sd", "replicas", "worst", "- fp32", "min to max", "within"]]
    for row in rows:
        line = [
            f"{row['topology']}, {row['wire']}",
            *(f"{row[key]:.4f}" for key in ("loss", "sd", "replicas", "worst")),
        ]
        difference = row["differences"]
        if row["wire"] == "fp32":
            line += ["-"] * 3
        else:
            line += [f"{fmean(difference):+.4f}", f"{min(difference):+.4f} to {max(difference):+.4f}"]
            line += ["yes" if row["within"] else "no"]
        lines.append(line)
    return lines


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table says, one sentence for each narrow dtype of each topology."""
    spread = {row["topology"]: row["sd"] for row in rows if row["wire"] == "fp32"}
    return [
        f"{row['topology']}: with {row['wire']} on the wire the loss is {fmean(row['differences']):+.4f} from fp32, "
        f"{'within' if row['within'] else 'beyond'} the {spread[row['topology']]:.4f} between seeds"
        for row in rows
        if row["wire"] != "fp32"
    ]


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """A dot for each seed, a line through those of one seed, a bar at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.topology for run in runs))
    figure, panels = plt.subplots(1, len(names), figsize=(8, 3.8), sharey=True, squeeze=False, layout="constrained")
    for axes, topology in zip(panels[0], names, strict=True):
        mine = [run for run in runs if run.topology == topology]
        for seed in dict.fromkeys(run.seed for run in mine):
            line = [run.consensus for run in mine if run.seed == seed]
            axes.plot(range(len(WIRES)), line, color="#c6c6c6", linewidth=1, zorder=0)
        for position, wire in enumerate(WIRES):
            losses = [run.consensus for run in mine if run.wire == wire]
            axes.plot([position] * len(losses), losses, "o", color=COLORS[wire], markersize=5)
            axes.plot([position - 0.18, position + 0.18], [fmean(losses)] * 2, color="black", linewidth=1.5)
        axes.set_xticks(range(len(WIRES)), WIRES)
        axes.set_xlim(-0.5, len(WIRES) - 0.5)
        axes.set_xlabel(f"wire dtype, topology {topology}")
        axes.grid(alpha=0.3, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("validation loss, nats per character")
    figure.suptitle(f"{title}\ndot: a seed; grey: the same seed; bar: mean", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(runs: Sequence[Run], title: str, facts: dict[str, Any], command: str, stem: Path) -> list[Path]:
    """Write stem.md, stem.json and stem.png; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("md", "json", "png")]
    rows = compare(runs)
    legend = "\n".join([LEGEND, "", *(f"- {sentence}" for sentence in sentences(rows))])
    paths[0].write_text(report.markdown(title, facts, command, table(rows), legend, paths[2].name))
    whole = {"title": title, "command": command, "facts": facts, "rows": rows, "runs": [asdict(run) for run in runs]}
    paths[1].write_text(json.dumps(whole, indent=1) + "\n")
    draw(runs, title, paths[2])
    return paths


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--topologies", nargs="+", default=list(TOPOLOGIES), metavar="NAME", help="exp and complete")
    add("--workers", type=int, default=4, help="virtual workers (4)")
    add("--seeds", type=int, default=3, help="at least 2 (3)")
    add("--steps", type=int, default=_TASK.steps, help=f"of every worker ({_TASK.steps})")
    add("--batch", type=int, default=_TASK.batch, help=f"windows of a worker and step ({_TASK.batch})")
    add("--width", type=int, default=_TASK.width, help=f"of the model; the demo's is 128 ({_TASK.width})")
    add("--data", metavar="FILE", help="another text; its last tenth is held out")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time (as many as cores)")
    add("--quick", action="store_true", help="tiny settings, to see that it runs; they replace those given")
    add("--output", type=Path, default=REPORTS, help="folder of the report, JSON and picture")
    add("--name", default="wire-loss", help="of these files, after the date (wire-loss)")
    add("--no-report", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in QUICK.items():
            setattr(options, name, value)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a spread needs at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Run, print, write."""
    options = parse(arguments)
    task = Task(steps=options.steps, batch=options.batch, width=options.width, text=options.data)
    counts = {"num_workers": options.workers, "num_seeds": options.seeds, "num_processes": options.processes}
    runs = measure(task, topologies=options.topologies, **counts)
    num_parameters = sum(p.numel() for p in task.network(task.corpus(), 0).parameters())
    facts = {
        "date": datetime.date.today().isoformat(),
        "workers": f"{options.workers} virtual workers of one process",
        "model": f"the demo's GPT with width {task.width} (demo: 128), {task.num_layers} blocks (3), {task.num_heads} "
        f"heads (4): {num_parameters:,} parameters",
        "data": f"{options.data or 'the works of Shakespeare, as in the demo'}; every worker takes {task.batch} "
        f"windows of {task.context} characters a step (demo: 4 of 64)",
        "optimizer": f"the demo's AdamW; learning rate up to {task.lr:g} in {task.steps // 10} steps, then a cosine "
        f"down to step {task.steps}",
        "loss": f"after step {task.steps}, on {task.windows} held-out windows",
        "seeds": f"{options.seeds}, of start and batches, the same for all",
        **provenance(),
    }
    title = f"Loss after {task.steps} steps of {options.workers} workers, by wire dtype"
    rows = compare(runs)
    lines = [title, *(f"{name}: {value}" for name, value in facts.items()), ""]
    print("\n".join([*lines, *report.aligned(table(rows)), "", LEGEND, "", *sentences(rows)]))
    if not options.no_report:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "-m", "benchmarks.wire_loss", *given])
        stem = options.output / f"{facts['date']}-{options.name}"
        for path in write(runs, title, facts, command, stem):
            print(f"wrote {path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path}")
    return runs


if __name__ == "__main__":
    main()
