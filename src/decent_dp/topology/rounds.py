"""One mixing step of all workers as a sparse matrix.

``W[i, j]`` is the weight worker ``i`` gives to worker ``j``'s parameters: ``x_i <- sum_j W[i, j] x_j``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decent_dp.errors import TopologyError

Row: TypeAlias = tuple[tuple[int, float], ...]
"""What a worker mixes: ``(rank, weight)`` pairs, ascending by rank, itself included, no zero weights."""


@dataclass(frozen=True, slots=True)
class Round:
    """One mixing step of all workers: row ``i`` is what worker ``i`` mixes.

    Workers with equal rows share one row object, so a clique of n workers takes memory for n pairs and not
    for n². A round by itself is only data; :class:`~decent_dp.topology.Topology` checks it.

    Args:
        rows: One :data:`Row` a worker, in rank order.

    Example:
        >>> Round.of_cliques(3, [(0, 2)]).matrix()
        array([[0.5, 0. , 0.5],
               [0. , 1. , 0. ],
               [0.5, 0. , 0.5]])
    """

    rows: tuple[Row, ...]

    @classmethod
    def identity(cls, n: int) -> "Round":
        """The round in which every one of ``n`` workers keeps its parameters."""
        return cls(tuple(((rank, 1.0),) for rank in range(n)))

    @classmethod
    def of_cliques(cls, n: int, cliques: Iterable[Sequence[int]]) -> "Round":
        """The round in which the members of each clique take the mean of the clique, all others nothing.

        Inside a clique of k workers every weight is 1/k.

        Args:
            n: Workers in all.
            cliques: Ranks that average together; no rank may stand in two cliques.

        Raises:
            TopologyError: A rank is out of range or listed more than once.
        """
        rows: list[Row | None] = [None] * n
        for clique in cliques:
            members = sorted(clique)
            row = tuple((rank, 1 / len(members)) for rank in members)
            for rank in members:
                if not 0 <= rank < n:
                    raise TopologyError(f"rank {rank} in clique {tuple(clique)}: ranks go from 0 to {n - 1}")
                if rows[rank] is row:
                    raise TopologyError(f"rank {rank} stands twice in clique {tuple(clique)}: list it once")
                if rows[rank] is not None:
                    raise TopologyError(f"rank {rank} stands in two cliques of one round: use two rounds")
                rows[rank] = row
        return cls(tuple(row if row is not None else ((rank, 1.0),) for rank, row in enumerate(rows)))

    @classmethod
    def of_matrix(cls, W: ArrayLike) -> "Round":
        """The round of a dense matrix; entries that are exactly zero are left out.

        Args:
            W: Square matrix, ``W[i, j]`` being the weight worker ``i`` gives to worker ``j``.

        Raises:
            TopologyError: ``W`` is not a square matrix of numbers.
        """
        try:
            if np.iscomplexobj(W):
                raise TypeError("weights are real, got complex ones")
            dense = np.asarray(W, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TopologyError(f"a round needs a matrix of numbers: {error}") from None
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or not dense.size:
            raise TopologyError(f"a round needs a square matrix with a row and a column a worker; got {dense.shape}")
        same: dict[Row, Row] = {}
        rows = []
        for values in dense:
            row = tuple((int(rank), float(values[rank])) for rank in np.flatnonzero(values))
            rows.append(same.setdefault(row, row))
        return cls(tuple(rows))

    def spread(self, workers_per_node: int) -> "Round":
        """The round of all workers, of one between nodes: each node has the mean of its workers to give.

        Its matrix is the Kronecker product of this one and of the mean over L workers, node by node.

        Example:
            >>> Round.of_cliques(2, [(0, 1)]).spread(2).matrix()[0]
            array([0.25, 0.25, 0.25, 0.25])
        """
        L = workers_per_node
        wide: dict[int, Row] = {}
        for row in self.rows:
            if id(row) not in wide:
                wide[id(row)] = tuple((node * L + k, weight / L) for node, weight in row for k in range(L))
        return Round(tuple(wide[id(row)] for row in self.rows for _ in range(L)))

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return len(self.rows)

    def matrix(self) -> NDArray[np.float64]:
        """The dense matrix W, shape ``(num_workers, num_workers)``."""
        W = np.zeros((len(self.rows), len(self.rows)))
        for rank, row in enumerate(self.rows):
            for other, weight in row:
                W[rank, other] = weight
        return W
