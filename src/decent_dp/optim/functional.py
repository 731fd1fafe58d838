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

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from decent_dp.optim.fused import fused_adam
from decent_dp.optim.pieces import Columns, Pieces


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
    pieces: Pieces | None = None,
) -> Pieces:
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
        pieces: What the step before has returned, to save time.

    Returns:
        How the tensors were cut, for the next step with these lists.

    Example:
        >>> x, g, M, V, b = (torch.full((1,), value) for value in (1.0, 2.0, 0.0, 0.0, 0.0))
        >>> _ = accum_adam([x], [g], [M], [V], [b], [1], lr=0.5, beta1=0.9, beta2=0.999, eps=0.0,
        ...                weight_decay=0.0, decoupled_weight_decay=True, accum_iter=4)
        >>> x, M, b
        (tensor([0.5000]), tensor([0.]), tensor([0.5000]))

    References:
        Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025,
        arXiv:2410.11998, appendix.
    """
    s = accum_iter
    columns = Columns(params, first_moments, second_moments, gradient_means)
    if pieces is None or not pieces.are_of(columns, steps, fused, whole=s == 1):
        pieces = Pieces(columns, steps, fused, whole=s == 1)
    for kind in pieces.kinds:
        step = steps[kind.members[0]]
        windows = -(-step // s)
        if kind.use_fused:
            counter = torch.full((), windows, dtype=torch.float32, device=kind.device)
            copies = kind.copy_moments()
        for batch, g in zip(kind.batches, kind.gradients(grads), strict=True):
            x, M, V, b = batch.x, batch.M, batch.V, batch.b
            if s > 1 and weight_decay and not decoupled_weight_decay:
                # Before x moves: b needs the x at which g was taken.
                torch._foreach_add_(b, x, alpha=weight_decay / s)
            if s == 1:
                m, v = M, V
            elif kind.use_fused:
                m, v = next(copies)
            else:
                m, v = [t.clone() for t in M], [t.clone() for t in V]
            if kind.use_fused:
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
            del m, v  # or the clones would not make room for those of the next batch
    return pieces


def _remember(M: list[Tensor], V: list[Tensor], b: list[Tensor], beta1: float, beta2: float) -> None:
    """Move the mean gradient of a window into the moments."""
    if b[0].is_complex():
        M, V, b = ([torch.view_as_real(t) for t in column] for column in (M, V, b))
    torch._foreach_lerp_(M, b, 1 - beta1)
    torch._foreach_mul_(V, beta2)
    torch._foreach_addcmul_(V, b, b, 1 - beta2)
    torch._foreach_zero_(b)
