"""O: failure, process life and noise. Kills, hangs and launch variables are in ``tests/test_failures.py``."""

import copy
import gc
import json
import os
import pickle
import re
import signal
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from decent_dp import ConfigurationError, DecentralizedDataParallel, ExchangeError, TrainingError
from spawn import SignalAt, spawn_script
from virtual import wrap_virtual

from .workers import flat, held, leave, loss_of, network, short_notes, stay_until_left

SGD = partial(torch.optim.SGD, lr=0.1)
TINY = 16 / 2**20


# ---------------------------------------------------------------- O3


def one_bad_replica(rank, n, topology, check):
    """A weight of rank 2 becomes nan at step 2."""
    model = DecentralizedDataParallel(network(), SGD, topology=topology, check_finite=check, bucket_size_in_mb=TINY)
    bad = []
    try:
        for t in range(6):
            model.synchronize()
            if (rank, t) == (2, 2):
                with torch.no_grad():
                    model.module[2].weight[0, 0] = float("nan")
            loss_of(model, t, rank).backward()
            bad.append(not flat(model).isfinite().all())
        model.synchronize()
        with model.consensus():
            bad.append(not flat(model).isfinite().all())
    except TrainingError as error:
        return bad, str(error)
    return bad, None


@pytest.mark.parametrize(("topology", "spread"), [("ring", [1, 2, 4, 4]), ("exp", [1, 2, 4, 4]), ("complete", [1, 4])])
def test_o3_without_the_check_a_bad_replica_spreads_as_the_matrices_say(pool, topology, spread):
    results = pool.run(one_bad_replica, 4, topology, False)
    counts = [sum(row) for row in zip(*(bad for bad, _ in results), strict=True)]
    assert counts[:2] == [0, 0]
    assert counts[2 : 2 + len(spread)] == spread
    assert counts[-1] == 4  # and the average of all is nan everywhere


def test_o3_with_the_check_nothing_spreads_and_the_error_names_rank_and_parameter(pool):
    results = pool.run(one_bad_replica, 4, "ring", True, group_timeout_s=3)
    assert not any(any(bad) for bad, _ in results)
    _, text = results[2]
    assert re.search(r"parameter '(0|2)\.(weight|bias)' is not finite", text)
    assert text.startswith("rank 2, step 2")


# ---------------------------------------------------------------- O5, M3: how processes end

