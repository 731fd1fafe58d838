"""Time to a validation loss: the demo's model on its text, on several hosts with shaped links, for all sides.

    python -m benchmarks.time_to_loss            4 hosts, 50 Mbit/s, loss 2.0, 3 seeds; about 10 minutes
    python -m benchmarks.time_to_loss --quick    a few steps, to see that it runs

All sides train the same model from the same start on the same batches with AdamW and the same learning rates, all three
fixed by the seed. The clock runs while they train: a segment of it begins at a common start and ends when the slowest
worker has taken the last step and nothing travels any more. So no side sends while the clock stands still, for which a
decentralized one pays with the overlap of one step a segment. It stands still while the loss is measured. What counts
is the loss of the consensus model, which for torch DDP is every replica; the losses of the replicas are measured beside
it. When the target is passed is interpolated between two measurements.

The demo as it is takes some 650 steps to loss 2.0, with 2.4 MiB in every transfer: most of an hour for all sides and
seeds. The default is its model with half the width and two blocks, trained with four times its batch. A transfer is
then small enough to gain from the 64 KiB that a shaped uplink lets through at once after a pause, which is for the good
of sides that pause it: torch DDP, during forward and backward. The schedule has more steps than the fastest side needs,
since it is the same for all: with --steps 500 the learning rate is down before the decentralized sides arrive.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import report
from benchmarks.crew import ROOT, Crew
from benchmarks.lab import Lab
from benchmarks.language import Task
from benchmarks.limits import host_bytes
from benchmarks.record import provenance

REPORTS = ROOT / "benchmarks" / "reports"
_TASK = Task()
SIDES = ("ours:exp", "ours:exp:bf16", "ddp", "ddp-fp16")
COLORS = ("#1f4e79", "#4fa3d1", "#c8553d", "#eda35a")
QUICK = {"target": 3.9, "seeds": 2, "steps": 12, "every": 4, "windows": 8, "rate_mbit": 400.0, "width": 32}


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: steps and seconds up to it; losses of the consensus model, replicas' mean and the worst one."""

    step: int
    seconds: float
    consensus: float
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Run:
    """One side with one seed.

    Attributes:
        side: Its name.
        seed: Of start and batches.
        points: In order of steps; the last is the first with all replicas at the target, or at the last step.
        average_s: Seconds of averaging all replicas once, outside the clock.
    """

    side: str
    seed: int
    points: tuple[Point, ...]
    average_s: float

    @property
    def ms(self) -> float:
        """Clock over steps."""
        return 1000 * self.points[-1].seconds / self.points[-1].step

    def reached(self, target: float, loss: str = "consensus") -> tuple[float, float]:
        """Seconds and steps at which a loss passed the target, between two measurements; infinite if it never did."""
        before = None
        for point in self.points:
            value = getattr(point, loss)
            if value <= target:
                if before is None:
                    return point.seconds, float(point.step)
                part = (getattr(before, loss) - target) / (getattr(before, loss) - value)
                seconds = before.seconds + part * (point.seconds - before.seconds)
                return seconds, before.step + part * (point.step - before.step)
            before = point
        return math.inf, math.inf


def run_once(crew: Crew, side: str, seed: int, task: Task, target: float, every: int, bucket_mib: float) -> Run:
    """Train until the consensus model and every replica are at the target, or to the last step."""
    crew.call("benchmarks.language:build", side=side, seed=seed, task=asdict(task), bucket_mib=bucket_mib)
    points: list[Point] = []
    step, seconds = 0, 0.0
    while True:
        replies = crew.call("benchmarks.language:evaluate")
        consensus = fmean(reply["share"] for reply in replies)
        replicas = [reply.get("replica", consensus) for reply in replies]
        points.append(Point(step, seconds, consensus, fmean(replicas), max(replicas)))
        if max(consensus, *replicas) <= target or step == task.steps:
            break
        num_steps = min(every, task.steps - step)
        seconds += max(crew.call("benchmarks.language:train", num_steps=num_steps))
        step += num_steps
    average_s = max(crew.call("benchmarks.language:average"))
    return Run(side, seed, tuple(points), average_s)


