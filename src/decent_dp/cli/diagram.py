"""A drawing of rounds for a terminal: workers are lines downwards, groups and messages are bars across them."""

from collections.abc import Sequence
from dataclasses import dataclass

from decent_dp.cli.output import WIDTH
from decent_dp.topology import AnyTopology, Average, Idle, Layout, Sharded, Swap

_MOST_BARS = 12
"""Lines of one round; more would not be read."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A group of workers that mix, or a message.

    Args:
        places: Who stands on it.
        sender: Who sends, if it is a message; else all give and take.
    """

    places: tuple[int, ...]
    sender: int | None = None


def diagram(topology: AnyTopology, steps: Sequence[int], *, is_ascii: bool = False) -> str:
    """The rounds of some steps; empty if the workers do not fit beside each other.

    A topology on two levels is drawn by its nodes.

    Args:
        topology: What to draw.
        steps: Which rounds.
        is_ascii: Whether to do without line-drawing characters.

    Example:
        >>> from decent_dp.topology import build
        >>> print(diagram(build("exp", Layout(4, 2)), [0, 1], is_ascii=True))
                 0  1    2  3
        step 0   o--o    o--o
        step 1   o--|----o  |
                 |  o----|--o
    """
    layout = topology.layout
    has_levels = isinstance(topology.plan_at(steps[0], 0), Sharded)
    if has_levels:
        layout = Layout(layout.num_nodes, 1)
    columns = _columns(layout, len(f"step {max(steps)}   "))
    if columns is None:
        return ""
    lines = _head(layout, columns, "node" if has_levels else "")
    for t in steps:
        bars = _bars(topology, t)
        layers = _layers(bars)
        note = ""
        if len(layers) > _MOST_BARS:
            layers = _layers([bar for bar in bars if 0 in bar.places and bar.sender in (0, None)])
            note = f"(of {len(bars)} groups and messages only those of 0 are drawn)"
        label = f"step {t}   "
        for layer in layers or [[]]:
            lines.append(label.ljust(columns[0]) + _line(layer, columns, is_ascii=is_ascii))
            label = ""
        lines += [" " * columns[0] + note] if note else []
    return "\n".join(line.rstrip() for line in lines)


def _columns(layout: Layout, margin: int) -> list[int] | None:
    """Where each worker's line is; the closest that is wide enough for its number."""
    n, digits = layout.num_workers, len(str(layout.num_workers - 1))
    for apart in range(3, 1, -1):
        gap = 2 if layout.workers_per_node > 1 else 0
        columns = [margin + apart * rank + gap * layout.node_of(rank) for rank in range(n)]
        if columns[-1] < WIDTH and (digits == 1 or apart == 3 or n <= 100):
            return columns
    return None


def _head(layout: Layout, columns: Sequence[int], who: str) -> list[str]:
    """The numbers, downwards where they have several digits."""
    digits = len(str(layout.num_workers - 1))
    lines = []
    for digit in range(digits):
        line = [" "] * (columns[-1] + 1)
        for rank, column in enumerate(columns):
            line[column] = str(rank).rjust(digits)[digit]
        lines.append("".join(line))
    if who:
        lines[-1] = who + lines[-1][len(who) :]
    return lines


def _bars(topology: AnyTopology, t: int) -> list[Bar]:
    layout, bars = topology.layout, []
    for rank in range(layout.num_workers):
        plan = topology.plan_at(t, rank)
        place = rank
        if isinstance(plan, Sharded):
            if rank != plan.ranks[0] or isinstance(plan.across, Idle):
                continue
            place = layout.node_of(rank)
            receive_from = {layout.node_of(other): weight for other, weight in plan.across.receive_from.items()}
            plan = Swap(tuple(layout.node_of(other) for other in plan.across.send_to), receive_from)
        if isinstance(plan, Average):
            if rank == plan.ranks[0]:
                bars.append(Bar(plan.ranks))
        elif isinstance(plan, Swap):
            for other in plan.send_to:
                if other not in plan.receive_from:
                    bars.append(Bar((place, other), sender=place))
                elif place < other:
                    bars.append(Bar((place, other)))
    return bars


def _layers(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Bars that do not overlap go on one line; the first line that has room."""
    layers: list[list[Bar]] = []
    ends: list[int] = []
    for bar in sorted(bars, key=lambda bar: (min(bar.places), max(bar.places))):
        at = next((k for k, end in enumerate(ends) if end < min(bar.places)), None)
        if at is None:
            at = len(layers)
            layers.append([])
            ends.append(-1)
        layers[at].append(bar)
        ends[at] = max(bar.places)
    return layers


def _line(bars: Sequence[Bar], columns: Sequence[int], *, is_ascii: bool) -> str:
    down, across, over, member, left, right = "|-|o<>" if is_ascii else "│─┼●◀▶"
    line = [" "] * (columns[-1] + 1)
    for column in columns:
        line[column] = down
    for bar in bars:
        first, last = columns[min(bar.places)], columns[max(bar.places)]
        for column in range(first, last):
            line[column] = over if line[column] == down else across
        for place in bar.places:
            line[columns[place]] = member
        if bar.sender is not None:
            receiver = next(place for place in bar.places if place != bar.sender)
            line[columns[receiver]] = right if receiver > bar.sender else left
    return "".join(line[columns[0] :])
