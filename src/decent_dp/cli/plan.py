"""``decent-dp plan``: what a step will take, for every topology, and which one to use."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from decent_dp.cli.output import print_json, table, wrapped
from decent_dp.cli.parsing import count, refuse_too_many, seed
from decent_dp.errors import ConfigurationError
from decent_dp.plan import ALL_REDUCE, Prediction, Profile, Recommendation, recommend
from decent_dp.topology import Layout

_DTYPES = ("float32", "bfloat16", "float16")

_SHORT_S = 0.01  # where the fastest step is shorter than this, microseconds are shown

_PLAN = """\
Milliseconds per step of all-reduce (torch's DistributedDataParallel) and of
every topology that serves the cluster, what bounds them, and which to use, if
decentralized training is worth it. docs/runtime-model.md derives the model.
"""

_LEGEND = """\
compute: the step if nothing had to be waited for. wire: what waiting for the
network adds. jitter: what steps of unequal length add. bound: compute if the
step is within 5 % of it, else the larger one of the other two.
"""


def add(subparsers: Any) -> None:
    """Add ``plan``."""
    parser = subparsers.add_parser(
        "plan", help="predict step times from a measurement, and recommend", description=_PLAN, epilog=_LEGEND
    )
    parser.add_argument("--profile", required=True, metavar="FILE", help="what 'decent-dp measure' has written")
    parser.add_argument("--workers", type=count, metavar="N", help="workers in all, if others than were measured")
    parser.add_argument("--nodes", type=count, metavar="M", help="nodes they share (default: as measured)")
    parser.add_argument("--topology", action="append", metavar="NAME", help="this one alone; may be repeated")
    parser.add_argument(
        "--wire-dtype", action="append", choices=_DTYPES, metavar="DTYPE",
        help="this one alone, of " + ", ".join(_DTYPES) + "; may be repeated (default: the first two)",
    )  # fmt: skip
    parser.add_argument("--steps", type=count, default=400, metavar="N", help="simulated steps with jitter (400)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the simulated jitter (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    profile = Profile.load(args.profile)
    layout = layout_of(profile, args.workers, args.nodes)
    found = recommend(
        profile,
        layout=layout,
        topologies=args.topology,
        wire_dtypes=args.wire_dtype or _DTYPES[:2],
        num_steps=args.steps,
        seed=args.seed,
    )
    if args.json:
        print_json(as_dict(profile, layout, found))
    else:
        print("\n".join(as_text(profile, layout, found)))
    return 0


def layout_of(profile: Profile, num_workers: int | None, num_nodes: int | None) -> Layout:
    """The workers asked for; what is not given is as it was measured.

    Raises:
        ConfigurationError: If the nodes would not be equally full.
    """
    measured = profile.layout
    if num_workers is None and num_nodes is None:
        return measured
    if num_nodes is None:
        num_nodes = measured.num_nodes
    if num_workers is None:
        num_workers = num_nodes * measured.workers_per_node
    if num_nodes < 1 or num_workers < 1 or num_workers % num_nodes:
        raise ConfigurationError(
            f"{num_workers} workers on {num_nodes} nodes: nodes must be equally full; give --workers and --nodes so "
            "that the second divides the first"
        )
    refuse_too_many(num_workers, "call decent_dp.plan.predict for one topology")
    return Layout(num_workers, num_workers // num_nodes)


def as_dict(profile: Profile, layout: Layout, found: Recommendation) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "num_workers": layout.num_workers,
        "num_nodes": layout.num_nodes,
        "is_measured_layout": layout == profile.layout,
        "num_bytes": profile.num_bytes,
        "recommended": asdict(found.choice),
        "fastest": asdict(found.fastest),
        "is_worth_it": found.is_worth_it,
        "reason": found.reason,
        "predictions": [asdict(prediction) for prediction in found.predictions],
        "left_out": found.left_out,
    }


def as_text(profile: Profile, layout: Layout, found: Recommendation) -> list[str]:
    """Lines for a terminal, at most 80 columns wide."""
    compute = profile.compute
    digits = 1 if found.fastest.step_s >= _SHORT_S else 3
    lines = [
        f"{layout.num_workers} workers on {layout.num_nodes} nodes, "
        f"{profile.num_bytes / 2**20:.1f} MiB of parameters in {len(compute.buckets)} buckets",
        f"forward {1000 * compute.forward_s:.{digits}f} ms, backward {1000 * compute.backward_s:.{digits}f} ms, "
        f"update {1000 * compute.update_s:.{digits}f} ms, mixing {1000 * compute.mix_s:.{digits}f} ms",
    ]
    if layout != profile.layout:
        lines.append(
            f"measured with {profile.num_workers} workers on {profile.layout.num_nodes} nodes; the rest is the model's"
        )
    slowest = max(compute.worker_factors)
    if slowest > 1.05 and layout.num_workers == profile.num_workers:
        rank = compute.worker_factors.index(slowest)
        lines.append(f"worker {rank} takes {slowest:.2f} times the mean in every step, and all wait for it")
    rows = [
        [p.topology, p.wire_dtype or "", *(f"{1000 * part:.{digits}f}" for part in _parts(p)), p.bound]
        for p in found.predictions
    ]
    lines += ["", table(["topology", "wire dtype", "ms/step", "compute", "+ wire", "+ jitter", "bound"], rows)]
    if found.left_out:
        same: dict[str, list[str]] = {}
        others = []
        for name, why in found.left_out.items():
            if why.startswith("same as"):
                same.setdefault(why, []).append(name)
            else:
                others.append(name)
        lines.append("")
        if others:
            lines.append(wrapped("cannot serve these workers: " + ", ".join(others)))
        lines += [wrapped(f"{why}: " + ", ".join(names)) for why, names in same.items()]
    lines += ["", wrapped(found.reason), wrapped(_advice(found))]
    return lines


def _parts(p: Prediction) -> tuple[float, float, float, float]:
    return p.step_s, p.compute_s, p.wire_s, p.jitter_s


def _advice(found: Recommendation) -> str:
    choice = found.choice
    if not found.is_worth_it:
        return "Recommended: torch's DistributedDataParallel; decentralized training is not worth it here."
    extra = f", wire_dtype=torch.{choice.wire_dtype}" if choice.wire_dtype else ""
    text = f"Recommended: DecentralizedDataParallel(..., topology={choice.topology!r}{extra})"
    is_slower = found.fastest.step_s < 0.995 * choice.step_s
    if is_slower and found.fastest.topology != ALL_REDUCE:
        fastest = f"{found.fastest.topology} {found.fastest.wire_dtype or ''}".strip()
        text += f"; {fastest} is the fastest, by {1 - found.fastest.step_s / choice.step_s:.1%}, and mixes less"
        if choice.wire_dtype is None and found.fastest.wire_dtype is not None:
            text = text.replace(", and mixes less", ", in less precision")
    return text + "."
