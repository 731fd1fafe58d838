"""Every case of kinds A to I is a test here, or one elsewhere that is the scenario as it stands."""

from pathlib import Path

import pytest

import ids

CASES = [
    *("A1", "A2", "B1", "B2", "B4", "B5", "C1", "C3", "C4", "C6", "D1", "D2", "E1", "E2", "E3", "E5", "E6", "E8"),
    *("F1", "F3", "F4", "G1", "G2", "G3", "G5", "G7", "G8", "H2", "I1", "I2"),
]

#: Scenarios that tests elsewhere are already.
COVERED = {
    "C1": (
        "tests/engine/test_training_state.py::test_refresh_takes_in_thawed_parameters_and_keeps_the_rest",
        "tests/test_wrapping.py::test_changes_after_wrapping_are_refused_by_name",
    ),
    "D1": ("tests/test_wrapping.py::test_workers_that_differ_all_raise",),
    "E3": ("tests/test_consensus.py::test_half_precision_averages_neither_overflow_nor_drift",),
    "G3": ("tests/engine/test_exactness.py::test_scaler_unscales_once_and_clips_after",),
}


def named_after(case):
    """Tests of these tables with the code of the case in their name."""
    files = sorted(Path(__file__).parent.glob("test_[a-i]_*.py"))
    return [
        name for file in files for name in ids.names_of_tests(str(file)) if name.startswith(f"test_{case.lower()}_")
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test(case):
    assert [test for test in COVERED.get(case, ()) if not ids.exists(test)] == []
    assert case in COVERED or named_after(case)
