"""What is recommended, and when nothing is."""

from __future__ import annotations

import pytest

from decent_dp.errors import TopologyError
from decent_dp.plan import ALL_REDUCE, lognormal, recommend
from decent_dp.topology import Layout, names
from plan.synthetic import MB, profile

FAST = {"across": 1e6 * MB, "inside": 1e6 * MB}


def test_everything_that_serves_the_cluster_is_predicted():
    found = recommend(profile(6, 2))
    predicted = {(p.topology, p.wire_dtype) for p in found.predictions}
    served = {name for name, _ in predicted}
    assert {ALL_REDUCE, "ring", "exp", "complete", "hierarchical", "base-2"} <= served
    assert {"alternating-exp-ring", "hypercube", "torus"} <= set(found.left_out)
    assert found.left_out["base-6"] == "same as complete"
    assert {"alternating-exp-ring", "hypercube", "torus"} == {
        name for name, why in found.left_out.items() if not why.startswith("same as")
    }
    assert served | set(found.left_out) == set(names()) - {"one-peer-exp"} | {ALL_REDUCE}
    assert predicted == {(name, dtype) for name in served for dtype in (None, "bfloat16")}
    times = [p.step_s for p in found.predictions]
    assert times == sorted(times)
    assert found.fastest == found.predictions[0]


def test_a_slow_network_between_nodes():
    found = recommend(profile(8, 2, net={"across": 2 * MB}), wire_dtypes=(None,))
    assert found.is_worth_it
    assert found.choice.topology == "alternating-exp-ring"
    assert "saves" in found.reason


def test_of_equal_steps_the_better_mixing_one():
    # 0.3 s of wire under 0.3 s of compute: every one-peer topology is free, and so is complete
    found = recommend(
        profile(4, 1, net={"across": 5 * MB}), topologies=("ring", "exp", "complete"), wire_dtypes=(None,)
    )
    assert found.choice.topology == "complete"


def test_narrow_only_where_it_saves_time():
    assert recommend(profile(4, 1, net={"across": 5 * MB})).choice.wire_dtype is None
    assert recommend(profile(4, 1, net={"across": MB}), topologies=["exp"]).choice.wire_dtype == "bfloat16"


def test_not_worth_it_on_a_fast_network():
    found = recommend(profile(8, 2, net=FAST))
    assert not found.is_worth_it
    assert found.choice.topology == ALL_REDUCE
    assert "nothing left to gain" in found.reason


def test_worth_it_for_jitter_alone():
    found = recommend(profile(16, 4, net=FAST, jitter_quantiles=lognormal(0.15)), num_steps=200)
    assert found.is_worth_it
    assert [p.bound for p in found.predictions if p.topology == ALL_REDUCE] == ["jitter", "jitter"]


def test_a_persistently_slow_worker_is_no_reason():
    found = recommend(profile(4, 1, net=FAST, worker_factors=(1.0, 1.0, 1.0, 1.5)))
    assert not found.is_worth_it


def test_one_worker_and_other_layouts():
    found = recommend(profile(1, 1))
    assert not found.is_worth_it
    assert found.reason == "One worker has nobody to mix with."
    larger = recommend(profile(4, 2, net={"across": MB}), layout=Layout(16, 4), topologies=["exp", "hierarchical"])
    assert larger.choice.topology == "hierarchical"


def test_names_that_do_not_serve():
    with pytest.raises(TopologyError, match="unknown topology 'nosuch'"):
        recommend(profile(), topologies=["nosuch"])
    with pytest.raises(TopologyError, match="serves 6 workers on 3 nodes"):
        recommend(profile(6, 2), topologies=["hypercube"])
