"""``decent-dp topology``: list the names, show one topology, compare all that serve a cluster."""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from decent_dp.cli.diagram import diagram
from decent_dp.cli.output import WIDTH, print_json, prints, table, wrapped
from decent_dp.cli.parsing import add_layout, count, layout_of, refuse_too_many
from decent_dp.cli.words import describe_round
from decent_dp.errors import ConfigurationError
from decent_dp.topology import (
    Analysis,
    AnyTopology,
    Comparison,
    Layout,
    Mixing,
    analyze,
    build,
    catalog,
    compare,
    draw,
    names,
)

if TYPE_CHECKING:
    from decent_dp.plan import Profile

_NUM_SHOWN = 8
_MOST_ROUNDS, _MOST_DRAWN = 256, 8192  # in a picture: rounds, and circles for workers in all of them
_DTYPES = ("float32", "bfloat16", "float16")

_SHOW = """\
The rounds of a topology in words and as a drawing, and what they cost. In the
drawing workers (nodes, where a node acts as one) are lines downwards; what
mixes is joined by a bar, and a message has an arrowhead at its receiver.
"""

_COMPARE = """\
Every topology that serves a cluster, side by side: what it sends, how fast
replicas agree, how far noise and unlike data keep them apart.
"""

_LEGEND = """\
sent: copies of the model a worker sends per step. leaving: copies that leave a
node per step, mean over nodes and steps; peak: the most in one step. agree:
rounds after which all replicas are equal, or the factor on their distance per
step. noise, data: the squared distance to the mean in the long run, caused by
independent noise and by updates that always differ, over the variance of these.
"""


