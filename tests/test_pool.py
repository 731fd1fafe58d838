"""The pool and the spawned scripts keep what they promise."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import children_end
from pool import Pool, WorkerError, WorkerFailure
from processes import command_of, process_info
from spawn import SignalAt, spawn_script


def sum_of_ranks(rank: int, n: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def launch_variables(rank: int, n: int) -> tuple[list[str], float]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FROM_THE_TEST")
    return [os.environ.get(name, "") for name in names], torch.rand(()).item()


def leave_traces(rank: int, n: int) -> None:
    os.environ["TRACE"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


def traces(rank: int, n: int) -> tuple[object, ...]:
    return "TRACE" in os.environ, torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()


def has_group(rank: int, n: int) -> bool:
    return dist.is_initialized()


def keep_groups_in_a_cycle(rank: int, n: int) -> None:
    groups: list[object] = [dist.new_group(list(range(n))) for _ in range(3)]
    groups.append(groups)
    dist.all_reduce(torch.ones(1), group=groups[0])


def fail_on_odd_ranks(rank: int, n: int) -> int:
    if rank % 2:
        raise KeyError(f"bad rank {rank}")
    return rank


def fail_while_others_wait(rank: int, n: int) -> float:
    if rank == 1:
        raise ValueError("no data")
    return sum_of_ranks(rank, n)


def warn(rank: int, n: int) -> None:
    warnings.warn("old", DeprecationWarning, stacklevel=1)


class FailsInDestructor:
    def __del__(self) -> None:
        raise OSError("in a destructor")


def fail_in_destructor(rank: int, n: int) -> None:
    cycle: list[object] = [FailsInDestructor()]
    cycle.append(cycle)


def fail_in_thread(rank: int, n: int) -> None:
    thread = threading.Thread(target=int, args=("x",))
    thread.start()
    thread.join()


def leave(rank: int, n: int) -> None:
    sys.exit(3)


def return_a_function(rank: int, n: int) -> object:
    return lambda: None


def hang_on_rank_1(rank: int, n: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


def stop_on_rank_1(rank: int, n: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def wait_for_a_hung_peer(rank: int, n: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def die_on_rank_1(rank: int, n: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(60)  # knows nothing of the death
    if rank == 0:
        dist.recv(torch.ones(1), src=1)


def start_a_child(rank: int, n: int) -> int:
    process = subprocess.Popen(["sleep", "60"])
    process.returncode = 0  # so that its destructor does not complain
    return process.pid


def take_one_step(rank: int, n: int) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p])
    p.sum().backward()
    optimizer.step()


def test_results_come_by_rank(pool: Pool) -> None:
    for n in (1, 2, 4):
        assert pool.run(sum_of_ranks, n) == [n * (n - 1) / 2] * n


def test_launch_variables_and_seeds(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "here")
    results = pool.run(launch_variables, 4, local_world_size=2)
    assert [variables for variables, _ in results] == [
        ["0", "4", "0", "2", "here"],
        ["1", "4", "1", "2", "here"],
        ["2", "4", "0", "2", "here"],
        ["3", "4", "1", "2", "here"],
    ]
    assert len({number for _, number in results}) == 4
    assert pool.run(launch_variables, 4, local_world_size=2) == results
    assert "RANK" not in os.environ


def test_without_a_process_group(pool: Pool) -> None:
    assert pool.run(has_group, 2, group_timeout_s=None) == [False, False]
    assert pool.run(has_group, 2) == [True, True]


def test_a_case_leaves_no_traces(pool: Pool) -> None:
    before = pool.run(traces, 2)
    assert before == [(False, torch.float32, True, 1)] * 2
    pool.run(leave_traces, 2)
    assert pool.run(traces, 2) == before


def test_descriptors_and_threads_do_not_grow(pool: Pool) -> None:
    pool.run(keep_groups_in_a_cycle, 3)
    before = pool.resources(3)
    for _ in range(5):
        pool.run(keep_groups_in_a_cycle, 3)
    assert pool.resources(3) == before


def test_forty_cases_are_quick(pool: Pool) -> None:
    pool.run(take_one_step, 4)
    begin = time.monotonic()
    for _ in range(40):
        pool.run(sum_of_ranks, 4)
    assert time.monotonic() - begin < 20
    begin = time.monotonic()
    pool.run(take_one_step, 4)
    assert time.monotonic() - begin < 2


def test_errors_come_with_rank_and_traceback(pool: Pool) -> None:
    pids = pool.pids()[:4]
    with pytest.raises(WorkerFailure, match=r"fail_on_odd_ranks: 2 of 4 workers failed") as caught:
        pool.run(fail_on_odd_ranks, 4)
    errors = caught.value.errors
    assert list(errors) == [1, 3]
    assert errors[3][:2] == ("KeyError", "'bad rank 3'")
    assert "in fail_on_odd_ranks" in errors[3].traceback
    assert all(error.traceback.strip() in str(caught.value) for error in errors.values())
    results = pool.run(fail_on_odd_ranks, 4, expect_errors=True)
    assert results[0::2] == [0, 2]
    assert [result.type_name for result in results[1::2]] == ["KeyError", "KeyError"]
    assert pool.run(sum_of_ranks, 4) == [6.0] * 4
    assert pool.pids()[:4] == pids


def test_peers_of_a_failing_rank_notice_at_once(pool: Pool) -> None:
    begin = time.monotonic()
    results = pool.run(fail_while_others_wait, 3, expect_errors=True)
    assert time.monotonic() - begin < 5
    assert results[1][:2] == ("ValueError", "no data")
    assert all(isinstance(result, WorkerError) for result in results)


@pytest.mark.parametrize(
    ("fn", "type_name"),
    [
        (warn, "DeprecationWarning"),
        (fail_in_destructor, "OSError"),
        (fail_in_thread, "ValueError"),
        (leave, "SystemExit"),
    ],
)
def test_nothing_is_silent(pool: Pool, fn: object, type_name: str) -> None:
    results = pool.run(fn, 2, expect_errors=True)
    assert [result.type_name for result in results] == [type_name] * 2


def test_a_result_that_cannot_be_sent(pool: Pool) -> None:
    (result,) = pool.run(return_a_function, 1, expect_errors=True)
    assert "pickle" in result.message


@pytest.mark.filterwarnings("ignore:old")
def test_workers_have_the_filters_of_the_test(pool: Pool) -> None:
    assert pool.run(warn, 2) == [None, None]


def test_too_many_workers(pool: Pool) -> None:
    with pytest.raises(ValueError, match="n=9: a case has 1 to 8 workers"):
        pool.run(has_group, 9)


def test_a_hang_is_a_failure_with_stacks(pool: Pool) -> None:
    pids = pool.pids()[:3]
    begin = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        pool.run(hang_on_rank_1, 3, timeout_s=1)
    assert 1 <= time.monotonic() - begin < 4
    assert list(caught.value.errors) == [1]
    assert caught.value.errors[1].type_name == "WorkerHung"
    assert "in hang_on_rank_1" in caught.value.errors[1].traceback
    assert process_info(pids[1]) is None or process_info(pids[1]).state == "Z"
    assert pool.run(sum_of_ranks, 3) == [3.0] * 3
    assert [new == old for new, old in zip(pool.pids(), pids, strict=False)] == [True, False, True]


def test_a_stopped_worker_is_replaced(pool: Pool) -> None:
    results = pool.run(stop_on_rank_1, 2, timeout_s=1, expect_errors=True)
    assert results[0] == 0
    assert results[1].type_name == "WorkerHung"
    assert "stopped" in results[1].message
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2


def test_peers_of_a_hung_rank_see_the_group_timeout(pool: Pool) -> None:
    results = pool.run(wait_for_a_hung_peer, 2, timeout_s=2.5, group_timeout_s=1, expect_errors=True)
    assert [result.type_name for result in results] == ["RuntimeError", "WorkerHung"]
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2


@pytest.mark.parametrize(("how", "code"), [("exit", "7"), ("kill", "-9")])
def test_a_death_is_noticed(pool: Pool, how: str, code: str) -> None:
    begin = time.monotonic()
    results = pool.run(die_on_rank_1, 3, how, group_timeout_s=1, expect_errors=True)
    assert time.monotonic() - begin < 5  # the default for a case is 30 s
    assert [result.type_name for result in results] == ["RuntimeError", "WorkerDied", "WorkerHung"]
    assert f"code {code}" in results[1].message
    assert pool.run(sum_of_ranks, 3) == [3.0] * 3


def test_an_interrupted_case_is_given_up(pool: Pool) -> None:
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2  # they are there
    pids = pool.pids()[:2]
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(hang_on_rank_1, 2)
    timer.join()
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2
    assert pool.pids()[1] != pids[1]


def test_an_idle_worker_that_died_is_replaced(pool: Pool) -> None:
    pid = pool.pids()[0]
    os.kill(pid, signal.SIGKILL)
    while process_info(pid) is not None:
        time.sleep(0.01)
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2


def test_close_kills_workers_and_their_children() -> None:
    with Pool() as own:
        (child,) = own.run(start_a_child, 1)
        pids = [child, *own.pids()]
        assert command_of(child) == "sleep 60"
    for pid in pids:
        info = process_info(pid)
        assert info is None or info.state == "Z"
    own.close()


def test_scripts_get_the_launch_variables_and_keep_their_outputs_apart() -> None:
    code = """
        import os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        print(*(os.environ[name] for name in names), *sys.argv[1:], "HOME" in os.environ, os.environ["MORE"])
        print("to stderr", os.environ["MASTER_PORT"], file=sys.stderr)
        sys.exit(int(os.environ["RANK"]))
    """
    run = spawn_script(code, 2, args=["a"], env={"HOME": None, "MORE": "m"}, timeout_s=10)
    assert [rank.code for rank in run.ranks] == [0, 1]
    assert run.ranks[1].stdout == "1 2 1 2 127.0.0.1 a False m\n"
    assert run.ranks[0].stderr.startswith("to stderr ")
    assert run.ranks[0].stderr == run.ranks[1].stderr
    assert all(0 < rank.wall_s < 10 for rank in run.ranks)
    assert run.leftovers == []


SLEEPER = """
    import os, time
    print("step", os.environ["RANK"])
    time.sleep({seconds})
