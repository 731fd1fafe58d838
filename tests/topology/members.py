"""The built-in topologies, and what each must do on which layouts: the table that the batteries run over."""

from collections.abc import Callable
from typing import NamedTuple

from decent_dp.topology import AnyTopology, Round


def _is_power_of_two(n: int) -> bool:
    return n.bit_count() == 1


def _is_grid(n: int) -> bool:
    return n == 1 or any(n % a == 0 and n // a >= 3 for a in range(3, n))


def _log2_up(n: int) -> int:
    return (n - 1).bit_length()


class Member(NamedTuple):
    """A row of the table.

    Attributes:
        serves: Whether it serves n workers, L a node.
        is_exact: Whether a cycle leaves every worker with the mean.
        max_partners: The most other workers that one worker takes weight from in a round.
    """

    serves: Callable[[int, int], bool] = lambda n, L: True
    is_exact: Callable[[int, int], bool] = lambda n, L: n <= 2
    max_partners: Callable[[int, int], int] = lambda n, L: 1


MEMBERS = {
    "alternating-exp-ring": Member(
        serves=lambda n, L: _is_power_of_two(n // L), is_exact=lambda n, L: True, max_partners=lambda n, L: 2 * L - 1
    ),
    "complete": Member(is_exact=lambda n, L: True, max_partners=lambda n, L: n - 1),
    "exp": Member(is_exact=lambda n, L: _is_power_of_two(n)),
    "hierarchical": Member(is_exact=lambda n, L: _is_power_of_two(n // L), max_partners=lambda n, L: 2 * L - 1),
    "hypercube": Member(serves=lambda n, L: _is_power_of_two(n), max_partners=lambda n, L: _log2_up(n)),
    "one-peer-exp": Member(is_exact=lambda n, L: _is_power_of_two(n)),
    "random-matching": Member(),
    "ring": Member(is_exact=lambda n, L: n <= 2 or n == 4),
    "static-exp": Member(is_exact=lambda n, L: n <= 3, max_partners=lambda n, L: _log2_up(n)),
    "static-ring": Member(is_exact=lambda n, L: n <= 3, max_partners=lambda n, L: 2),
    "torus": Member(serves=lambda n, L: _is_grid(n), is_exact=lambda n, L: n == 1, max_partners=lambda n, L: 4),
    **{
        f"base-{base}": Member(is_exact=lambda n, L: True, max_partners=lambda n, L, k=base - 1: k)  # type: ignore[misc]
        for base in range(2, 10)
    },
}


def serves(name: str, n: int, local: int = 1) -> bool:
    """Whether the built-in topology can be had for n workers with ``local`` on a node; others are taken to be."""
    return name not in MEMBERS or MEMBERS[name].serves(n, local)


def rounds_of(topology: AnyTopology, num_rounds: int = 12) -> list[Round]:
    """The rounds of one cycle, or the first few where there is none."""
    return [topology.round_at(t) for t in range(topology.num_rounds or num_rounds)]
