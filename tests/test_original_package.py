"""A script written for decent-dp 0.2.3 of PyPI runs here as it is: `scripts/original_package.py`.

It runs under that package too, with 2 and 4 workers (tried by hand: ``torchrun --standalone --nproc-per-node 2``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spawn import spawn_script

SCRIPT = Path(__file__).parent / "scripts" / "original_package.py"
UPDATES = 6
PARAMETERS = 6
EDGES = {
    ("complete", 2): {((0, 1), 0.5)},
    ("ring", 2): {((0, 1), 0.5)},
    ("one-peer-exp", 2): {((0, 1), 0.5)},
    ("weighted-pairs", 2): {((0, 1), 0.6), ((0, 1), 0.75)},
    ("complete", 4): {((0, 1, 2, 3), 0.25)},
    ("ring", 4): {((0, 1), 0.5), ((2, 3), 0.5), ((1, 2), 0.5), ((0, 3), 0.5)},
    ("one-peer-exp", 4): {((0, 1), 0.5), ((2, 3), 0.5), ((0, 2), 0.5), ((1, 3), 0.5)},
    ("weighted-pairs", 4): {((0, 1), 0.6), ((2, 3), 0.6), ((1, 2), 0.75), ((0, 3), 0.75)},
    ("alternating-exp-ring", 4): {((0, 1), 0.5), ((2, 3), 0.5), ((0, 1, 2, 3), 0.25)},
}


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the script printed."""
    run = spawn_script(SCRIPT, request.param, torchrun=True, timeout_s=90)
    assert run.launcher is not None
    assert run.launcher.code == 0, [rank.stderr for rank in run.ranks]
    assert [rank.stderr for rank in run.ranks] == [""] * request.param
    assert run.leftovers == []
    return json.loads(run.ranks[0].stdout)


def check_arrivals(workers: list[list[Any]]) -> None:
    """`comm_buffer` is (1 - w) / (k - 1) times the sum of the workers of the edge, at every call."""
    for calls in workers:
        assert len(calls) == (UPDATES - 1) * PARAMETERS
        for index, (ranks, _, weight, _, arrived) in enumerate(calls):
            share = (1 - weight) / (len(ranks) - 1)
            total = [sum(values) for values in zip(*(workers[rank][index][3] for rank in ranks), strict=True)]
            assert arrived == pytest.approx([share * value for value in total], abs=1e-6)


def test_hook_finds_what_arrived(seen: dict[str, Any]) -> None:
    num_workers = len(seen["ranks"])
    assert set(seen["hooks"]) == {name for name, n in EDGES if n == num_workers}
    for name, workers in seen["hooks"].items():
        check_arrivals(workers)
        edges = {(tuple(ranks), round(kept, 9)) for calls in workers for ranks, kept, *_ in calls}
        assert edges == EDGES[name, num_workers]
        assert all(rank in ranks for rank, calls in enumerate(workers) for ranks, *_ in calls)
        assert all(weight == pytest.approx(kept) for calls in workers for _, kept, weight, *_ in calls)


def test_hook_finds_what_arrived_under_weaker_mixing(seen: dict[str, Any]) -> None:
    check_arrivals(seen["weaker"])


def runs(seen: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {**seen["trained"], "all arguments by position": seen["all_positional"]}


def test_every_optimizer_learns(seen: dict[str, Any]) -> None:
    assert len(runs(seen)) == 7
    for name, workers in runs(seen).items():
        for worker in workers:
            first, last = worker["losses"]
            assert last < 0.75 * first, name
        assert len({worker["lr"] for worker in workers}) == 1
        assert 0 < workers[0]["lr"] < 2e-2


def test_global_average(seen: dict[str, Any]) -> None:
    for workers in runs(seen).values():
        mean = [sum(values) / len(workers) for values in zip(*(worker["before"] for worker in workers), strict=True)]
        for worker in workers:
            assert worker["averaged"] == pytest.approx(mean, abs=1e-6)
            assert worker["distance"] == pytest.approx(math.dist(worker["before"], mean), abs=1e-6)
            assert worker["distance"] > 1e-5
            assert worker["reverted"]
            assert worker["nothing"] is None
            assert worker["kept"] == workers[0]["kept"] == pytest.approx(mean, abs=1e-6)


def test_accumulation_updates_once_a_window(seen: dict[str, Any]) -> None:
    for worker in seen["accumulated"]:
        assert worker == {"moved": [False, False, True, False, False, True], "moved_by_default": False}


def test_registry_names_and_modes(seen: dict[str, Any]) -> None:
    assert seen["ranks"] == list(range(len(seen["ranks"])))
    assert {"complete", "ring", "one-peer-exp", "alternating-exp-ring", "weighted-pairs"} <= set(seen["registry"])
    assert seen["registered"]
    assert seen["names"] == [f"net.{layer}.{name}" for layer in (0, 2, 3) for name in ("weight", "bias")]
    assert seen["modes"] == [True, True, True]
