"""The rounds of a topology as a picture, an .svg or .png file; needs matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decent_dp.errors import ConfigurationError, DecentDPError
from decent_dp.topology import AnyTopology, Average, Idle, Layout, Sharded, Swap

_ENDINGS = (".svg", ".png")
_MOST_COLUMNS = 4
_ACROSS, _INSIDE, _MEMBER = "#c4451c", "#4a78a8", "#222222"


class PictureError(DecentDPError):
    """There is no picture."""


def save_picture(topology: AnyTopology, steps: Sequence[int], path: Path) -> None:
    """Draw some rounds, each a circle of workers; nodes are arcs of it.

    Lines inside a node and between nodes differ in colour; a message one way has an arrowhead. A clique is a star
    around its centre.

    Args:
        topology: What to draw.
        steps: Which rounds.
        path: The file; its ending says the format.

    Raises:
        ConfigurationError: The ending is neither .svg nor .png.
        PictureError: matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigurationError(f"--draw {path}: the file must end in .svg or .png")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError("--draw needs matplotlib, which is not installed: pip install 'decent-dp[plots]'") from None
    num_columns = min(_MOST_COLUMNS, len(steps))
    num_rows = -(-len(steps) // num_columns)
    size = 3.0 if topology.layout.num_workers <= 32 else 4.5
    with matplotlib.rc_context({"svg.hashsalt": topology.name}):
        figure = Figure(figsize=(size * num_columns, (size + 0.3) * num_rows), layout="constrained")
        axes = figure.subplots(num_rows, num_columns, squeeze=False)
        for ax in axes.flat:
            ax.set_axis_off()
            ax.set_aspect("equal")
            ax.set_xlim(-1.5, 1.5)
            ax.set_ylim(-1.5, 1.5)
        for ax, t in zip(axes.flat, steps, strict=False):
            ax.set_title(f"step {t}")
            _draw_round(ax, topology, t)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, format=path.suffix.lower()[1:], dpi=150, metadata=metadata)
        except OSError as error:
            raise PictureError(
                f"--draw {path} cannot be written ({error.strerror}): give a file in a folder that is there"
            ) from None


def _places(layout: Layout) -> list[tuple[float, float]]:
    """Workers on a circle, from the top clockwise, with a gap between nodes."""
    gap = 1.0 if layout.num_nodes > 1 and layout.workers_per_node > 1 else 0.0
    total = layout.num_workers + gap * layout.num_nodes
    angles = (2 * math.pi * (rank + gap * layout.node_of(rank)) / total for rank in range(layout.num_workers))
    return [(math.sin(angle), math.cos(angle)) for angle in angles]


def _draw_round(ax: Any, topology: AnyTopology, t: int) -> None:
    layout = topology.layout
    places = _places(layout)
    for rank in range(layout.num_workers):
        plan = topology.plan_at(t, rank)
        if isinstance(plan, Average):
            if rank == plan.ranks[0]:
                _star(ax, layout, places, plan.ranks)
            continue
        if isinstance(plan, Sharded):
            if rank == plan.ranks[0]:
                _star(ax, layout, places, plan.ranks)
            plan = plan.across
        if isinstance(plan, Idle):
            continue
        assert isinstance(plan, Swap)
        for other in plan.send_to:
            if other not in plan.receive_from:
                _line(ax, layout, places, rank, other, is_one_way=True)
            elif rank < other:
                _line(ax, layout, places, rank, other)
    small = layout.num_workers > 32
    for rank, (x, y) in enumerate(places):
        ax.plot(x, y, "o", color=_MEMBER, markersize=3 if small else 5, zorder=3)
        ax.text(1.16 * x, 1.16 * y, str(rank), ha="center", va="center", fontsize=5 if small else 8)
    if layout.num_nodes > 1 and layout.workers_per_node > 1:
        for node in range(layout.num_nodes):
            x, y = (sum(places[rank][axis] for rank in layout.ranks_of(node)) for axis in (0, 1))
            x, y = (1.4 * along / math.hypot(x, y) for along in (x, y))
            ax.text(x, y, f"node {node}", ha="center", va="center", fontsize=7, color=_INSIDE)


def _star(ax: Any, layout: Layout, places: Sequence[tuple[float, float]], ranks: Sequence[int]) -> None:
    x, y = (sum(places[rank][axis] for rank in ranks) / len(ranks) for axis in (0, 1))
    colour = _colour(layout, ranks)
    for rank in ranks:
        ax.plot([x, places[rank][0]], [y, places[rank][1]], color=colour, linewidth=1, zorder=1)
    ax.plot(x, y, "s", color=colour, markersize=4, zorder=2)


def _line(
    ax: Any, layout: Layout, places: Sequence[tuple[float, float]], a: int, b: int, *, is_one_way: bool = False
) -> None:
    style = {
        "arrowstyle": "-|>" if is_one_way else "-",
        "color": _colour(layout, (a, b)),
        "shrinkA": 2,
        "shrinkB": 3,
        "linewidth": 1,
        "connectionstyle": "arc3,rad=0.12",
    }
    ax.annotate("", xy=places[b], xytext=places[a], arrowprops=style, zorder=1)


def _colour(layout: Layout, ranks: Sequence[int]) -> str:
    return _INSIDE if len({layout.node_of(rank) for rank in ranks}) == 1 else _ACROSS
