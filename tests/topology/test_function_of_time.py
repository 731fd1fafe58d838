"""A function of the step answers what a cycle does, and is refused as early as can be."""

import random

import numpy as np
import pytest

from decent_dp.errors import TopologyError
from decent_dp.topology import Average, FunctionOfTime, Idle, Layout, Round, Swap, draw, exp, from_function

from .oracle import carry_out, plans_at

LAYOUT = Layout(4, 2)


def turning(t: int) -> Round:
    """Worker 0 meets another one every step."""
    return Round.of_cliques(4, [(0, 1 + t % 3)])


def test_it_answers_like_a_cycle() -> None:
    cycle = exp(Layout(8, 2))
    endless = from_function("exp", Layout(8, 2), lambda t: cycle.rounds[t % 3])
    assert isinstance(endless, FunctionOfTime)
    assert endless.num_rounds is None
    assert (endless.name, endless.layout, endless.doubly_stochastic) == ("exp", Layout(8, 2), True)
    x = np.random.default_rng(0).normal(size=(8, 2))
    for t in (0, 1, 2, 3, 17, 2, 10**9):
        assert endless.round_at(t) == cycle.round_at(t)
        assert plans_at(endless, t) == plans_at(cycle, t)
        np.testing.assert_allclose(carry_out(plans_at(endless, t), x), endless.round_at(t).matrix() @ x, atol=1e-14)


def test_cliques_are_named_beforehand() -> None:
    def halves(t: int) -> Round:
        return Round.of_cliques(6, [(0, 1, 2), (3, 4, 5)] if t % 2 else [(0, 3)])

    topology = from_function("halves", Layout(6, 3), halves, cliques=[(5, 3, 4), [0, 1, 2], range(3)])
    assert topology.cliques() == ((0, 1, 2), (3, 4, 5))
    assert topology.plan_at(1, 4) == Average((3, 4, 5), 1.0)
    for layout, is_sharded in ((Layout(6, 3), True), (Layout(6, 2), False), (Layout(6, 1), True)):
        plan = from_function("halves", layout, halves, cliques=topology.cliques()).plan_at(1, 4)
        assert isinstance(plan, Average)
        assert plan.in_shards is is_sharded
    forgetful = from_function("halves", Layout(6, 3), halves, cliques=[(0, 1, 2)])
    assert forgetful.plan_at(0, 3) == Swap((0,), {0: 0.5})
    with pytest.raises(TopologyError, match=r"'halves', step 1: ranks \(3, 4, 5\).*cliques=.*pairs"):
        forgetful.plan_at(1, 0)


@pytest.mark.parametrize("cliques", [[(0, 1)], [(0, 1, 1)], [(0, 1, 4)], [(-1, 0, 1)], [(0, 1, "2")], [3], 3])
def test_wrong_cliques_are_refused(cliques) -> None:
    with pytest.raises(TopologyError, match=r"'turning'.*three or more ranks from 0 to 3"):
        from_function("turning", LAYOUT, turning, cliques=cliques)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([[1.0]], ["gave a list", "return a Round", "of_cliques"]),
        (None, ["gave a NoneType"]),
        (Round.identity(3), ["3 x 3", "4 workers"]),
        (Round((((0, 0.5),), ((1, 1.0),), ((2, 1.0),), ((3, 1.0),))), ["rank 0", "0.5", "sum to 1"]),
        (Round((((0, 1.0),), ((0, 1.0),), ((2, 1.0),), ((3, 1.0),))), ["column", "doubly_stochastic=False"]),
    ],
)
@pytest.mark.parametrize("at", [0, 5])
def test_a_wrong_round_is_named_when_it_is_first_asked_for(wrong, words: list[str], at: int) -> None:
    with pytest.raises(TopologyError) as caught:
        from_function("mine", LAYOUT, lambda t: wrong if t == at else turning(t)).plan_at(5, 0)
    for word in ["'mine'", f"step {at}", *words]:
        assert word in str(caught.value)


def test_row_stochastic_only_is_accepted_when_declared() -> None:
    one_way = Round((((0, 1.0),), ((0, 0.5), (1, 0.5))))
    topology = from_function("one way", Layout(2, 1), lambda t: one_way, doubly_stochastic=False)
    assert topology.plan_at(3, 1) == Swap((), {0: 0.5})


def test_a_round_that_is_not_a_function_of_t_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"step 0.*two different rounds.*t alone"):
        from_function("dice", Layout(64, 1), lambda t: Round.of_cliques(64, [random.sample(range(64), 2)]))


@pytest.mark.parametrize("fn", [None, Round.identity(4), [Round.identity(4)]])
def test_something_else_than_a_function_is_refused(fn) -> None:
    with pytest.raises(TopologyError, match="function from a step t to a Round"):
        from_function("mine", LAYOUT, fn)


def test_something_else_than_a_layout_is_refused() -> None:
    with pytest.raises(TopologyError, match="layout=4"):
        from_function("mine", 4, turning)  # type: ignore[arg-type]


def test_questions_out_of_range_are_refused() -> None:
    topology = from_function("turning", LAYOUT, turning)
    with pytest.raises(TopologyError, match="rank 4"):
        topology.plan_at(0, 4)
    with pytest.raises(TopologyError, match="step -1"):
        topology.round_at(-1)


def test_few_rounds_are_kept_and_none_is_made_again_for_the_next_bucket() -> None:
    asked: list[int] = []

    def counted(t: int) -> Round:
        asked.append(t)
        return turning(t)

    topology = from_function("turning", LAYOUT, counted)
    asked.clear()
    for t in range(1, 100):
        for rank in range(4):
            topology.plan_at(t, rank)
    assert asked == list(range(1, 100))
    assert len(topology._kept) < 20
    assert topology.plan_at(0, 3) == Idle()


def test_fingerprints_compare_the_first_rounds_and_the_cliques() -> None:
    same = from_function("turning", LAYOUT, turning).fingerprint()
    assert from_function("turning", LAYOUT, lambda t: turning(t + 3)).fingerprint() == same
    others = [
        from_function("turning", LAYOUT, lambda t: turning(t + 1)),
        from_function("turning", LAYOUT, lambda t: turning(t + (t == 5))),
        from_function("other", LAYOUT, turning),
        from_function("turning", Layout(4, 1), turning),
        from_function("turning", LAYOUT, turning, cliques=[(0, 1, 2)]),
        from_function("turning", LAYOUT, turning, doubly_stochastic=False),
    ]
    assert len({same, *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_it_is_drawn_as_far_as_asked() -> None:
    topology = from_function("turning", LAYOUT, turning)
    assert draw(topology, num_rounds=2) == "0: (0 1) idle 2 3\n1: (0 2) idle 1 3"
    assert len(draw(topology).splitlines()) == 4
    assert len(draw(exp(Layout(8, 1)), num_rounds=7).splitlines()) == 7


def test_its_text_is_short() -> None:
    assert repr(from_function("turning", LAYOUT, turning)).startswith("FunctionOfTime(name='turning'")
