"""Every problem: its batches, its measures, and that the library's step solves it."""

import sys
from functools import partial

import pytest
import torch
from torch.optim import SGD

from decent_dp.errors import ConfigurationError
from decent_dp.simulate import build_problem, simulate
from decent_dp.simulate.extras import MissingPackageError
from decent_dp.simulate.problems import PROBLEMS
from decent_dp.simulate.problems.problem import split_by_label
from decent_dp.topology import Layout, build

TRAINED = ["least-squares", "logistic", "digits"]


def make(name, n=4, **options):
    if name == "digits":
        pytest.importorskip("sklearn")
    return build_problem(name, n, **options)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("topology", ["exp", None])
def test_training_lowers_the_loss(name, topology):
    problem = make(name)
    run = simulate(problem, topology and build(topology, Layout(4, 1)), partial(SGD, lr=problem.lr), 60)
    first, last = run.records[0], run.records[-1]
    assert first.consensus_distance == 0
    assert last.loss < first.loss
    assert last.loss_of_consensus < first.loss_of_consensus
    assert (last.accuracy is None) == (name == "least-squares")
    if last.accuracy is not None:
        assert last.accuracy > 0.6
        assert last.accuracy_of_consensus > 0.6
    assert (last.consensus_distance > 0) == (topology is not None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_seed_fixes_data_and_batches(name):
    batches = [make(name, seed=seed).draw() for seed in (3, 3, 4)]
    equal = [all(torch.equal(a, b) for x, y in zip(batches[0], other, strict=True) for a, b in zip(x, y, strict=True))
             for other in batches[1:]]  # fmt: skip
    assert equal == [True, name == "consensus"]  # which has no batches
    assert len(batches[0]) == 4


def test_least_squares_measures_the_mean_of_the_losses_of_the_workers():
    problem = make("least-squares")
    model = problem.make()
    with torch.no_grad():
        model.x.copy_(torch.linspace(-1, 1, 20))
        at_x = torch.stack([model(*batch) for batch in problem.draw()]).mean()
        model.x.copy_(problem.solution)
        smallest = torch.stack([model(*batch) for batch in problem.draw()]).mean()
    X = torch.linspace(-1, 1, 20).double().unsqueeze(0)
    assert problem.evaluate(X)["loss"].item() == pytest.approx((at_x - smallest).item())


def test_all_reduce_is_gradient_descent_on_the_mean():
    problem, again = make("least-squares"), make("least-squares")
    run = simulate(problem, None, partial(SGD, lr=0.05), 5, every=5)
    x = torch.zeros(20, dtype=torch.float64)
    for _ in range(5):
        x -= 0.05 * again._hessian @ (x - again.solution)
    assert run.records[-1].loss == pytest.approx(again.evaluate(x.unsqueeze(0))["loss"].item(), rel=1e-9)


def test_splits_are_alike_or_sorted():
    labels = torch.arange(8).repeat(10)
    alike = split_by_label(labels, 4, 0.0, torch.Generator().manual_seed(0))
    apart = split_by_label(labels, 4, 1.0, torch.Generator().manual_seed(0))
    assert [len(labels[own].unique()) for own in apart] == [2, 2, 2, 2]
    assert min(len(labels[own].unique()) for own in alike) > 4
    assert torch.cat(apart).sort().values.tolist() == list(range(80))
    with pytest.raises(ConfigurationError, match="80 samples for 81 workers"):
        split_by_label(labels, 81, 0.0, torch.Generator())


def test_digits_say_what_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingPackageError, match="needs scikit-learn, which is not installed"):
        build_problem("digits", 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nois", {}, "unknown problem 'nois'"),
        ("logistic", {"noise": 1.0}, "takes no noise; it takes dimension, heterogeneity"),
        ("logistic", {"heterogeneity": 2.0}, "heterogeneity=2.0: give a number, between 0 and 1"),
        ("noise", {"noise": -1.0}, "noise=-1.0"),
    ],
)
def test_what_cannot_work_is_refused(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_problem(name, 4, **options)


def test_workers_of_topology_and_problem_must_agree():
    with pytest.raises(ConfigurationError, match="is for 8 workers and the problem for 4"):
        simulate(make("noise"), build("exp", Layout(8, 1)), partial(SGD, lr=1.0), 1)
