"""Adam and accumulated Adam in float64 numpy, straight from the formula, with no eye to speed."""

from collections.abc import Sequence

import numpy as np


def accum_adam(
    x: np.ndarray,
    gradients: Sequence[np.ndarray],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    accum_iter: int,
) -> list[np.ndarray]:
    """Return the parameters after every step; complex numbers are pairs of real ones."""
    if np.iscomplexobj(x):
        pairs = [np.stack([z.real, z.imag], axis=-1) for z in (x, *gradients)]
        path = accum_adam(
            pairs[0], pairs[1:], lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, decoupled=decoupled, accum_iter=accum_iter,
        )  # fmt: skip
        return [z[..., 0] + 1j * z[..., 1] for z in path]
    x = x.astype(np.float64)
    M, V, b = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    path = []
    for step, g in enumerate(gradients, start=1):
        g = g.astype(np.float64)
        if decoupled:
            x = x - lr * weight_decay * x
        else:
            g = g + weight_decay * x
        k = (step + accum_iter - 1) // accum_iter
        m = beta1 * M + (1 - beta1) * g
        v = beta2 * V + (1 - beta2) * g**2
        x = x - lr * (m / (1 - beta1**k)) / (np.sqrt(v / (1 - beta2**k)) + eps)
        b = b + g / accum_iter
        if step % accum_iter == 0:
            M = beta1 * M + (1 - beta1) * b
            V = beta2 * V + (1 - beta2) * b**2
            b = np.zeros_like(b)
        path.append(x)
    return path
