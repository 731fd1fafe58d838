"""Names find builders."""

from collections.abc import Iterator

import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import (
    Layout,
    Topology,
    base_graph,
    build,
    catalog,
    complete,
    names,
    random_matching,
    register,
    ring,
)


@pytest.fixture(autouse=True)
def _same_table_afterwards() -> Iterator[None]:
    before = dict(catalog._BUILDERS)
    yield
    catalog._BUILDERS.clear()
    catalog._BUILDERS.update(before)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("rign", "ring"),
        ("Ring", "ring"),
        ("alternating_exp_ring", "alternating-exp-ring"),
        ("expo", "exp"),
        ("base2", "base-2"),
        ("Base-3", "base-3"),
        ("base-02", "base-2"),
        ("torrus", "torus"),
        ("hyper-cube", "hypercube"),
        ("static_exp", "static-exp"),
        ("random matching", "random-matching"),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_the_list(given: str, nearest: str) -> None:
    with pytest.raises(TopologyError) as caught:
        build(given, Layout(4, 1))
    message = str(caught.value)
    assert repr(given) in message
    assert f"did you mean {nearest!r}" in message
    for name in names():
        assert name in message


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(TopologyError) as caught:
        build("zzz", Layout(4, 1))
    assert "did you mean" not in str(caught.value)
    assert "complete" in str(caught.value)


def test_something_else_than_a_name_is_refused() -> None:
    with pytest.raises(TopologyError, match="int"):
        build(3, Layout(4, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [2, 3, 9, 10, 17, 4096])
def test_every_base_has_a_name(base: int) -> None:
    assert build(f"base-{base}", Layout(20, 4)) == base_graph(Layout(20, 4), base)
    assert build(f"base-{base}", Layout(20, 4)).name == f"base-{base}"


def test_the_first_few_bases_are_listed() -> None:
    assert [name for name in names() if name.startswith("base-")] == [f"base-{base}" for base in range(2, 10)]


@pytest.mark.parametrize("name", ["base-0", "base-1"])
def test_a_base_below_two_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match=f"'{name}'.*at least 2"):
        build(name, Layout(4, 1))


@pytest.mark.parametrize("name", ["base-", "base--2", "base-2.0", "base-x", "base-٣", "base-9999999999", "ring-2"])
def test_what_only_looks_like_a_base_is_unknown(name: str) -> None:
    with pytest.raises(TopologyError, match="unknown topology"):
        build(name, Layout(4, 1))


def test_a_base_may_be_replaced_by_name() -> None:
    with pytest.raises(TopologyError, match="replace=True"):
        register("base-12", ring)
    register("base-12", ring, replace=True)
    assert build("base-12", Layout(4, 1)).name == "ring"


def test_a_function_of_time_can_be_registered() -> None:
    register("mine", lambda layout: random_matching(layout, seed=5))
    assert build("mine", Layout(4, 1)) == random_matching(Layout(4, 1), seed=5)


def test_a_registered_builder_is_found() -> None:
    def mine(layout: Layout) -> Topology:
        return Topology("mine", layout, ring(layout).rounds)

    register("mine", mine)
    assert "mine" in names()
    assert build("mine", Layout(4, 2)).name == "mine"


def test_a_name_in_use_is_kept_unless_replaced() -> None:
    with pytest.raises(TopologyError, match="replace=True"):
        register("ring", complete)
    assert build("ring", Layout(4, 1)).name == "ring"
    register("ring", complete, replace=True)
    assert build("ring", Layout(4, 1)).name == "complete"


@pytest.mark.parametrize("name", ["", "  ", " ring2", None])
def test_a_name_must_be_readable(name) -> None:
    with pytest.raises(TopologyError, match="name"):
        register(name, ring)


def test_a_builder_must_give_a_topology_for_the_layout() -> None:
    register("nothing", lambda layout: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TopologyError, match=r"'nothing'.*NoneType"):
        build("nothing", Layout(4, 1))
    register("fixed", lambda layout: ring(Layout(4, 1)))
    with pytest.raises(TopologyError, match=r"'fixed'.*4.*8"):
        build("fixed", Layout(8, 1))
