"""Topology classes written for ``decent_dp.topo`` keep working."""

import doctest
import random
from collections.abc import Iterator

import numpy as np
import pytest

from decent_dp import topo
from decent_dp.errors import TopologyError
from decent_dp.topo import Edge, TopologyReg
from decent_dp.topology import Average, Idle, Layout, Round, build, catalog, names


@pytest.fixture(autouse=True)
def _same_tables_afterwards() -> Iterator[None]:
    builders, classes = dict(catalog._BUILDERS), dict(TopologyReg.registry)
    yield
    for table, before in ((catalog._BUILDERS, builders), (TopologyReg.registry, classes)):
        table.clear()
        table.update(before)


def define(edges_of, name: str = "mine") -> type[topo.Topology]:
    """A registered class whose edge lists are ``edges_of(self)``."""

    @TopologyReg.register(name)
    class Mine(topo.Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return edges_of(self)

    return Mine


def alternating_pairs(self) -> list[list[Edge]]:
    n = self._world_size
    return [[Edge([(i + s) % n, (i + s + 1) % n], 0.5) for i in range(0, n, 2)] for s in (0, 1)]


def test_a_list_of_all_edges() -> None:
    cls = define(alternating_pairs)
    assert TopologyReg.registry["mine"] is cls
    assert "mine" in names()
    built = build("mine", Layout(6, 2))
    assert built.name == "mine"
    assert built.layout == Layout(6, 2)
    assert built.rounds == build("ring", Layout(6, 2)).rounds


def test_a_list_that_depends_on_the_rank() -> None:
    define(lambda self: [[e for e in edges if self._rank in e.ranks] for edges in alternating_pairs(self)])
    assert build("mine", Layout(6, 2)).rounds == build("ring", Layout(6, 2)).rounds


def test_the_order_of_edges_and_of_ranks_is_free() -> None:
    def shuffled(self) -> list[list[Edge]]:
        order = random.Random(self._rank)
        lists = [
            [Edge(tuple(order.sample(list(e.ranks), 2)), e.weight) for e in edges] for edges in alternating_pairs(self)
        ]
        for edges in lists:
            order.shuffle(edges)
        return lists

    define(shuffled)
    assert build("mine", Layout(8, 4)).fingerprint() == build("mine", Layout(8, 4)).fingerprint()
    assert build("mine", Layout(8, 4)).rounds == build("ring", Layout(8, 4)).rounds


def test_the_class_sees_its_place() -> None:
    seen = []

    def look(self) -> list[list[Edge]]:
        seen.append((self._rank, self._world_size, self._local_world_size, self._n_nodes))
        return [[Edge(list(range(self._world_size)), 1 / self._world_size)]]

    define(look)
    build("mine", Layout(6, 2))
    assert seen == [(rank, 6, 2, 3) for rank in range(6)]


def test_an_init_of_its_own_runs() -> None:
    @TopologyReg.register("mine")
    class Mine(topo.Topology):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.everybody = list(range(self._world_size))

        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge(self.everybody, 0.25)]]

    assert build("mine", Layout(4, 1)).plan_at(0, 0) == Average((0, 1, 2, 3), 1.0)


@pytest.mark.parametrize(("k", "keeps"), [(2, 0.5), (2, 0.8), (3, 0.5), (4, 0.25), (4, 0.0)])
def test_the_weight_is_what_a_worker_keeps(k: int, keeps: float) -> None:
    define(lambda self: [[Edge(range(k), keeps)], [Edge(range(self._world_size), 0.2)]])
    W = build("mine", Layout(5, 1)).round_at(0).matrix()
    np.testing.assert_allclose(np.diag(W)[:k], keeps)
    np.testing.assert_allclose(W[:k, :k][~np.eye(k, dtype=bool)], (1 - keeps) / (k - 1))
    np.testing.assert_array_equal(W[k:, k:], np.eye(5 - k))


def test_an_edge_of_one_worker_and_an_edge_that_keeps_all_are_idle() -> None:
    define(lambda self: [[Edge([0], 1.0), Edge([1, 2], 1.0)], [Edge([0, 1, 2], 1 / 3)]])
    built = build("mine", Layout(3, 1))
    assert built.round_at(0) == Round.identity(3)
    assert built.plan_at(1, 0) == Average((0, 1, 2), 1.0)


def test_one_worker_needs_no_edges() -> None:
    define(lambda self: [[Edge([0, 1 % self._world_size], 1 / (self._world_size - 1))]])
    assert build("mine", Layout(1, 1)).plan_at(0, 0) == Idle()