"""


def test_signals_at_a_marker() -> None:
    signals = [SignalAt("step 0", 0, signal.SIGKILL), SignalAt("step 1", 1, signal.SIGSTOP)]
    run = spawn_script(SLEEPER.format(seconds=1), 3, signals=signals, timeout_s=10)
    assert [rank.code for rank in run.ranks] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [rank.left_stopped for rank in run.ranks] == [False, True, False]
    assert run.ranks[0].wall_s < run.ranks[2].wall_s


def test_a_script_that_hangs() -> None:
    with pytest.raises(TimeoutError, match="step 1"):
        spawn_script(SLEEPER.format(seconds=60), 2, timeout_s=1)


def test_leftovers_are_told_and_killed() -> None:
    code = """
        import subprocess
        print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    """
    run = spawn_script(code, 1, timeout_s=10, leftover_grace_s=0.2)
    assert run.leftovers == ["sleep 60"]
    info = process_info(int(run.ranks[0].stdout))
    assert info is None or info.state == "Z"


def test_torchrun() -> None:
    signals = [SignalAt("step 1", 1, signal.SIGKILL)]
    run = spawn_script(SLEEPER.format(seconds=30), 2, torchrun=True, signals=signals)
    assert run.launcher is not None
    assert run.launcher.code != 0
    assert "SIGKILL" in run.launcher.stderr
    assert run.ranks[1].stdout == "step 1\n"
    assert run.ranks[0].stdout in ("", "step 0\n")  # torchrun may end it before it came that far
    assert run.launcher.wall_s < 30
    assert run.leftovers == []


def test_a_pytest_that_is_killed_or_interrupted_leaves_nothing(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        import pytest
        from conftest import pool

        def hang(rank, n):
            print(f"\\nhanging {rank}", flush=True)
            time.sleep(60)

        def test_hang(pool):
            pool.run(hang, 2)

        if __name__ == "__main__":
            sys.exit(pytest.main(["-s", "-p", "no:cacheprovider", "--rootdir", ".", __file__]))
    """
    signals = [SignalAt("hanging 1", 0, signal.SIGKILL), SignalAt("hanging 1", 1, signal.SIGINT)]
    run = spawn_script(code, 2, signals=signals, env={"TMPDIR": str(tmp_path)})
    assert [rank.code for rank in run.ranks] == [-signal.SIGKILL, pytest.ExitCode.INTERRUPTED]
    assert run.leftovers == []


def test_the_guard_finds_a_child_that_is_left() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"left processes running:\n.*sleep 60"), children_end():
        process = subprocess.Popen(["sleep", "60"])
    assert process.wait() == -signal.SIGKILL
