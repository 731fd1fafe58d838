"""The arithmetic of accumulated Adam: parameters move every step, moments remember once per window of steps.

    s     accum_iter, steps in a window               x   parameters
    k     ceil(step / s), the window a step is in     g   gradient at x
    M, V  first and second moment at the end of the   b   mean of the window's gradients, as far as it got
          last window, both 0 at first
    m, v  the moments this step moves with            β1, β2, ε, λ   as in Adam(W), η the learning rate

One step (λ = 0; see below for weight decay):

    m = β1 M + (1 - β1) g
    v = β2 V + (1 - β2) g²
    x ← x - η (m / (1 - β1^k)) / (√(v / (1 - β2^k)) + ε)
    b ← b + g / s
    and at the end of a window, when step mod s = 0:
    M ← β1 M + (1 - β1) b
    V ← β2 V + (1 - β2) b²
    b ← 0

So V estimates the square of the *mean* of s gradients, as Adam does with gradients averaged over s workers,
while a worker that averages parameters never sees that mean. With s = 1 this is Adam, bit for bit.

Weight decay: `AccumAdam` adds it to the gradient, g ← g + λ x, in every line above; `AccumAdamW` shrinks
first, x ← (1 - η λ) x.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from decent_dp.optim.fused import is_dense, is_plain, supports_fused

# [Note: pieces] The four parts of a step touch x, g, M, V, b and the scratch copies m, v. Done one after
# another over a whole bucket they read memory twice as often as Adam does. So a bucket is walked in batches
# of at most this many bytes per tensor: on a CPU the seven pieces of a batch stay in its cache, elsewhere the
# size bounds the scratch.
_BATCH_BYTES_CPU = 2 * 2**20
_BATCH_BYTES = 256 * 2**20
# Scratch pieces start at multiples of this many elements, so that vector loads are aligned for any dtype.
_ALIGNMENT = 64

_Columns = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


@torch.no_grad()
def accum_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    gradient_means: Sequence[Tensor],
    steps: Sequence[int],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    accum_iter: int,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> None:
    """Take one step of accumulated Adam on lists of tensors, in place.

    The formula stands at the top of this module; item i of every list belongs to parameter i. The lists may
    mix dtypes, devices, shapes and memory formats. Complex tensors are treated as pairs of real ones, as
    torch does.

    Args:
        params: x, changed.
        grads: g, read only, of the shapes of `params`.
        first_moments: M, changed at the end of a window.
        second_moments: V, changed at the end of a window.
        gradient_means: b, changed.
        steps: The number of this step for each parameter, 1 for the first.
        lr: η.
        beta1: β1.
        beta2: β2.
        eps: ε.
        weight_decay: λ.
        decoupled_weight_decay: Shrink x first (AdamW) instead of adding λ x to g (Adam).
        accum_iter: s, in steps.
        foreach: As in torch.optim.Adam, for the parameters that the fused kernel does not serve.
        fused: False: never the fused kernel. Otherwise wherever torch supports it.

    Example:
        >>> x, g, M, V, b = (torch.full((1,), value) for value in (1.0, 2.0, 0.0, 0.0, 0.0))
        >>> accum_adam([x], [g], [M], [V], [b], [1], lr=0.5, beta1=0.9, beta2=0.999, eps=0.0,
        ...            weight_decay=0.0, decoupled_weight_decay=True, accum_iter=4)
        >>> x, M, b
        (tensor([0.5000]), tensor([0.]), tensor([0.5000]))

    References:
        Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025,
        arXiv:2410.11998, appendix.
    """
    s = accum_iter
    kernel = adamw if decoupled_weight_decay else adam
    lists = (params, grads, first_moments, second_moments, gradient_means)
    for (device, _, use_fused, flat, step), columns in _alike(lists, steps, fused).items():
        k = -(-step // s)
        batch_bytes = _BATCH_BYTES_CPU if device.type == "cpu" else _BATCH_BYTES
        for x, g, M, V, b in _batches(columns, batch_bytes) if flat and s > 1 else (columns,):
            if s == 1:
                m, v = M, V
            else:
                # b before x moves: with λ added to the gradient it needs the x at which g was taken.
                torch._foreach_add_(b, g, alpha=1 / s)
                if weight_decay and not decoupled_weight_decay:
                    torch._foreach_add_(b, x, alpha=weight_decay / s)
                m, v = _scratch_copies(M, V) if flat else ([t.clone() for t in M], [t.clone() for t in V])
            kernel(
                x, g, m, v, [],
                # The kernel counts up before it uses the count; its bias corrections are by window.
                _counters(len(x), k - 1, device if use_fused else torch.device("cpu")),
                foreach=None if use_fused else foreach, fused=True if use_fused else None, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps, maximize=False,
            )  # fmt: skip
            if s > 1 and step % s == 0:
                torch._foreach_lerp_(M, b, 1 - beta1)
                torch._foreach_mul_(V, beta2)
                torch._foreach_addcmul_(V, b, b, 1 - beta2)
                torch._foreach_zero_(b)


def _alike(
    lists: Sequence[Sequence[Tensor]], steps: Sequence[int], fused: bool | None
) -> dict[tuple[torch.device, torch.dtype, bool, bool, int], _Columns]:
    """Sort parameters into those one call can serve: by device, dtype, fused, flat and step."""
    groups: dict[tuple[torch.device, torch.dtype, bool, bool, int], _Columns] = {}
    for x, g, *state, step in zip(*lists, steps, strict=True):
        if x.numel() == 0:
            continue
        use_fused = fused is not False and supports_fused(x)
        if x.is_complex():
            x, g, *state = (torch.view_as_real(t.resolve_conj()) for t in (x, g, *state))
        flat = is_plain(x) and is_dense(x) and all(_same_order(t, x) for t in state)
        if flat:
            if not _same_order(g, x) or g.dtype != x.dtype:
                g = torch.empty_like(x).copy_(g)
            row = tuple(map(_flatten, (x, g, *state)))
        else:
            row = (x, g, *state)
        key = (x.device, x.dtype, use_fused and flat, flat, step)
        columns = groups.setdefault(key, ([], [], [], [], []))
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
    return groups


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two tensors of one shape lie in memory in the same order."""
    return all(i == j or size == 1 for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True))


