"""Virtual workers that run the library's own step on small problems, and a clock for clusters of any size.

`simulate` trains n replicas in one process and notes loss, accuracy and consensus distance; `run_clock` says when the
steps would end on a cluster, measured or made of plain numbers. ``decent-dp simulate`` is both on a command line.
"""

from decent_dp.simulate.clock import Times, run_clock
from decent_dp.simulate.cluster import cluster, with_stragglers
from decent_dp.simulate.problems import Problem, build_problem
from decent_dp.simulate.run import Record, Run, simulate
from decent_dp.simulate.workers import AllReduced, VirtualWorkers

__all__ = [
    "AllReduced",
    "Problem",
    "Record",
    "Run",
    "Times",
    "VirtualWorkers",
    "build_problem",
    "cluster",
    "run_clock",
    "simulate",
    "with_stragglers",
]
