"""The table of topologies: names to builders."""

import difflib
import re
from collections.abc import Callable
from functools import partial

from decent_dp.errors import TopologyError
from decent_dp.topology.alternating import alternating_exp_ring
from decent_dp.topology.base_graph import base_graph
from decent_dp.topology.complete import complete
from decent_dp.topology.function_of_time import AnyTopology, FunctionOfTime
from decent_dp.topology.hierarchical import hierarchical
from decent_dp.topology.layout import Layout, check_layout
from decent_dp.topology.one_peer import exp, ring
from decent_dp.topology.random_matching import random_matching
from decent_dp.topology.static import hypercube, static_exp, static_ring, torus
from decent_dp.topology.topology import Topology

_BUILDERS: dict[str, Callable[[Layout], AnyTopology]] = {
    "alternating-exp-ring": alternating_exp_ring,
    "complete": complete,
    "exp": exp,
    "hierarchical": hierarchical,
    "hypercube": hypercube,
    "one-peer-exp": exp,
    "random-matching": random_matching,
    "ring": ring,
    "static-exp": static_exp,
    "static-ring": static_ring,
    "torus": torus,
}

_NUMBERED: dict[str, tuple[Callable[[Layout, int], AnyTopology], range]] = {"base": (base_graph, range(2, 10))}
"""Families whose names end in a number, as ``base-2``: the builder, and the numbers listed; it takes others too."""


def register(name: str, builder: Callable[[Layout], AnyTopology], *, replace: bool = False) -> None:
    """Give a builder a name, on every worker alike.

    Args:
        name: What :func:`build` and the wrapper's ``topology`` argument will find it by.
        builder: A function from a layout to a topology for that layout.
        replace: Whether the name may be in use already.

    Raises:
        TopologyError: The name is no usable text, or it is in use and ``replace`` is False.

    Example:
        >>> register("exp", exp, replace=True)
        >>> build("exp", Layout(num_workers=4, workers_per_node=1)).name
        'exp'
    """
    if not isinstance(name, str) or not name or name != name.strip():
        raise TopologyError(f"topology name {name!r}: give a text without spaces around it")
    if not callable(builder):
        raise TopologyError(f"builder of topology {name!r} is {builder!r}; give a function from a Layout to a Topology")
    if _find(name) is not None and not replace:
        raise TopologyError(
            f"topology name {name!r} is in use: choose another name, or pass replace=True to put the new "
            "builder in its place"
        )
    _BUILDERS[name] = builder


def build(name: str, layout: Layout) -> AnyTopology:
    """The topology of that name for these workers.

    Args:
        name: One of :func:`names`, or ``base-`` and any whole number of at least 2, or ``hierarchical(NAME)`` with
            another of these between nodes (``hierarchical(complete, NAME)`` says the same).
        layout: The workers and nodes.

    Raises:
        TopologyError: The name is unknown, or the topology cannot serve this layout.

    Example:
        >>> build("ring", Layout(num_workers=8, workers_per_node=4)).num_rounds
        2
    """
    if not isinstance(name, str):
        raise TopologyError(f"{name!r} is of type {type(name).__name__}; give the name of a topology: {_listed()}")
    builder = _find(name)
    if builder is None:
        near = difflib.get_close_matches(name.lower(), names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise TopologyError(f"unknown topology {name!r}{hint} Known are {_listed()}; register() adds your own")
    topology = builder(check_layout(layout))
    if not isinstance(topology, (Topology, FunctionOfTime)):
        raise TopologyError(
            f"the builder of topology {name!r} gave a {type(topology).__name__}; it must return a Topology"
        )
    if topology.layout != layout:
        raise TopologyError(
            f"the builder of topology {name!r} gave one for {topology.layout}, asked for {layout}; it must "
            "use the layout it is given"
        )
    return topology


def names() -> tuple[str, ...]:
    """All names :func:`build` knows, sorted; of ``base-2``, ``base-3``, ... without end the first few."""
    numbered = (f"{family}-{number}" for family, (_, listed) in _NUMBERED.items() for number in listed)
    return tuple(sorted({*_BUILDERS, *numbered}))


def summary(name: str) -> str:
    """The first line of the docstring of a name's builder; empty if there is none.

    Args:
        name: As for :func:`build`; of ``hierarchical(NAME)`` it is that of ``hierarchical``.

    Example:
        >>> summary("complete")
        'All n workers take the mean of all in every round.'
    """
    name = name if name in _BUILDERS else name.partition("(")[0]
    family = name.rpartition("-")[0]
    builder = _BUILDERS.get(name) or (_NUMBERED[family][0] if family in _NUMBERED else None)
    return (builder.__doc__ or "").strip().partition("\n")[0] if builder else ""


def _find(name: str) -> Callable[[Layout], AnyTopology] | None:
    """The builder of a name, or None."""
    if name in _BUILDERS:
        return _BUILDERS[name]
    outer = re.fullmatch(r"hierarchical\((?:complete, *)?([^(),]+)\)", name)
    between = None if outer is None else _find(outer[1])
    if between is not None:
        return partial(hierarchical, outer=between)
    parsed = re.fullmatch(r"(.+)-(0|[1-9][0-9]{0,8})", name)
    if parsed is None or parsed[1] not in _NUMBERED:
        return None
    builder, number = _NUMBERED[parsed[1]][0], int(parsed[2])
    return lambda layout: builder(layout, number)


def _listed() -> str:
    return ", ".join(repr(name) for name in names())