def measure(
    lab: Lab,
    task: Task,
    *,
    sides: Sequence[str] = SIDES,
    num_seeds: int = 3,
    target: float = 2.0,
    every: int = 20,
    bucket_mib: float = 0.0625,
    say: bool = False,
) -> tuple[list[Run], int]:
    """All sides with all seeds, seed by seed.

    Returns:
        The runs, and the number of parameters.
    """
    arguments = {"task": asdict(task), "bucket_mib": bucket_mib}
    runs = []
    with Crew(lab) as crew:
        for side in sides:  # what a process does for the first time is nobody's time
            num_parameters = crew.call("benchmarks.language:build", side=side, seed=0, **arguments)[0]
            crew.call("benchmarks.language:train", num_steps=3)
        for seed in range(num_seeds):
            for side in sides[seed % len(sides) :] + sides[: seed % len(sides)]:
                run = run_once(crew, side, seed, task, target, every, bucket_mib)
                runs.append(run)
                if say:
                    seconds, steps = run.reached(target)
                    last = run.points[-1]
                    print(
                        f"seed {seed} {side}: {seconds:.1f} s, {steps:.0f} steps, {run.ms:.0f} ms/step; at step "
                        f"{last.step} consensus {last.consensus:.3f}, worst {last.worst:.3f}",
                        file=sys.stderr,
                        flush=True,
                    )
    return sorted(runs, key=lambda run: sides.index(run.side)), num_parameters


# -------------------------------------------------------------------- the report

LEGEND = (
    "Medians over seeds, and from the lowest to the highest seed. s, steps: on the clock until the consensus model (of "
    "torch DDP: every replica) is at the target; x DDP: median of s over that of torch DDP; s, all replicas: until the "
    "worst replica is at the target as well; last loss: of the consensus model where the run stopped, which it does at "
    "the target or at the end of the schedule; ms/step: clock over steps, whole run."
)


def _name(side: str) -> str:
    name = side.replace("ours:", "decent_dp ").replace(":", ", ")
    return name.replace("ddp-fp16", "torch DDP, fp16 hook") if name != "ddp" else "torch DDP"


def _span(values: Sequence[float], digits: int) -> list[str]:
    """Median and range as text; what was not reached is infinite."""
    low, middle, high = (
        f"{value:.{digits}f}" if math.isfinite(value) else "not reached"
        for value in (min(values), median(values), max(values))
    )
    return [middle, f"{low} to {high}" if math.isfinite(min(values)) else "-"]


def table(runs: Sequence[Run], target: float) -> list[list[str]]:
    """Head and a line per side."""
    lines = [["side", "s", "min to max", "x DDP", "steps", "min to max", "s, all replicas", "last loss"]]
    lines[0] += ["ms/step", "min to max"]
    names = list(dict.fromkeys(run.side for run in runs))
    seconds = {side: [run.reached(target)[0] for run in runs if run.side == side] for side in names}
    base = median(seconds.get("ddp", [math.inf]))
    for side in names:
        mine = [run for run in runs if run.side == side]
        ratio = median(seconds[side]) / base
        lines.append(
            [
                _name(side),
                *_span(seconds[side], 1),
                f"{ratio:.2f}" if 0 < ratio < math.inf else "-",
                *_span([run.reached(target)[1] for run in mine], 0),
                _span([run.reached(target, "worst")[0] for run in mine], 1)[0],
                f"{median(run.points[-1].consensus for run in mine):.3f}",
                *_span([run.ms for run in mine], 0),
            ]
        )
    return lines


