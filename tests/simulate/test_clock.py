"""The clock, against what can be said by hand and what the runtime model predicts."""

from dataclasses import replace

import numpy as np
import pytest

from decent_dp.errors import ConfigurationError
from decent_dp.plan import Rate, predict
from decent_dp.simulate import cluster, run_clock, with_stragglers
from decent_dp.topology import Layout, build

FAST = 1e15
GIGABIT = 125e6


def step_s(name, layout, profile, steps=200, **options):
    topology = None if name == "all-reduce" else build(name, layout)
    return run_clock(topology, profile, steps, layout=layout, **options).step_s


def make(layout, bytes_per_s=FAST, **options):
    return cluster(layout, compute_s=0.3, num_parameters=25 * 10**6, bytes_per_s=bytes_per_s, **options)


def test_without_network_a_step_is_compute():
    layout = Layout(8, 2)
    for name in ("all-reduce", "exp", "alternating-exp-ring", "complete", "random-matching"):
        assert step_s(name, layout, make(layout)) == pytest.approx(0.3, rel=1e-3)


def test_an_exchange_hides_under_a_whole_step_and_a_sum_of_gradients_does_not():
    layout = Layout(4, 1)  # 100 MB: 0.2 s at 500 MB/s for a message, 0.3 s for the sum
    profile = make(layout, bytes_per_s=5e8)
    assert step_s("exp", layout, profile) == pytest.approx(0.3, rel=0.02)
    assert step_s("all-reduce", layout, profile) > 0.4
    assert step_s("exp", layout, make(layout, bytes_per_s=1e8)) == pytest.approx(1.0, rel=0.02)


def test_one_step_of_slack_hides_jitter():
    layout = Layout(64, 8)
    profile = with_stragglers(make(layout), jitter=0.1)
    assert step_s("all-reduce", layout, profile, 1000) / 0.3 == pytest.approx(1.25, abs=0.02)
    assert step_s("alternating-exp-ring", layout, profile, 1000) / 0.3 == pytest.approx(1.02, abs=0.01)


@pytest.mark.parametrize("name", ["all-reduce", "exp", "ring"])
def test_nothing_hides_a_worker_that_is_always_slow(name):
    layout = Layout(16, 4)
    profile = with_stragglers(make(layout), slow_rank=3, slow_factor=1.3)
    assert step_s(name, layout, profile, 400) == pytest.approx(0.39, rel=0.01)


@pytest.mark.parametrize("name", ["all-reduce", "exp", "ring", "alternating-exp-ring", "hierarchical", "complete"])
def test_it_agrees_with_the_prediction(name):
    layout = Layout(8, 2)
    profile = with_stragglers(make(layout, bytes_per_s=5 * GIGABIT, latency_s=1e-4), jitter=0.05)
    assert step_s(name, layout, profile, 400) == pytest.approx(predict(profile, name).step_s, rel=0.02)


@pytest.mark.parametrize("more", [{"mix_s": 0.02, "travel_s": 0.05}, {}], ids=["travel", "16 bits"])
@pytest.mark.parametrize("name", ["exp", "hierarchical", "complete"])
def test_it_agrees_with_the_prediction_of_a_measured_profile(name, more):
    layout = Layout(8, 4)
    made = make(layout, bytes_per_s=8 * GIGABIT, latency_s=1e-3)
    # a sum that is slower than its messages, so that what carries an average shows
    network = replace(made.network, clique_of_node=Rate(0.0, 1e8), all_reduce=Rate(0.0, 1e8))
    profile = replace(made, element_bytes=4 if more else 2, compute=replace(made.compute, **more), network=network)
    assert step_s(name, layout, profile, 200) == pytest.approx(predict(profile, name).step_s, rel=1e-3)


@pytest.mark.parametrize("name", ["all-reduce", "exp", "hierarchical", "complete"])
def test_a_profile_of_other_workers_keeps_what_its_network_was_measured_with(name):
    profile = make(Layout(8, 4), bytes_per_s=4 * GIGABIT, latency_s=1e-2)
    for layout in (Layout(8, 2), Layout(32, 16)):
        expected = predict(profile, name, layout=layout).step_s
        assert step_s(name, layout, with_stragglers(profile, layout=layout)) == pytest.approx(expected, rel=1e-3)
        assert step_s(name, layout, profile) == pytest.approx(expected, rel=1e-3)


def test_times_go_up_and_follow_from_the_seed():
    layout = Layout(4, 1)
    profile = with_stragglers(make(layout), jitter=0.2)
    runs = [run_clock(build("exp", layout), profile, 50, seed=seed, layout=layout) for seed in (1, 1, 2)]
    assert (np.diff(runs[0].last_s) > 0).all()
    assert (runs[0].last_s >= runs[0].mean_s).all()
    np.testing.assert_array_equal(runs[0].last_s, runs[1].last_s)
    assert (runs[0].last_s != runs[2].last_s).any()


def test_thousands_of_workers():
    layout = Layout(2048, 8)
    profile = with_stragglers(make(layout, bytes_per_s=GIGABIT), jitter=0.1)
    for name in ("exp", "complete", "hierarchical"):
        assert 0.3 < step_s(name, layout, profile, 20) < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [({"compute_s": 0.0}, "compute_s=0.0"), ({"bytes_per_s": -1.0}, "bytes_per_s"), ({"latency_s": -1.0}, "latency_s")],
)
def test_numbers_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        cluster(Layout(2, 1), **{"compute_s": 0.1, "num_parameters": 10, "bytes_per_s": 1e9, **options})


def test_a_slow_worker_must_exist():
    with pytest.raises(ConfigurationError, match="slow worker 4: the workers are 0 to 3"):
        with_stragglers(make(Layout(4, 1)), slow_rank=4)
