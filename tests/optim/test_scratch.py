"""Copies in scratch memory."""

import torch

from decent_dp.optim.scratch import Scratch


def test_copies_lie_as_the_originals_and_apart():
    tensors = [torch.randn(70), torch.randn(()), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)]
    copies = Scratch().copies(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)


def test_memory_is_used_again():
    scratch = Scratch()
    (first,) = scratch.copies([torch.ones(100)])
    (second,) = scratch.copies([torch.zeros(70)])
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(scratch.copies([torch.ones(3, 100)])[0], torch.ones(3, 100))
