"""10 steps, save, new processes, 10 steps: as 20 steps, to the last bit."""

from pathlib import Path

import pytest
import torch

from decent_dp.checkpoint import load, save
from decent_dp.topology import catalog
from engine.oracle import BUCKET_MB, loss_of, make_network
from pool import Pool
from virtual import names_for, stack, wrap_virtual

from .runs import COSINE, OPTIMIZERS, TINY, train

EVERY_TOPOLOGY = [*((4, 2, name) for name in names_for(4, 2)), (9, 1, "torus"), (3, 3, "ring"), (3, 1, "complete")]
#: Each with one optimizer, in turn; and all optimizers with some.
RUNS = [(world, list(OPTIMIZERS)[k % 3]) for k, world in enumerate(EVERY_TOPOLOGY)]
RUNS += [(EVERY_TOPOLOGY[k], optimizer) for k in (0, 5, 6) for optimizer in OPTIMIZERS]


def test_every_topology_is_among_the_runs():
    assert {name for _, _, name in EVERY_TOPOLOGY} == set(catalog.names())


@pytest.fixture(scope="module")
def others():
    """Processes that have not seen the run that they go on with."""
    with Pool() as workers:
        yield workers


def wrap(n, per_node, topology, optimizer, bucket_mb, **options):
    return wrap_virtual(
        n, lambda rank: make_network(), OPTIMIZERS[optimizer], COSINE, topology, bucket_size_in_mb=bucket_mb,
        workers_per_node=per_node, **options
    )  # fmt: skip


def run(models, first, last):
    for t in range(first, last):
        for rank, model in enumerate(models):
            loss_of(model, t, 0, rank, 1).backward()


def assert_goes_on(wrap_with, directory, buckets):
    straight = wrap_with(BUCKET_MB)
    run(straight, 0, 20)
    first = wrap_with(BUCKET_MB)
    run(first, 0, 10)
    for model in first:
        save(model, directory)
    for bucket_mb in buckets:
        second = wrap_with(bucket_mb)
        for model in second:
            load(model, directory)
        assert [model.get_lr() for model in second] == [model.get_lr() for model in first]
        run(second, 10, 20)
        assert torch.equal(stack(second), stack(straight))
    run(first, 10, 20)  # saving changes nothing
    assert torch.equal(stack(first), stack(straight))


@pytest.mark.parametrize(("world", "optimizer"), [*dict.fromkeys(RUNS)])
def test_every_topology_and_optimizer_goes_on_with_other_buckets(world, optimizer, tmp_path: Path):
    n, per_node, topology = world
    assert_goes_on(lambda mb: wrap(n, per_node, topology, optimizer, mb), tmp_path, (BUCKET_MB, 25))


@pytest.mark.parametrize("topology", ["ring", "exp", "complete"])
def test_a_narrow_wire_dtype_goes_on(topology, tmp_path: Path):
    def wrap_with(mb):
        return wrap(4, 4, topology, "adamw", mb, wire_dtype=torch.bfloat16)

    # owners of parts keep what rounding took, and for cliques the parts depend on the buckets
    assert_goes_on(wrap_with, tmp_path, (BUCKET_MB,) if topology == "complete" else (BUCKET_MB, 25))


@pytest.mark.parametrize(
    ("optimizer", "topology", "n", "options"),
    [
        ("sgd", "exp", 4, {"param_as_bucket_view": False}),
        ("adamw", "complete", 3, {}),
        ("accum-adamw", "ring", 4, {"workers_per_node": 2}),
    ],
)
def test_a_whole_run_goes_on_in_new_processes(pool, others, tmp_path: Path, optimizer, topology, n, options):
    straight = pool.run(train, n, optimizer, topology, TINY, 0, 20, None, None, options)
    pool.run(train, n, optimizer, topology, TINY, 0, 10, None, tmp_path, options)
    for bucket_mb in (TINY, 25):
        resumed = others.run(train, n, optimizer, topology, bucket_mb, 10, 20, tmp_path, None, options)
        assert resumed == straight
    assert not set(others.pids()) & set(pool.pids())
    assert {t for t, *_ in straight} == {20}
    assert len({digest for _, _, _, digest, _ in straight}) == n