def draw(runs: Sequence[Run], target: float, title: str, path: Path) -> None:
    """Loss of the consensus model over seconds and over steps; a colour a side, a line a seed, dots at the target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    colors = dict(zip(dict.fromkeys(run.side for run in runs), COLORS, strict=False))
    for index, (axes, unit) in enumerate(zip(panels, ("seconds", "step"), strict=True)):
        labelled = set()
        for run in runs:
            axes.plot(
                [getattr(point, unit) for point in run.points],
                [point.consensus for point in run.points],
                color=colors[run.side],
                linewidth=1,
                label=None if run.side in labelled else _name(run.side),
            )
            axes.plot(run.reached(target)[index], target, "o", color=colors[run.side], markersize=5)
            labelled.add(run.side)
        axes.axhline(target, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    losses = [point.consensus for run in runs for point in run.points]
    panels[0].set_ylim(min([*losses, target]) - 0.03, min(max(losses), target + 0.8))
    panels[0].set_ylabel("validation loss, nats per character")
    panels[0].set_xlabel("seconds, without those of the measurements")
    panels[1].set_xlabel("steps of every worker")
    for handle in panels[1].legend(frameon=False, fontsize=9).get_lines():
        handle.set_linewidth(2.5)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(
    runs: Sequence[Run], target: float, title: str, facts: dict[str, Any], command: str, stem: Path
) -> list[Path]:
    """Write stem.md, stem.json and stem.png; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("md", "json", "png")]
    paths[0].write_text(report.markdown(title, facts, command, table(runs, target), LEGEND, paths[2].name))
    whole = {"title": title, "command": command, "facts": facts, "target": target}
    paths[1].write_text(json.dumps({**whole, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    draw(runs, target, title, paths[2])
    return paths


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="number of hosts, a worker on each (4)")
    add("--rate-mbit", type=float, default=50, help="uplink of a host in Mbit/s; 0 does not shape (50)")
    add("--loopback", action="store_true", help="no namespaces, even as root")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="all of them when not given")
    add("--target", type=float, default=2.0, help="loss in nats per character (2.0)")
    add("--seeds", type=int, default=3, help="runs of a side (3)")
    add("--every", type=int, default=20, help="steps between measurements (20)")
    add("--bucket-mib", type=float, default=0.0625, help="size of a bucket, of all sides (0.0625)")
    add("--steps", type=int, default=_TASK.steps, help=f"schedule and most steps of a run ({_TASK.steps})")
    add("--batch", type=int, default=_TASK.batch, help=f"windows of a worker and step ({_TASK.batch})")
    add("--width", type=int, default=_TASK.width, help=f"of the model; the demo's is 128 ({_TASK.width})")
    add("--layers", type=int, default=_TASK.num_layers, help=f"of the model; the demo has 3 ({_TASK.num_layers})")
    add("--lr", type=float, default=_TASK.lr, help=f"highest learning rate ({_TASK.lr})")
    add("--windows", type=int, default=_TASK.windows, help=f"held-out windows to measure on ({_TASK.windows})")
    add("--data", metavar="FILE", help="another text; its last tenth is held out")
    add("--quick", action="store_true", help="tiny settings, to see that it runs; they replace those given")
    add("--output", type=Path, default=REPORTS, help="folder of the report, JSON and picture")
    add("--name", default="time-to-loss", help="of these files, after the date (time-to-loss)")
    add("--no-report", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in QUICK.items():
            setattr(options, name, value)
    return options


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Run, print, write."""
    options = parse(arguments)
    task = Task(
        steps=options.steps,
        width=options.width,
        num_layers=options.layers,
        batch=options.batch,
        lr=options.lr,
        windows=options.windows,
        text=options.data,
    )
    with Lab(options.hosts, 1e6 * options.rate_mbit or None, namespaces=not options.loopback) as lab:
        runs, num_parameters = measure(
            lab,
            task,
            sides=options.sides,
            num_seeds=options.seeds,
            target=options.target,
            every=options.every,
            bucket_mib=options.bucket_mib,
            say=True,
        )
        network, is_shaped = lab.description, lab.why_not_shaped is None
    wire = {side: host_bytes(side, 4 * num_parameters, options.hosts, 1) or 0.0 for side in options.sides}
    averages = [run.average_s for run in runs if run.side.startswith("ours")]
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "network": network,
        "model": f"the demo's GPT with width {task.width} (demo: 128), {task.num_layers} blocks (3), {task.num_heads} "
        f"heads (4): {num_parameters:,} parameters, {num_parameters * 4 / 2**20:.2f} MiB",
        "data": f"{options.data or 'the works of Shakespeare, as in the demo'}; every worker takes {task.batch} "
        f"windows of {task.context} characters a step (demo: 4 of 64)",
        "optimizer": f"the demo's AdamW; learning rate up to {task.lr:g} in {task.steps // 10} steps, then a cosine "
        f"down to step {task.steps}, the last one of a run",
        "loss": f"of the consensus model, every {options.every} steps on {task.windows} held-out windows, outside the "
        "clock",
        "seeds": f"{options.seeds}, of start and batches, the same for all sides; the sides take turns",
        "buckets": f"{options.bucket_mib:g} MiB",
        "MiB of a host per step": ", ".join(f"{_name(side)} {sent / 2**20:.2f}" for side, sent in wire.items()),
        **({"averaging all replicas once": f"{median(averages):.2f} s, not in the clock"} if averages else {}),
        **provenance(),
    }
    rate = f"{options.rate_mbit:g} Mbit/s" if is_shaped else "unshaped"
    title = f"Time to validation loss {options.target}: {options.hosts} hosts x 1 worker, {rate}"
    lines = [title, *(f"{name}: {value}" for name, value in facts.items()), ""]
    print("\n".join([*lines, *report.aligned(table(runs, options.target)), "", LEGEND]))
    if not options.no_report:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "-m", "benchmarks.time_to_loss", *given])
        stem = options.output / f"{facts['date']}-{options.name}"
        for path in write(runs, options.target, title, facts, command, stem):
            print(f"wrote {path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path}")
    return runs


if __name__ == "__main__":
    main()
