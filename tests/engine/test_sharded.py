"""Rounds in shards: two levels, narrow wires, parts that are empty, several nodes that send at once."""

from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.errors import TopologyError
from decent_dp.topology import Layout, Sharded, build, from_edges, hierarchical, static_ring
from virtual import stack, wrap_virtual

SIZES = (50, 1, 3, 17)


def replicas(layout, topology, dtype, wire, spread=1.0):
    """Without learning; starts differ by rank."""
    models = wrap_virtual(
        layout.num_workers,
        lambda rank: nn.ParameterList([torch.zeros(size, dtype=dtype) for size in SIZES]),
        partial(torch.optim.SGD, lr=0.0),
        topology=topology,
        wire_dtype=wire,
        bucket_size_in_mb=1e-4,
        workers_per_node=layout.workers_per_node,
    )
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed(rank)
        for p in model.parameters():
            p.data.copy_(5.123456 + spread * torch.randn(p.shape, generator=generator, dtype=dtype))
    return models


def run(models, steps):
    for _ in range(steps):
        for model in models:
            sum((p * 0).sum() for p in model.parameters()).backward()
    return stack(models)


def weighted(layout):
    """Nodes that keep more than half, one that idles, one that sends to two."""
    rounds = [[(0, 1, 0.3), (1, 2, 0.2)], [(0, 2, 0.4)]]
    return hierarchical(layout, lambda nodes: from_edges(rounds, nodes))


LAYOUT = Layout(6, 2)
OUTER = {"exp": hierarchical(LAYOUT), "static-ring": hierarchical(LAYOUT, static_ring), "weighted": weighted(LAYOUT)}
WIRES = [None, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("wire", WIRES)
def test_rounds_multiply_by_their_matrices(outer, wire):
    topology = OUTER[outer]
    models = replicas(LAYOUT, topology, torch.float64, wire)
    expected = stack(models)
    for t in range(7):
        if t:
            expected = torch.from_numpy(topology.round_at(t - 1).matrix()) @ expected
        actual = run(models, 1)
        tolerance = 1e-13 if wire is None else 10 * torch.finfo(wire).eps * 8
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(("dtype", "wire"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float16)])
def test_the_mean_is_kept_and_replicas_that_agree_stay_put(outer, dtype, wire):
    models = replicas(LAYOUT, OUTER[outer], dtype, wire)
    start = stack(models)
    end = run(models, 30)
    torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=30 * 4 * torch.finfo(dtype).eps)
    models = replicas(LAYOUT, OUTER[outer], dtype, wire, spread=0.0)
    start = stack(models)
    assert torch.equal(run(models, 10), start)


def test_a_node_sends_one_copy_for_each_node_it_sends_to():
    topology, L = build("hierarchical", Layout(12, 4)), 4
    for t in range(topology.num_rounds):
        sent = [0.0] * 3
        for rank in range(12):
            plan = topology.plan_at(t, rank)
            assert isinstance(plan, Sharded)
            assert len(set(plan.ranks)) == L
            sent[rank // L] += len(plan.across.send_to) / L
        assert sent == [1.0] * 3


@pytest.mark.parametrize(("wire", "copies"), [(None, 1.0), (torch.bfloat16, 0.5 + 0.5 / 2 + 0.5 / 2)])
def test_what_is_kept_for_the_exchange(wire, copies):
    """One tensor like the parameters; narrow: what travels, a part of the other, what rounding takes from mine."""
    layout = Layout(4, 2)
    models = wrap_virtual(
        4,
        lambda rank: nn.Linear(100, 100, bias=False),
        partial(torch.optim.SGD, lr=0.0),
        topology="hierarchical",
        wire_dtype=wire,
        workers_per_node=2,
    )
    assert build("hierarchical", layout).num_rounds == 1
    run(models, 3)
    kept = sum(t.numel() * t.element_size() for b in models[0]._replica.buckets for t in b._state.values())
    assert kept == copies * 100 * 100 * 4


def on_gloo(rank, n, topology, wire):
    model = DecentralizedDataParallel(
        nn.ParameterList([torch.full((size,), rank + 0.1 * size, dtype=torch.float64) for size in SIZES]),
        partial(torch.optim.SGD, lr=0.1),
        topology=topology,
        wire_dtype=wire,
        workers_per_node=2,
        bucket_size_in_mb=1e-4,
    )
    for t in range(6):
        sum((p * (rank + t)).sum() for p in model.parameters()).backward()
    model.synchronize()
    return torch.cat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("topology", ["hierarchical", "alternating-exp-ring", "complete"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_processes_give_bit_for_bit_what_virtual_workers_give(pool, topology, wire):
    results = torch.stack(pool.run(on_gloo, 4, topology, wire))
    models = wrap_virtual(
        4,
        lambda rank: nn.ParameterList([torch.full((size,), rank + 0.1 * size, dtype=torch.float64) for size in SIZES]),
        partial(torch.optim.SGD, lr=0.1),
        topology=topology,
        wire_dtype=wire,
        workers_per_node=2,
        bucket_size_in_mb=1e-4,
    )
    for t in range(6):
        for rank, model in enumerate(models):
            sum((p * (rank + t)).sum() for p in model.parameters()).backward()
    if topology == "complete" and wire is None:  # one collective over two nodes, in an order of its own
        torch.testing.assert_close(results, stack(models), rtol=0, atol=1e-12)
    else:
        assert torch.equal(results, stack(models))


@pytest.mark.parametrize("outer", ["ring", "alternating-exp-ring", "base-2"])
def test_any_topology_with_a_cycle_may_be_between_the_nodes(outer):
    layout = Layout(8, 2)
    topology = build(f"hierarchical(complete, {outer})", layout)
    assert topology.name == f"hierarchical({outer})"
    between = build(outer, Layout(4, 1))
    for t in range(between.num_rounds):
        inside = torch.full((2, 2), 0.5, dtype=torch.float64)
        expected = torch.kron(torch.from_numpy(between.round_at(t).matrix()), inside)
        torch.testing.assert_close(torch.from_numpy(topology.round_at(t).matrix()), expected)
    with pytest.raises(TopologyError, match="no cycle"):
        build("hierarchical(random-matching)", layout)
    with pytest.raises(TopologyError, match="unknown topology"):
        build("hierarchical(rign)", layout)