def add(subparsers: Any) -> None:
    """Add ``topology`` with ``list``, ``show`` and ``compare``."""
    parser = subparsers.add_parser(
        "topology", help="list, show and compare topologies", description="List, show and compare topologies."
    )
    commands = parser.add_subparsers(dest="topology_command", metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="the names", description="The names, and what their rounds are.")

    showing = commands.add_parser("show", help="one topology, round by round", description=_SHOW)
    showing.add_argument("name", metavar="NAME", help="a name that 'decent-dp topology list' knows")
    add_layout(showing)
    showing.add_argument(
        "--rounds", type=count, metavar="K", help=f"rounds to show (default: a cycle, at most {_NUM_SHOWN})"
    )
    showing.add_argument("--matrix", action="store_true", help="print the matrix W of each round too")
    showing.add_argument("--draw", type=Path, metavar="FILE", help="draw the rounds into an .svg or .png file")

    comparing = commands.add_parser("compare", help="all that serve a cluster", description=_COMPARE, epilog=_LEGEND)
    add_layout(comparing, required=False)
    comparing.add_argument(
        "--profile", metavar="FILE", help="predict step times, from what 'decent-dp measure' wrote; its workers are "
        "taken unless others are given",
    )  # fmt: skip
    comparing.add_argument(
        "--wire-dtype", choices=_DTYPES, metavar="DTYPE",
        help="what travels, if not the parameters as they are: " + ", ".join(_DTYPES),
    )  # fmt: skip
    for command in (listing, showing, comparing):
        command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Do what was asked for."""
    {"list": _list, "show": _show, "compare": _compare}[args.topology_command](args)


def _layout_of(args: argparse.Namespace) -> Layout:
    refuse_too_many(args.workers, "build and analyse larger ones with decent_dp.topology")
    return layout_of(args)


# list -----------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> None:
    summaries = {name: catalog.summary(name) for name in names()}
    if args.json:
        print_json([{"name": name, "summary": summary} for name, summary in summaries.items()])
        return
    together: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        together.setdefault(summary, []).append(name)
    for summary, same in together.items():
        print(", ".join(same) if len(same) < 4 else f"{same[0]}, {same[1]}, ..., {same[-1]}, ...")
        print(wrapped(summary, 4, first="    "))
    print(wrapped("Also base-N for any N, and hierarchical(NAME) with any other of these between the nodes."))


# show -----------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> None:
    topology = build(args.name, _layout_of(args))
    steps = range(args.rounds or min(topology.num_rounds or 4, _NUM_SHOWN))
    if args.draw is not None:
        at_most = min(_MOST_ROUNDS, _MOST_DRAWN // topology.layout.num_workers)
        if len(steps) > at_most:
            raise ConfigurationError(
                f"--draw {args.draw}: {len(steps)} rounds of {_plural(topology.layout.num_workers, 'worker')} are too "
                f"many for a picture; give --rounds {at_most} or less"
            )
        from decent_dp.cli.picture import save_picture  # matplotlib is optional

        save_picture(topology, steps, args.draw)
    analysis = analyze(topology)
    if args.json:
        print_json(_shown(args.name, topology, steps, analysis, with_matrix=args.matrix))
        return
    _print_head(args.name, topology)
    for t in steps:
        print(wrapped(f"step {t}: {describe_round(topology, t)}", 4))
    if len(steps) < (topology.num_rounds or math.inf):
        more = f"{topology.num_rounds - len(steps)} more in a cycle" if topology.num_rounds else "and so on, no cycle"
        print(f"... {more}; --rounds K shows K rounds")
    drawn = diagram(topology, steps, is_ascii=not prints("│─┼●◀▶"))
    print()
    print(drawn or "(too many workers to draw in 80 columns; --draw FILE.svg draws them on a circle)")
    print()
    print(_facts(analysis))
    if args.matrix:
        for t in steps:
            print(f"\nW of step {t}")
            print(_matrix(topology.round_at(t).matrix()))
    if args.draw is not None:
        print(f"\ndrawn into {args.draw}")


def _print_head(name: str, topology: AnyTopology) -> None:
    cycle = f"a cycle of {_plural(topology.num_rounds, 'round')}" if topology.num_rounds else "no cycle"
    print(f"{name} for {_cluster(topology.layout)}: {cycle}")
    print(wrapped(catalog.summary(name)) + "\n")


def _cluster(layout: Layout) -> str:
    nodes = f"{_plural(layout.num_nodes, 'node')}, {layout.workers_per_node} on each"
    return f"{_plural(layout.num_workers, 'worker')} on {nodes if layout.num_nodes > 1 else 'one node'}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _facts(analysis: Analysis) -> str:
    sent, found = analysis.traffic, analysis.mixing
    mean, busiest, peak = map(_number, (sent.leaving_node, sent.leaving_busiest_node, sent.leaving_node_peak))
    lines = [("a worker sends", f"{_number(sent.per_worker)} times the model per step")]
    if analysis.topology.layout.num_nodes > 1:
        from_busiest = "" if busiest == mean else f", {busiest} from the busiest node"
        at_most = "" if peak == mean else f", at most {peak}"
        lines.append(("leaving a node", f"{mean} times the model per step{from_busiest}{at_most}"))
    if found is None:
        return _aligned([*lines, ("agreement", analysis.reason or "")])
    if found.rounds_to_exact is not None:
        lines.append(("all replicas equal", f"after {_plural(found.rounds_to_exact, 'round')}"))
    else:
        lines.append(("their distance", f"times {_contraction(found)} per step in the long run"))
    if found.cycle_distance is not None and found.rounds_to_exact is None:
        lines.append(("", f"times {found.cycle_distance:.3f} at most after a cycle"))
    lines.append(("noise factor", _number(found.noise)))
    lines.append(("unlike data factor", _number(found.heterogeneity)))
    if found.method != "exact":
        lines.append(("", f"these by {found.method}"))
    return _aligned(lines)


def _aligned(lines: list[tuple[str, str]]) -> str:
    return "\n".join(wrapped(f"{label:<20}{text}", 20) for label, text in lines)


def _number(value: float) -> str:
    """Three digits, more where that would leave out whole numbers."""
    return "inf" if math.isinf(value) else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _matrix(W: NDArray[np.float64]) -> str:
    """One row of W after the other, each on as many lines as it needs."""
    rows = [["." if value == 0 else f"{value:.3g}".removeprefix("0") for value in row] for row in W]
    width = max(len(cell) for row in rows for cell in row)
    on_a_line = (WIDTH - 2) // (width + 1)
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell in row]
        for start in range(0, len(cells), on_a_line):
            lines.append((" " if start else "[") + " ".join(cells[start : start + on_a_line]))
        lines[-1] += "]"
    return "\n".join(lines)


def _shown(name: str, topology: AnyTopology, steps: range, analysis: Analysis, *, with_matrix: bool) -> dict[str, Any]:
    rounds = [
        {
            "words": describe_round(topology, t),
            "drawing": line.partition(": ")[2],
            **({"matrix": topology.round_at(t).matrix().tolist()} if with_matrix else {}),
        }
        for t, line in zip(steps, draw(topology, len(steps)).splitlines(), strict=True)
    ]
    return {
        "name": name,
        "summary": catalog.summary(name),
        **_layout(topology.layout),
        "num_rounds": topology.num_rounds,
        "rounds": rounds,
        **_analysis(analysis),
    }


def _layout(layout: Layout) -> dict[str, int]:
    return {
        "num_workers": layout.num_workers,
        "num_nodes": layout.num_nodes,
        "workers_per_node": layout.workers_per_node,
    }


def _analysis(analysis: Analysis) -> dict[str, Any]:
    mixing = asdict(analysis.mixing) if analysis.mixing is not None else None
    return {"traffic": asdict(analysis.traffic), "mixing": mixing, "reason": analysis.reason}


# compare --------------------------------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> None:
    profile = _load(args.profile)
    if args.workers is None and args.nodes is None and profile is not None:
        layout = profile.layout
    elif args.workers is None:
        raise ConfigurationError("--workers is missing: give how many there are, or --profile FILE of a measurement")
    else:
        layout = _layout_of(args)
    found = compare(layout, narrow_wire=args.wire_dtype in _DTYPES[1:])
    times = _step_times(profile, found, args.wire_dtype) if profile is not None else {}
    if args.json:
        print_json(_compared(found, times, args.wire_dtype))
        return
    print(f"{_cluster(layout)}\n")
    header, rows = _rows(found, times)
    print(table(header, rows))
    print()
    print(wrapped(" ".join(_LEGEND.split())))
    if times:
        print(wrapped("ms: predicted time of a step; all-reduce is torch's DistributedDataParallel."))
    for name, analysis in found.analyses.items():
        if analysis.reason is not None:
            print(wrapped(f"{name}: {analysis.reason}"))
    if found.same:
        by_first: dict[str, list[str]] = {}
        for name, first in found.same.items():
            by_first.setdefault(first, []).append(name)
        same = "; ".join(f"{first}: {', '.join(sorted(others))}" for first, others in sorted(by_first.items()))
        print(wrapped(f"The same rounds here as {same}."))
    if found.refused:
        refused = ", ".join(sorted(found.refused))
        print(wrapped(f"Not for this cluster: {refused}; 'decent-dp topology show' says why."))


def _load(path: str | None) -> "Profile | None":
    if path is None:
        return None
    from decent_dp.plan import Profile

    return Profile.load(path)


def _step_times(profile: "Profile", found: Comparison, wire_dtype: str | None) -> dict[str, float]:
    """Predicted seconds per step by name, of all-reduce too."""
    from decent_dp.plan import ALL_REDUCE, predict

    return {
        name: predict(profile, name, wire_dtype, layout=found.layout).step_s for name in (ALL_REDUCE, *found.analyses)
    }


def _rows(found: Comparison, times: dict[str, float]) -> tuple[list[str], list[list[str]]]:
    header = ["topology", "sent", "leaving", "peak", "agree", "noise", "data"]
    rows = []
    for name, analysis in found.analyses.items():
        sent, mixing = analysis.traffic, analysis.mixing
        row = [name, f"{sent.per_worker:.2f}", f"{sent.leaving_node:.2f}", f"{sent.leaving_node_peak:.2f}"]
        if mixing is None:
            row += ["?", "?", "?"]
        else:
            is_exact = mixing.rounds_to_exact is not None
            agree = f"in {mixing.rounds_to_exact}" if is_exact else f"x {_contraction(mixing)}"
            row += [agree, _factor(mixing.noise), _factor(mixing.heterogeneity)]
        rows.append(row)
    if times:
        header.append("ms")
        for row in rows:
            row.append(f"{1000 * times[row[0]]:.1f}")
        n = found.layout.num_workers
        from decent_dp.plan import ALL_REDUCE

        across = 2 * (n - 1) / n if found.layout.num_nodes > 1 else 0.0
        sent_by_all = [f"{2 * (n - 1) / n:.2f}", f"{across:.2f}", f"{across:.2f}"]
        rows.append([ALL_REDUCE, *sent_by_all, "always", "0", "0", f"{1000 * times[ALL_REDUCE]:.1f}"])
    return header, rows


def _contraction(mixing: Mixing) -> str:
    """Four digits of the factor, or two of what is missing to 1."""
    gap = mixing.spectral_gap
    return f"1-{gap:.1e}" if 0 < gap < 5e-4 else f"{mixing.contraction_per_step:.4f}"


def _factor(value: float) -> str:
    return (
        "inf"
        if math.isinf(value)
        else f"{value:.2f}"
        if value < 1000
        else f"{value:.0f}"
        if value < 1e6
        else f"{value:.2g}"
    )


def _compared(found: Comparison, times: dict[str, float], wire_dtype: str | None) -> dict[str, Any]:
    topologies = []
    for name, analysis in found.analyses.items():
        same = sorted(other for other, first in found.same.items() if first == name)
        entry = {"name": name, "same": same, "num_rounds": analysis.topology.num_rounds, **_analysis(analysis)}
        topologies.append({**entry, "step_s": times.get(name)})
    return {
        **_layout(found.layout),
        "wire_dtype": wire_dtype,
        "topologies": topologies,
        "all_reduce_step_s": times.get("all-reduce"),
        "refused": found.refused,
    }
