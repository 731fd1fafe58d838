"""A simulation: virtual workers, a problem, a clock, and what is noted on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from decent_dp.ddp import OPTIM_FN_TYPE
from decent_dp.errors import ConfigurationError
from decent_dp.simulate.clock import Times
from decent_dp.simulate.problems import Problem
from decent_dp.simulate.workers import AllReduced, VirtualWorkers
from decent_dp.topology import AnyTopology

_NUM_RECORDS = 100


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured after some steps; None where the problem or the simulation has no such measure.

    Attributes:
        step: Steps taken.
        time_s: When the last worker had taken them, by the simulated clock.
        consensus_distance: Root mean square over the workers of the distance between a replica and the consensus.
        loss: Mean over the replicas, each on everybody's data.
        loss_of_consensus: Of the average of all replicas.
        accuracy: Mean over the replicas.
        accuracy_of_consensus: Of the average of all replicas.
    """

    step: int
    time_s: float | None
    consensus_distance: float
    loss: float | None = None
    loss_of_consensus: float | None = None
    accuracy: float | None = None
    accuracy_of_consensus: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One topology, simulated.

    Attributes:
        topology: Its name.
        records: Measures, from before the first step to after the last; empty if only the clock ran.
        step_s: Mean time of a step by the simulated clock, or None.
        factors: What the problem says of the topology alone, by name.
    """

    topology: str
    records: tuple[Record, ...] = ()
    step_s: float | None = None
    factors: tuple[tuple[str, float], ...] = ()

    def reached(self, target: float) -> Record | None:
        """The first record whose consensus has this loss or less, or None."""
        return next(
            (r for r in self.records if r.loss_of_consensus is not None and r.loss_of_consensus <= target), None
        )


def simulate(
    problem: Problem,
    topology: AnyTopology | None,
    optim_fn: OPTIM_FN_TYPE,
    num_steps: int,
    *,
    name: str | None = None,
    every: int | None = None,
    times: Times | None = None,
    say: Callable[[int], None] | None = None,
) -> Run:
    """Train virtual workers and note how they are.

    The same problem with the same seed gives the same numbers, and other topologies the same batches. A problem is
    used up: make a new one for every run.

    Args:
        problem: New.
        topology: For the workers of the problem; None averages gradients, as torch's DistributedDataParallel does.
        optim_fn: As for `decent_dp.DecentralizedDataParallel`.
        num_steps: Steps of every worker.
        name: What to call the topology; its own name when None.
        every: Steps between two records; in all about 100 records when None, every step where the loss is flat.
        times: When these steps end; see `decent_dp.simulate.clock.run_clock`.
        say: Told the number of steps taken, at every record.

    Raises:
        ConfigurationError: Topology and problem are for different numbers of workers, or a number cannot be.

    Example:
        >>> from functools import partial
        >>> from torch.optim import SGD
        >>> from decent_dp.simulate.problems import build_problem
        >>> from decent_dp.topology import Layout, build
        >>> run = simulate(build_problem("consensus", 4), build("exp", Layout(4, 1)), partial(SGD, lr=1.0), 3)
        >>> [round(record.consensus_distance, 1) for record in run.records]
        [4.1, 4.1, 2.0, 0.0]
    """
    if num_steps < 1 or (every is not None and every < 1):
        raise ConfigurationError(f"num_steps={num_steps}, every={every}: give at least 1")
    if topology is not None and topology.layout.num_workers != problem.num_workers:
        raise ConfigurationError(
            f"the topology '{topology.name}' is for {topology.layout.num_workers} workers and the problem for "
            f"{problem.num_workers}; make both for the same workers"
        )
    with _one_thread():
        return _simulate(problem, topology, optim_fn, num_steps, name, every, times, say)


def _simulate(
    problem: Problem,
    topology: AnyTopology | None,
    optim_fn: OPTIM_FN_TYPE,
    num_steps: int,
    name: str | None,
    every: int | None,
    times: Times | None,
    say: Callable[[int], None] | None,
) -> Run:
    workers = (
        AllReduced(problem.make, optim_fn) if topology is None else VirtualWorkers(problem.make, topology, optim_fn)
    )
    if problem.starts is not None:
        workers.overwrite(problem.starts)
    every = every or (1 if problem.is_flat else max(1, num_steps // _NUM_RECORDS))
    records = [_record(problem, workers.parameters(), 0, times)]
    for t in range(num_steps):
        workers.step(problem.draw())
        if (t + 1) % every == 0 or t + 1 == num_steps:
            records.append(_record(problem, workers.parameters(), t + 1, times))
            if say is not None:
                say(t + 1)
    name = name or ("all-reduce" if topology is None else topology.name)
    lr = workers.models[0].get_lr()
    squared = _stationary(
        [record.consensus_distance**2 for record in records], None if topology is None else topology.num_rounds
    )
    return Run(
        name, tuple(records), None if times is None else times.step_s, tuple(problem.factors(squared, lr).items())
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors of a virtual worker are too small to be shared out: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _record(problem: Problem, X: Tensor, step: int, times: Times | None) -> Record:
    time_s = None if times is None else float(times.last_s[step - 1]) if step else 0.0
    consensus = X.double().mean(0)
    distance = (X.double() - consensus).square().sum(1).mean().sqrt().item()
    values: dict[str, float] = {}
    replicas = problem.evaluate(X)
    for measure, value in problem.evaluate(consensus.to(X.dtype).unsqueeze(0)).items():
        values[measure] = replicas[measure].mean().item()
        values[f"{measure}_of_consensus"] = value.item()
    return Record(step, time_s, distance, **values)


def _stationary(squares: list[float], num_rounds: int | None) -> float:
    """Mean over the last half, over whole cycles if there are any in it."""
    half = max(len(squares) // 2, 1)
    if num_rounds is not None and num_rounds <= half:
        half -= half % num_rounds
    return sum(squares[-half:]) / half
