"""The runtime model against the step times that the paper printed, on clusters that are not here.

    python -m benchmarks.paper

Per cluster four numbers are fitted to its nine: the part of a step's compute that does not depend on the number of
workers, the part that they share, the bandwidth out of a node for pairs, and that for sums. The rest is the same for
all clusters and set by hand: a third of the compute is forward, buckets of 25 MiB, gradients that come evenly, no
jitter, and a node inside of which transfers hide.

As in the paper's package, every round of the alternating exponential ring is a collective of its members.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.crew import ROOT
from benchmarks.record import provenance
from decent_dp.plan import ALL_REDUCE, BucketTime, Compute, Network, Profile, Rate, predict
from decent_dp.topology import Layout, Topology, alternating_exp_ring, exp

MODEL_BYTES, BUCKET_BYTES = 253_000_000, 25 * 2**20
INSIDE_BYTES_PER_S, LATENCY_S = 20e9, 20e-6
LIMIT = 0.10
SIDES = ("All-Reduce", "exp", "AER")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the paper measured on one cluster: milliseconds per step of transformer-base with 25,000 tokens in all.

    Attributes:
        name: As in the paper.
        gpus_per_node: L.
        gpus: The numbers of workers.
        ms: Of each side, by number of workers.
    """

    name: str
    gpus_per_node: int
    gpus: tuple[int, ...]
    ms: dict[str, tuple[float, ...]]