# One process imports torch and forks the two workers of every case; from there on each lives as if it was launched.
ENDINGS = """
import gc, json, os, sys, time
from functools import partial
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from decent_dp import DecentralizedDataParallel
from decent_dp.engine.training_state import capture
from faults import DelayedCommunicator

SGD = partial(torch.optim.SGD, lr=0.1)
SGD([torch.zeros(1)])  # loads more of torch, before the fork
gc.freeze()


def train(topology, slow_step=None, **options):
    model = DecentralizedDataParallel(nn.Linear(2, 1), SGD, topology=topology, bucket_size_in_mb=1e-5, **options)
    for t in range(4):
        if t == slow_step and dist.get_rank() == 1:
            time.sleep(0.7)
        model(torch.ones(1, 2)).sum().backward()
    return model


def destroyed(topology):
    model = train(topology)
    model.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def destroyed_before_the_model(topology):
    model = train(topology)
    dist.barrier()
    dist.destroy_process_group()
    del model


def not_destroyed(topology):
    model = train(topology)
    dist.barrier()


def in_flight(topology):
    model = train(topology, communicator=DelayedCommunicator(0.3))
    dist.barrier()


def slow_last_step(topology):
    train(topology, slow_step=3)


def slow_last_step_before_the_next_model(topology):
    train(topology, slow_step=3)
    train(topology).synchronize()


def slow_last_step_then_saving(topology):
    # Only the slow one captures its state at the end, and so waits for its last exchange.
    model = train(topology, slow_step=3)
    if dist.get_rank() == 1:
        capture(model._replica)


def global_model(topology):
    global model
    model = train(topology)
    model.synchronize()


def raises(topology):
    model = train(topology)
    if dist.get_rank() == 1:
        raise ValueError("out of data")
    for t in range(4):
        model(torch.ones(1, 2)).sum().backward()


class Worker:
    def __init__(self, case, rank, folder):
        self.err = folder / f"{case}-{rank}.err"
        self.code = None
        self.begin = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(os.open(self.err, os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(2, 1)
            os.environ["LOCAL_WORLD_SIZE"] = "2" if case.endswith("hierarchical") else ""
            if not os.environ["LOCAL_WORLD_SIZE"]:
                del os.environ["LOCAL_WORLD_SIZE"]

    def ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.wall_s = os.waitstatus_to_exitcode(status), time.monotonic() - self.begin
        return self.code is not None


folder, runs = Path(sys.argv[2]), []
for name, topology, n in json.loads(sys.argv[1]):
    workers, case = [], f"{name}-{topology}"
    for rank in range(n):
        workers.append(Worker(case, rank, folder))
        if workers[-1].pid == 0:
            # A store that outlives every worker, as that of torchrun does.
            dist.init_process_group("gloo", init_method=f"file://{folder}/{case}.store", rank=rank, world_size=n)
            globals()[name](topology)
            sys.exit()
    runs.append(workers)
while not all([worker.ended() for workers in runs for worker in workers]):
    time.sleep(0.02)
print(json.dumps([[[w.code, w.wall_s, w.err.read_text()] for w in workers] for workers in runs]))
"""
CLEAN = ("destroyed", "destroyed_before_the_model", "not_destroyed", "in_flight", "global_model")
SLOW = ("slow_last_step", "slow_last_step_before_the_next_model", "slow_last_step_then_saving")
RING, COMPLETE, HIERARCHICAL = ("ring", 2), ("complete", 3), ("hierarchical", 4)
ENDING_CASES = [
    ("destroyed", *RING),
    ("destroyed_before_the_model", *COMPLETE),
    ("not_destroyed", *RING),
    ("in_flight", *RING),
    ("in_flight", *COMPLETE),
    ("in_flight", *HIERARCHICAL),
    ("global_model", *RING),
    ("slow_last_step", *RING),
    ("slow_last_step", *COMPLETE),
    ("slow_last_step", *HIERARCHICAL),
    ("slow_last_step_before_the_next_model", *RING),
    ("slow_last_step_then_saving", *RING),
    ("slow_last_step_then_saving", *COMPLETE),
    ("slow_last_step_then_saving", *HIERARCHICAL),
    ("raises", *RING),
    ("raises", *COMPLETE),
    ("raises", *HIERARCHICAL),
]