ALL = Edge([0, 1, 2, 3], 0.25)


@pytest.mark.parametrize(
    ("edges_of", "words"),
    [
        (
            lambda s: [[ALL], [Edge([0, 1], 0.5), Edge([1, 2], 0.5)]],
            ["round 1", "rank 1", "(0, 1)", "(1, 2)"],
        ),
        (lambda s: [[ALL], [Edge([0, 4], 0.5)]], ["round 1", "rank 4", "0 to 3"]),
        (lambda s: [[ALL], [Edge([2, 2], 0.5)]], ["round 1", "rank 2", "twice"]),
        (lambda s: [[ALL], [Edge([], 0.5)]], ["round 1", "no ranks"]),
        (lambda s: [[ALL]] * (1 + (s._rank == 2)), ["rank 2", "2 rounds", "rank 0", "1 round"]),
        (lambda s: [[ALL], [Edge([0, 1], 0.5), Edge([1, 0], 0.6)]], ["round 1", "rank 0", "0.5", "0.6"]),
        (
            lambda s: [[ALL], [Edge([0, 1], 0.6 if s._rank == 3 else 0.5)]],
            ["round 1", "rank 3", "0.5", "0.6"],
        ),
        (lambda s: [[ALL], [Edge([0, 1], 1.5)]], ["round 1", "rank 0", "1.5"]),
        (lambda s: [[ALL], [Edge([0, 1], float("nan"))]], ["round 1", "rank 0", "nan"]),
        (lambda s: [], ["no rounds"]),
        (lambda s: None, ["rank 0", "NoneType", "list of lists of Edge"]),
        (lambda s: [ALL], ["round 0", "Edge", "list of lists of Edge"]),
        (lambda s: [[(0, 1)]], ["round 0", "rank 0", "tuple", "Edge"]),
        (lambda s: [[Edge([0, 1], 0.5)]], ["worker 2", "worker 0"]),
    ],
)
def test_wrong_edges_are_named(edges_of, words: list[str]) -> None:
    define(edges_of)
    with pytest.raises(TopologyError) as caught:
        build("mine", Layout(4, 1))
    for word in ["'mine'", *words]:
        assert word in str(caught.value)


def test_registering_the_same_class_again_changes_nothing() -> None:
    cls = define(alternating_pairs)
    assert TopologyReg.register("mine")(cls) is cls
    again = define(alternating_pairs)  # the same definition run once more, as in a notebook
    assert TopologyReg.registry["mine"] is again


def test_another_class_under_a_taken_name_is_refused() -> None:
    class Other(topo.Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return []

    define(alternating_pairs)
    for name in ("mine", "complete", "ring", "one-peer-exp", "alternating-exp-ring"):
        with pytest.raises(TopologyError, match=name):
            TopologyReg.register(name)(Other)


def test_a_class_may_take_a_name_that_was_free_in_the_original_package() -> None:
    cls = define(alternating_pairs, name="exp")
    assert TopologyReg.registry["exp"] is cls
    assert build("exp", Layout(6, 1)).num_rounds == 2


def test_only_topology_classes_are_registered() -> None:
    with pytest.raises(TopologyError, match=r"decent_dp\.topo\.Topology"):
        TopologyReg.register("mine")(int)  # type: ignore[type-var]


def test_the_built_in_names_are_in_the_registry() -> None:
    for name in ("complete", "ring", "exp", "one-peer-exp", "alternating-exp-ring"):
        cls = TopologyReg.registry[name]
        assert issubclass(cls, topo.Topology)
        for layout in (Layout(1, 1), Layout(2, 1), Layout(4, 2), Layout(8, 4)):
            define(lambda self, cls=cls: cls._at(Layout(self._world_size, self._local_world_size), 0)._get_topo_edges())
            np.testing.assert_allclose(
                [round.matrix() for round in build("mine", layout).rounds],
                [round.matrix() for round in build(name, layout).rounds],
                atol=1e-15,
            )


def test_docstrings_run() -> None:
    assert doctest.testmod(topo).failed == 0


def test_a_directed_round_has_no_edges() -> None:
    with pytest.raises(TopologyError, match="directed"):
        TopologyReg.registry["exp"]._at(Layout(6, 1), 0)._get_topo_edges()


def test_a_class_is_not_instantiated_by_hand() -> None:
    with pytest.raises(TopologyError, match="by name"):
        TopologyReg.registry["ring"](4)
