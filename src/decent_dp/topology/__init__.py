"""Who mixes with whom, and with what weight: pure data, no torch, no process group.

A :class:`Round` is a sparse matrix over the workers, a :class:`Topology` a cycle of rounds; what one worker
does in a round (its plan) is derived from the matrix. Builders are functions from a :class:`Layout` to a
topology, and a table finds them by name. A topology without a cycle is a :class:`FunctionOfTime`.

Example:
    >>> topology = build("exp", Layout(num_workers=4, workers_per_node=2))
    >>> print(draw(topology))
    0: (0 1) (2 3)
    1: (0 2) (1 3)
    >>> topology.plan_at(t=1, rank=0)
    Swap(send_to=(2,), receive_from=mappingproxy({2: 0.5}))
"""

from decent_dp.topology.alternating import alternating_exp_ring
from decent_dp.topology.analysis import Analysis, Comparison, analyze, compare
from decent_dp.topology.base_graph import base_graph
from decent_dp.topology.catalog import build, names, register
from decent_dp.topology.complete import complete
from decent_dp.topology.custom import from_edges, from_function, from_matrices
from decent_dp.topology.drawing import draw
from decent_dp.topology.function_of_time import AnyTopology, FunctionOfTime
from decent_dp.topology.hierarchical import hierarchical
from decent_dp.topology.layout import Layout
from decent_dp.topology.mixing import Mixing, mixing
from decent_dp.topology.one_peer import exp, ring
from decent_dp.topology.plans import Average, Idle, Plan, Sharded, Swap, plan_of
from decent_dp.topology.random_matching import random_matching
from decent_dp.topology.rounds import Round, Row
from decent_dp.topology.static import hypercube, static_exp, static_ring, torus
from decent_dp.topology.topology import Topology
from decent_dp.topology.traffic import Traffic, traffic

__all__ = [
    "Analysis",
    "AnyTopology",
    "Average",
    "Comparison",
    "FunctionOfTime",
    "Idle",
    "Layout",
    "Mixing",
    "Plan",
    "Round",
    "Row",
    "Sharded",
    "Swap",
    "Topology",
    "Traffic",
    "alternating_exp_ring",
    "analyze",
    "base_graph",
    "build",
    "compare",
    "complete",
    "draw",
    "exp",
    "from_edges",
    "from_function",
    "from_matrices",
    "hierarchical",
    "hypercube",
    "mixing",
    "names",
    "plan_of",
    "random_matching",
    "register",
    "ring",
    "static_exp",
    "static_ring",
    "torus",
    "traffic",
]
