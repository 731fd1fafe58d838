"""How tensors are cut, and that what was cut is used again only for the same memory."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from decent_dp.optim import AccumAdam, AccumAdamW
from decent_dp.optim.pieces import _SCRATCH, Columns, Pieces


def columns_of(*tensors: torch.Tensor) -> Columns:
    return Columns(list(tensors), *([torch.randn_like(t) for t in tensors] for _ in range(3)))


def test_copies_lie_as_the_originals_and_apart():
    columns = columns_of(torch.randn(70), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.ones(()))
    (kind,) = Pieces(columns, [1, 1, 1], None, whole=False).kinds
    ((m, v),) = kind.copy_moments()
    for copies, originals in ((m, columns.M), (v, columns.V)):
        for copy, tensor in zip(copies, originals, strict=True):
            assert copy.numel() == tensor.numel()
            assert torch.equal(copy, tensor.view(-1) if copy.ndim < tensor.ndim else tensor)
    for tensor in (*m, *v):
        tensor.zero_()
    assert all(tensor.ne(0).all() for tensor in (*columns.M, *columns.V))


def test_pieces_cover_everything_once():
    columns = columns_of(torch.zeros(3_000_001), torch.zeros(7), torch.zeros(900, 1000).t(), torch.zeros(0, 3))
    grads = [torch.randn_like(x) for x in columns.x]
    for kind in Pieces(columns, [1] * 4, None, whole=False).kinds:
        for batch, g in zip(kind.batches, kind.gradients(grads), strict=True):
            assert len(g) == len(batch.x)
            torch._foreach_add_(list(batch.x), g)
    for x, g in zip(columns.x, grads, strict=True):
        assert torch.equal(x, g)


def replace_parameter(optimizer, p):
    p.data = p.data.clone()


def turn_parameter(optimizer, p):
    p.data = p.data.t().clone().t()


def replace_moment(optimizer, p):
    optimizer.state[p]["first_moment"] = optimizer.state[p]["first_moment"].clone()


def replace_memory_of_moment(optimizer, p):
    optimizer.state[p]["gradient_mean"].data = optimizer.state[p]["gradient_mean"] * 2


def turn_moment(optimizer, p):
    optimizer.state[p]["second_moment"].t_()


def widen(optimizer, p):
    p.data = p.data.double()
    for name, value in optimizer.state[p].items():
        optimizer.state[p][name] = value.double() if torch.is_tensor(value) else value


def load(optimizer, p):
    optimizer.load_state_dict(optimizer.state_dict())


def join_a_group(optimizer, p):
    optimizer.add_param_group({"params": [torch.nn.Parameter(p.detach().clone())]})


def start_anew(optimizer, p):
    del optimizer.state[p]


def change_window(optimizer, p):
    optimizer.param_groups[0]["accum_iter"] = 1


def change_kernel(optimizer, p):
    optimizer.param_groups[0]["fused"] = False


def leave_out(optimizer, p):
    """Its step falls behind that of the others."""
    optimizer.param_groups[0]["params"][-1].grad = None
    optimizer.step()


@pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])
@pytest.mark.parametrize(
    "change",
    [
        replace_parameter, turn_parameter, replace_moment, replace_memory_of_moment, turn_moment, widen, load,
        join_a_group, start_anew, change_window, change_kernel, leave_out,
    ],
)  # fmt: skip
def test_what_was_cut_is_dropped_when_the_memory_changes(cls, change):
    ends = []
    for keeps in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((300, 300), (5, 5), (600, 600))
        ]
        optimizer = cls(params, lr=0.1, weight_decay=0.1, accum_iter=3)
        for step in range(12):
            if not keeps:
                optimizer._pieces.clear()
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if step == 4:
                change(optimizer, params[0])
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
        ends.append([p.detach() for p in params] + [optimizer.state[p][name] for p in params for name in
                    ("first_moment", "second_moment", "gradient_mean")])  # fmt: skip
    for kept, fresh in zip(*ends, strict=True):
        assert torch.equal(kept, fresh)


def test_what_was_cut_is_kept_from_step_to_step():
    params = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = AccumAdamW(params, lr=0.1)
    seen = []
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen.append(optimizer._pieces[0])
    assert seen[0] is seen[1] is seen[2]
    params[1].data = params[1].data.clone()
    optimizer.step()
    assert optimizer._pieces[0] is not seen[0]


def test_are_of_the_same_memory_cut_in_the_same_way():
    columns = columns_of(torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16))
    made = Pieces(columns, [5, 3], None, whole=False)
    assert made.are_of(columns, [5, 3], None, whole=False)
    assert made.are_of(columns, [9, 7], None, whole=False)
    assert not made.are_of(columns, [6, 3], None, whole=False)
    assert not made.are_of(columns, [5, 3], None, whole=True)
    assert not made.are_of(columns, [5, 3], False, whole=False)
    other = Columns(*([t.view(torch.bfloat16) for t in column] for column in columns))
    assert not made.are_of(other, [5, 3], None, whole=False)


def stepped(size=3_000_000, dtype=torch.float32):
    p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = AccumAdamW([p], lr=0.1)
    optimizer.step()
    return optimizer


def test_optimizers_of_a_thread_share_the_memory_for_copies_and_free_it():
    before = set(_SCRATCH.items())
    first, second = stepped(), stepped()
    (memory,) = {id(kind._scratch) for o in (first, second) for kind in o._pieces[0].kinds}
    assert memory == id(_SCRATCH[threading.get_ident(), torch.float32])
    narrow = stepped(dtype=torch.bfloat16)
    assert narrow._pieces[0].kinds[0]._scratch.dtype == torch.bfloat16
    del first, second, narrow
    gc.collect()
    assert set(_SCRATCH.items()) == before


@pytest.mark.parametrize("size", [1, 65, 400_000, 3_000_000])
def test_the_memory_for_copies_is_bounded(size):
    columns = columns_of(*torch.zeros(min(20_000, 12_000_000 // size), size).unbind())
    (kind,) = Pieces(columns, [1] * len(columns.x), None, whole=False).kinds
    bound = 4.5 * 2**20 * torch.get_num_threads() + 2 * 4 * 64  # as the docstring of AccumAdam says
    assert kind._scratch.nbytes <= bound


def test_threads_share_no_memory_for_copies():
    optimizer = stepped()
    here = optimizer._pieces[0].kinds[0]._scratch
    with ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step).result()
        there = optimizer._pieces[0].kinds[0]._scratch
    assert there is not here


def test_memory_for_copies_made_in_inference_mode_serves_outside_of_it():
    p = torch.nn.Parameter(torch.ones(3_000_000))
    p.grad = torch.ones_like(p)
    first = AccumAdamW([p], lr=0.1)
    with torch.inference_mode():
        first.step()
    stepped().step()
