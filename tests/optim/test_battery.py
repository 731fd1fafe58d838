"""Every optimizer of the package against the float64 oracle: a new member is a row of `OPTIMIZERS`."""

import functools

import numpy as np
import pytest
import torch

from decent_dp import optim
from decent_dp.optim import pieces
from optim import oracle

# name -> (factory, decay is decoupled, steps in a window)
OPTIMIZERS = {
    "adam": (optim.optim_fn_adam, False, 1),
    "adamw": (optim.optim_fn_adamw, True, 1),
    **{f"accum_adam-{s}": (functools.partial(optim.optim_fn_accum_adam, accum_iter=s), False, s) for s in (1, 2, 3, 4)},
    **{
        f"accum_adamw-{s}": (functools.partial(optim.optim_fn_accum_adamw, accum_iter=s), True, s) for s in (1, 2, 3, 4)
    },
}
# dtype -> absolute tolerance per step, with |x| of about 1
DTYPES = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
SHAPES = {"matrix": (5, 7), "vector": (70,), "scalar": (), "empty": (0, 3), "image": (4, 3, 2, 2)}
HYPERPARAMETERS = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}


def make(dtype: torch.dtype, seed: int = 0) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    named = []
    for name, shape in SHAPES.items():
        value = torch.randn(shape, dtype=wide, generator=generator).to(dtype)
        if name == "image":
            value = value.to(memory_format=torch.channels_last)
        named.append((name, torch.nn.Parameter(value)))
    return named


def gradients_like(named: list[tuple[str, torch.nn.Parameter]], number: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    wide = {True: torch.complex128, False: torch.float64}
    return [
        [
            torch.randn(p.shape, dtype=wide[p.is_complex()], generator=generator)
            .to(p.dtype)
            .as_strided(p.shape, p.stride())
            for _, p in named
        ]
        for _ in range(number)
    ]


def wide_numpy(tensor: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(wide).numpy().copy()


def run(optimizer, named, gradients):
    path = []
    for row in gradients:
        for (_, parameter), gradient in zip(named, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        path.append([wide_numpy(parameter) for _, parameter in named])
    return path


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_the_formula_at_every_step(name, dtype, weight_decay):
    optim_fn, decoupled, s = OPTIMIZERS[name]
    named = make(dtype)
    start = [wide_numpy(parameter) for _, parameter in named]
    gradients = gradients_like(named, 2 * s + 1)
    optimizer = optim_fn(named, weight_decay=weight_decay, **HYPERPARAMETERS)
    path = run(optimizer, named, gradients)
    for i, (label, parameter) in enumerate(named):
        expected = oracle.accum_adam(
            start[i], [wide_numpy(row[i]) for row in gradients], **HYPERPARAMETERS,
            weight_decay=weight_decay if parameter.ndim >= 2 else 0.0, decoupled=decoupled, accum_iter=s,
        )  # fmt: skip
        for step in range(2 * s + 1):
            np.testing.assert_allclose(
                path[step][i], expected[step], rtol=0, atol=DTYPES[dtype] * (step + 1), err_msg=f"{label}, {step + 1}"
            )
        for value in optimizer.state[parameter].values():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.ndim:
                assert value.dtype == parameter.dtype
                assert value.stride() == parameter.stride()


@pytest.mark.parametrize("options", [{"fused": False}, {"fused": None}, {"fused": False, "foreach": True}], ids=str)
@pytest.mark.parametrize("cls", [optim.AccumAdam, optim.AccumAdamW])
def test_kernels_agree_on_mixed_lists(cls, options):
    """One list with every dtype and shape, skipped parameters included."""
    named = [(f"{dtype}.{name}", p) for dtype in DTYPES for name, p in make(dtype)]
    start = [wide_numpy(parameter) for _, parameter in named]
    gradients = gradients_like(named, 7)
    skips = {(step, i) for step in range(7) for i in range(len(named)) if (step * 5 + i) % 4 == 0}
    optimizer = cls(named, lr=0.03, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3, accum_iter=3, **options)
    for step, row in enumerate(gradients):
        for i, ((_, parameter), gradient) in enumerate(zip(named, row, strict=True)):
            parameter.grad = None if (step, i) in skips else gradient
        optimizer.step()
    for i, (_, parameter) in enumerate(named):
        taken = [wide_numpy(row[i]) for step, row in enumerate(gradients) if (step, i) not in skips]
        assert optimizer.state[parameter]["step"] == len(taken)
        expected = oracle.accum_adam(
            start[i], taken, **HYPERPARAMETERS, weight_decay=0.3, decoupled=cls is optim.AccumAdamW, accum_iter=3
        )
        np.testing.assert_allclose(wide_numpy(parameter), expected[-1], rtol=0, atol=7 * DTYPES[parameter.dtype])


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("accumulated", "plain"),
    [(optim.optim_fn_accum_adam, optim.optim_fn_adam), (optim.optim_fn_accum_adamw, optim.optim_fn_adamw)],
)
def test_window_of_one_is_adam_bit_for_bit(accumulated, plain, dtype, fused):
    paths = []
    for optim_fn in (functools.partial(accumulated, accum_iter=1), plain):
        named = make(dtype)
        optimizer = optim_fn(named, weight_decay=0.3, fused=fused, **HYPERPARAMETERS)
        paths.append(run(optimizer, named, gradients_like(named, 9)))
    for mine, torchs in zip(*paths, strict=True):
        for a, b in zip(mine, torchs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_batches_do_not_change_results(monkeypatch, dtype):
    """Bit-equal whether tensors travel whole, together or in many pieces."""
    ends = []
    for batch_bytes, small_bytes in ((2**24, 2**24), (2**12, 0), (2**11, 2**8)):
        monkeypatch.setattr(pieces, "_BATCH_BYTES_CPU", batch_bytes)
        monkeypatch.setattr(pieces, "_SMALL_BYTES", small_bytes)
        generator = torch.Generator().manual_seed(3)
        named = [
            (str(shape), torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for shape in ((61, 73), (5,), (2000,), (3, 3), ())
        ]
        optimizer = optim.optim_fn_accum_adam(named, weight_decay=0.3, accum_iter=2, **HYPERPARAMETERS)
        run(optimizer, named, gradients_like(named, 5))
        ends.append([p.detach() for _, p in named] + [optimizer.state[p]["second_moment"] for _, p in named])
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            assert torch.equal(a, b)
