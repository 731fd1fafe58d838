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

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from decent_dp.optim.fused import fused_adam, is_dense, is_plain, supports_fused
from decent_dp.optim.scratch import ALIGNMENT, Scratch

# [Note: pieces] The parts of a step touch x, g, M, V, b and the scratch copies m, v. Done one after another over a
# whole bucket they read memory twice as often as Adam does. So a bucket is walked in batches of about this many
# bytes per tensor, half as much more or less: on a CPU (there per thread) the pieces of a batch stay in its cache,
# elsewhere the size bounds the scratch. Smaller ones would pay more for calls than they gain in cache.
_BATCH_BYTES_CPU = 3 * 2**19
_BATCH_BYTES = 256 * 2**20
# Smaller tensors are not worth a view of their own.
_SMALL_BYTES = 2**18

# Parameters one call can serve: device, dtype, whether plain tensors, whether fused, step.
_Kind = tuple[torch.device, torch.dtype, bool, bool, int]
# x, g, M, V, b
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
    lists = (params, grads, first_moments, second_moments, gradient_means)
    for (device, _, plain, use_fused, step), columns in _alike(lists, steps, fused).items():
        windows = -(-step // s)
        scratch = Scratch()
        counter = torch.full((), windows, dtype=torch.float32, device=device) if use_fused else None
        for x, g, M, V, b in _batches(columns, device) if plain and s > 1 else (columns,):
            if s > 1 and weight_decay and not decoupled_weight_decay:
                # Before x moves: b needs the x at which g was taken.
                torch._foreach_add_(b, x, alpha=weight_decay / s)
            moments = [*M, *V]
            if s > 1:
                moments = scratch.copies(moments) if use_fused else [t.clone() for t in moments]
            m, v = moments[: len(x)], moments[len(x) :]
            if counter is not None:
                fused_adam(
                    x, g, m, v, [counter] * len(x), decoupled_weight_decay=decoupled_weight_decay,
                    beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
                )  # fmt: skip
            else:
                kernel = adamw if decoupled_weight_decay else adam
                # It counts up before it uses the count; its bias corrections are by window.
                counters = list(torch.full((len(x),), windows - 1, dtype=torch.float32).unbind())
                kernel(
                    x, g, m, v, [], counters,
                    foreach=foreach, has_complex=x[0].is_complex(), amsgrad=False, maximize=False,
                    beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
                )  # fmt: skip
            if s > 1:
                # After the kernel, which computes while it waits for g; here g comes from the cache.
                torch._foreach_add_(b, g, alpha=1 / s)
                if step % s == 0:
                    _remember(M, V, b, beta1, beta2)
            del moments, m, v  # or the clones would not make room for those of the next batch


def _alike(lists: Sequence[Sequence[Tensor]], steps: Sequence[int], fused: bool | None) -> dict[_Kind, _Columns]:
    """Sort parameters into those one call can serve: columns x, g, M, V, b for each kind."""
    groups: dict[_Kind, _Columns] = {}
    for x, g, M, V, b, step in zip(*lists, steps, strict=True):
        if x.numel() == 0:
            continue
        use_fused = fused is not False and supports_fused(x)
        g = g.resolve_conj()
        plain = is_plain(x)
        if plain and is_dense(x) and all(_same_order(t, x) for t in (M, V, b)):
            if not _same_order(g, x) or g.dtype != x.dtype:
                g = torch.empty_like(x).copy_(g)
            if x.numel() * x.element_size() > _SMALL_BYTES:
                x, g, M, V, b = map(_flatten, (x, g, M, V, b))
        else:
            use_fused = False
        columns = groups.setdefault((x.device, x.dtype, plain, use_fused, step), ([], [], [], [], []))
        for column, tensor in zip(columns, (x, g, M, V, b), strict=True):
            column.append(tensor)
    return groups


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two tensors of one shape lie in memory in the same order."""
    return a.stride() == b.stride() or all(
        i == j or size == 1 for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True)
    )


def _flatten(tensor: Tensor) -> Tensor:
    """The elements in the order they lie in memory, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _batches(columns: _Columns, device: torch.device) -> Iterator[_Columns]:
    """Collect small tensors and cut large flat ones into batches, see [Note: pieces]."""
    batch_bytes = _BATCH_BYTES_CPU * torch.get_num_threads() if device.type == "cpu" else _BATCH_BYTES
    capacity = batch_bytes // columns[0][0].element_size()
    batch: _Columns = ([], [], [], [], [])
    size = 0
    for row in zip(*columns, strict=True):
        for piece in _cut(row, capacity):
            for column, tensor in zip(batch, piece, strict=True):
                column.append(tensor)
            size += piece[0].numel()
            if size > capacity // 2:
                yield batch
                batch, size = ([], [], [], [], []), 0
    if batch[0]:
        yield batch


def _cut(row: tuple[Tensor, ...], capacity: int) -> Iterable[tuple[Tensor, ...]]:
    """Views of equal parts of a flat row that is larger than `capacity`, other rows as they are."""
    size = row[0].numel()
    if size <= capacity or row[0].ndim != 1:
        return [row]
    # A cut falls where a vector of the kernel ends, so that results do not depend on where it is.
    length = -(-size // (-(-size // capacity) * ALIGNMENT)) * ALIGNMENT
    return zip(*(torch.unsafe_split(tensor, length) for tensor in row), strict=True)  # without Python in between


def _remember(M: list[Tensor], V: list[Tensor], b: list[Tensor], beta1: float, beta2: float) -> None:
    """Move the mean gradient of a window into the moments."""
    if b[0].is_complex():
        M, V, b = ([torch.view_as_real(t) for t in column] for column in (M, V, b))
    torch._foreach_lerp_(M, b, 1 - beta1)
    torch._foreach_mul_(V, beta2)
    torch._foreach_addcmul_(V, b, b, 1 - beta2)
    torch._foreach_zero_(b)
