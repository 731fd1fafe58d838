"""The runtime model on synthetic networks, against answers worked out by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import decent_dp.plan as plan_package
from decent_dp.errors import ConfigurationError, TopologyError
from decent_dp.plan import ALL_REDUCE, lognormal, predict, quantiles_of
from decent_dp.topology import Layout, Round, Topology, build, exp
from plan.synthetic import MB, profile

FAST = {"across": 1e6 * MB, "inside": 1e6 * MB}


def step(*arguments, **more):
    return predict(*arguments, **more).step_s


# -------------------------------------------------------------------- bounds, one at a time


@pytest.mark.parametrize("topology", ["ring", "exp", "complete", "alternating-exp-ring", "hierarchical", ALL_REDUCE])
@pytest.mark.parametrize("L", [1, 2])
def test_compute_bound_is_forward_backward_update_and_mixing(topology, L):
    cluster = profile(4, L, net=FAST, update_s=0.02, mix_s=0.01, buckets=4)
    prediction = predict(cluster, topology)
    # idle rounds mix nothing; a sum takes a second pass, to scale what is sent
    mixing = 0.0 if topology == ALL_REDUCE else 0.01
    if topology == "alternating-exp-ring" and L == 1:
        mixing = 0.01  # half of the workers idle in a round, and wait a little for the others
    passes = 2 if topology == "complete" and L == 2 else 1
    assert prediction.step_s == pytest.approx(0.32 + passes * mixing, abs=0.006)
    assert prediction.bound == "compute"


def test_wire_bound_is_bytes_over_bandwidth():
    # 1 MB at 1 MB/s: the exchange takes a second and the step no less
    assert step(profile(), "ring") == pytest.approx(1.0)
    assert step(profile(), "exp") == pytest.approx(1.0)
    prediction = predict(profile(), "ring")
    assert prediction.bound == "wire"
    assert prediction.compute_s == pytest.approx(0.3)
    assert prediction.wire_s == pytest.approx(0.7)
    assert prediction.jitter_s == 0


def test_an_exchange_hides_under_the_whole_next_step():
    # ready at the end of backward, waited for at the end of the next one: 300 ms to hide in
    assert step(profile(net={"across": MB / 0.29}), "ring") == pytest.approx(0.3)
    assert step(profile(net={"across": MB / 0.31}), "ring") == pytest.approx(0.31)


def test_buckets_queue_for_one_way_out():
    # 4 buckets of 1 MB, 0.25 s each
    assert step(profile(buckets=4, net={"across": 4 * MB}), "ring") == pytest.approx(1.0)


def test_latency_is_hidden_too_and_counts_once_for_all_buckets():
    slow = {"across": 1e6 * MB, "latency_s": 0.5}
    for buckets in (1, 5):
        assert step(profile(buckets=buckets, net=slow), "ring") == pytest.approx(0.5, rel=1e-3)
    assert step(profile(net={**slow, "latency_s": 0.2}), "ring") == pytest.approx(0.3)
    # two phases in shards
    assert step(profile(net=slow), "complete") == pytest.approx(1.0, rel=1e-3)


def test_all_reduce_hides_under_the_rest_of_backward_alone():
    # n = 4, a ring: 1.5 MB a bucket
    assert step(profile(net={"across": 15 * MB}), ALL_REDUCE) == pytest.approx(0.3 + 0.1)
    # two buckets, ready at 0.1 and 0.2: 0.1 + 0.1 + 2 x 0.15
    two = profile(buckets=2, net={"across": 10 * MB})
    assert step(two, ALL_REDUCE) == pytest.approx(0.1 + 0.1 + 0.3)
    # 0.05 each: the first one hides, and the second follows its gradients
    assert step(profile(buckets=2, net={"across": 30 * MB}), ALL_REDUCE) == pytest.approx(0.3 + 0.05)
    # the update comes after all of it
    assert step(profile(net={"across": 15 * MB}, update_s=0.03), ALL_REDUCE) == pytest.approx(0.43)


def test_complete_has_the_volume_of_all_reduce_and_a_step_to_hide_it():
    cluster = profile(net={"across": 5 * MB})  # 0.3 s
    assert step(cluster, "complete") == pytest.approx(0.3)
    assert step(cluster, ALL_REDUCE) == pytest.approx(0.6)


def test_one_worker_has_nothing_to_wait_for():
    for topology in (ALL_REDUCE, "ring", "exp", "complete", "alternating-exp-ring", "hierarchical", "base-2"):
        prediction = predict(profile(1, 1, update_s=0.02, mix_s=0.01), topology)
        assert prediction.step_s == pytest.approx(0.32)
        assert prediction.bound == "compute"


# -------------------------------------------------------------------- traffic between nodes


def test_what_leaves_a_node_follows_the_rounds():
    # 4 nodes of 2 workers, 2 MB/s out of a node: half a second for each copy
    cluster = profile(8, 2, net={"across": 2 * MB})
    # (0 1)(2 3).. inside, then (1 2)(3 4)..: two copies leave each node in every second step
    assert step(cluster, "ring") == pytest.approx((0.3 + 1.0) / 2, abs=0.02)
    # inside, then two rounds in which both workers of a node send away
    assert step(cluster, "exp") == pytest.approx((0.3 + 1.0 + 1.0) / 3, abs=0.02)
    # a ring over all eight has one link out of each node, 14/8 of a copy
    assert step(cluster, "complete") == pytest.approx(1.75 * 0.5, abs=0.02)
    # one copy leaves a node, whoever sends it
    assert step(cluster, "hierarchical") == pytest.approx(0.5, abs=0.02)
    # half a copy on average, a whole one in every second round, and 300 ms of compute in every round
    assert step(cluster, "alternating-exp-ring") == pytest.approx((0.5 + 0.3) / 2, abs=0.02)


def test_flows_share_a_link_only_if_it_was_measured_so():
    cluster = profile(8, 4, net={"across": MB, "shared": False})
    assert step(cluster, "exp") == pytest.approx((0.3 + 0.3 + 1.0) / 3, abs=0.02)
    assert step(profile(8, 4, net={"across": MB}), "exp") == pytest.approx((0.3 + 0.3 + 4.0) / 3, abs=0.02)


def test_averages_in_shards_on_a_cpu_and_rings_on_an_accelerator_send_as_much():
    for device in ("cpu", "cuda"):
        assert step(profile(device=device), "complete") == pytest.approx(1.5)
    # in 16 bits always in shards: 6 of 7 parts leave a node of two, from both workers, twice
    narrow = predict(profile(8, 2), "complete", "bfloat16")
    assert narrow.step_s == pytest.approx(0.5 * 2 * 2 * 6 / 8, abs=0.02)


def test_inside_of_a_node():
    cluster = profile(4, 4, net={"inside": MB})
    assert step(cluster, "ring") == pytest.approx(1.0)
    assert step(cluster, "complete") == pytest.approx(1.5)
    assert step(cluster, ALL_REDUCE) == pytest.approx(0.3 + 1.5)


def test_static_graphs_send_several_copies():
    cluster = profile(8, 1)
    assert step(cluster, "static-ring") == pytest.approx(2.0)
    assert step(cluster, "static-exp") == pytest.approx(3.0)


def test_idle_rounds_cost_nothing():
    rounds = (Round.of_cliques(4, [(0, 1), (2, 3)]), Round.of_cliques(4, [(1, 2), (0, 3)]), Round.identity(4))
    cluster = profile()
    often = predict(cluster, Topology("often", Layout(4, 1), rounds[:2])).step_s
    seldom = predict(cluster, Topology("seldom", Layout(4, 1), rounds)).step_s
    assert often == pytest.approx(1.0)
    assert seldom == pytest.approx((1.0 + 1.0 + 0.3) / 3)
    lonely = Topology("lonely", Layout(4, 1), (Round.identity(4), Round.of_cliques(4, [range(4)])))
    assert predict(cluster, lonely).step_s == pytest.approx((0.3 + 1.5) / 2)


def test_half_of_the_width_takes_half_of_the_time():
    assert step(profile(), "ring", "bfloat16") == pytest.approx(0.5)
    assert step(profile(), ALL_REDUCE, "fp16") == pytest.approx(0.3 + 0.75)
    costly = profile(net=FAST, narrow_s=0.05)
    assert step(costly, "ring", "bf16") == pytest.approx(0.35)
    assert step(costly, "ring") == pytest.approx(0.3)
    travelling = profile(net=FAST, travel_s=0.04)
    assert step(travelling, "ring") == pytest.approx(0.34)
    assert step(travelling, "ring", "bf16") == pytest.approx(0.32)
    assert step(travelling, ALL_REDUCE) == pytest.approx(0.3, rel=1e-4)
    assert predict(costly, "ring", "float32").wire_dtype is None  # no narrower than the parameters


# -------------------------------------------------------------------- workers that differ


def test_a_worker_that_is_always_slow_slows_everybody():
    factors = (1.0, 1.3, 1.0, 1.0)
    for topology in ("ring", "exp", "complete", ALL_REDUCE):
        prediction = predict(profile(net=FAST, worker_factors=factors), topology)
        assert prediction.step_s == pytest.approx(1.3 * 0.3, rel=0.01)
        assert prediction.compute_s == pytest.approx(1.3 * 0.3)
        assert prediction.bound == "compute"


def test_one_step_of_slack_absorbs_jitter():
    # coefficient of variation 0.1, 64 workers: the largest of 64 is 1.25, and nobody waits for it with slack
    cluster = profile(64, 8, net=FAST, jitter_quantiles=lognormal(0.1))
    ratio = step(cluster, ALL_REDUCE) / 0.3
    assert ratio == pytest.approx(1.25, abs=0.03)
    waits = predict(cluster, "alternating-exp-ring")
    assert waits.step_s / 0.3 == pytest.approx(1.02, abs=0.015)
    assert waits.bound == "compute"
    assert predict(cluster, ALL_REDUCE).bound == "jitter"
    assert predict(cluster, ALL_REDUCE).jitter_s == pytest.approx(0.3 * (ratio - 1), rel=1e-3)


def test_all_reduce_waits_for_the_slowest_of_all():
    # uniform on [0.5, 1.5], n = 4: the largest is 0.5 + 4/5 on average
    cluster = profile(4, 1, net=FAST, jitter_quantiles=(0.5, 1.5))
    assert step(cluster, ALL_REDUCE, num_steps=4000) == pytest.approx(0.3 * 1.3, rel=0.01)


def test_the_same_seed_gives_the_same_numbers():
    cluster = profile(jitter_quantiles=lognormal(0.2))
    assert predict(cluster, "exp", seed=1) == predict(cluster, "exp", seed=1)
    assert predict(cluster, "exp", seed=1) != predict(cluster, "exp", seed=2)


# -------------------------------------------------------------------- properties


@pytest.mark.parametrize(
    "name", [ALL_REDUCE, "ring", "exp", "complete", "alternating-exp-ring", "static-exp", "base-3"]
)
@pytest.mark.parametrize("quantiles", [(1.0,), (0.7, 0.9, 1.6)])
def test_more_of_anything_is_never_faster(name, quantiles):
    kept = {"buckets": 3, "jitter_quantiles": quantiles}
    base = step(profile(8, 2, net={"across": 2 * MB, "latency_s": 0.01}, **kept), name, num_steps=60)
    changes = [
        {"net": {"across": MB, "latency_s": 0.01}},
        {"net": {"across": 2 * MB, "latency_s": 0.2}},
        {"net": {"across": 2 * MB, "latency_s": 0.01, "inside": 0.5 * MB}},
        {"bucket_bytes": 2 * MB},
        {"forward_s": 0.3},
        {"backward_s": 0.6},
        {"update_s": 0.1},
        {"mix_s": 0.1},
        {"worker_factors": (1.0,) * 7 + (1.5,)},
    ]
    for change in changes:
        more = {"net": {"across": 2 * MB, "latency_s": 0.01}, **kept, **change}
        assert step(profile(8, 2, **more), name, num_steps=60) >= base * (1 - 1e-9), change


@pytest.mark.parametrize("name", [ALL_REDUCE, "ring", "exp", "complete", "hierarchical", "random-matching"])
def test_no_step_is_shorter_than_its_compute(name):
    for L in (1, 2, 8):
        prediction = predict(profile(8, L, buckets=3, update_s=0.01), name)
        assert prediction.step_s >= prediction.compute_s * (1 - 1e-9)


def test_other_workers_on_the_same_machines():
    cluster = profile(4, 2, net={"across": 2 * MB}, worker_factors=(1.0, 1.0, 1.0, 2.0))
    larger = predict(cluster, "hierarchical", layout=Layout(16, 4))
    assert larger.step_s == pytest.approx(0.5, abs=0.02)  # one copy a node still
    assert step(cluster, "exp", layout=Layout(8, 1)) == pytest.approx(0.5)
    assert step(cluster, "exp", layout=Layout(4, 1)) == pytest.approx(0.6)  # the same workers, one of them slow
    assert step(cluster, exp(Layout(4, 1))) == step(cluster, "exp", layout=Layout(4, 1))


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(ConfigurationError, match=r"no pair_across.*measure on at least two nodes"):
        predict(profile(4, 4), "exp", layout=Layout(8, 4))
    with pytest.raises(ConfigurationError, match=r"no pair_inside.*measure on at least two workers a node"):
        predict(profile(4, 1), "ring", layout=Layout(8, 2))
    with pytest.raises(TopologyError, match="unknown topology 'nosuch'"):
        predict(profile(), "nosuch")
    with pytest.raises(ConfigurationError, match="wire_dtype is 'int3'"):
        predict(profile(), "ring", "int3")
    with pytest.raises(ConfigurationError, match="is for"):
        predict(profile(), build("ring", Layout(8, 1)), layout=Layout(4, 1))


def test_quantiles():
    assert quantiles_of([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert quantiles_of([1.0]) == (1.0,)
    many = quantiles_of(range(1, 1002))
    assert (len(many), many[0], many[50], many[-1]) == (101, 1.0, 501.0, 1001.0)
    with pytest.raises(ConfigurationError, match="coefficient of variation"):
        lognormal(-1)


def test_predicting_needs_no_torch():
    for path in Path(plan_package.__file__).parent.glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert ("torch" in names) == (path.name in ("measure.py", "patterns.py")), path
