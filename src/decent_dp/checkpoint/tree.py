"""Nested plain data with tensors in it, as few large tensors and a skeleton, and back.

Plain data is what `torch.load` reads with ``weights_only=True``: whoever wrote a file, reading it runs nothing.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decent_dp.errors import CheckpointError

Items = dict[str, Any]

#: Tensors of one dtype are put together up to this size: saving does not handle thousands of small ones, which would
#: hold up the interpreter beside it, and a piece is still in the cache when it is checked and written.
PIECE_BYTES = 2 * 2**20

_ALIGN_BYTES = 64
_SCALARS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_VALUES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, bool), (int, int.__int__), (float, float.__float__), (str, str.__str__), (bytes, bytes)
)  # fmt: skip


class _Tensors:
    """The tensors of one section, each once, in the order in which they were met."""

    def __init__(self) -> None:
        self.all: list[Tensor] = []
        self._known: dict[Any, int] = {}

    def place(self, tensor: Tensor) -> Tensor | OrderedDict[str, int]:
        """Return what stands for a tensor in the skeleton: its number, in a kind of dict that is used for nothing else.

        Tensors that are not strided stand there themselves.
        """
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        signs = tensor.is_conj(), tensor.is_neg()  # views that read the same memory as something else
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), signs) if tensor.numel() else id(tensor)
        if key not in self._known:
            self._known[key] = len(self.all)
            self.all.append(tensor)
        return OrderedDict(tensor=self._known[key])


class Staging:
    """Memory for one copy of a worker's state; kept, so that the next copy need not be given pages by the system.

    It comes from the system and not from the allocator of the process, which would hand out other pages to the training
    step afterwards, and the step would pay for them.
    """

    def __init__(self) -> None:
        self._kept: dict[str, mmap.mmap] = {}

    def allocate(self, name: str, lengths: Mapping[str, tuple[torch.dtype, int]]) -> Items:
        """Return tensors of the given dtypes and lengths; they overwrite those returned before for the same name."""
        sizes = [-(-dtype.itemsize * length // _ALIGN_BYTES) * _ALIGN_BYTES for dtype, length in lengths.values()]
        memory, num_bytes = self._kept.get(name), max(1, sum(sizes))
        if memory is None or len(memory) != num_bytes:
            memory = self._kept[name] = mmap.mmap(-1, num_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # not every kernel has them
                    memory.madvise(mmap.MADV_HUGEPAGE)
        items: Items = {}
        begin = 0
        for (key, (dtype, length)), size in zip(lengths.items(), sizes, strict=True):
            items[key] = torch.empty(0, dtype=dtype, device="cpu")
            if length:
                items[key] = torch.frombuffer(memory, dtype=dtype, count=length, offset=begin)
            begin += size
        return items


def pack(name: str, value: Any, staging: Staging | None = None) -> Items:
    """Copy a nested value into items that can be saved: one object, and tensors that hold all of its tensors.

    Args:
        name: Of the section; keys of the items begin with it.
        value: Dicts, lists, tuples, sets, numbers, strings, bytes, None, and tensors on any device.
        staging: Where to copy to; new memory when None.

    Returns:
        The items; their tensors are one-dimensional, on the CPU and share no memory with ``value``.

    Raises:
        CheckpointError: Something inside is not plain data; the message says where.

    Example:
        >>> items = pack("model", {"a": torch.zeros(2, 3), "b": [1, "x", torch.ones(4)]})
        >>> sorted(items), items["model/float32/0"].shape
        (['model', 'model/float32/0'], torch.Size([10]))
        >>> unpack("model", items)["b"]
        [1, 'x', tensor([1., 1., 1., 1.])]
    """
    tensors = _Tensors()
    tree = _skeleton(value, name, tensors)
    places: list[tuple[str, int, tuple[int, ...]]] = []
    open_pieces: dict[torch.dtype, tuple[str, int]] = {}  # of each dtype: the piece being filled, and its length
    num_pieces: dict[torch.dtype, int] = {}
    lengths: dict[str, tuple[torch.dtype, int]] = {}
    for tensor in tensors.all:
        dtype, numel = tensor.dtype, tensor.numel()
        key, begin = open_pieces.get(dtype, ("", 0))
        if not key or (begin and (begin + numel) * dtype.itemsize > PIECE_BYTES):
            number = num_pieces[dtype] = num_pieces.get(dtype, -1) + 1
            key, begin = f"{name}/{str(dtype).removeprefix('torch.')}/{number}", 0
        places.append((key, begin, tuple(tensor.shape)))
        open_pieces[dtype] = (key, begin + numel)
        lengths[key] = (dtype, begin + numel)
    items: Items = {name: {"tree": tree, "places": places}}
    items |= (staging or Staging()).allocate(name, lengths)
    for tensor, (key, begin, shape) in zip(tensors.all, places, strict=True):
        items[key][begin : begin + tensor.numel()].view(shape).copy_(tensor)
    return items


def unpack(name: str, items: Mapping[str, Any]) -> Any:
    """Return the value that `pack` was given; its tensors are views of those of the items.

    Raises:
        ValueError: The items do not fit each other.
    """
    try:
        tree, places = items[name]["tree"], items[name]["places"]
        return _fill(tree, [_cut(items[key], int(begin), torch.Size(shape)) for key, begin, shape in places])
    except (KeyError, IndexError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"its section '{name}' is not what was saved ({error})") from error


def _cut(piece: Tensor, begin: int, shape: torch.Size) -> Tensor:
    return piece.narrow(0, begin, shape.numel()).view(shape)


def _skeleton(value: Any, where: str, tensors: _Tensors) -> Any:
    if isinstance(value, Tensor):
        if value.is_quantized:
            raise CheckpointError(f"{where} is a quantized tensor, which cannot be saved; save value.dequantize()")
        return tensors.place(value)
    value = _plain(value)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(_plain(key), (str, int, float, bool, type(None))):
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings or numbers to be saved")
        return {_plain(key): _skeleton(inner, f"{where}/{key}", tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [_skeleton(inner, f"{where}/{number}", tensors) for number, inner in enumerate(value)]
        return tuple(inside) if isinstance(value, tuple) else inside
    if isinstance(value, (set, frozenset)):
        return {_element(inner, where) for inner in value}
    way_out = "torch.from_numpy makes a tensor of it" if isinstance(value, np.ndarray) else "give what it holds"
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which only pickle could restore, and files are read without running "
        f"what they say; save tensors, numbers, strings, lists, tuples and dicts: {way_out}"
    )


def _plain(value: Any) -> Any:
    """A scalar's value as what reads without pickle: numpy's float64 and enums of numbers or strings are subclasses."""
    if isinstance(value, np.generic):
        value = value.item()
    for kind, plain in _VALUES:
        if isinstance(value, kind):
            return plain(value)
    return value


def _element(value: Any, where: str) -> Any:
    value = _plain(value)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, tuple):
        return tuple(_element(inner, where) for inner in value)
    raise CheckpointError(
        f"{where} is a set with a {type(value).__name__} in it; elements must be strings, numbers or tuples of them to "
        "be saved"
    )


def _fill(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, OrderedDict):
        return tensors[tree["tensor"]]
    if isinstance(tree, dict):
        return {key: _fill(inner, tensors) for key, inner in tree.items()}
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(_fill(inner, tensors) for inner in tree)
    return tree


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value that is no dict, or an empty one, with the keys that lead to it.

    Example:
        >>> list(leaves({"a": {"b": 1}, "c": [2], "d": {}}))
        [(('a', 'b'), 1), (('c',), [2]), (('d',), {})]
    """
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value