def name_of(case: tuple[str, str, int]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All cases at once: code, seconds and what was printed, of each worker."""
    folder = tmp_path_factory.mktemp("endings")
    run = spawn_script(ENDINGS, 1, args=[json.dumps(ENDING_CASES), str(folder)], timeout_s=60)
    assert run.ranks[0].code == 0, run.ranks[0].stderr
    assert run.leftovers == []
    return json.loads(run.ranks[0].stdout)


@pytest.mark.parametrize("case", [case for case in ENDING_CASES if case[0] in CLEAN], ids=name_of)
def test_o5_m3_every_clean_exit_is_silent(case: tuple[str, str, int], endings: list[Any]) -> None:
    for code, wall_s, printed in endings[ENDING_CASES.index(case)]:
        assert (code, printed) == (0, "")
        assert wall_s < 40


@pytest.mark.parametrize("case", [case for case in ENDING_CASES if case[0] in SLOW], ids=name_of)
def test_o5_who_has_finished_does_not_fail_who_is_at_the_last_step(case: tuple[str, str, int], endings: Any) -> None:
    """All take the same number of updates; the one that ends first takes its connections along."""
    ranks = endings[ENDING_CASES.index(case)]
    for code, _, printed in ranks:
        assert (code, printed) == (0, "")
    # Who waits for the slow one is woken by it, and does not sit out the five seconds it would give.
    walls = [wall_s for _, wall_s, _ in ranks]
    assert max(walls) - min(walls) < 4


@pytest.mark.parametrize("case", [case for case in ENDING_CASES if case[0] == "raises"], ids=name_of)
def test_o5_an_exception_on_one_rank_ends_all_with_one_traceback(case: tuple[str, str, int], endings: Any) -> None:
    ranks = endings[ENDING_CASES.index(case)]
    last_lines = [printed.strip().splitlines()[-1] for _, _, printed in ranks]
    assert [code for code, _, _ in ranks] == [1] * len(ranks)
    assert last_lines[1].endswith("ValueError: out of data")
    # The exchange of the last step, 3, may end halfway where it has several parts that rank 1 has to hand on.
    steps = "45" if case[1] == "ring" else "345"
    for rank in {0, *range(2, len(ranks))}:
        assert re.search(rf"ExchangeError: rank {rank}, step [{steps}]: .*(rank 1\b|ranks \[)", last_lines[rank])
    for _, _, printed in ranks:
        assert "Exception ignored" not in printed
        assert "terminate called" not in printed


INTERRUPTED = """
import time
from functools import partial
import torch
from torch import nn
from decent_dp import DecentralizedDataParallel, initialize_dist

rank, _ = initialize_dist()
model = DecentralizedDataParallel(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1), topology="ring")
for t in range(10_000):
    print(f"step {t}", flush=True)
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.01)
"""


def test_o5_interrupting_the_launcher_ends_all() -> None:
    """Ctrl+C in a terminal goes to torchrun, which ends its workers."""
    interrupt = SignalAt("step 20", rank=1, signal=signal.SIGINT, to_launcher=True)
    run = spawn_script(INTERRUPTED, 2, torchrun=True, signals=[interrupt], timeout_s=80)
    assert run.launcher is not None
    assert run.launcher.code != 0
    assert run.leftovers == []
    for rank in run.ranks:
        assert "step 10" in rank.stdout
        assert "step 500" not in rank.stdout
        assert "Exception ignored" not in rank.stderr
        assert "terminate called" not in rank.stderr


def test_o5_an_interrupt_in_the_middle_of_a_step_leaves_the_model_unusable() -> None:
    """KeyboardInterrupt is no Exception, and half a step has been taken."""

    class Interrupt(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].shape == (4, 3):
                raise KeyboardInterrupt
            super().step(closure)

    (model,) = wrap_virtual(1, lambda rank: network(), partial(Interrupt, lr=0.1), bucket_size_in_mb=TINY)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 0, 0).backward()
    with pytest.raises(TrainingError, match=r"rank 0, step 0: .*KeyboardInterrupt in step 0.*checkpoint"):
        loss_of(model, 1, 0)


# ---------------------------------------------------------------- O6


class Rows(Dataset):
    """Rows that say in which process they were made, and whether something was inherited that must not be used."""

    def __init__(self, model):
        self.model = model if isinstance(model, nn.Module) else None

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and self.model is not None:
            with torch.no_grad():
                self.model.module(torch.ones(1, 3))  # reading an inherited replica is harmless
        return torch.full((3,), float(index))


def forked_loaders(rank, n, topology, num_data_workers, persistent):
    """Three epochs with data workers that were forked after the wrapper was made, with an exchange in flight."""
    model = DecentralizedDataParallel(network(), SGD, topology=topology, bucket_size_in_mb=TINY)
    options = {}
    if num_data_workers:
        options = {"multiprocessing_context": "fork", "persistent_workers": persistent}
    loader = DataLoader(Rows(model), batch_size=4, num_workers=num_data_workers, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        for _ in range(3):
            for x in loader:
                model(x * (1 + rank)).square().mean().backward()
    model.synchronize()
    return model.t, flat(model).tolist()


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_o6_data_workers_may_be_forked_after_wrapping(pool, topology):
    expected = pool.run(forked_loaders, 2, topology, 0, False)
    assert [t for t, _ in expected] == [9, 9]
    for persistent in (False, True):
        assert pool.run(forked_loaders, 2, topology, 2, persistent) == expected


def forked_child(rank, n, topology):
    """A child drops what it inherited, with an exchange in flight; seconds until it has ended, and how."""
    model = DecentralizedDataParallel(network(), SGD, topology=topology)
    loss_of(model, 0, rank).backward()
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        del model
        gc.collect()
        os._exit(7)
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() - begin < 10:
        time.sleep(0.02)
    if done == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "the child hangs"
    loss_of(model, 1, rank).backward()
    return os.waitstatus_to_exitcode(done[1])


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_o6_a_forked_child_may_drop_what_it_inherited(pool, topology):
    assert pool.run(forked_child, 2, topology) == [7, 7]


def sgd_function(named):
    return torch.optim.SGD(named, lr=0.1)


def spawned(rank, folder, optim_fns):
    """What mp.spawn starts; the last optim_fn is a lambda made here."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for optim_fn in [*optim_fns, lambda named: torch.optim.SGD(named, lr=0.1)]:
        model = DecentralizedDataParallel(network(), optim_fn, topology="ring")
        for t in range(3):
            loss_of(model, t, rank).backward()
        model.synchronize()
        results.append(flat(model).tolist())
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_o6_spawn_takes_functions_and_partials_and_lambdas_made_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        mp.spawn(spawned, (tmp_path, [lambda named: torch.optim.SGD(named, lr=0.1)]), nprocs=2)
    mp.spawn(spawned, (tmp_path, [SGD, sgd_function]), nprocs=2)
    models = wrap_virtual(2, lambda rank: network(), SGD, topology="ring")
    for t in range(3):
        for rank, model in enumerate(models):
            loss_of(model, t, rank).backward()
    for rank, model in enumerate(models):
        assert torch.load(tmp_path / f"{rank}.pt") == [flat(model).tolist()] * 3


