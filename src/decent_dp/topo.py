"""The import path of the original package for custom topologies: classes that list weighted edges.

New code writes a builder (:func:`decent_dp.topology.from_edges`, :func:`decent_dp.topology.register`); a
class here becomes one when it is registered.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from operator import index as whole
from typing import ClassVar, NoReturn, TypeVar

from decent_dp import topology
from decent_dp.engine.pre_average import Edge
from decent_dp.errors import TopologyError
from decent_dp.topology import Average, Idle, Layout, Round, Swap, plan_of

__all__ = ["Edge", "Topology", "TopologyReg"]

_logger = logging.getLogger("decent_dp")


class Topology:
    """Base class of custom topologies: override ``_get_topo_edges``.

    One instance is made for every rank; ``_rank``, ``_world_size``, ``_local_world_size`` and ``_n_nodes``
    are set before ``__init__`` runs, so the edges may depend on the rank. What all ranks list is merged, in
    any order. A worker in no edge of a round idles. In a world of one worker no edges are asked for.

    Example:
        >>> @TopologyReg.register("halves-and-all")
        ... class HalvesAndAll(Topology):
        ...     def _get_topo_edges(self):
        ...         ranks = list(range(self._world_size))
        ...         half = len(ranks) // 2
        ...         halves = [Edge(part, 1 / len(part)) for part in (ranks[:half], ranks[half:])]
        ...         return [halves, [Edge(ranks, 1 / len(ranks))]]
        >>> print(topology.draw(topology.build("halves-and-all", Layout(6, 3))))
        0: (0 1 2) (3 4 5)
        1: (0 1 2 3 4 5)
    """

    _rank: int
    _world_size: int
    _local_world_size: int
    _n_nodes: int

    def __init__(self, local_world_size: int | None = None) -> None:
        if not hasattr(self, "_rank"):
            raise TopologyError(
                f"{type(self).__name__} was called by hand; register the class with "
                "@TopologyReg.register(name) and hand the topology over by name, so that it is made for "
                "every rank"
            )

    def _get_topo_edges(self) -> list[list[Edge]]:
        """The edges of each round of the cycle."""
        raise NotImplementedError(f"{type(self).__name__} must define _get_topo_edges() -> list[list[Edge]]")

    @classmethod
    def _at(cls, layout: Layout, rank: int) -> "Topology":
        """The instance of one rank."""
        instance = cls.__new__(cls)
        instance._rank = rank
        instance._world_size = layout.num_workers
        instance._local_world_size = layout.workers_per_node
        instance._n_nodes = layout.num_nodes
        instance.__init__(layout.workers_per_node)  # type: ignore[misc]  # a subclass's own may read the four above
        return instance


_Class = TypeVar("_Class", bound=type[Topology])


class TopologyReg:
    """The table of topology classes, the built-in names included."""

    registry: ClassVar[dict[str, type[Topology]]] = {}

    @staticmethod
    def register(name: str) -> Callable[[_Class], _Class]:
        """Decorate a class to make its topology available under ``name``.

        Registering a class again, or the same definition run again, keeps or renews the entry. The
        four names of the original package and the name of another class are refused; any other built-in name
        goes to the class, because there it was free.

        Raises:
            TopologyError: The name is taken, or what is decorated is no subclass of :class:`Topology`.
        """

        def enter(cls: _Class) -> _Class:
            if not (isinstance(cls, type) and issubclass(cls, Topology)):
                raise TopologyError(f"{cls!r} cannot be registered as {name!r}: derive it from decent_dp.topo.Topology")
            holder = TopologyReg.registry.get(name)
            if holder is not None and _definition(holder) != _definition(cls):
                if name in _ORIGINAL_NAMES or name not in _BUILT_IN:
                    raise TopologyError(
                        f"topology name {name!r} belongs to {holder.__name__}, so {cls.__name__} cannot have "
                        "it: choose another name"
                    )
                _logger.warning("topology %r is now %s, no longer the built-in one", name, cls.__name__)
            topology.register(name, _builder(name, cls), replace=holder is not None or name not in topology.names())
            TopologyReg.registry[name] = cls
            return cls

        return enter


def _definition(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _builder(name: str, cls: type[Topology]) -> Callable[[Layout], topology.Topology]:
    def build(layout: Layout) -> topology.Topology:
        if layout.num_workers == 1:
            return topology.Topology(name, layout, (Round.identity(1),))
        lists = [_listed(name, cls._at(layout, rank)) for rank in range(layout.num_workers)]
        for rank, edges in enumerate(lists):
            if len(edges) != len(lists[0]):
                raise TopologyError(
                    f"topology {name!r}: rank {rank} lists {_rounds(edges)}, rank 0 lists "
                    f"{_rounds(lists[0])}; all ranks must list the same number"
                )
        rounds = (
            _merge(f"topology {name!r}, round {t}", layout.num_workers, [edges[t] for edges in lists])
            for t in range(len(lists[0]))
        )
        return topology.Topology(name, layout, tuple(rounds))

    return build


def _rounds(edges: Sequence[object]) -> str:
    return f"{len(edges)} round" + ("" if len(edges) == 1 else "s")


def _listed(name: str, instance: Topology) -> list[list[Edge]]:
    """What one rank lists, its form checked."""
    given: object = instance._get_topo_edges()
    wanted = f"_get_topo_edges of {type(instance).__name__} must return a list of lists of Edge, one list a round"
    if not isinstance(given, Sequence):
        raise TopologyError(f"topology {name!r}, rank {instance._rank}: got a {type(given).__name__}; {wanted}")
    for t, edges in enumerate(given):
        if not isinstance(edges, Sequence):
            raise TopologyError(
                f"topology {name!r}, round {t}, rank {instance._rank}: got a {type(edges).__name__}; {wanted}"
            )
        for edge in edges:
            if not isinstance(edge, Edge):
                raise TopologyError(
                    f"topology {name!r}, round {t}, rank {instance._rank}: got a {type(edge).__name__} in "
                    f"the list; {wanted}"
                )
    return [list(edges) for edges in given]


def _merge(where: str, num_workers: int, lists: Iterable[Iterable[Edge]]) -> Round:
    """One round of the edges that all ranks list for it."""
    weights: dict[tuple[int, ...], float] = {}
    for rank, edges in enumerate(lists):
        for edge in edges:
            ranks, weight = _checked(where, rank, edge, num_workers)
            known = weights.setdefault(ranks, weight)
            if abs(known - weight) > 1e-12:
                reason = f"lists edge {ranks} with weight {weight}, elsewhere it has {known}; give it one weight"
                _refuse(where, rank, reason)
    edge_of: dict[int, tuple[int, ...]] = {}
    rows = list(Round.identity(num_workers).rows)
    for ranks, keeps in weights.items():
        k = len(ranks)
        gives = (1 - keeps) / (k - 1) if k > 1 else 0.0
        mean = tuple((rank, 1 / k) for rank in ranks) if abs(keeps * k - 1) <= 1e-12 else None
        for rank in ranks:
            if rank in edge_of:
                reason = f"is in the edges {edge_of[rank]} and {ranks}; a worker is in one edge a round"
                _refuse(where, rank, reason)
            edge_of[rank] = ranks
            own = ((other, keeps if other == rank else gives) for other in ranks)
            rows[rank] = mean or tuple(entry for entry in own if entry[1])
    return Round(tuple(rows))


def _checked(where: str, lister: int, edge: Edge, num_workers: int) -> tuple[tuple[int, ...], float]:
    """The ranks of an edge, ascending, and what a member keeps."""
    try:
        ranks, weight = tuple(sorted(whole(rank) for rank in edge.ranks)), float(edge.weight)
    except (TypeError, ValueError):
        raise TopologyError(
            f"{where}: rank {lister} lists {edge!r}; an Edge takes whole ranks and a weight, as in Edge([0, 1], 0.5)"
        ) from None
    if not ranks:
        raise TopologyError(f"{where}: rank {lister} lists an edge with no ranks; leave it out")
    for rank, following in zip(ranks, (*ranks[1:], None), strict=True):
        if not 0 <= rank < num_workers:
            _refuse(where, rank, f"in edge {ranks}, but ranks go from 0 to {num_workers - 1}")
        if rank == following:
            _refuse(where, rank, f"twice in edge {ranks}; list it once")
    if len(ranks) == 1:
        return ranks, 1.0  # alone a worker keeps everything
    if not 0 <= weight <= 1:
        _refuse(where, ranks[0], f"edge {ranks} has the weight {weight}; what a worker keeps goes from 0 to 1")
    return ranks, weight


def _refuse(where: str, rank: int, reason: str) -> NoReturn:
    raise TopologyError(f"{where}, rank {rank}: {reason}")


class _BuiltIn(Topology):
    """A topology of the catalog as a class of edges."""

    _name: ClassVar[str]

    def _get_topo_edges(self) -> list[list[Edge]]:
        layout = Layout(self._world_size, self._local_world_size)
        built = topology.build(self._name, layout)
        if built.num_rounds is None:
            raise TopologyError(
                f"{self._name!r} has no cycle whose edges could be listed; use decent_dp.topology.build and its rounds"
            )
        return [list({edge.ranks: edge for edge in _edges(built, t)}.values()) for t in range(built.num_rounds)]


def _edges(built: topology.AnyTopology, t: int) -> Iterable[Edge]:
    for rank in range(built.layout.num_workers):
        plan = plan_of(built.round_at(t), rank)
        if isinstance(plan, Average):
            k = len(plan.ranks)
            yield Edge(plan.ranks, 1 - plan.weight * (k - 1) / k)
        elif isinstance(plan, Swap):
            if len(plan.send_to) != 1 or plan.send_to != tuple(plan.receive_from):
                raise TopologyError(
                    f"{built.name!r} for {built.layout.num_workers} workers is directed or gives a worker several "
                    "partners, and neither can be said with edges; use decent_dp.topology.build and its rounds"
                )
            yield Edge(tuple(sorted((rank, *plan.send_to))), 1 - plan.receive_from[plan.send_to[0]])
        else:
            assert isinstance(plan, Idle)


_ORIGINAL_NAMES = ("alternating-exp-ring", "complete", "one-peer-exp", "ring")
_BUILT_IN = topology.names()
for _name in _BUILT_IN:
    TopologyReg.registry[_name] = type(_name, (_BuiltIn,), {"_name": _name, "__doc__": f"The built-in {_name!r}."})
