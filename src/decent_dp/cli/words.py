"""The rounds of a topology in words."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from decent_dp.topology import AnyTopology, Average, Idle, Layout, Plan, Sharded, Swap

_MOST_LISTED = 6
Message = tuple[int, int, float]
"""Receiver, sender, weight."""


def describe_round(topology: AnyTopology, t: int) -> str:
    """What the workers do in step ``t``, as a sentence without a full stop.

    Example:
        >>> from decent_dp.topology import build
        >>> describe_round(build("exp", Layout(12, 4)), 2)
        'every worker takes 1/2 from the worker 4 before it; 12 of 12 messages between nodes'
        >>> describe_round(build("base-3", Layout(6, 3)), 0)
        '3 pairs average, 2 inside a node and 1 between nodes'
    """
    layout = topology.layout
    plans = [topology.plan_at(t, rank) for rank in range(layout.num_workers)]
    if isinstance(plans[0], Sharded):
        of_nodes = [_of_node(plan, layout) for plan in plans[:: layout.workers_per_node]]
        nodes = Layout(layout.num_nodes, 1)
        return "; ".join(["every node averages over its workers", *_phrases(of_nodes, nodes, "node")])
    return "; ".join(_phrases(plans, layout, "worker"))


def _of_node(plan: Plan, layout: Layout) -> Plan:
    """What a node does, of what its first worker does with a shard."""
    assert isinstance(plan, Sharded)
    if isinstance(plan.across, Idle):
        return plan.across
    taken = {layout.node_of(rank): weight for rank, weight in plan.across.receive_from.items()}
    return Swap(tuple(layout.node_of(rank) for rank in plan.across.send_to), taken)


def _phrases(plans: Sequence[Plan], layout: Layout, who: str) -> list[str]:
    phrases, messages, idle = [], [], []
    cliques: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    pairs: Counter[float] = Counter()
    pairs_inside: Counter[float] = Counter()
    for rank, plan in enumerate(plans):
        if isinstance(plan, Idle):
            idle.append(rank)
        elif isinstance(plan, Average):
            if rank == plan.ranks[0]:
                cliques[len(plan.ranks)] += 1
                inside[len(plan.ranks)] += len({layout.node_of(other) for other in plan.ranks}) == 1
        elif isinstance(plan, Swap):
            partner, weight = _partner(plans, rank)
            if partner is None:
                messages += [(rank, other, weight) for other, weight in plan.receive_from.items()]
            elif rank < partner:
                pairs[weight] += 1
                pairs_inside[weight] += layout.node_of(rank) == layout.node_of(partner)
    for weight, number in pairs.items():
        does = "average" if weight == 0.5 else f"give each other {fraction(weight)}"
        of = "" if who == "worker" else f" of {who}s"
        phrases.append(_groups(number, "pair", does, _where(number, pairs_inside[weight], layout), of))
    for size, number in cliques.items():
        if size == layout.num_workers:
            phrases.append(f"all {size} {who}s average")
        else:
            phrases.append(_groups(number, "group", "average", _where(number, inside[size], layout), f" of {size}"))
    if messages:
        phrases += _messages(messages, layout, who)
    if idle:
        are = _list(idle) if len(idle) <= _MOST_LISTED else f"{len(idle)} of {len(plans)}"
        is_one = len(idle) == 1
        does = ("idles" if is_one else "idle") if who == "worker" else ("meets no other" if is_one else "meet no other")
        phrases.append(f"{who}{'' if is_one else 's'} {are} {does}")
    return phrases


def _groups(number: int, kind: str, does: str, where: str, size: str = "") -> str:
    if number == 1:
        does = does.replace("give each", "gives each").replace("average", "averages")
    return f"{number} {kind}{'s' if number > 1 else ''}{size} {does}{where}"


def _partner(plans: Sequence[Plan], rank: int) -> tuple[int | None, float]:
    """The one other worker that gives and takes the same weight and meets nobody else."""
    plan = plans[rank]
    assert isinstance(plan, Swap)
    if len(plan.send_to) == 1 and tuple(plan.receive_from) == plan.send_to:
        partner = plan.send_to[0]
        if plans[partner] == Swap((rank,), {rank: plan.receive_from[partner]}):
            return partner, plan.receive_from[partner]
    return None, 0.0


def _where(number: int, num_inside: int, layout: Layout) -> str:
    if layout.num_nodes == 1 or layout.workers_per_node == 1:
        return ""
    if num_inside in (0, number):
        return ", inside a node" if num_inside else ", between nodes"
    return f", {num_inside} inside a node and {number - num_inside} between nodes"


def _messages(messages: Sequence[Message], layout: Layout, who: str) -> list[str]:
    n = layout.num_workers
    apart: list[set[tuple[int, float]]] = [set() for _ in range(n)]
    for receiver, sender, weight in messages:
        apart[receiver].add(((receiver - sender) % n, round(weight, 12)))
    weights = {round(weight, 12) for _, _, weight in messages}
    share = fraction(next(iter(weights))) if len(weights) == 1 else "a share"
    if all(taken == apart[0] for taken in apart) and len(apart[0]) <= _MOST_LISTED:
        distances = sorted(distance for distance, _ in apart[0])
        before = f"{who} {distances[0]}" if len(distances) == 1 else f"{who}s {_list(distances)}"
        each = "each of " if len(distances) > 1 else ""
        what = f"every {who} takes {share} from {each}the {before} before it"
    else:
        most = max(len(taken) for taken in apart)
        num_taking = sum(bool(taken) for taken in apart)
        subject = f"every {who} takes" if num_taking == n else f"{num_taking} {who}(s) take"
        least = min(len(taken) for taken in apart if taken)
        several = f"{most}" if least == most else f"{least} to {most}"
        what = f"{subject} {share} from {'each of ' if most > 1 else ''}{several} other{'s' if most > 1 else ''}"
    if layout.num_nodes == 1 or layout.workers_per_node == 1:
        return [what]
    num_across = sum(layout.node_of(receiver) != layout.node_of(sender) for receiver, sender, _ in messages)
    return [what, f"{num_across} of {len(messages)} messages between nodes"]


def fraction(weight: float) -> str:
    """A weight as people write it: ``1/3``, or three digits if it is no simple fraction."""
    near = Fraction(weight).limit_denominator(128)
    if 0 < near < 1 and abs(float(near) - weight) < 1e-9:
        return f"{near.numerator}/{near.denominator}"
    return f"{weight:.3g}"


def _list(numbers: Sequence[int]) -> str:
    if len(numbers) < 3:
        return " and ".join(map(str, numbers))
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