# ---------------------------------------------------------------- O7


def many_steps(rank, n, topology, num_steps):
    """Steps with skipped updates, accumulation, evaluation and averages; what is held now and then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=10**6)
    model = DecentralizedDataParallel(
        network(),
        partial(torch.optim.Adam, lr=1e-3),
        partial(torch.optim.lr_scheduler.StepLR, step_size=100, gamma=0.9),
        topology,
        scaler,
        bucket_size_in_mb=TINY,
    )
    x = torch.ones(2, 3)
    seen = []
    for t in range(1, num_steps + 1):
        if t % 5 == 0:
            with model.no_sync():
                scaler.scale(model(x).square().mean()).backward()
        factor = float("inf") if (t + rank) % 50 == 0 else 1.0
        scaler.scale(model(x).square().mean() * factor).backward()
        if t % 100 == 0:
            scaler.update(8.0)
            with torch.no_grad(), model.consensus():
                model(x)
            model(x)  # an output that nobody differentiates
        if t in (num_steps // 10, num_steps // 2, num_steps):
            model.synchronize()
            dist.barrier()
            seen.append(held())
    return seen


@pytest.mark.parametrize(("topology", "num_steps"), [("ring", 2000), ("complete", 600)])
def test_o7_nothing_grows_over_many_steps(pool, topology, num_steps):
    for first, middle, last in pool.run(many_steps, 2, topology, num_steps, timeout_s=60):
        assert last.num_tensors <= first.num_tensors
        assert last.num_handles <= first.num_handles <= 16
        assert last.num_descriptors == first.num_descriptors
        assert last.num_threads == first.num_threads
        assert last.resident_kib - middle.resident_kib < 1024


def rounds(rank, n, num_rounds):
    """Wrap, train, delete; a model of 4 MB, so that one that stays is seen."""
    seen, dead = [], []
    for number in range(num_rounds):
        module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 3))
        model = DecentralizedDataParallel(
            module, SGD, topology="ring", bucket_size_in_mb=1 if number % 2 else 25, param_as_bucket_view=number % 3 > 0
        )
        for _ in range(2):
            model(torch.ones(1, 1000)).sum().backward()
        model.synchronize()
        dist.barrier()
        references = [weakref.ref(model), weakref.ref(module), *(weakref.ref(p) for p in module.parameters())]
        references += [weakref.ref(optimizer) for optimizer in model.optimizers]
        del model
        gc.collect()
        assert references[0]() is None
        module(torch.ones(1, 1000)).sum().backward()  # fires no old hook
        assert all(p.grad is not None for p in module.parameters())
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        copy.deepcopy(module)
        del module
        gc.collect()
        dead.append(all(reference() is None for reference in references))
        seen.append(held())
    return seen, dead


def test_o7_twenty_models_come_and_go_without_a_trace(pool):
    for seen, dead in pool.run(rounds, 2, 20, timeout_s=60):
        assert all(dead)
        assert seen[-1].num_tensors <= seen[5].num_tensors
        assert seen[-1].num_handles <= seen[5].num_handles
        assert max(h.num_descriptors for h in seen[10:]) <= max(h.num_descriptors for h in seen[:10])
        assert max(h.num_threads for h in seen[10:]) <= max(h.num_threads for h in seen[:10])
        assert seen[-1].resident_kib - seen[9].resident_kib < 20_000  # ten models that stay would be 80 MB


def given_up(rank, n, topology, folder):
    """Rank 1 does not take the last step; whether the model of rank 0 is gone once it has learnt of that."""
    model = DecentralizedDataParallel(network(), SGD, topology=topology)
    loss_of(model, 0, rank).backward()
    if rank == 0:
        loss_of(model, 1, rank).backward()
        with short_notes(), pytest.raises(ExchangeError):
            model.synchronize()
        leave(folder, rank)
    else:
        stay_until_left(folder, 1)
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("topology", ["ring", "complete", "hierarchical"])
def test_o7_a_model_that_failed_goes_too(pool, topology, tmp_path):
    assert pool.run(given_up, 2, topology, tmp_path, group_timeout_s=2) == [True, True]


def test_o7_the_wrapper_goes_without_the_garbage_collector_too() -> None:
    """No cycle keeps the model: memory is free as soon as the last name is gone."""
    (model,) = wrap_virtual(1, lambda rank: network(), SGD)
    loss_of(model, 0, 0).backward()
    reference = weakref.ref(model.module)
    gc.collect()
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- O10


@pytest.mark.parametrize("where", [0, 1])
def test_o10_a_parameter_elsewhere_is_refused_by_name_and_device(where):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[where].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    with pytest.raises(ConfigurationError, match=rf"parameter '{where}.weight' is on meta and others are on cpu"):
        wrap_virtual(1, lambda rank: model, SGD)


def backend_of_other_device(rank, n):
    """What a CUDA model meets in a gloo group, told without a GPU."""
    communicator = DecentralizedDataParallel(network(), SGD)._communicator
    with pytest.raises(ConfigurationError, match=r"on cuda and the process group has .*cpu:gloo,cuda:nccl"):
        communicator.prepare((), [torch.device("cuda")])


def test_o10_a_backend_that_does_not_fit_the_device_is_refused(pool):
    pool.run(backend_of_other_device, 2)


# ---------------------------------------------------------------- determinism


def seeded(rank, n, topology, wire_dtype):
    """Random starts, data and dropout from the seed of the rank."""
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    state = torch.get_rng_state()
    model = DecentralizedDataParallel(
        model, partial(torch.optim.Adam, lr=0.01), topology=topology, wire_dtype=wire_dtype, bucket_size_in_mb=TINY
    )
    assert torch.equal(torch.get_rng_state(), state)
    for _ in range(20):
        model(torch.randn(4, 3)).square().mean().backward()
    model.synchronize()
    return flat(model).tolist()


@pytest.mark.parametrize(
    ("topology", "wire_dtype"),
    [("ring", None), ("exp", None), ("exp", torch.bfloat16), ("complete", torch.bfloat16)],
)
def test_same_seeds_give_bit_equal_runs(pool, topology, wire_dtype):
    assert pool.run(seeded, 4, topology, wire_dtype) == pool.run(seeded, 4, topology, wire_dtype)