def _flatten(tensor: Tensor) -> Tensor:
    """The elements in the order they lie in memory, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _batches(columns: _Columns, batch_bytes: int) -> Iterator[_Columns]:
    """Cut flat tensors into batches of at most so many bytes, see [Note: pieces]."""
    capacity = max(batch_bytes // columns[0][0].element_size(), _ALIGNMENT)
    batch: _Columns = ([], [], [], [], [])
    filled = 0
    for row in zip(*columns, strict=True):
        start, size = 0, row[0].numel()
        while start < size:
            length = min(size - start, capacity - filled)
            whole = length == size
            for column, tensor in zip(batch, row, strict=True):
                column.append(tensor if whole else tensor.narrow(0, start, length))
            start += length
            # Round up, so that every piece but the last of a tensor ends where a vector does: results do not
            # depend on where the cuts are.
            filled += -(-length // _ALIGNMENT) * _ALIGNMENT
            if filled >= capacity:
                yield batch
                batch, filled = ([], [], [], [], []), 0
    if filled:
        yield batch


def _scratch_copies(M: list[Tensor], V: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of flat pieces, side by side in one allocation each."""
    room = [-(-piece.numel() // _ALIGNMENT) * _ALIGNMENT for piece in M]
    copies = []
    for pieces in (M, V):
        scratch = pieces[0].new_empty(sum(room))
        parts = [part[: piece.numel()] for part, piece in zip(torch.split(scratch, room), pieces, strict=True)]
        torch._foreach_copy_(parts, pieces)
        copies.append(parts)
    return copies[0], copies[1]


def _counters(number: int, windows: int, device: torch.device) -> list[Tensor]:
    """The step counters a kernel of torch wants, one scalar for each tensor."""
    return list(torch.full((number,), windows, dtype=torch.float32, device=device).unbind())
