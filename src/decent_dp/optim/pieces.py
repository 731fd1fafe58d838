"""The tensors of accumulated Adam, sorted into what one kernel call serves and cut into what fits into a cache.

The parts of a step touch x, g, M, V, b (as in `decent_dp.optim.functional`) and copies of M and V. Done one after
another over a whole bucket they read memory twice as often as Adam does. So a bucket is walked in batches: on a CPU the
pieces of a batch stay in its cache, elsewhere the size of a batch bounds the memory for the copies.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from decent_dp.optim.fused import is_dense, is_plain, supports_fused

# Bytes per tensor of a batch, half as much more or less, on a CPU for each thread. Smaller ones would pay more for
# calls than they gain in cache.
_BATCH_BYTES_CPU = 3 * 2**19
_BATCH_BYTES = 256 * 2**20
# Smaller tensors are not worth a view of their own.
_SMALL_BYTES = 2**18
# In elements: a whole number of vectors for any dtype.
_ALIGNMENT = 64

# Memory for the copies on CPUs, by thread and dtype: all optimizers that a thread steps use the same, which stays in
# its cache, and the last one frees it.
_SCRATCH: weakref.WeakValueDictionary[tuple[int, torch.dtype], Tensor] = weakref.WeakValueDictionary()


class Columns(NamedTuple):
    """Item i of each list belongs to parameter i, or to one piece of it."""

    x: Sequence[Tensor]
    M: Sequence[Tensor]
    V: Sequence[Tensor]
    b: Sequence[Tensor]


class Pieces:
    """All tensors of a step but the gradients. Worth keeping: to sort and to cut takes longer than to look whether.

    Of the thread that made them, since those of one thread share the memory for copies.
    """

    def __init__(self, columns: Columns, steps: Sequence[int], fused: bool | None, *, whole: bool) -> None:
        """Sort and cut.

        Args:
            columns: Of any dtypes, devices, shapes and memory formats.
            steps: The number of this step for each parameter.
            fused: False: never the fused kernel.
            whole: Cut nothing.
        """
        self._content = self._describe(columns, steps, fused, whole)
        rows: dict[tuple[torch.device, torch.dtype, bool, bool, int], list[int]] = {}
        for i, x in enumerate(columns.x):
            if x.numel() > 0:
                plain = is_plain(x)
                use_fused = fused is not False and supports_fused(x) and _is_ordered(columns, i)
                rows.setdefault((x.device, x.dtype, plain, use_fused, steps[i]), []).append(i)
        self.kinds = [
            Kind(columns, members, use_fused=use_fused, whole=whole or not plain)
            for (_, _, plain, use_fused, _), members in rows.items()
        ]

    def are_of(self, columns: Columns, steps: Sequence[int], fused: bool | None, *, whole: bool) -> bool:
        """Whether they would be made of these in the same way: of tensors in the same memory, a step or some later.

        And by the same thread.
        """
        return self._content is not None and self._content == self._describe(columns, steps, fused, whole)

    @staticmethod
    def _describe(columns: Columns, steps: Sequence[int], fused: bool | None, whole: bool) -> object:
        tensors = [tensor for column in columns for tensor in column]
        if not all(map(is_plain, tensors)):
            return None
        where = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
        return threading.get_ident(), fused, whole, where, [step - steps[0] for step in steps]


class Kind:
    """Parameters that one call can serve: of one device, dtype and step."""

    def __init__(self, columns: Columns, members: list[int], *, use_fused: bool, whole: bool) -> None:
        """Cut the columns' items `members` into batches, or leave them `whole` and in one."""
        self.members, self.use_fused = members, use_fused
        first = columns.x[members[0]]
        self.device, self.dtype = first.device, first.dtype
        self._capacity = math.inf if whole else _batch_bytes(first.device) // first.element_size()
        self._ordered = [columns.x[i] if _is_ordered(columns, i) else None for i in members]
        cut = Columns(*(self._cut([column[i] for i in members]) for column in columns))
        self._ends: list[int] = []
        size = 0
        for end, piece in enumerate(cut.x, start=1):
            size += _align(piece.numel())
            if size > self._capacity // 2 or end == len(cut.x):
                self._ends.append(end)
                size = 0
        ranges = zip([0, *self._ends], self._ends, strict=False)
        self.batches = [Batch(Columns(*(column[begin:end] for column in cut))) for begin, end in ranges]
        self._scratch_size = max(batch.scratch_size for batch in self.batches)
        self._copies: list[tuple[list[Tensor], list[Tensor]]] | None = None
        if use_fused and not whole and self.device.type == "cpu":
            self._scratch = _kept_scratch(self._scratch_size, self.dtype)
            self._copies = [batch.place_copies(self._scratch) for batch in self.batches]

    def copy_moments(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield for each batch copies of its M and V, which those for the next batch overwrite."""
        copies: Iterable[tuple[list[Tensor], list[Tensor]]] | None = self._copies
        if copies is None:
            scratch = torch.empty(self._scratch_size, dtype=self.dtype, device=self.device)
            copies = (batch.place_copies(scratch) for batch in self.batches)
        for batch, (m, v) in zip(self.batches, copies, strict=True):
            torch._foreach_copy_([*m, *v], [*batch.M, *batch.V])
            yield m, v

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the pieces of the gradients, given for all parameters, that belong to each batch."""
        pieces = self._cut([_like(grads[i], x) for i, x in zip(self.members, self._ordered, strict=True)])
        begin = 0
        for end in self._ends:
            yield pieces[begin:end]
            begin = end

    def _cut(self, tensors: list[Tensor]) -> list[Tensor]:
        pieces: list[Tensor] = []
        for tensor, ordered in zip(tensors, self._ordered, strict=True):
            size = tensor.numel()
            if ordered is None or size * tensor.element_size() <= _SMALL_BYTES:
                pieces.append(tensor)
            elif size <= self._capacity:
                pieces.append(_flatten(tensor))
            else:
                # A cut falls where a vector of the kernel ends, so that results do not depend on where it is.
                length = _align(-(-size // int(-(-size // self._capacity))))
                pieces.extend(torch.unsafe_split(_flatten(tensor), length))
        return pieces


class Batch:
    """What is worked on at a time."""

    def __init__(self, columns: Columns) -> None:
        self.x, self.M, self.V, self.b = map(list, columns)
        moments = [*self.M, *self.V]
        *starts, self.scratch_size = accumulate((_align(tensor.numel()) for tensor in moments), initial=0)
        self._places = [(t.shape, t.stride(), start) for t, start in zip(moments, starts, strict=True)]

    def place_copies(self, scratch: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Find room for copies of M and V in flat memory of at least `scratch_size` elements; they lie as those do."""
        copies = [scratch.as_strided(*place) for place in self._places]
        return copies[: len(self.M)], copies[len(self.M) :]


def _align(size: int) -> int:
    """A number of elements, up to a whole number of vectors."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _kept_scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Memory for the copies of this thread's batches, on the CPU."""
    key = threading.get_ident(), dtype
    scratch = _SCRATCH.get(key)
    if scratch is None or scratch.numel() < size:
        with torch.inference_mode(False):  # other optimizers may step outside of it
            scratch = torch.empty(size, dtype=dtype, device="cpu")
        _SCRATCH[key] = scratch
    return scratch


def _batch_bytes(device: torch.device) -> int:
    return _BATCH_BYTES_CPU * torch.get_num_threads() if device.type == "cpu" else _BATCH_BYTES


def _is_ordered(columns: Columns, i: int) -> bool:
    """Whether all fill their memory and in the same order, so that it can be walked from end to end."""
    x = columns.x[i]
    return is_plain(x) and is_dense(x) and all(_same_order(t, x) for t in (columns.M[i], columns.V[i], columns.b[i]))


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two tensors of one shape lie in memory in the same order."""
    return a.stride() == b.stride() or all(
        i == j or size == 1 for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True)
    )


def _like(g: Tensor, x: Tensor | None) -> Tensor:
    """A gradient as it is, or in the order and the dtype of x."""
    g = g.resolve_conj()
    return g if x is None or (g.dtype == x.dtype and _same_order(g, x)) else torch.empty_like(x).copy_(g)


def _flatten(tensor: Tensor) -> Tensor:
    """The elements in the order they lie in memory, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
