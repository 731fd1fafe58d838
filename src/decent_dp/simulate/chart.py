"""Simulations as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decent_dp.errors import ConfigurationError
from decent_dp.simulate.extras import load_extra
from decent_dp.simulate.run import Run

_MEASURES = (
    ("loss", "loss_of_consensus", "loss"),
    ("consensus_distance", None, "consensus distance"),
    ("accuracy", "accuracy_of_consensus", "accuracy"),
)


def draw(runs: Sequence[Run], path: str | Path, title: str) -> None:
    """Draw every measure against the step, and against simulated time where there is a clock.

    Solid lines are the consensus (or the distance), thin ones the mean of the replicas.

    Args:
        runs: Of one problem.
        path: Where to; ``.png``, ``.svg`` or ``.pdf``.
        title: Above the picture.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigurationError: There is nothing to draw, or the ending is another.
    """
    check_path(path)
    if not any(run.records for run in runs):
        raise ConfigurationError("a plot shows what changes from step to step, and the clock alone has run")
    figure_module = load_extra("matplotlib.figure", "matplotlib", "a plot")
    measures = [m for m in _MEASURES if any(getattr(run.records[-1], m[0]) is not None for run in runs)]
    axes = [("step", "step")]
    if any(run.records[-1].time_s for run in runs):
        axes.append(("time_s", "simulated time, s"))
    figure = figure_module.Figure(
        figsize=(1.5 + 4.5 * len(axes), 1.2 + 2.6 * len(measures)), layout="constrained", dpi=120
    )
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(measures), len(axes), squeeze=False, sharex="col", sharey="row")
    for row, (of_replicas, of_consensus, label) in zip(grid, measures, strict=True):
        for panel, (across, _) in zip(row, axes, strict=True):
            for number, run in enumerate(runs):
                _line(panel, run, across, of_consensus or of_replicas, f"C{number % 10}", width=1.6, name=run.topology)
                if of_consensus is not None:
                    _line(panel, run, across, of_replicas, f"C{number % 10}", width=0.7)
            if of_replicas != "accuracy" and _spans_decades(runs, of_replicas):
                panel.set_yscale("log", nonpositive="mask")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(label)
    for panel, (_, label) in zip(grid[-1], axes, strict=True):
        panel.set_xlabel(label)
    grid[0][-1].legend(frameon=False, fontsize=8)
    if len(measures) > 1:
        grid[0][0].set_title("thick: consensus, thin: mean of replicas", fontsize=8, loc="left")
    figure.savefig(path)


def _spans_decades(runs: Sequence[Run], measure: str) -> bool:
    values = [getattr(record, measure) for run in runs for record in run.records]
    positive = [value for value in values if value and value > 0]
    return bool(positive) and max(positive) > 20 * min(positive)


def check_path(path: str | Path) -> None:
    """Raise unless matplotlib is there, and the ending is one that it is used for here."""
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigurationError(f"a plot to {path}: give a file that ends in .png, .svg or .pdf")
    load_extra("matplotlib.figure", "matplotlib", "a plot")


def _line(
    panel: Any, run: Run, across: str, measure: str, color: str, *, width: float, name: str | None = None
) -> None:
    panel.plot(
        [getattr(record, across) for record in run.records],
        [getattr(record, measure) for record in run.records],
        color=color,
        linewidth=width,
        label=name,
    )