CLUSTERS = (
    Cluster(
        "T4, InfiniBand 100",
        8,
        (16, 32, 64),
        {"All-Reduce": (372.5, 225.5, 167.3), "exp": (314.8, 178.8, 123.1), "AER": (312.3, 178.8, 122.2)},
    ),
    Cluster(
        "A100, InfiniBand 100",
        4,
        (8, 16, 32),
        {"All-Reduce": (73.0, 54.8, 51.5), "exp": (63.4, 46.8, 44.7), "AER": (61.7, 45.8, 43.7)},
    ),
    Cluster(
        "A40, Ethernet 25",
        4,
        (8, 16, 32),
        {"All-Reduce": (166.1, 195.5, 188.5), "exp": (122.8, 97.4, 110.8), "AER": (122.0, 78.9, 67.9)},
    ),
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The four numbers of a cluster.

    Attributes:
        fixed_ms: Compute of a step, whatever the number of workers.
        shared_ms: Compute of a step on one worker that more workers divide among them.
        pairs_gb_per_s: Out of a node, all of its workers at once.
        sums_gb_per_s: Along a ring that leaves each node once.
    """

    fixed_ms: float
    shared_ms: float
    pairs_gb_per_s: float
    sums_gb_per_s: float


def predicted_ms(cluster: Cluster, fitted: Fitted, num_gpus: int, side: str) -> float:
    """Predict one number of the table."""
    L = cluster.gpus_per_node
    layout = Layout(num_gpus, L)
    compute_s = (fitted.fixed_ms + fitted.shared_ms / num_gpus) / 1000
    backward_s = compute_s * 2 / 3
    sizes = [min(BUCKET_BYTES, MODEL_BYTES - begin) for begin in range(0, MODEL_BYTES, BUCKET_BYTES)]
    ends = np.cumsum(sizes) / MODEL_BYTES
    buckets = tuple(BucketTime(size, float(end) * backward_s) for size, end in zip(sizes, ends, strict=True))
    inside, sums = Rate(LATENCY_S, INSIDE_BYTES_PER_S), Rate(LATENCY_S * num_gpus, 1e9 * fitted.sums_gb_per_s)
    pairs = 1e9 * fitted.pairs_gb_per_s
    network = Network(inside, inside, Rate(LATENCY_S, pairs), Rate(LATENCY_S, pairs / L), inside, sums, sums)
    ones = (1.0,) * num_gpus
    profile = Profile(
        num_gpus, L, "cuda", 4, Compute(compute_s / 3, backward_s, 0.0, buckets, worker_factors=ones), network
    )
    if side == "AER":
        rounds = alternating_exp_ring(layout).rounds
        return 1000 * predict(profile, Topology("collectives", layout, rounds)).step_s
    return 1000 * predict(profile, ALL_REDUCE if side == "All-Reduce" else exp(layout)).step_s


def table_of(cluster: Cluster, fitted: Fitted) -> dict[str, tuple[float, ...]]:
    """Predict all numbers of a cluster."""
    return {side: tuple(predicted_ms(cluster, fitted, n, side) for n in cluster.gpus) for side in SIDES}


def errors_of(cluster: Cluster, predicted: dict[str, tuple[float, ...]]) -> list[float]:
    """Predicted over printed, minus one."""
    return [p / m - 1 for side in SIDES for p, m in zip(predicted[side], cluster.ms[side], strict=True)]


def fit(cluster: Cluster, num_rounds: int = 120) -> Fitted:
    """The four numbers with the smallest mean of ``|log(predicted / printed)|``, searched by a simplex from a guess."""
    small, large = cluster.ms["AER"][0], cluster.ms["AER"][-1]
    shared = (small - large) / (1 / cluster.gpus[0] - 1 / cluster.gpus[-1])
    guess = np.log([max(small - shared / cluster.gpus[0], 1.0), shared, 5.0, 5.0])

    def cost(point: Any) -> float:
        numbers = Fitted(*(float(value) for value in np.exp(point)))
        return float(np.mean(np.abs(np.log1p(errors_of(cluster, table_of(cluster, numbers))))))

    return Fitted(*(round(float(value), 3) for value in np.exp(_simplex(cost, guess, num_rounds))))


def _simplex(cost: Callable[[Any], float], start: Any, num_rounds: int, size: float = 0.3) -> Any:
    """The downhill simplex method of Nelder and Mead (1965)."""
    points = [np.array(start)] + [np.array(start) + size * np.eye(len(start))[k] for k in range(len(start))]
    costs = [cost(point) for point in points]
    for _ in range(num_rounds):
        order = np.argsort(costs)
        points, costs = [points[k] for k in order], [costs[k] for k in order]
        middle = np.mean(points[:-1], axis=0)

        def at(factor: float, middle: Any = middle, worst: Any = points[-1]) -> tuple[Any, float]:
            point = middle + factor * (worst - middle)
            return point, cost(point)

        best = at(-1.0)
        if best[1] < costs[0]:
            best = min(best, at(-2.0), key=lambda one: one[1])
        elif best[1] >= costs[-2]:
            best = at(0.5)
        if best[1] < costs[-1]:
            points[-1], costs[-1] = best
        else:
            points = [points[0]] + [points[0] + 0.5 * (point - points[0]) for point in points[1:]]
            costs = [costs[0]] + [cost(point) for point in points[1:]]
    return points[int(np.argmin(costs))]


def table(clusters: Sequence[Cluster], fits: Sequence[Fitted]) -> list[list[str]]:
    """Head and rows as text."""
    lines = [["cluster", "GPUs", *(f"{side}" for side in SIDES)]]
    for cluster, fitted in zip(clusters, fits, strict=True):
        predicted = table_of(cluster, fitted)
        for k, n in enumerate(cluster.gpus):
            cells = [f"{predicted[side][k]:.1f} / {cluster.ms[side][k]:.1f}" for side in SIDES]
            lines.append([cluster.name, str(n), *cells])
    return lines


def draw(clusters: Sequence[Cluster], fits: Sequence[Fitted], path: Path) -> None:
    """Bars of the paper with the model's value beside each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(clusters), figsize=(11, 3.6), layout="constrained")
    colors = {"All-Reduce": "#b8b8b8", "exp": "#a9c6d8", "AER": "#2a6f97"}
    for axes, cluster, fitted in zip(panels, clusters, fits, strict=True):
        predicted = table_of(cluster, fitted)
        for s, side in enumerate(SIDES):
            x = np.arange(len(cluster.gpus)) + (s - 1) * 0.27
            axes.bar(x, cluster.ms[side], width=0.25, color=colors[side], label=f"{side}, paper")
            axes.plot(x, predicted[side], "_", color="#d1495b", markersize=15, markeredgewidth=2.5)
        axes.plot([], [], "_", color="#d1495b", markersize=12, markeredgewidth=2.5, label="model")
        axes.set_xticks(range(len(cluster.gpus)), [f"{n} GPUs" for n in cluster.gpus], fontsize=9)
        error = median(map(abs, errors_of(cluster, predicted)))
        axes.set_title(f"{cluster.name}\nmedian error {error:.1%}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms per step")
    panels[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> float:
    """Fit, print, write; returns the median error over all clusters."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="folder")
    parser.add_argument("--name", default="paper", help="of the files there, after the date (paper)")
    parser.add_argument("--rounds", type=int, default=120, help="of the search (120)")
    options = parser.parse_args(arguments)
    fits = [fit(cluster, options.rounds) for cluster in CLUSTERS]
    errors = [
        error
        for cluster, fitted in zip(CLUSTERS, fits, strict=True)
        for error in errors_of(cluster, table_of(cluster, fitted))
    ]
    middle, worst = median(map(abs, errors)), max(map(abs, errors))
    facts: dict[str, Any] = {
        "result": f"median error {middle:.1%} (at most {LIMIT:.0%}), worst {worst:.1%}, {len(errors)} numbers",
        "published numbers": "Wang et al., ICLR 2025, arXiv 2410.11998: transformer-base, 25,000 tokens in all",
    }
    for cluster, fitted in zip(CLUSTERS, fits, strict=True):
        facts[f"fitted, {cluster.name}"] = (
            f"{fitted.fixed_ms:.1f} ms + {fitted.shared_ms:.0f} ms / GPUs of compute, "
            f"{fitted.pairs_gb_per_s:.1f} GB/s out of a node for pairs, {fitted.sums_gb_per_s:.1f} GB/s for sums"
        )
    facts["decent_dp"] = "{decent_dp}, commit {commit}".format(**provenance())
    lines = table(CLUSTERS, fits)
    print("\n".join([*report.aligned(lines), "", *(f"{name}: {value}" for name, value in facts.items())]))
    options.output.mkdir(parents=True, exist_ok=True)
    text, numbers, picture = (
        options.output / f"{datetime.date.today().isoformat()}-{options.name}.{ending}"
        for ending in ("md", "json", "png")
    )
    draw(CLUSTERS, fits, picture)
    legend = "model / paper, ms per step."
    text.write_text(
        report.markdown(
            "The runtime model against the paper's table",
            facts,
            "python -m benchmarks.paper",
            lines,
            legend,
            picture.name,
        )
    )
    fitted_by_name = {cluster.name: asdict(one) for cluster, one in zip(CLUSTERS, fits, strict=True)}
    whole = {"median_error": middle, "worst_error": worst, "fitted": fitted_by_name}
    numbers.write_text(json.dumps(whole, indent=1) + "\n")
    assert math.isfinite(middle)
    return middle


if __name__ == "__main__":
    main()
