"""``decent-dp topology list``, ``show`` and ``compare``."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from decent_dp.cli.diagram import diagram
from decent_dp.cli.words import describe_round
from decent_dp.topology import Layout, build, from_edges, from_matrices, names

from .program import as_user, in_process

CLUSTERS = [(1, 1), (5, 1), (12, 3), (32, 4), (64, 8)]


# list -----------------------------------------------------------------------------------------------------------------


def test_every_name_is_listed_with_what_it_is(capsys) -> None:
    listed = json.loads(in_process(capsys, "topology list --json").out)
    assert [entry["name"] for entry in listed] == list(names())
    assert all(entry["summary"].endswith(".") for entry in listed)
    text = in_process(capsys, "topology list").out
    for entry in listed:
        assert " ".join(entry["summary"].split()) in " ".join(text.split())
    assert "exp, one-peer-exp" in text
    assert "base-2, base-3, ..., base-9, ..." in text


# show -----------------------------------------------------------------------------------------------------------------


def test_show_says_rounds_in_words_and_draws_them(capsys) -> None:
    ran = in_process(capsys, "topology show base-2 --workers 12 --nodes 3")
    assert ran.code == 0
    assert "base-2 for 12 workers on 3 nodes, 4 on each: a cycle of 5 rounds" in ran.out
    assert "step 4: 6 pairs average, between nodes" in ran.out
    assert "step 3   ●──┼──┼──●" in ran.out
    assert re.search(r"all replicas equal +after 5 rounds", ran.out)


@pytest.mark.parametrize("name", [*(name for name in names() if not re.match(r"base-[4-8]|one", name)), "base-17"])
@pytest.mark.parametrize(("workers", "nodes"), CLUSTERS)
def test_show_fits_80_columns(capsys, name, workers, nodes) -> None:
    ran = in_process(capsys, f"topology show {name} --workers {workers} --nodes {nodes} --matrix --rounds 2")
    if ran.code:
        assert (ran.code, ran.err.count("\n")) == (2, 1)
    else:
        assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["exp", "complete", "hierarchical"])
def test_show_fits_80_columns_with_ranks_of_three_digits(capsys, name) -> None:
    ran = in_process(capsys, f"topology show {name} --workers 128 --nodes 16 --matrix --rounds 1")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_show_as_json_has_everything(capsys) -> None:
    ran = in_process(capsys, "topology show exp --workers 4 --nodes 2 --matrix --json")
    found = json.loads(ran.out)
    assert (found["name"], found["num_workers"], found["num_nodes"], found["num_rounds"]) == ("exp", 4, 2, 2)
    assert found["rounds"][1]["words"] == "2 pairs average, between nodes"
    assert found["rounds"][1]["drawing"] == "(0 2) (1 3)"
    product = np.array(found["rounds"][1]["matrix"]) @ np.array(found["rounds"][0]["matrix"])
    assert product == pytest.approx(np.full((4, 4), 0.25))
    assert found["traffic"]["leaving_node_peak"] == 2
    assert found["mixing"]["rounds_to_exact"] == 2
    assert "matrix" not in json.loads(in_process(capsys, "topology show exp --workers 4 --json").out)["rounds"][0]


def test_show_prints_the_matrices_on_request(capsys) -> None:
    out = in_process(capsys, "topology show static-ring --workers 4 --matrix").out
    assert "W of step 0\n[.333 .333    . .333]\n[.333 .333 .333    .]\n" in out
    assert "W of" not in in_process(capsys, "topology show static-ring --workers 4").out


def test_show_takes_any_topology_between_nodes(capsys) -> None:
    found = json.loads(in_process(capsys, "topology show hierarchical(base-2) --workers 12 --nodes 3 --json").out)
    assert found["summary"].startswith("Any topology over the nodes")
    assert found["rounds"][1]["words"].endswith("1 pair of nodes gives each other 2/3; node 0 meets no other")
    assert found["mixing"]["rounds_to_exact"] == 3


def test_show_cuts_long_cycles_unless_asked(capsys) -> None:
    out = in_process(capsys, "topology show ring --workers 11").out
    assert "step 7:" in out
    assert "step 8:" not in out
    assert "... 3 more in a cycle; --rounds K shows K rounds" in out
    assert "step 10:" in in_process(capsys, "topology show ring --workers 11 --rounds 11").out
    assert "no cycle" in in_process(capsys, "topology show random-matching --workers 4").out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ring 4 2", "2 pairs average, inside a node"),
        ("ring 5 1", "2 pairs average; worker 4 idles"),
        ("complete 6 3", "all 6 workers average"),
        ("base-4 8 2", "4 pairs average, inside a node"),
        ("base-3 6 3", "3 pairs average, 2 inside a node and 1 between nodes"),
        ("exp 6 3", "every worker takes 1/2 from the worker 1 before it; 2 of 6 messages between nodes"),
        ("static-exp 6 6", "every worker takes 1/4 from each of the workers 1, 2 and 4 before it"),
        ("torus 9 9", "every worker takes 1/5 from each of 4 others"),
        ("alternating-exp-ring 8 2",
         "every node averages over its workers; 1 pair of nodes averages; nodes 0 and 1 meet no other"),
        ("hierarchical 6 2", "every node averages over its workers; every node takes 1/2 from the node 1 before it"),
    ],
)  # fmt: skip
def test_rounds_in_words(line, expected) -> None:
    name, workers, per_node = line.split()
    assert describe_round(build(name, Layout(int(workers), int(per_node))), 0) == expected


def test_uneven_rounds_in_words() -> None:
    star = from_matrices([[[0.4, 0.3, 0.3], [0.3, 0.7, 0], [0.3, 0, 0.7]]])
    assert describe_round(star, 0) == "every worker takes 3/10 from each of 1 to 2 others"
    weighted = from_edges([[(0, 1, 0.8)], [(1, 2, 0.5), (0, 3, 0.123456789)]], Layout(4, 1))
    assert describe_round(weighted, 0) == "1 pair gives each other 4/5; workers 2 and 3 idle"
    assert describe_round(weighted, 1) == "1 pair gives each other 0.123; 1 pair averages"
    cliques = from_edges([[(0, 1, 1 / 3), (1, 2, 1 / 3), (0, 2, 1 / 3)], [(2, 3, 0.5)]], Layout(4, 2))
    assert describe_round(cliques, 0) == "1 group of 3 averages, between nodes; worker 3 idles"


def test_the_drawing_of_messages_and_groups() -> None:
    assert diagram(build("exp", Layout(3, 1)), [0, 1]).splitlines() == [
        "         0  1  2",
        "step 0   ●──▶  │",
        "         ◀──┼──●",
        "         │  ●──▶",
        "step 1   ◀──●  │",
        "         ●──┼──▶",
        "         │  ◀──●",
    ]
    assert diagram(build("complete", Layout(4, 2)), [0], is_ascii=True).splitlines()[1] == "step 0   o--o----o--o"


def test_the_drawing_of_two_levels_is_of_nodes() -> None:
    lines = diagram(build("alternating-exp-ring", Layout(32, 8)), [0, 1]).splitlines()
    assert lines == ["node     0  1  2  3", "step 0   │  │  ●──●", "step 1   ●──●  │  │"]


def test_the_drawing_leaves_out_what_would_not_be_read() -> None:
    assert "of 24 groups and messages only those of 0 are drawn" in diagram(build("exp", Layout(24, 8)), [4])
    assert diagram(build("exp", Layout(48, 8)), [0]) == ""


def test_a_terminal_without_line_drawing_gets_ascii() -> None:
    ran = as_user("topology", "show", "ring", "--workers", "4", PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    assert "step 0   o--o  o--o" in ran.out


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_show_draws_into_a_file(capsys, tmp_path: Path, ending, start) -> None:
    file = tmp_path / f"rounds.{ending}"
    ran = in_process(capsys, f"topology show alternating-exp-ring --workers 8 --nodes 4 --draw {file}")
    assert (ran.code, ran.err) == (0, "")
    assert f"drawn into {file}" in ran.out
    assert file.read_bytes().startswith(start)


def test_a_drawing_is_the_same_every_time(capsys, tmp_path: Path) -> None:
    files = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for file in files:
        assert in_process(capsys, f"topology show complete --workers 4 --draw {file} --json").code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_drawing_that_would_never_end_is_refused(capsys, tmp_path: Path) -> None:
    ran = in_process(capsys, f"topology show exp --workers 4 --rounds 3000 --draw {tmp_path}/x.svg")
    assert (ran.code, ran.out) == (2, "")
    assert "3000 rounds of 4 workers are too many for a picture; give --rounds 256 or less" in ran.err


def test_a_drawing_that_cannot_be_made(capsys, monkeypatch, tmp_path: Path) -> None:
    ran = in_process(capsys, f"topology show ring --workers 4 --draw {tmp_path}/none/x.svg")
    assert (ran.code, ran.out) == (1, "")
    assert "cannot be written (No such file or directory): give a file in a folder that is there" in ran.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = in_process(capsys, f"topology show ring --workers 4 --draw {tmp_path}/x.svg")
    assert (ran.code, ran.err) == (
        1, "decent-dp: --draw needs matplotlib, which is not installed: pip install 'decent-dp[plots]'\n"
    )  # fmt: skip


# compare --------------------------------------------------------------------------------------------------------------


def test_compare_has_a_row_for_every_topology_that_serves(capsys) -> None:
    ran = in_process(capsys, "topology compare --workers 24 --nodes 3")
    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines() if line}
    assert rows["static-exp"][:3] == ["5.00", "23.00", "23.00"]
    assert rows["base-2"] == ["0.83", "3.00", "8.00", "in", "6", "2.09", "6.05"]
    assert rows["exp"][3:6] == ["x", "0.7300", "1.81"]
    assert "The same rounds here as base-4: base-5;" in ran.out
    assert "Not for this cluster: alternating-exp-ring, hypercube" in ran.out


@pytest.mark.parametrize(("workers", "nodes"), CLUSTERS)
def test_compare_fits_80_columns(capsys, workers, nodes) -> None:
    ran = in_process(capsys, f"topology compare --workers {workers} --nodes {nodes}")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_compare_as_json(capsys) -> None:
    found = json.loads(in_process(capsys, "topology compare --workers 32 --nodes 4 --json").out)
    by_name = {entry["name"]: entry for entry in found["topologies"]}
    assert by_name["hierarchical"]["traffic"]["leaving_node"] == 1.0
    assert by_name["exp"]["same"] == ["base-2", "base-3", "one-peer-exp"]
    assert by_name["random-matching"]["mixing"]["method"] == "expectation"
    assert by_name["exp"]["step_s"] is None
    assert sorted([*by_name, *found["refused"], *(n for e in by_name.values() for n in e["same"])]) == list(names())


def test_compare_counts_narrow_averages_in_shards(capsys) -> None:
    for dtype, leaving in [("float32", 2 * 31 / 32), ("bfloat16", 12)]:
        line = f"topology compare --workers 32 --nodes 4 --wire-dtype {dtype} --json"
        found = json.loads(in_process(capsys, line).out)
        complete = next(entry for entry in found["topologies"] if entry["name"] == "complete")
        assert complete["traffic"]["leaving_node"] == pytest.approx(leaving)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A measurement of 8 workers on 2 nodes, of which the network is the bottleneck."""
    plan = pytest.importorskip("decent_dp.plan")
    fast, slow = plan.Rate(1e-4, 1e10), plan.Rate(1e-3, 1e8)
    network = plan.Network(fast, fast, slow, plan.Rate(1e-3, 2.5e7), fast, slow, slow)
    compute = plan.Compute(0.05, 0.1, 0.01, (plan.BucketTime(10**7, 0.1),), worker_factors=(1.0,) * 8)
    file = tmp_path / "profile.json"
    plan.Profile(8, 4, "cuda", 4, compute, network).save(file)
    return file


def test_compare_predicts_step_times_from_a_measurement(capsys, profile: Path) -> None:
    ran = in_process(capsys, f"topology compare --profile {profile}")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("8 workers on 2 nodes, 4 on each\n")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert re.search(r"^all-reduce +1.75 +1.75 +1.75 +always +0 +0 +\d+\.\d$", ran.out, re.MULTILINE)
    found = json.loads(in_process(capsys, f"topology compare --profile {profile} --json").out)
    times = {entry["name"]: entry["step_s"] for entry in found["topologies"]}
    assert 0.15 < times["hierarchical"] < times["static-exp"]
    assert found["all_reduce_step_s"] > 0.2


def test_compare_predicts_for_other_workers_than_were_measured(capsys, profile: Path) -> None:
    ran = in_process(
        capsys, f"topology compare --workers 16 --nodes 4 --profile {profile} --wire-dtype bfloat16 --json"
    )
    found = json.loads(ran.out)
    assert found["num_workers"] == 16
    assert all(entry["step_s"] > 0 for entry in found["topologies"])
