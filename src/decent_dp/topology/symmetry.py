"""Rounds that look alike from many workers, taken apart into small matrices.

If W does not change when all workers are shifted along a grid that closes on itself, the Fourier transform over the
grid makes W a block diagonal matrix: one block for each frequency, as large as the number b of kinds of workers. Norms,
eigenvalues and traces are those of W. A circle (one kind: every circulant round), a circle of pairs (the one-peer
ring), binary digits (the hypercube) and a grid with two axes (the torus) are looked for; with anything else W is its
own and only block.

Legend: n workers, G = n / b places on the grid, F frequencies (as many as places).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from decent_dp.topology.rounds import Round, Row

Array: TypeAlias = NDArray[Any]
"""Real or complex."""

_TOLERANCE = 1e-14
"""Weights closer than this are equal: equal shares are computed alike, sums are off by a rounding."""

_MOST_TAKEN = 16
"""Weights in a row up to which multiplying row by row is faster than by the dense matrix."""


class Sparse:
    """A round as its own and only block, multiplied weight by weight.

    Args:
        round: With few weights in every row.
    """

    def __init__(self, round: Round) -> None:
        self.num_taken = max(len(row) for row in round.rows)
        self._ranks = np.zeros((self.num_taken, round.num_workers), dtype=np.intp)
        self._weights = np.zeros((self.num_taken, round.num_workers, 1))
        for rank, row in enumerate(round.rows):
            for k, (other, weight) in enumerate(row):
                self._ranks[k, rank], self._weights[k, rank] = other, weight

    def __matmul__(self, X: Array) -> Array:
        """Multiply an array of shape ``(1, n, c)``."""
        total: Array = self._weights[0] * X[:, self._ranks[0]]
        for ranks, weights in zip(self._ranks[1:], self._weights[1:], strict=True):
            total += weights * X[:, ranks]
        return total


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rounds of one cycle as block diagonal matrices.

    Args:
        num_blocks: F.
        size: b, workers of a block.
        rounds: Arrays of shape ``(F, b, b)``, or what multiplies like them.
    """

    num_blocks: int
    size: int
    rounds: tuple[Array | Sparse, ...]

    @property
    def projection(self) -> Array:
        """P = I - J likewise, shape ``(F, b, b)``: it takes the mean over the workers away."""
        P = np.broadcast_to(np.eye(self.size), (self.num_blocks, self.size, self.size)).copy()
        P[0] -= 1 / self.size
        return P

    def apply(self, t: int, X: Array) -> Array:
        """``P W_t X``, for X of shape ``(F, b, c)``."""
        product = self.rounds[t] @ X
        product[0] -= product[0].mean(axis=0)
        return product

    @property
    def work(self) -> float:
        """About the operations of multiplying by all rounds once, counting what waits for memory higher."""
        F, b = self.num_blocks, self.size
        return sum(40.0 * W.num_taken * b**2 if isinstance(W, Sparse) else 2.0 * F * b**3 for W in self.rounds)


def blocks_of(rounds: Sequence[Round]) -> Blocks:
    """The rounds as block diagonal matrices, with the smallest blocks that one of the known grids allows.

    Args:
        rounds: Of the same workers.

    Example:
        >>> blocks_of([Round.of_cliques(6, [range(6)])]).size, blocks_of([Round.of_cliques(6, [(0, 1)])]).size
        (1, 6)
    """
    n = rounds[0].num_workers
    for shape, b in _grids(n):
        kernels = _kernels(rounds, shape, b)
        if kernels is not None:
            axes = tuple(range(len(shape)))
            found = (np.fft.fftn(kernel.reshape(*shape, b, b), axes=axes).reshape(-1, b, b) for kernel in kernels)
            return Blocks(n // b, b, tuple(found))
    return Blocks(1, n, tuple(_whole(round) for round in rounds))


def _whole(round: Round) -> Array | Sparse:
    sparse = max(len(row) for row in round.rows) <= _MOST_TAKEN
    return Sparse(round) if sparse else round.matrix()[np.newaxis]


def _grids(n: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shapes of grids that are tried, and the kinds of workers on each."""
    yield (n,), 1
    if n > 2 and n & (n - 1) == 0:
        yield (2,) * (n.bit_length() - 1), 1
    for a in range(math.isqrt(n), 1, -1):
        if n % a == 0:
            yield (a, n // a), 1
    if n > 2 and n % 2 == 0:
        yield (n // 2,), 2


def _kernels(rounds: Sequence[Round], shape: tuple[int, ...], b: int) -> list[NDArray[np.float64]] | None:
    kernels = []
    for round in rounds:
        kernel = _kernel(round, shape, b)
        if kernel is None:
            return None
        kernels.append(kernel)
    return kernels


def _kernel(round: Round, shape: tuple[int, ...], b: int) -> NDArray[np.float64] | None:
    """What a worker of each kind gives by distance on the grid, shape ``(G, b, b)``; None if that is not all."""
    G = math.prod(shape)
    coordinates = np.array(np.unravel_index(np.arange(G), shape))
    sizes = np.array(shape)[:, np.newaxis]
    kernel = np.zeros((G, b, b))
    known: dict[int, tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]] = {}
    for rank, row in enumerate(round.rows):
        if id(row) not in known:
            known[id(row)] = _arrays(row, b)
        place, kind = divmod(rank, b)
        places, kinds, weights = known[id(row)]
        apart = (coordinates[:, place, np.newaxis] - coordinates[:, places]) % sizes
        seen = np.zeros((G, b))
        seen[np.ravel_multi_index(tuple(apart), shape), kinds] = weights
        if place == 0:
            kernel[:, kind] = seen
        elif np.abs(kernel[:, kind] - seen).max() > _TOLERANCE:
            return None
    return kernel


def _arrays(row: Row, b: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    ranks = np.array([rank for rank, _ in row], dtype=np.intp)
    return ranks // b, ranks % b, np.array([weight for _, weight in row])
