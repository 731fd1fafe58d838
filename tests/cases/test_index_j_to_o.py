"""Every case of kinds J to O is a test: here in its kind's table, named after its code, or elsewhere by `COVERED`."""

import re
from pathlib import Path

import pytest

import ids

CASES = [
    *("J1", "J3", "J4", "K1", "L1", "L2", "L3", "L4", "L5", "M1", "M3", "N1", "N2", "N3", "N6", "N7"),
    *("O2", "O3", "O4", "O5", "O6", "O7", "O10"),
]
#: Tests elsewhere that are the scenario, or the part of it that the tests here do not repeat.
COVERED = {
    "J3": ["tests/test_wrapping.py::test_what_cannot_be_wrapped"],
    "J4": ["tests/test_consensus.py::test_the_average_goes_to_the_model_and_not_to_a_copy"],
    "K1": [
        "tests/test_uneven.py::test_join_lets_workers_take_unequal_numbers_of_updates",
        "tests/test_uneven.py::test_a_worker_that_skips_a_step_unannounced_is_noticed",
    ],
    "L1": [
        "tests/engine/test_exactness.py::test_one_worker_is_the_plain_optimizer_bit_for_bit",
        "tests/test_wrapping.py::test_no_process_group",
    ],
    "L2": ["tests/topology/test_members.py::test_member"],
    "M1": ["tests/test_consensus.py::test_consensus_on_one_rank_alone_fails_in_time"],
    "N1": ["tests/test_wrapping.py::test_names_and_loading_go_both_ways"],
    "N2": ["tests/engine/test_training_state.py::test_the_scaler_goes_on"],
    "N3": ["tests/engine/test_training_state.py::test_a_run_goes_on_bit_for_bit_with_other_buckets"],
    "O2": ["tests/test_failures.py::test_others_end_and_name_the_lost_worker"],
    "O3": [
        "tests/test_uneven.py::test_numbers_that_are_not_finite_are_refused_before_they_spread_if_asked_for",
        "tests/test_uneven.py::test_without_the_check_one_bad_replica_spreads_along_the_topology",
    ],
    "O4": [
        "tests/test_failures.py::test_without_launch_variables_there_is_one_worker",
        "tests/test_failures.py::test_wrong_launch_variables_are_named",
        "tests/test_failures.py::test_busy_port_is_named",
        "tests/test_failures.py::test_an_initialised_group_is_used_as_it_is",
        "tests/test_failures.py::test_second_job_on_a_port_fails_and_leaves_the_first_alone",
    ],
    "O5": [
        "tests/test_quick_start.py::test_quick_start_under_torchrun",
        "tests/test_quick_start.py::test_exception_on_one_rank_ends_all",
    ],
    "O7": ["tests/test_wrapping.py::test_hooks_and_memory_go_with_the_wrapper"],
    "O10": ["tests/test_wrapping.py::test_what_cannot_be_wrapped"],
}


def named_after(case: str) -> list[str]:
    """Tests of these tables with the code of the case in their name."""
    pattern = re.compile(rf"(^|_){case.lower()}_")
    files = sorted(Path(__file__).parent.glob("test_[j-o]*.py"))
    return [name for file in files for name in ids.names_of_tests(str(file)) if pattern.search(name)]


@pytest.mark.parametrize("case", CASES)
def test_case_is_a_test(case: str) -> None:
    elsewhere = COVERED.get(case, [])
    assert [test_id for test_id in elsewhere if not ids.exists(test_id)] == []
    assert elsewhere or named_after(case)


def test_the_table_names_no_other_case() -> None:
    assert set(COVERED) <= set(CASES)
