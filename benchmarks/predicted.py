"""The runtime model against measured steps, on several hosts with shaped links.

    python -m benchmarks.predicted                                 all 18 settings, 40 minutes
    python -m benchmarks.predicted --settings 400x4x2x300          one: Mbit/s, hosts, workers a host, ms of compute
    python -m benchmarks.predicted --report                        tables and picture of what there is; measures nothing

In every setting the workers measure a profile, as `decent-dp measure` does, and then train: with torch's DDP and with
five topologies. The model has seen the profile only. Each setting is stored as soon as it is measured, and a run that
is started again goes on with the ones that are missing; predictions are made from the stored profiles.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import report
from benchmarks.crew import ROOT, Crew
from benchmarks.lab import Lab, why_not
from benchmarks.record import provenance
from benchmarks.work import make
from decent_dp.plan import ALL_REDUCE, Profile, predict

SIDES = {
    "ddp": ALL_REDUCE,
    "ours:ring": "ring",
    "ours:exp": "exp",
    "ours:alternating-exp-ring": "alternating-exp-ring",
    "ours:complete": "complete",
    "ours:hierarchical": "hierarchical",
}
RATES_MBIT, LAYOUTS, COMPUTES_MS = (100, 400, 1000), ((4, 1), (4, 2)), (100, 300, 900)
PARAMETERS_MIB, BUCKET_MIB = 5.0, 1.0  # small: the machine's cores carry the traffic of all hosts
MEDIAN_LIMIT, WORST_LIMIT, CHOICE_LIMIT = 0.08, 0.20, 15
_EQUAL = 0.03


@dataclass(frozen=True, slots=True)
class Setting:
    """A network, its hosts and the compute of a step."""

    rate_mbit: int
    num_hosts: int
    workers_per_host: int
    compute_ms: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.rate_mbit}x{self.num_hosts}x{self.workers_per_host}x{self.compute_ms}"

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Read a name.

        Raises:
            ValueError: If it is none.
        """
        numbers = [int(part) for part in name.split("x")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise ValueError(f"setting {name!r}; give MBITxHOSTSxWORKERSxMS, as 400x4x2x300")
        return cls(*numbers)


ALL = tuple(Setting(r, *hosts, c) for r, hosts, c in itertools.product(RATES_MBIT, LAYOUTS, COMPUTES_MS))


# -------------------------------------------------------------------- called in workers


def profile(
    state: dict[str, Any], work: dict[str, Any], workers_per_host: int, bucket_mib: float, num_steps: int
) -> str:
    """Measure as the command line does; returns the profile as JSON."""
    from benchmarks.sides import _optim_fn
    from decent_dp.comm import TorchCommunicator
    from decent_dp.plan.measure import measure, time_model

    made, communicator, steps = make(**work), TorchCommunicator(), itertools.count()

    def compute() -> Any:
        return time_model(
            communicator,
            made.network(),
            lambda model: made.loss(model, next(steps), communicator.rank),
            _optim_fn,
            bucket_size_in_mb=bucket_mib,
            num_steps=num_steps,
        )

    found = measure(communicator, workers_per_host, compute).to_json()
    communicator.close()
    return found


# -------------------------------------------------------------------- measuring


def measure_setting(setting: Setting, num_blocks: int, num_steps: int, num_warmup: int = 2) -> dict[str, Any]:
    """Profile and train; returns what is stored."""
    begin = time.monotonic()
    work: dict[str, Any] = {"kind": "emulated", "parameters_mib": PARAMETERS_MIB, "num_layers": 20}
    work["compute_s"] = setting.compute_ms / 1000
    blocks: dict[str, list[float]] = {side: [] for side in SIDES}
    with (
        Lab(setting.num_hosts, 1e6 * setting.rate_mbit) as lab,
        Crew(lab, setting.workers_per_host) as crew,
    ):
        arguments = {"workers_per_host": setting.workers_per_host, "bucket_mib": BUCKET_MIB, "num_steps": 8}
        measured = crew.call("benchmarks.predicted:profile", work=work, **arguments)[0]
        for side in SIDES:
            crew.call("benchmarks.sides:build", name=side, work=work, bucket_mib=BUCKET_MIB)
        for block in range(num_blocks):
            for side in SIDES:
                counts = {"first_step": 1000 * block, "num_warmup": num_warmup, "num_steps": num_steps}
                replies = crew.call("benchmarks.sides:run", name=side, **counts)
                blocks[side].append(fmean(ms for reply in replies for ms in reply["step_ms"]))
    return {
        "profile": json.loads(measured),
        "block_ms": blocks,
        "took_s": round(time.monotonic() - begin, 1),
        "facts": {"date": datetime.date.today().isoformat(), "network": lab.description, **provenance()},
    }


# -------------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Compared:
    """One setting: predicted and measured milliseconds per step of each side."""

    setting: Setting
    predicted_ms: Mapping[str, float]
    measured_ms: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, minus one."""
        return {side: self.predicted_ms[side] / self.measured_ms[side] - 1 for side in self.predicted_ms}

    @property
    def choice(self) -> str:
        """The side that the model says is fastest."""
        return min(self.predicted_ms, key=lambda side: self.predicted_ms[side])

    @property
    def lost(self) -> float:
        """What the choice takes longer than the side that was measured fastest."""
        return self.measured_ms[self.choice] / min(self.measured_ms.values()) - 1


def compare(stored: Mapping[str, Any]) -> list[Compared]:
    """Predict every setting that is stored."""
    found = []
    for name, one in stored.items():
        measured = {side: median(ms) for side, ms in one["block_ms"].items()}
        from_profile = Profile.from_json(json.dumps(one["profile"]), name)
        predicted = {side: 1000 * predict(from_profile, SIDES[side]).step_s for side in measured}
        found.append(Compared(Setting.parse(name), predicted, measured))
    return sorted(found, key=lambda one: list(map(int, one.setting.name.split("x"))))


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Errors and choices over all settings."""
    errors = [abs(error) for one in compared for error in one.errors.values()]
    return {
        "settings": len(compared),
        "median error": median(errors),
        "worst error": max(errors),
        "right choices": sum(one.lost <= _EQUAL for one in compared),
    }


def sentence(compared: Sequence[Compared]) -> str:
    """The summary in words."""
    found = summary(compared)
    return (
        f"{found['settings']} of {len(ALL)} settings: median error {found['median error']:.1%} "
        f"(at most {MEDIAN_LIMIT:.0%}), worst {found['worst error']:.1%} (at most {WORST_LIMIT:.0%}), best choice "
        f"named in {found['right choices']} (at least {CHOICE_LIMIT} of {len(ALL)}; within {_EQUAL:.0%} of the best "
        "counts)"
    )


def table(compared: Sequence[Compared]) -> list[list[str]]:
    """Head and rows as text."""
    short = {side: SIDES[side].replace("alternating-exp-ring", "AER").replace("all-reduce", "DDP") for side in SIDES}
    lines = [["Mbit/s", "hosts", "ms", *(f"{short[side]}" for side in SIDES), "choice", "lost"]]
    for one in compared:
        s = one.setting
        cells = [f"{one.predicted_ms[side]:.0f}/{one.measured_ms[side]:.0f}" for side in SIDES]
        layout = f"{s.num_hosts}x{s.workers_per_host}"
        lines.append([f"{s.rate_mbit}", layout, f"{s.compute_ms}", *cells, short[one.choice], f"{one.lost:.1%}"])
    return lines


LEGEND = (
    "predicted/measured ms per step; choice: the side that the model says is fastest; lost: what it takes longer than "
    "the side that was measured fastest."
)


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Predicted against measured, with a band of 20 %."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 6), layout="constrained")
    for side, topology in SIDES.items():
        x, y = [one.measured_ms[side] for one in compared], [one.predicted_ms[side] for one in compared]
        axes.scatter(x, y, s=26, marker="s" if side == "ddp" else "o", label=topology, alpha=0.8)
    everything = [ms for one in compared for ms in (*one.measured_ms.values(), *one.predicted_ms.values())]
    ends = [0.85 * min(everything), 1.15 * max(everything)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="black", alpha=0.08, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured ms per step", ylabel="predicted")
    axes.set_title("runtime model against measured steps; band: 20 %", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(stored: Mapping[str, Any], folder: Path, stem: str, command: str) -> list[Path]:
    """Write stem.md and stem.png beside the stored stem.json."""
    compared = compare(stored)
    facts: dict[str, Any] = {"result": sentence(compared), **next(iter(stored.values()))["facts"]}
    facts["network"] = "hosts in network namespaces, shaped uplinks of the rates in the table"
    facts["work"] = f"emulated compute, {PARAMETERS_MIB:g} MiB of parameters, buckets of {BUCKET_MIB:g} MiB, SGD"
    facts["took"] = f"{sum(one['took_s'] for one in stored.values()) / 60:.0f} minutes in all"
    picture = folder / f"{stem}.png"
    draw(compared, picture)
    text = report.markdown(
        "The runtime model against measured steps", facts, command, table(compared), LEGEND, picture.name
    )
    (folder / f"{stem}.md").write_text(text)
    return [folder / f"{stem}.md", picture]


def main(arguments: Sequence[str] | None = None) -> list[Compared]:
    """Measure what is missing, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="MBITxHOSTSxWORKERSxMS (all 18)")
    parser.add_argument("--blocks", type=int, default=2, help="turns of every side (2)")
    parser.add_argument("--steps", type=int, default=12, help="counted steps of a turn (12: whole cycles of all)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="folder")
    parser.add_argument("--name", default="predicted", help="of the files there (predicted)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    try:
        settings = [Setting.parse(name) for name in options.settings] if options.settings else list(ALL)
    except ValueError as error:
        parser.error(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    place = options.output / f"{options.name}.json"
    stored: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    missing = [] if options.report else [setting for setting in settings if setting.name not in stored]
    if missing and why_not() is not None:
        parser.error(f"links cannot be shaped here: {why_not()}; --report works without")
    for setting in missing:
        stored[setting.name] = measure_setting(setting, options.blocks, options.steps)
        place.write_text(json.dumps(stored, indent=1) + "\n")
        took_s = stored[setting.name]["took_s"]
        print(f"{setting.name}: {took_s:.0f} s", file=sys.stderr, flush=True)
    if not stored:
        parser.error(f"{place} has no settings yet; run without --report")
    compared = compare(stored)
    print("\n".join([*report.aligned(table(compared)), "", sentence(compared)]))
    for path in write(stored, options.output, options.name, "python -m benchmarks.predicted"):
        print(f"wrote {path}")
    return compared


if __name__ == "__main__":
    main()
