"""What one would like to know of a topology before training with it."""

from dataclasses import dataclass

from decent_dp.errors import TopologyError
from decent_dp.topology.catalog import build, names
from decent_dp.topology.function_of_time import AnyTopology
from decent_dp.topology.layout import Layout
from decent_dp.topology.mixing import Mixing, mixing
from decent_dp.topology.traffic import Traffic, traffic


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a topology sends, how fast replicas agree, how far apart they stay.

    Args:
        topology: What was analysed.
        traffic: Copies of the model sent.
        mixing: Convergence and the factors of noise and heterogeneity; None if that would take too long.
        reason: Why there is no mixing; None if there is.
    """

    topology: AnyTopology
    traffic: Traffic
    mixing: Mixing | None
    reason: str | None = None


def analyze(topology: AnyTopology, *, narrow_wire: bool = False) -> Analysis:
    """What a topology sends, how fast replicas agree, and how far noise and unlike data keep them apart.

    Args:
        topology: Any.
        narrow_wire: As for `decent_dp.topology.traffic.traffic`.

    Example:
        >>> found = analyze(build("base-2", Layout(num_workers=24, workers_per_node=8)))
        >>> round(found.traffic.per_worker, 3), found.mixing.rounds_to_exact, round(found.mixing.noise, 3)
        (0.833, 6, 2.088)
    """
    sent = traffic(topology, narrow_wire=narrow_wire)
    try:
        return Analysis(topology, sent, mixing(topology))
    except TopologyError as error:
        return Analysis(topology, sent, None, str(error))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every named topology on one layout.

    Args:
        layout: The workers and nodes.
        analyses: By name, of those that serve the layout; of several that are the same rounds here only the first.
        same: The first name by every other name of the same rounds.
        refused: Why others cannot serve the layout, by name.
    """

    layout: Layout
    analyses: dict[str, Analysis]
    same: dict[str, str]
    refused: dict[str, str]


def compare(layout: Layout, *, narrow_wire: bool = False) -> Comparison:
    """Analyse every topology that has a name and serves the layout.

    Args:
        layout: The workers and nodes.
        narrow_wire: As for `analyze`.

    Example:
        >>> found = compare(Layout(num_workers=6, workers_per_node=2))
        >>> sorted(found.refused), found.same["one-peer-exp"]
        (['alternating-exp-ring', 'hypercube', 'torus'], 'exp')
    """
    topologies: dict[str, AnyTopology] = {}
    same: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in sorted(names(), key=lambda name: (name != "complete", len(name), name)):
        try:
            topology = build(name, layout)
        except TopologyError as error:
            refused[name] = str(error)
            continue
        first = next((other for other, seen in topologies.items() if _are_same(seen, topology)), None)
        if first is None:
            topologies[name] = topology
        else:
            same[name] = first
    analyses = {name: analyze(topology, narrow_wire=narrow_wire) for name, topology in sorted(topologies.items())}
    return Comparison(layout, analyses, same, refused)


def _are_same(a: AnyTopology, b: AnyTopology) -> bool:
    """Whether two topologies have the same rounds, carried out in the same way."""
    if a.num_rounds is None or b.num_rounds is None:
        return False
    return a.num_rounds == b.num_rounds and all(
        a.round_at(t) == b.round_at(t) and a.plan_at(t, 0) == b.plan_at(t, 0) for t in range(a.num_rounds)
    )
