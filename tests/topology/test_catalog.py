"""Names find builders."""

from collections.abc import Iterator

import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Layout, Topology, build, catalog, complete, names, register, ring


@pytest.fixture(autouse=True)
def _same_table_afterwards() -> Iterator[None]:
    before = dict(catalog._BUILDERS)
    yield
    catalog._BUILDERS.clear()
    catalog._BUILDERS.update(before)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("rign", "ring"), ("Ring", "ring"), ("alternating_exp_ring", "alternating-exp-ring"), ("expo", "exp")],
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
