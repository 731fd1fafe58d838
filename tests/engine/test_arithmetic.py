"""Rounding that keeps what it takes away."""

import pytest
import torch

from decent_dp.engine.arithmetic import dtype_of_rest, join, split

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
]


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
def test_a_number_is_rounded_to_its_neighbour_and_comes_back_to_the_last_bit(wide, narrow):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(20_000, dtype=wide, generator=generator)
    numbers *= 10.0 ** torch.randint(-4, 4, numbers.shape, generator=generator)
    exact = numbers.to(narrow).to(wide)
    halfway = (exact + torch.nextafter(exact.to(narrow), torch.tensor(9e9, dtype=narrow)).to(wide)) / 2
    for x in (numbers, exact, -exact, halfway, -halfway, torch.zeros(3, dtype=wide)):
        rounded = torch.empty(len(x), dtype=narrow)
        rest = torch.empty(len(x), dtype=dtype_of_rest(wide, narrow))
        split(x.clone(), rounded, rest)
        assert torch.equal(join(rounded, rest, torch.empty_like(x)), x)
        assert ((rounded.to(wide) - x).abs() <= (x.to(narrow).to(wide) - x).abs()).all()
        if x is exact:
            assert torch.equal(rounded.to(wide), x)
            assert not rest.any()
